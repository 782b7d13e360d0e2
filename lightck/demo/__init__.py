"""``lightck demo``: train, kill, recover, go on, and compare with a run that was never killed.

``plan`` draws the kills, ``process`` runs one training in a child, ``child`` is that child, ``run`` puts the two
runs together and compares them, ``report`` shows what happens. The training itself is ``examples/train_gpt.py``.
"""
