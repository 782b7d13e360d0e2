"""Several calls of a store at once, in bounded memory. A store in which one call at a time is best gets one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lightck.tiers.store import Store

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Buffer = npt.NDArray[np.uint8]


def in_order(call: Callable[[_Item], _Result], items: Iterable[_Item], n: int) -> Generator[_Result, None, None]:
    """Yield the result of a call for each item, in their order. Up to ``n`` results are being made, or are waiting."""
    if n == 1:
        yield from map(call, items)
        return
    with ThreadPoolExecutor(n, "lightck-get") as threads:
        started: deque[Future[_Result]] = deque()
        try:
            for item in items:
                if len(started) == n:
                    yield started.popleft().result()
                started.append(threads.submit(call, item))
            while started:
                yield started.popleft().result()
        finally:
            for each in started:
                each.cancel()


class Puts:
    """Puts of pieces, up to ``store.n_parallel`` at once, each from a buffer that nobody writes to meanwhile."""

    def __init__(self, store: Store, nbytes: int) -> None:
        """``nbytes``: the size of the largest piece."""
        self._store, self._nbytes = store, nbytes
        self._free: list[Buffer] = []
        self._n_made = 0
        self._started: dict[Future[None], Buffer] = {}
        n = store.n_parallel
        self._threads = ThreadPoolExecutor(n, "lightck-put") if n > 1 else None

    def buffer(self) -> Buffer:
        """Return memory for a piece; wait for a put to end if all is in use. Raises the error of a put that failed."""
        if not self._free and self._n_made < self._store.n_parallel:
            self._n_made += 1
            self._free.append(np.empty(self._nbytes, np.uint8))
        if not self._free:
            self._collect(wait(self._started, return_when=FIRST_COMPLETED).done)
        return self._free[-1]

    def put(self, name: str, data: memoryview) -> None:
        """Begin to put a piece, which lies in the memory that ``buffer`` has returned. A store for one call at a time
        has it when this returns."""
        if self._threads is None:
            self._store.put(name, data)
        else:
            self._started[self._threads.submit(self._store.put, name, data)] = self._free.pop()

    def finish(self) -> None:
        """Wait until all pieces are stored. Raises the error of a put that failed."""
        self._collect(set(self._started))

    def _collect(self, ended: set[Future[None]]) -> None:
        for each in ended:
            each.result()
            self._free.append(self._started.pop(each))

    def end(self) -> None:
        """Wait for what has begun, so that nothing is stored later on. What has not begun is left out."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)


@contextmanager
def puts_to(store: Store, nbytes: int) -> Iterator[Puts]:
    """Yield ``Puts``. At the end nothing is in flight, whatever was raised."""
    puts = Puts(store, nbytes)
    try:
        yield puts
        puts.finish()
    finally:
        puts.end()
