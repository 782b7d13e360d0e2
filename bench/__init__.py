"""What a checkpoint costs: workloads, the loop that measures them, the tables of results and the bars they are held to;
and other ways to save, measured and damaged alike.

No part of what is installed. ``lightck bench`` runs it in the root of a checkout (``lightck/cli/bench.py``), with the
lightck that it is called with. Each row runs in a process of its own and checks that what was saved loads back right.
"""
