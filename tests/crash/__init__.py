"""Tools for crash tests of pools.

``trace`` reads the events of the choke point, ``persistence`` and ``fates`` model what a power cut may leave of them,
``cuts`` chooses the images, ``recording`` runs a training and keeps its trace and its true states, ``simulator``
recovers each image with ``lightck.recover`` (docs/power-cut.md). ``memory`` is a second backend, for tests of backends.
``campaign``, ``campaigns/`` and ``evidence`` inject faults by the thousand: ``python -m crash``.
"""
