"""What a session cost and did: plain counters while it runs, a frozen record for the user."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

from lightck.interrupts import deferred


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of a session's counters. Times in seconds, sizes in bytes."""

    stall_seconds: float = 0.0
    """All wall time that lightck spent on the training thread."""
    wait_seconds: float = 0.0
    """The part of it that waited for (and helped with) copies and commits."""
    cpu_seconds: float = 0.0
    """CPU time of all lightck threads and hooks."""
    bytes_written: int = 0
    """Payload and manifests handed to the medium."""
    bytes_helped: int = 0
    """The part of it that the waiting training thread copied itself."""
    checkpoints: int = 0
    """Versions committed."""
    committed: int | None = None
    """Step of the newest durable version."""
    skipped: int = 0
    """Versions given up (written to by a forward) or refused (``pause_on_nonfinite``), and optimizer steps that changed
    nothing (GradScaler)."""
    recopied: int = 0
    """Tensors that something wrote to after the update of their layer (``lightck.layerwise``), so that they were copied
    again. Without layers always 0: a version whose source moved is given up (``skipped``)."""
    left_out: int = 0
    """Tensors that the newest version did not have to write again."""
    kept: int = 0
    """Versions exported by ``keep=``."""
    staging: str | None = None
    """The way by which the newest version's tensors left their device (``attach(..., staging=...)``)."""
    staging_trial: bool = False
    """The ways out of the device are still tried, because none was named."""
    wait_policy: str | None = None
    """"passive" where OpenMP's threads sleep instead of spinning while versions are copied, since copies found no
    processor otherwise; "trial" while that is found out; None where they are left alone."""
    interval: int = 1
    """Updates between versions, as of now."""
    emulated: str | None = None
    """The memory whose speed was emulated (``LIGHTCK_EMULATE``): none of these times is the medium's own."""


class Observer(Protocol):
    """What a trace wants to know as it happens. Times in seconds of ``time.perf_counter``."""

    def stalled(self, what: str, begin: float, end: float, is_state: bool = False) -> None: ...


class Meter:
    """The running counters behind ``Stats``."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        """There while a trace is recorded."""
        self.stall_seconds = self.wait_seconds = 0.0
        self.hook_cpu_seconds = self.keep_cpu_seconds = self.staging_cpu_seconds = 0.0
        self.kept = 0
        self.staging: str | None = None
        self.staging_trial = False
        self.wait_policy: str | None = None
        self.bytes_written = self.bytes_helped = self.checkpoints = self.skipped = self.recopied = self.left_out = 0
        self._depth = 0

    def note_committed(self, nbytes: int, nbytes_helped: int) -> None:
        """One more version, of so many bytes."""
        self.checkpoints += 1
        self.bytes_written += nbytes
        self.bytes_helped += nbytes_helped

    @contextmanager
    def stall(self, what: str = "lightck") -> Iterator[None]:
        """Time on the training thread; signals wait for its end. Nested uses count once. ``what`` is for a trace."""
        with deferred():
            if self._depth:
                yield
                return
            self._depth, wall, cpu = 1, time.perf_counter(), time.thread_time()
            try:
                yield
            finally:
                self._depth = 0
                now = time.perf_counter()
                self.stall_seconds += now - wall
                self.hook_cpu_seconds += time.thread_time() - cpu
                if self.observer is not None:
                    self.observer.stalled(what, wall, now)

    def note_state(self, step: int, began: float) -> None:
        """The state of a step was read, from ``began`` (``time.perf_counter``) until now."""
        if self.observer is not None:
            self.observer.stalled(f"state of step {step}", began, time.perf_counter(), is_state=True)

    @contextmanager
    def wait(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self.wait_seconds += now - start
            if self.observer is not None:
                self.observer.stalled("wait", start, now)

    def snapshot(
        self, *, engine_cpu_seconds: float, committed: int | None, interval: int, emulated: str | None = None
    ) -> Stats:
        own = {f.name: getattr(self, f.name) for f in fields(Stats) if hasattr(self, f.name)}
        cpu_seconds = self.hook_cpu_seconds + self.keep_cpu_seconds + self.staging_cpu_seconds + engine_cpu_seconds
        return Stats(**own, cpu_seconds=cpu_seconds, committed=committed, interval=interval, emulated=emulated)
