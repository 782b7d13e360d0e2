"""What a session did and what it cost: ``Meter`` counts while it runs, ``Stats`` is the frozen copy for the user."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

from lightck.interrupts import begin_deferral, end_deferral


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of a session's counters. Times in seconds, sizes in bytes."""

    stall_seconds: float = 0.0
    """Wall time that lightck spent on the training thread."""
    wait_seconds: float = 0.0
    """The part of ``stall_seconds`` in which the training thread waited for copies and commits, or helped to copy."""
    cpu_seconds: float = 0.0
    """CPU time of all threads and hooks of lightck."""
    bytes_written: int = 0
    """Payload and manifests handed to the medium."""
    bytes_helped: int = 0
    """The part of ``bytes_written`` that the training thread copied itself while it waited."""
    checkpoints: int = 0
    """Checkpoints that were committed."""
    committed: int | None = None
    """Step of the newest durable checkpoint."""
    skipped: int = 0
    """The sum of three counts: checkpoints that were dropped because a source changed during the copy, checkpoints that
    ``pause_on_nonfinite`` refused, and steps of a fused optimizer that changed nothing because a GradScaler found
    an infinity. Skipped steps of other optimizers are not counted."""
    recopied: int = 0
    """Tensors that were copied again because something wrote to them after their layer was updated (``layerwise``).
    Without ``layerwise`` always 0: a checkpoint whose source changed is dropped (``skipped``)."""
    left_out: int = 0
    """Tensors that the newest checkpoint did not write, because its slot held the same bytes already."""
    kept: int = 0
    """Checkpoints that ``keep=`` exported."""
    staging: str | None = None
    """The transfer method of the newest checkpoint's tensors on a device (``attach(..., staging=...)``)."""
    staging_trial: bool = False
    """Whether lightck is still comparing transfer methods, because ``staging=`` named none."""
    wait_policy: str | None = None
    """"passive": OpenMP's threads sleep instead of spinning while a checkpoint is copied, because the copies got no
    processor otherwise; "trial": lightck is comparing both; None: OpenMP's threads are left as they are."""
    interval: int = 1
    """Updates between checkpoints, at present."""
    emulated: str | None = None
    """The memory whose speed was emulated (``LIGHTCK_EMULATE``): the times here are not those of the real medium."""

    @property
    def versions(self) -> int:
        """The old name of ``checkpoints``; it goes away in the next release."""
        warnings.warn("Stats.versions is now Stats.checkpoints.", DeprecationWarning, stacklevel=2)
        return self.checkpoints


class Observer(Protocol):
    """Receives each stall as it ends, for a trace. Times are in seconds of ``time.perf_counter``. ``is_state``: the
    time in which small state was read; it lies inside another stall."""

    def stalled(self, what: str, begin: float, end: float, is_state: bool = False) -> None: ...


class Stall:
    """One ``stall`` block of a meter. A class and no generator, because several run at each step.

    The time of the block counts as CPU time, except while it waits (``Meter.wait``). The thread's CPU clock is not
    read, because that takes longer than the whole block at a step that saves nothing.
    """

    __slots__ = ("_begin", "_defers", "_meter", "_what")

    def __init__(self, meter: Meter, what: str) -> None:
        self._meter, self._what = meter, what

    def __enter__(self) -> None:
        self._defers = begin_deferral()
        meter = self._meter
        if meter.stall_in_progress is None:
            meter.stall_in_progress, self._begin = self, time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        try:
            meter = self._meter
            if meter.stall_in_progress is self:
                meter.stall_in_progress, now = None, time.perf_counter()
                seconds = now - self._begin
                meter.stall_seconds += seconds
                meter.hook_cpu_seconds += seconds
                if meter.observer is not None:
                    meter.observer.stalled(self._what, self._begin, now)
        finally:
            if self._defers:
                end_deferral()


class Meter:
    """The running counters behind ``Stats``."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        """Set while a trace is recorded."""
        self.stall_seconds = self.wait_seconds = 0.0
        self.hook_cpu_seconds = self.keep_cpu_seconds = self.staging_cpu_seconds = 0.0
        self.kept = 0
        self.staging: str | None = None
        self.staging_trial = False
        self.wait_policy: str | None = None
        self.bytes_written = self.bytes_helped = self.checkpoints = self.skipped = self.recopied = self.left_out = 0
        self.stall_in_progress: Stall | None = None
        """The outermost ``stall`` block that the training thread is in."""

    def count_commit(self, nbytes: int, nbytes_helped: int) -> None:
        """Count one committed checkpoint of ``nbytes``."""
        self.checkpoints += 1
        self.bytes_written += nbytes
        self.bytes_helped += nbytes_helped

    def count_hook(self, seconds: float) -> None:
        """Count the time of a hook outside its ``stall`` blocks."""
        seconds = max(seconds, 0.0)
        self.stall_seconds += seconds
        self.hook_cpu_seconds += seconds

    def stall(self, what: str = "lightck") -> Stall:
        """Count the time of this block on the training thread, and defer signals to its end. Nested blocks count once.
        ``what`` names the stall in a trace."""
        return Stall(self, what)

    def state_was_read(self, step: int, began: float) -> None:
        """Report to a trace that the small state of a step was read from ``began`` until now."""
        if self.observer is not None:
            self.observer.stalled(f"state of step {step}", began, time.perf_counter(), is_state=True)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Count the time of this block as waiting."""
        start, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            now = time.perf_counter()
            self.wait_seconds += now - start
            if self.stall_in_progress is not None:  # which counts all its time as CPU time
                self.hook_cpu_seconds += time.thread_time() - cpu - (now - start)
            if self.observer is not None:
                self.observer.stalled("wait", start, now)

    def snapshot(
        self, *, engine_cpu_seconds: float, committed: int | None, interval: int, emulated: str | None = None
    ) -> Stats:
        own = {f.name: getattr(self, f.name) for f in fields(Stats) if hasattr(self, f.name)}
        cpu_seconds = self.hook_cpu_seconds + self.keep_cpu_seconds + self.staging_cpu_seconds + engine_cpu_seconds
        return Stats(**own, cpu_seconds=cpu_seconds, committed=committed, interval=interval, emulated=emulated)
