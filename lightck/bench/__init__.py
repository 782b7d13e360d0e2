"""``lightck bench``: workloads, the loop that measures them, the tables of results and the bars they are held to.

It lies in the package, and not in ``bench/``, so that an installed lightck can measure the machine it is on; ``bench/``
has what belongs to the project: the kept results and the rivals. Uses what a user has, and below that only what the
bandwidth rows need of ``pool``. Each row runs in a process of its own and checks that what was saved loads back right.
"""
