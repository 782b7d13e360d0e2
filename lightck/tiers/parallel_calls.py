"""Several calls of a store at the same time, in bounded memory. While some pieces are put, the next ones are read and
prepared."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lightck.tiers.store import Store

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Buffer = npt.NDArray[np.uint8]
_HUGE_PAGE = 2 << 20
_N_BUFFERS_MIN = 3
"""One piece is read, one is prepared and one is put."""


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


class NamedBytes(NamedTuple):
    """What is put under a name."""

    name: str
    data: memoryview


class _Prepared(NamedTuple):
    """A piece that is being prepared."""

    future: Future[Any]
    buffer: Buffer
    name_of: Callable[[Any], NamedBytes | None]


class Puts:
    """Pieces on their way to a store. The caller reads one into memory, one thread prepares it (compresses and hashes),
    and ``store.n_parallel`` threads put it. Nobody writes to its memory until it is stored."""

    def __init__(self, store: Store, nbytes: int) -> None:
        """``nbytes``: the size of the largest piece."""
        self._store, self._nbytes = store, nbytes
        self._free: list[Buffer] = []
        self._n_made = 0
        self._prepared: _Prepared | None = None
        self._started: dict[Future[None], Buffer] = {}
        self._preparing = ThreadPoolExecutor(1, "lightck-hash")
        self._putting = ThreadPoolExecutor(store.n_parallel, "lightck-put")

    def buffer(self) -> Buffer:
        """Return memory for a piece; if all is in use, wait until a piece is stored. Raises the error of a put that
        failed."""
        if not self._free and self._n_made < max(_N_BUFFERS_MIN, self._store.n_parallel):
            self._n_made += 1
            self._free.append(_page_aligned(self._nbytes))
        while not self._free:
            self._go_on()
        return self._free.pop()

    def prepare(
        self, buffer: Buffer, prepare: Callable[[], _Item], name_of: Callable[[_Item], NamedBytes | None]
    ) -> None:
        """Begin to prepare a piece, which lies in memory that ``buffer`` has returned. ``name_of`` is called later, by
        the thread that calls this object, with what ``prepare`` has returned. It returns what is put under which name;
        None if nothing need be put."""
        while self._prepared is not None:
            self._go_on()
        self._prepared = _Prepared(self._preparing.submit(prepare), buffer, name_of)

    def finish(self) -> None:
        """Wait until all pieces are stored. Raises the error of a put that failed."""
        while self._prepared is not None or self._started:
            self._go_on()

    def _go_on(self) -> None:
        """Wait until a piece is prepared or stored, and put what is prepared."""
        prepared = self._prepared
        ended = wait([*self._started, *([prepared.future] if prepared else [])], return_when=FIRST_COMPLETED).done
        for each in ended:
            if each in self._started:
                each.result()
                self._free.append(self._started.pop(each))
        if prepared is not None and prepared.future in ended:
            self._prepared = None
            self._put(prepared)

    def _put(self, prepared: _Prepared) -> None:
        """Begin to put a piece, if it is to be put."""
        found = prepared.name_of(prepared.future.result())
        if found is None:
            self._free.append(prepared.buffer)
        else:
            self._started[self._putting.submit(self._store.put, *found)] = prepared.buffer

    def end(self) -> None:
        """Wait for what has begun, so that nothing is stored later on. What has not begun is left out."""
        for each in (self._preparing, self._putting):
            each.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def puts_to(store: Store, nbytes: int) -> Iterator[Puts]:
    """Yield ``Puts``. When the block ends, no put is under way any more, whatever was raised."""
    puts = Puts(store, nbytes)
    try:
        yield puts
        puts.finish()
    finally:
        puts.end()


def _page_aligned(nbytes: int) -> Buffer:
    """Return new memory that begins at a page, and lies in huge pages where the kernel gives them: a direct write from
    small pages costs several times as much processor time. It is not allocated before it is written."""
    if nbytes < _HUGE_PAGE:
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE), np.uint8)[:nbytes]
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % _HUGE_PAGE
    return whole[begin : begin + nbytes]
