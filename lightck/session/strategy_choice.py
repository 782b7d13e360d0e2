"""``strategy="auto"``: begin with ``FullState()``, and go on with ``Gradients(base_every="auto")`` where it costs less.

    attach                  if the pool has gradient records, the session is one of ``Gradients`` from the start. Else
                            it is one of ``FullState``, and ``not_eligible`` says whether ``Gradients`` would take it
    steps 4 to 10           how long the training waits for copies, and how long copies keep processors busy
    after step 10           ``Gradients`` is tried if all of this holds: the training waits, or copies keep processors
                            busy, for more than 1 % of the time; an update changes at least twice as many bytes as it
                            consumes; no checkpoint is pinned; the pool fits into half of the free space
    the next checkpoint     is full, and is written into a new pool file, which replaces the present one (a relayout)
    after the next update   updates are recorded
    two rounds of bases     the same costs are measured with ``Gradients``. If they are not lower than those of
                            ``FullState``, updates are recorded no more, and the next checkpoint is written into a new
                            file of the first kind

Invariant: the file at the pool's path is whole at any moment, and of one kind. An attach after a crash finds the kind
in the file. Each checkpoint is exact, also while the strategy changes.

Failures: a new file that does not fit, although the free space was measured before, is removed again, and the session
goes on with the present one. Every other error of a relayout is an error as in any relayout.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

from lightck.errors import LightckError, UnsupportedError
from lightck.events import StepListener
from lightck.pipeline.gradient_pools import GradientPools, updated_nbytes
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.create import pool_nbytes
from lightck.pool.format.layout import Entry
from lightck.pool.gradient_log import BASE_EVERY_MIN, tolerant_base_every
from lightck.pool.reader import open_pool
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.devdax import DevdaxBackend
from lightck.session.arguments import AUTO_STRATEGY, Arguments
from lightck.session.base_every import MEASURED, WARM_UP, free_beside, records_of_new_pool
from lightck.session.discover import Found
from lightck.session.gradient_arguments import refuse_unrecordable
from lightck.state.device_transfers import transfer_of
from lightck.stats import Meter
from lightck.strategy.full import FullState
from lightck.strategy.gradients import Gradients

log = logging.getLogger("lightck")
COST_MIN = 0.01
"""``FullState`` is kept if copies cost a smaller share of the time than this."""
RATIO_MIN = 2.0
"""``FullState`` is kept if an update changes fewer bytes than this for each byte of gradients."""
ROUNDS = 2
"""For how many rounds of bases the costs of ``Gradients`` are measured."""
AUTO_CANDIDATE = Gradients(base_every="auto")
"""The strategy that may take the place of ``FullState``."""
FULL = FullState.__name__


# -- at attach ---------------------------------------------------------------------------------------------------------


def with_present_strategy(arguments: Arguments, path: str, backend: Backend, *, is_rank_pool: bool) -> Arguments:
    """Return the arguments with the strategy of the pool at this path, where ``strategy="auto"``: ``AUTO_CANDIDATE`` if
    the pool has gradient records, else ``FullState``. For a rank of a group, and with ``overwrite=True``, it is always
    ``FullState``."""
    options = arguments.save_options
    if options.strategy != AUTO_STRATEGY:
        return arguments
    is_always_full = is_rank_pool or arguments.overwrite
    strategy = AUTO_CANDIDATE if not is_always_full and _has_gradients(path, backend) else FullState()
    return replace(arguments, save_options=replace(options, strategy=strategy))


def _has_gradients(path: str, backend: Backend) -> bool:
    """Whether the pool at this path has gradient records. If it cannot be opened, the attach says why."""
    with suppress(LightckError):
        reader = open_pool(path, backend.name, gradients=True)
        try:
            return reader.superblock.has_gradients
        finally:
            reader.close()
    return False


@contextmanager
def explained_refusal(path: str) -> Iterator[None]:
    """Within this block, in which ``strategy="auto"`` found gradient records at this path: raise ``UnsupportedError``
    if ``AUTO_CANDIDATE`` is refused. (The advice of the original error would mislead, because ``FullState`` cannot go
    on in this pool.)"""
    try:
        yield
    except UnsupportedError as err:
        reason = str(err).partition(". ")[0].rstrip(".")
        raise UnsupportedError(
            f'The pool {path!r} holds gradient records, because strategy="auto" chose Gradients in a run before, or a '
            f"training with strategy=Gradients(...) made it. {reason}. Undo what has changed since that run. Or "
            "write the newest checkpoint into a new pool (lightck compact POOL NEW), and attach to that one: there "
            'strategy="auto" begins with FullState().'
        ) from err


def not_eligible(arguments: Arguments, backend: Backend, found: Found, *, is_rank_pool: bool) -> str:
    """Return why ``Gradients`` is not to be chosen for this training; "" if it may be."""
    if is_rank_pool:
        return "in a group of ranks nothing is measured. Pass strategy=lightck.Gradients(...) there"
    if arguments.save_options.tiers:
        return "a tier gets checkpoints more cheaply from a pool that holds them whole"
    if isinstance(backend, DevdaxBackend):
        return 'a device-dax device (backend="devdax") has no room for a second pool beside the present one'
    if any(transfer_of(p) is not None for p in arguments.model.parameters()):
        return "gradients on a device are copied while the training waits"
    try:
        refuse_unrecordable(AUTO_CANDIDATE, arguments, found, is_rank_pool=False)
    except (UnsupportedError, ValueError) as err:
        return str(err)
    return ""


# -- while training runs -----------------------------------------------------------------------------------------------


class StepCosts(NamedTuple):
    """What a session has spent so far, in seconds. now: the time; in a difference of two, the time between them.
    waited: how long the training waited for copies. stalled: time of the training in lightck, the waits included.
    copied: CPU time of copy threads."""

    now: float
    waited: float
    stalled: float
    copied: float


def added_seconds(spent: StepCosts, processors: int) -> float:
    """Return what lightck costs a training that keeps all ``processors`` busy."""
    return spent.stalled + spent.copied / processors


def reason_to_keep(spent: StepCosts, processors: int) -> str:
    """Return why ``FullState`` is cheap enough; "" if it is not. ``spent``: between two moments. ``processors``: how
    many the process may use."""
    seconds = max(spent.now, 1e-9)
    waited, copied = spent.waited / seconds, spent.copied / (seconds * processors)
    if max(waited, copied) > COST_MIN:
        return ""
    return (
        f"training waits {waited:.1%} of its time for copies, and copies take {copied:.1%} of the processors' time; "
        f"below {COST_MIN:.0%} nothing is gained"
    )


def records_that_fit(laid_out: list[Entry], state_nbytes: int, free_nbytes: int) -> tuple[int, str]:
    """Return the number of record slots of the new pool, and why ``FullState`` is kept; "" if it is not. laid_out: the
    entries of the new pool. state_nbytes: bytes of small state. free_nbytes: how many bytes are free beside the present
    pool."""
    changed, consumed = updated_nbytes(laid_out)
    ratio = changed / consumed if consumed else 0.0
    if ratio < RATIO_MIN:
        return 0, (
            f"an update changes {ratio:.1f} times as many bytes as its gradients have, and only from "
            f"{RATIO_MIN:.0f} times on is it worth while to store gradients instead"
        )
    n_records = records_of_new_pool(laid_out, state_nbytes, free_nbytes)
    needed = pool_nbytes(laid_out, slots=n_records, state_nbytes=state_nbytes)
    if needed > free_nbytes // 2:
        return 0, (
            f"the smallest pool with gradient records needs {needed / 1e6:,.0f} MB, and half of the free space is "
            f"{free_nbytes / 2e6:,.0f} MB"
        )
    return n_records, ""


def keep_full_state(meter: Meter, reason: str) -> None:
    """Log and remember that ``FullState`` is kept."""
    meter.strategy_reason = reason
    log.info('lightck: strategy="auto" stays with FullState(): %s', reason)


class StrategyChoice(StepListener):
    """Measures, and chooses."""

    def __init__(
        self,
        pipeline: Pipeline,
        meter: Meter,
        kind: GradientPools,
        *,
        n_pins: Callable[[], int],
        state_nbytes: Callable[[], int],
        record_updates: Callable[[bool], None],
        done: Callable[[StepListener], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """kind: of the pool that ``AUTO_CANDIDATE`` writes to. n_pins: returns how many checkpoints are pinned.
        state_nbytes: returns how many bytes small state has. record_updates: records updates from now on, or (False) no
        more. done: is called with this object when nothing is left to do. clock: returns the time in seconds."""
        self._pipeline, self._meter, self._kind = pipeline, meter, kind
        self._first_kind, self._first_n_slots = pipeline.pool.kind, pipeline.pool.n_slots
        self._n_pins, self._state_nbytes, self._clock = n_pins, state_nbytes, clock
        self._record_updates, self._done = record_updates, done
        self._processors = len(os.sched_getaffinity(0))
        self._is_recording = self._is_decided = False
        reference = weakref.WeakMethod(self._keep_present)  # the pipeline outlives a session that is collected

        def does_not_fit(err: LightckError) -> None:
            method = reference()
            if method is not None:
                method(err)

        self._does_not_fit = does_not_fit
        self._n_steps = 0
        """Steps since attach, or since updates are recorded."""
        self._begin: StepCosts | None = None
        """What was spent when the measurement began."""
        self._of_full_state: StepCosts | None = None
        """What a step of ``FullState`` spent."""

    # -- events --------------------------------------------------------------------------------------------

    def after_step(self, index: int) -> None:
        # Hooks before updates can be added and removed here, because torch does not iterate over them now.
        if self._writes_gradients and not self._is_recording:
            self._is_recording, self._n_steps = True, 0
            self._record_updates(True)
            self._meter.strategy = type(AUTO_CANDIDATE).__name__
        elif not self._writes_gradients and self._meter.strategy != FULL:
            self._meter.strategy = FULL
        if self._is_decided and self._is_recording == self._writes_gradients:
            self._done(self)

    def step_ended(self, step: int) -> None:
        if self._is_decided or self._is_recording != self._writes_gradients:
            return
        self._n_steps += 1
        if self._n_steps == WARM_UP:
            self._begin = self._costs()
        elif self._begin is not None and self._n_steps == self._n_measured:
            spent = StepCosts(*(after - before for before, after in zip(self._begin, self._costs(), strict=True)))
            per_step = StepCosts(*(one / (self._n_steps - WARM_UP) for one in spent))
            self._begin = None
            if self._is_recording:
                self._compare(per_step)
            else:
                self._choose(per_step)

    @property
    def _writes_gradients(self) -> bool:
        return self._pipeline.pool.kind is self._kind

    @property
    def _n_measured(self) -> int:
        """The number of steps at whose end a measurement ends."""
        if not self._is_recording:
            return MEASURED
        return WARM_UP + ROUNDS * (self._kind.base_every_of(self._pipeline.pool.writer) or BASE_EVERY_MIN)

    def _costs(self) -> StepCosts:
        meter = self._meter
        return StepCosts(self._clock(), meter.wait_seconds, meter.stall_seconds, self._pipeline.engine.cpu_seconds)

    # -- the choice ----------------------------------------------------------------------------------------

    def _choose(self, spent: StepCosts) -> None:
        n_records, reason = 0, reason_to_keep(spent, self._processors)
        writer = self._pipeline.pool.writer
        if not reason and self._n_pins():
            reason = "a checkpoint is pinned, and a pool with gradient records can hold none"
        if not reason and writer is None:
            reason = "no checkpoint was written in the first steps"
        if not reason and writer is not None:
            entries = self._kind.laid_out(writer.entries[number] for number in writer.numbers.values())
            n_records, reason = records_that_fit(entries, self._state_nbytes(), free_beside(self._pipeline.path))
        if reason:
            self._is_decided = True
            keep_full_state(self._meter, reason)
            return
        self._of_full_state = spent
        log.info(
            'lightck: strategy="auto" tries Gradients(base_every=%d): with FullState() the training waits %.1f %% of '
            "the time for copies, and copies take %.1f %% of the time of one processor",
            tolerant_base_every(n_records),
            100 * spent.waited / spent.now,
            100 * spent.copied / spent.now,
        )
        self._pipeline.request_kind(
            self._kind, AUTO_CANDIDATE, n_records, "its checkpoints get gradient records", self._does_not_fit
        )

    def _compare(self, spent: StepCosts) -> None:
        """Keep ``Gradients`` if a step costs less with it."""
        assert self._of_full_state is not None, "_choose has set it"
        self._is_decided = True
        full, now = (added_seconds(one, self._processors) for one in (self._of_full_state, spent))
        reason = f"a checkpoint costs {1e3 * now:.3g} ms with Gradients and {1e3 * full:.3g} ms with FullState"
        self._meter.strategy_reason = reason
        if now < full:
            log.info('lightck: strategy="auto" stays with Gradients: %s', reason)
            return
        log.info('lightck: strategy="auto" goes back to FullState(): %s', reason)
        self._is_recording = False
        self._record_updates(False)
        reason = "its checkpoints have the whole state again"
        self._pipeline.request_kind(self._first_kind, FullState(), self._first_n_slots, reason, self._does_not_fit)

    def _keep_present(self, err: LightckError) -> None:
        """Called after a new pool did not fit, when the session writes to its earlier pool again."""
        self._is_decided = True
        candidate = type(AUTO_CANDIDATE).__name__
        other, present = (FULL, candidate) if self._writes_gradients else (candidate, FULL)
        self._meter.strategy_reason = f"a pool for {other} could not be made: {err}"
        log.warning(
            'lightck: strategy="auto" stays with %s, because a pool for %s could not be made: %s The present pool is '
            "intact, and checkpoints go on in it",
            present,
            other,
            err,
        )
