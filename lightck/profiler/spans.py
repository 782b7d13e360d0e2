"""The copies and commits of the copy threads and of the training thread, as the native engine recorded them.

The engine puts a *span* (a kind of work, its begin and end, its thread) into a queue for each block that it copies and
for each part of a commit. This module takes the spans out of the queue and makes events of them. Successive blocks of
one tensor by one thread become one event. Spans for which the queue had no space are dropped and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightck._native import check, ffi, lib
from lightck.pool.engine import Engine
from lightck.pool.format.layout import Entry
from lightck.profiler import events
from lightck.profiler.events import COMMIT, COPY, STALL, TRAINER_COPY, Event

SPAN_DTYPE = np.dtype(  # as ``lck_span`` in lck.h; times are in nanoseconds of CLOCK_MONOTONIC
    [
        ("begin", "u8"),
        ("end", "u8"),
        ("cpu", "u8"),
        ("generation", "u8"),
        ("tensor", "u8"),
        ("nbytes", "u8"),
        ("kind", "u4"),
        ("thread", "u4"),
        ("helped", "u4"),
        ("zero", "u4"),  # padding, always 0
    ]
)
_PAUSE_NS = 200_000
"""If the pause between two blocks is longer than this, they become two events, because the thread did something else in
between, or had no processor."""
_CELLS = 1 << 16
"""The number of cells in the engine's queue. A cell has 72 bytes: a span and a sequence number. Each copied block needs
a cell. So, with blocks of 1 MiB, 64 GiB can be copied between two calls of ``take``."""
_COMMIT_EVENTS = {
    lib.LCK_SPAN_MANIFEST: "manifest",
    lib.LCK_SPAN_SYNC: "sync",
    lib.LCK_SPAN_COMMIT_RECORD: "commit record",
}


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    step: int
    entries: tuple[Entry, ...]
    """The tensors of the checkpoint, by record number."""


class EngineSpans:
    """The engine's spans during one recording. Created on the training thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._taken: list[npt.NDArray[np.void]] = []
        self._count = 0
        """The number of spans in ``_taken``."""
        self._checkpoints: dict[int, _Checkpoint] = {}
        """By generation."""
        self._buffer = np.zeros(1 << 14, SPAN_DTYPE)
        """The spans of one call of ``lck_spans_take``."""
        self._trainer = threading.get_native_id()
        """Native id of the training thread."""
        self.dropped = 0
        """The number of spans that were lost, because the queue or ``_taken`` was full."""

    def start(self) -> None:
        self.take()  # empties the queue, which may hold spans of an earlier recording
        self._taken.clear()
        self.dropped = self._count = 0
        check(lib.lck_spans_start(self._engine.handle, _CELLS), "recording spans")

    def checkpoint_begun(self, generation: int, step: int, entries: Sequence[Entry]) -> None:
        """Store the step and the tensors of a checkpoint that begins, for the names of its events. ``entries``: the
        tensors by record number."""
        self._checkpoints[generation] = _Checkpoint(step, tuple(entries))

    def take(self) -> None:
        """Move all spans from the queue of the engine to this object."""
        if self._engine.handle is None:
            return
        count, dropped = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        array = ffi.cast("lck_span *", self._buffer.ctypes.data)
        while True:
            check(lib.lck_spans_take(self._engine.handle, array, len(self._buffer), count, dropped), "taking spans")
            self.dropped += int(dropped[0])
            self._keep(_merged(self._buffer[: count[0]]))
            if count[0] < len(self._buffer):
                return

    def _keep(self, spans: npt.NDArray[np.void]) -> None:
        if self._count + len(spans) > events.EVENTS_MAX // 2:
            self.dropped += len(spans)
            return
        self._count += len(spans)
        self._taken.append(spans)

    def stop(self) -> None:
        if self._engine.handle is not None:
            check(lib.lck_spans_stop(self._engine.handle), "ending the record of spans")
            self.take()

    # -- as events ---------------------------------------------------------------------------------------

    def events(self, start: int) -> Iterator[Event]:
        """Yield the events of the spans that began at or after ``start`` (nanoseconds of CLOCK_MONOTONIC). The times of
        the events count from ``start``."""
        spans = np.concatenate(self._taken) if self._taken else np.zeros(0, SPAN_DTYPE)
        spans = _merged(spans[spans["begin"] >= start])
        copy_threads = sorted({int(t) for t in spans["thread"]} - {self._trainer})
        rows = {thread: f"{COPY}{number}" for number, thread in enumerate(copy_threads, 1)}
        for span in spans:
            event = self._event(span, rows.get(int(span["thread"]), TRAINER_COPY), start)
            if event is not None:
                yield event

    def _event(self, span: np.void, row: str, start: int) -> Event | None:
        """Return the event of a span, or None if the span is not shown. ``row``: the row of the span's thread."""
        checkpoint = self._checkpoints.get(int(span["generation"]))
        if checkpoint is None:  # the checkpoint began before the recording
            return None
        kind, nbytes = int(span["kind"]), int(span["nbytes"])
        begin, end = int(span["begin"]) - start, int(span["end"]) - start
        by = row.removeprefix("copy: ")
        args = {"step": checkpoint.step, "bytes": nbytes, "cpu_ms": round(int(span["cpu"]) / 1e6, 4), "by": by}
        if kind in _COMMIT_EVENTS:
            return Event(COMMIT, _COMMIT_EVENTS[kind], begin, end, args)
        if kind == lib.LCK_SPAN_HEADER:
            return Event(STALL, "slot header", begin, end, args)
        if kind == lib.LCK_SPAN_NOW:  # all copies at the boundary, as one event; docs/trace.md has this name
            return Event(TRAINER_COPY, "at once", begin, end, args) if nbytes else None
        number = int(span["tensor"])
        name = checkpoint.entries[number].name if number < len(checkpoint.entries) else f"tensor {number}"
        return Event(row, name, begin, end, {**args, "module": module_of(name), "helped": bool(span["helped"])})


def module_of(name: str) -> str:
    """Return the name of the module that a tensor belongs to: ``h.0.fc`` for ``optimizer/h.0.fc.weight/exp_avg``."""
    param = name.split("/")[1] if "/" in name else name
    return param.rpartition(".")[0]


def _merged(spans: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Merge the spans of successive copies that have the same thread, checkpoint and tensor into one span, with the sum
    of their bytes and processor times. Return the merged spans and all other spans."""
    if not len(spans):
        return spans.copy()
    spans = spans[np.lexsort((spans["begin"], spans["kind"], spans["thread"]))]
    last, this = spans[:-1], spans[1:]
    same = (this["kind"] == lib.LCK_SPAN_COPY) & (this["begin"] < last["end"] + np.uint64(_PAUSE_NS))
    for field in ("kind", "thread", "generation", "tensor", "helped"):
        same &= this[field] == last[field]
    firsts = np.flatnonzero(np.concatenate([[True], ~same]))
    merged = spans[firsts].copy()
    merged["end"] = spans["end"][np.concatenate([firsts[1:] - 1, [len(spans) - 1]])]
    for field in ("nbytes", "cpu"):
        merged[field] = np.add.reduceat(spans[field], firsts)
    return merged
