"""On which processors the copies run.

Persistent memory belongs to one socket. What another one stores goes through the link between them, at a fraction of
the speed, so the copy threads stay with the memory. Of ordinary memory nothing is known before its pages are there:
the copy threads run where a processor is free.
"""

from __future__ import annotations

import os

from lightck.pool.storage.system import System


def processors(node: int | None, threads: int) -> frozenset[int]:
    """Those of a pool's NUMA node that the calling thread may run on. Empty where the copy threads had better run
    anywhere: where the node is not known, is the only one, or has no more of them than there are copy threads, which
    would wait there for a training that fills them."""
    if node is None:
        return frozenset()
    allowed = os.sched_getaffinity(0)
    near = System().processors(node) & allowed
    return near if threads < len(near) < len(allowed) else frozenset()
