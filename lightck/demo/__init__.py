"""``lightck demo``: trains, kills, resumes, and compares the result with a run that was never killed.

``plan`` draws the kills, ``process`` runs a training in a child process, ``child`` is the program of that process,
``run`` does both runs and compares them, ``report`` shows the result. The training itself is ``examples/train_gpt.py``.
"""
