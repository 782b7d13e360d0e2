"""The end of a session: closed versions commit, threads end, and the pool is given up last."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

from lightck.hooks.own import remove
from lightck.interrupts import deferred, resumed
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.storage.lock import PoolLock


def end(pipeline: Pipeline, lock: PoolLock, handles: list[Any]) -> None:
    """Once, by ``close`` or by garbage collection. A collector runs anywhere, also on a thread that is waited for here:
    then on another one."""
    if pipeline.is_here:
        threading.Thread(target=_end, args=(pipeline, lock, handles), name="lightck-end").start()
    else:
        _end(pipeline, lock, handles)


def _end(pipeline: Pipeline, lock: PoolLock, handles: list[Any]) -> None:
    """A handler that raises (Ctrl-C) may end the wait for copies, and nothing else: who has the lock next must find
    nobody that writes."""
    remove(handles)
    with deferred(), ExitStack() as last:
        last.callback(lock.release)
        last.callback(pipeline.close)
        if not pipeline.engine.is_forked:
            resumed(pipeline.finish_quietly)
