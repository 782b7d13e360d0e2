"""``lightck demo``: trains, kills, resumes, and compares the result with a run that was never killed.

``plan`` draws the kills, ``place`` chooses the folder of the pool, ``process`` runs a training in a child process,
``child`` is the program of the child process, ``run`` does the two runs (with and without kills), ``compare`` compares
them, ``report`` shows the result. The training itself is ``examples/train_gpt.py``.
"""
