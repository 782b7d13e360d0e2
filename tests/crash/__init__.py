"""Tools for testing that a pool survives what it promises to survive. Not needed for training.

``trace`` reads what the choke point recorded, ``persistence`` and ``fates`` say what a power cut may leave of it,
``cuts`` which images are built, ``recording`` runs a training and keeps trace and truth, ``simulator`` recovers each
image with the shipped ``lightck.recover`` (docs/power-cut.md). ``memory`` is a second backend, for tests of the seam.
``campaign``, ``campaigns/`` and ``evidence`` inject faults by the thousand: ``python -m crash``.
"""
