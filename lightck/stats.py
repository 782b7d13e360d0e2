"""What a session did and how long it took: ``Meter`` holds the running counters, ``Stats`` is a copy of them for the
user."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from lightck.interrupts import begin_deferral, end_deferral


@dataclass(frozen=True, slots=True)
class TierStats:
    """What this session has sent to one tier. Times are in seconds, sizes in bytes."""

    root: str
    """The folder, or the URL."""
    step: int | None = None
    """Step of the newest checkpoint that this session has sent. Before it has sent one: the step of the newest
    checkpoint in the tier whose step is at most the one from which the training continued. None: there is none."""
    checkpoints: int = 0
    """The number of checkpoints that this session has sent."""
    bytes_sent: int = 0
    """What was written for them; tensors that did not change are written once."""
    seconds: float = 0.0
    """How long the newest one took."""
    sent_at: float | None = None
    """When the newest one was sent, as ``time.time()``."""
    error: str | None = None
    """Why the last attempt to send a checkpoint, or to remove old ones, failed; None if it did not. Training goes on,
    and so do the attempts."""
    failing_since: float | None = None
    """Since when no checkpoint could be sent, as ``time.time()``; None if the last one was sent."""
    failures: int = 0
    """The number of periods of failure since ``attach``: failed attempts without a success between them count once."""
    waiting: int = 0
    """Checkpoints that are to be sent to this tier at present: in the pool at most 2, and any number in a folder tier
    from which this tier is fed."""
    rounds: int = 0
    """How often everything in it was read again (``Tier(reread=...)``)."""
    bytes_reread: int = 0
    damaged: int = 0
    """Files in it that were found damaged, or gone, while they were read again; each counts once."""
    mended: int = 0
    """How many of these were written anew, from another copy."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of a session's counters, which count from ``attach`` on. Times are in seconds, sizes in bytes."""

    stall_seconds: float = 0.0
    """Wall time that lightck spent on the training thread. Not included is the time to free gradients that
    ``zero_grad()`` dropped while lightck still copied them: without lightck, ``zero_grad()`` itself takes this time."""
    slowdown_seconds: float = 0.0
    """An estimate, in addition to ``stall_seconds``: how much longer the loop's own operations took because lightck's
    code ran between them and displaced theirs from the processor's caches. Measured with a small model at the first
    attach of the process; 0 on a machine with an accelerator."""
    wait_seconds: float = 0.0
    """The part of ``stall_seconds`` in which the training thread waited for copies and commits, or helped to copy."""
    collective_seconds: float = 0.0
    """Time in which reductions of gradients were under way: in each backward pass from the first launch to the last
    end. Only counted for a layer-wise update under DistributedDataParallel, else 0."""
    collective_bytes_copied: int = 0
    """Bytes that lightck copied in ``collective_seconds``: what it adds to the traffic of memory while gradients are on
    the wire."""
    rank_wait_seconds: float = 0.0
    """The part of ``wait_seconds`` in which this rank waited for other ranks: it may overwrite an older checkpoint only
    after they have committed a newer one. 0 without a group."""
    cpu_seconds: float = 0.0
    """CPU time of all threads and hooks of lightck."""
    bytes_written: int = 0
    """Bytes of payload and manifests of the committed checkpoints, and of gradient records between them."""
    bytes_helped: int = 0
    """The part of ``bytes_written`` that the training thread copied itself while it waited."""
    checkpoints: int = 0
    """The number of checkpoints that were committed."""
    committed: int | None = None
    """Step of the newest committed checkpoint; None if there is none."""
    committed_at: float | None = None
    """When this session last reported a commit, as ``time.time()``; None if it has not yet."""
    step: int = 0
    """Updates since the beginning of the training, as ``Session.step``."""
    in_flight: int = 0
    """The number of checkpoints between their boundary and their commit, at present."""
    skipped: int = 0
    """The sum of three counts: checkpoints that were dropped because a source changed during the copy, checkpoints that
    ``pause_on_nonfinite`` refused, and steps of a fused optimizer that changed nothing because a GradScaler found
    an infinity. Skipped steps of other optimizers are not counted."""
    recopied: int = 0
    """The number of tensors that were copied again because something wrote to them after their layer was updated
    (``layerwise``). Without ``layerwise`` always 0: a checkpoint whose source changed is dropped and counted in
    ``skipped``."""
    left_out: int = 0
    """The number of tensors that the newest checkpoint did not write, because its slot held the same bytes already."""
    kept: int = 0
    """The number of checkpoints that were exported (``Tier(format="safetensors")``)."""
    holds_honored: int = 0
    """How often lightck skipped a slot because another process was reading the checkpoint in it."""
    holds_overrun: int = 0
    """How often lightck wrote to a slot although another process held it to read the checkpoint in it, because the
    training needed the slot. That process sees this and starts again; one slot more (``attach(..., slots=)``) avoids
    it."""
    staging: str | None = None
    """The transfer method of the newest checkpoint's tensors on a device (``attach(..., staging=...)``); None if it has
    no such tensors."""
    staging_trial: bool = False
    """Whether lightck is still comparing transfer methods, because ``staging=`` named none."""
    disk_writes: str | None = None
    """How the large blocks of the newest committed checkpoint were written to a disk: "direct" (past the page cache,
    ``O_DIRECT``), or "page cache: " and the reason; None before the first commit, and if the pool is not on a disk.
    Both survive the same failures. Direct writes need less processor time."""
    wait_policy: str | None = None
    """"passive": OpenMP's threads sleep instead of spinning while a checkpoint is copied, because spinning threads left
    no processor to the copy threads. "trial": lightck is comparing sleeping with spinning. None: lightck does not
    change how OpenMP's threads wait."""
    interval: int = 1
    """The number of updates from one checkpoint to the next, at present."""
    strategy: str = "FullState"
    """The class of the strategy, at present. It changes only with ``strategy="auto"``."""
    strategy_reason: str | None = None
    """Why ``strategy="auto"`` has chosen this strategy; None while it measures, and without it."""
    base_every: int | None = None
    """With ``Gradients``: each parameter is written once every this many steps, at present. None with another
    strategy."""
    replica_drift: float | None = None
    """With ``Replica``: the largest absolute difference that was seen between an element of a tensor and of its copy
    (infinity: one of them is NaN). None with another strategy."""
    replica_drift_tensor: str | None = None
    """The tensor in which ``replica_drift`` was seen; None: no copy has differed. (A difference of 0.0 in a named
    tensor: other bits that are equal as numbers, such as -0.0.)"""
    replica_renewed: int = 0
    """How often the copies of a parameter and its optimizer state were copied from the training again, the first copy
    not counted (``Replica``)."""
    tiers: tuple[TierStats, ...] = ()
    """What was sent to each tier (``attach(..., tiers=[...])``)."""
    pool_rounds: int = 0
    """With ``tiers=``: how often everything in the pool was read again (``Tier(reread=...)``)."""
    pool_bytes_reread: int = 0
    """What was read of the pool for that."""
    pool_damaged: int = 0
    """Checkpoints of the pool that were found damaged while they were read again; each counts once."""
    emulated: str | None = None
    """The memory whose speed was emulated (``LIGHTCK_EMULATE``); None without emulation. With emulation the times are
    not those of the real medium."""

    @property
    def added_seconds(self) -> float:
        """All time that lightck added to the loop: ``stall_seconds`` and ``slowdown_seconds``."""
        return self.stall_seconds + self.slowdown_seconds

    @property
    def versions(self) -> int:
        """The old name of ``checkpoints``; it goes away in the next release."""
        warnings.warn("Stats.versions is now Stats.checkpoints.", DeprecationWarning, stacklevel=2)
        return self.checkpoints


class Slowdown(NamedTuple):
    """How much longer the loop's own operations take because of lightck, in seconds per step."""

    unsaved: float = 0.0
    """In a step that saves no checkpoint."""
    saved: float = 0.0
    """In a step that saves a checkpoint."""


class Observer(Protocol):
    """Receives each stall when it ends, for a trace. ``begin`` and ``end`` are values of ``time.perf_counter``, in
    seconds. ``is_state``: whether small state was read in this time. Such a time gets a row of its own in the trace,
    because it lies inside another stall."""

    def stalled(self, what: str, begin: float, end: float, is_state: bool = False) -> None: ...


class Stall:
    """The context manager that ``Meter.stall`` returns. It is a class, because a ``@contextmanager`` function takes
    longer, and several of these blocks run at each step.

    The wall time of the block counts as CPU time, and ``Meter.wait`` subtracts its waits again. The CPU clock of the
    thread is not read here, because at a step that saves nothing a read takes longer than the whole block.
    """

    __slots__ = ("_begin", "_defers", "_loop_seconds", "_meter", "_what")

    def __init__(self, meter: Meter, what: str) -> None:
        self._meter, self._what = meter, what

    def __enter__(self) -> None:
        self._defers = begin_deferral()
        meter = self._meter
        if meter.stall_in_progress is None:
            meter.stall_in_progress, self._begin, self._loop_seconds = self, time.perf_counter(), meter.loop_seconds

    def __exit__(self, *exception: object) -> None:
        try:
            meter = self._meter
            if meter.stall_in_progress is self:
                meter.stall_in_progress, now = None, time.perf_counter()
                seconds = now - self._begin - (meter.loop_seconds - self._loop_seconds)
                meter.stall_seconds += seconds
                meter.hook_cpu_seconds += seconds
                if meter.observer is not None:
                    meter.observer.stalled(self._what, self._begin, now)
        finally:
            if self._defers:
                end_deferral()


class _WorkOfLoop:
    """The context manager that ``Meter.work_of_loop`` returns."""

    __slots__ = ("_begin", "_meter")

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._meter.loop_seconds += time.perf_counter() - self._begin


class Meter:
    """The running counters of a session, from which ``snapshot`` makes ``Stats``. A counter that has the name of a
    field of ``Stats`` gives this field its value."""

    def __init__(self, slowdown: Slowdown = Slowdown(), strategy: str = "FullState") -> None:  # noqa: B008 - a tuple
        self.observer: Observer | None = None
        """The trace that is being recorded, if any."""
        self._slowdown = slowdown
        self.unsaved_slowdown_seconds = 0.0
        """What ``slowdown_seconds`` would be if no step had saved a checkpoint."""
        self.stall_seconds = self.slowdown_seconds = self.wait_seconds = 0.0
        self.loop_seconds = 0.0
        """Time in blocks of ``work_of_loop``, which no other counter includes."""
        self.hook_cpu_seconds = self.keep_cpu_seconds = self.staging_cpu_seconds = self.replica_cpu_seconds = 0.0
        self.committed_at: float | None = None
        self.replica_drift: float | None = None
        self.replica_drift_tensor: str | None = None
        self.replica_renewed = 0
        self.collective_seconds, self.collective_bytes_copied = 0.0, 0
        self.kept = self.holds_honored = self.holds_overrun = 0
        self.strategy = strategy
        self.strategy_reason: str | None = None
        self.tiers: tuple[TierStats, ...] = ()
        self.pool_rounds = self.pool_bytes_reread = self.pool_damaged = 0
        self.staging: str | None = None
        self.staging_trial = False
        self.disk_writes: str | None = None
        self.wait_policy: str | None = None
        self.bytes_written = self.bytes_helped = self.checkpoints = self.skipped = self.recopied = self.left_out = 0
        self.stall_in_progress: Stall | None = None
        """The outermost ``stall`` block that the training thread is executing; None outside of these blocks."""

    def count_commit(self, nbytes: int, nbytes_helped: int) -> None:
        """Count one committed checkpoint. ``nbytes``: the bytes that were written for it; ``nbytes_helped``: the part
        that the training thread copied while it waited."""
        self.checkpoints += 1
        self.committed_at = time.time()
        self.bytes_written += nbytes
        self.bytes_helped += nbytes_helped

    def count_record(self, nbytes: int, nbytes_helped: int) -> None:
        """Count one gradient record that is not committed. The arguments are those of ``count_commit``."""
        self.bytes_written += nbytes
        self.bytes_helped += nbytes_helped

    def count_step(self, is_saved: bool) -> None:
        """Count the slowdown of one closed step. ``is_saved``: whether a checkpoint or a gradient record is saved."""
        self.unsaved_slowdown_seconds += self._slowdown.unsaved
        self.slowdown_seconds += self._slowdown.saved if is_saved else self._slowdown.unsaved

    def count_hook(self, seconds: float) -> None:
        """Count the seconds that a hook took outside of its ``stall`` blocks."""
        if seconds > 0.0:
            self.stall_seconds += seconds
            self.hook_cpu_seconds += seconds

    def stall(self, what: str = "lightck") -> Stall:
        """Return a context manager that counts the time of its block, on the training thread, and defers signals to the
        end of the block. The time of a block inside another one counts once. ``what``: the name of the stall in a
        trace."""
        return Stall(self, what)

    def work_of_loop(self) -> _WorkOfLoop:
        """Return a context manager for work that the loop would do anyway, and that lightck only delays. Its time is
        left out of all counters."""
        return _WorkOfLoop(self)

    def state_was_read(self, step: int, began: float) -> None:
        """Report to a trace that the small state of a step was read from ``began`` (of ``time.perf_counter``) until
        now."""
        if self.observer is not None:
            self.observer.stalled(f"state of step {step}", began, time.perf_counter(), is_state=True)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Count the time of this block in ``wait_seconds``. Only the CPU time of the thread in the block counts as CPU
        time."""
        start, cpu, of_loop = time.perf_counter(), time.thread_time(), self.loop_seconds
        try:
            yield
        finally:
            now = time.perf_counter()
            self.wait_seconds += now - start - (self.loop_seconds - of_loop)
            if self.stall_in_progress is not None:  # the stall counts all its time as CPU time: subtract the wait here
                self.hook_cpu_seconds += time.thread_time() - cpu - (now - start)
            if self.observer is not None:
                self.observer.stalled("wait", start, now)

    def snapshot(
        self,
        *,
        engine_cpu_seconds: float,
        committed: int | None,
        step: int,
        in_flight: int,
        interval: int,
        rank_wait_seconds: float = 0.0,
        base_every: int | None = None,
        emulated: str | None = None,
    ) -> Stats:
        """Return the present values of all counters. The arguments are figures that only the session knows."""
        own = {f.name: getattr(self, f.name) for f in fields(Stats) if hasattr(self, f.name)}
        in_python = self.hook_cpu_seconds + self.keep_cpu_seconds + self.staging_cpu_seconds + self.replica_cpu_seconds
        return Stats(
            **own,
            cpu_seconds=in_python + engine_cpu_seconds,
            committed=committed,
            step=step,
            in_flight=in_flight,
            interval=interval,
            rank_wait_seconds=rank_wait_seconds,
            base_every=base_every,
            emulated=emulated,
        )
