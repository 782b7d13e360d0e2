"""On which processors the copies run.

Persistent memory belongs to one socket. What another one stores goes through the link between them, at a fraction of
the speed, so the copy threads stay with the memory. Of ordinary memory nothing is known before its pages are there:
the copy threads run where a processor is free.
"""

from __future__ import annotations

import os

from lightck.pool.system import System


def processors(node: int | None, system: System | None = None) -> frozenset[int]:
    """Those of a pool's NUMA node that the calling thread may run on; empty where the node is not known, where it has
    none of them, or all: there is nothing to choose then."""
    if node is None:
        return frozenset()
    allowed = os.sched_getaffinity(0)
    near = (system or System()).processors(node) & allowed
    return frozenset() if near == allowed else near
