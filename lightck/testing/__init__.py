"""Tools for testing that a pool survives what it promises to survive. Not needed for training.

``trace`` reads what the choke point recorded, ``persistence`` says which bytes a power cut may leave behind,
``recording`` runs a training and keeps trace and truth, ``simulator`` builds every crash image and recovers it with the
shipped ``lightck.recover``. ``memory`` is a second backend, for tests of the seam.
``campaign``, ``campaigns/`` and ``evidence`` inject faults by the thousand: ``python -m lightck.testing``.
"""
