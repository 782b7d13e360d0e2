"""Replay: the state after update t, computed from older copies of the units and from what the updates since then
consumed, with the same bits as in the training.

A unit is a parameter with its optimizer state. Each unit starts at the step of its own base, and takes the updates that
follow it, one after the other: element by element this is the computation of the training, which updates one parameter
independently of all others. So units whose bits do not depend on the number of threads are replayed in parallel, with
one intra-op thread each. All others are replayed one by one, with the number of threads of the training.

Idea: gradients as exact differential checkpoints, as in LowDiff (Yao et al., 2025), with the real optimizer instead of
a sum of gradients.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch

from lightck.errors import ReplayError, listed
from lightck.restore.unit_replay import Base, Check, SlicedReplay, UnitReplay
from lightck.state.consumed_update import ConsumedStep, ConsumedUpdate
from lightck.state.fingerprint import flushes_denormals
from lightck.state.neutral_settings import float32_by_default, neutral_settings
from lightck.state.partial_optimizer import PartialOptimizer, recorded_name
from lightck.state.unit_update import (
    SLICE_NUMEL,
    Unit,
    UpdateInSlices,
    group_indexes_of,
    is_independent_of_threads,
    is_left_alone,
    update_in_slices,
    update_unit,
)


def replay(
    bases: Sequence[Base],
    updates: Iterable[ConsumedUpdate],
    optimizers: Mapping[int, PartialOptimizer],
    to_step: int,
    *,
    check: Check | None = None,
    workers: int | None = None,
    slice_numel: int | None = SLICE_NUMEL,
) -> None:
    """Bring all units to the state of ``to_step``, in place.

    Args:
        bases: the units; each has the state of its own step.
        updates: what the updates consumed. Those of every step after the oldest base up to ``to_step`` are needed.
        optimizers: index of each optimizer -> the object that replays its steps.
        to_step: the step to reach. No base may be younger.
        check: compares a unit with what is known of it after an update. The first difference ends the replay.
        workers: how many units are replayed at the same time, where that gives the same bits; by default one for each
            processor of this process.
        slice_numel: the number of elements of a slice; None: no slices. The caller must choose it so that each slice of
            a gradient in a pool begins where a block does, and so that no page that ``check`` compares lies in two
            slices.

    Raises:
        ReplayError: an update is missing or cannot be replayed, ``check`` found a difference, or this process
            flushes denormal numbers to zero. If the update of a unit fails, the message names the unit and the step,
            and the units have bytes of different steps.
    """
    if flushes_denormals():
        raise ReplayError(
            "The updates cannot be replayed: this process takes very small numbers for zero, and the training did "
            "not. Call torch.set_flush_denormal(False) before the recovery."
        )
    plan = _Plan(bases, updates, optimizers, to_step, check, slice_numel)
    parallel = [base for base in bases if plan.is_parallel(base)]
    in_turn = [base for base in bases if not plan.is_parallel(base)]
    with neutral_settings(), float32_by_default():
        _replay_in_parallel(plan, parallel, workers or len(os.sched_getaffinity(0)))
        for base in in_turn:
            plan.replay(base)


@dataclass(frozen=True, slots=True)
class _OptimizerCall:
    """One call of ``optimizer.step`` in one update. ``group_indexes``: name of a parameter -> index of its group."""

    consumed: ConsumedStep
    optimizer: PartialOptimizer
    group_indexes: Mapping[str, int]


class _Plan:
    """What a replay of a unit needs to know, the same for all units."""

    def __init__(
        self,
        bases: Sequence[Base],
        updates: Iterable[ConsumedUpdate],
        optimizers: Mapping[int, PartialOptimizer],
        to_step: int,
        check: Check | None,
        slice_numel: int | None,
    ) -> None:
        self._to_step, self._check, self._slice_numel = to_step, check, slice_numel
        self._optimizers = optimizers
        self._updates = {update.step: update for update in updates}
        self._calls = {step: _calls(update, optimizers) for step, update in self._updates.items()}
        self.is_cancelled = threading.Event()
        younger = [base.unit.name for base in bases if base.step > to_step]
        if younger:
            raise ReplayError(f"the bases of {listed(younger)} are younger than step {to_step}")
        low = min((base.step for base in bases), default=to_step)
        missing = [str(step) for step in range(low + 1, to_step + 1) if step not in self._updates]
        if missing:
            raise ReplayError(
                f"what the update of step {listed(missing)} consumed is missing, so the state of step {to_step} cannot "
                f"be made from step {low}"
            )

    def is_parallel(self, base: Base) -> bool:
        """Whether other units may be replayed at the same time, each with one intra-op thread."""
        found = [self._optimizers.get(index) for index in base.unit.states]
        return all(one is not None and is_independent_of_threads(base.unit, one) for one in found)

    def replay(self, base: Base) -> None:
        """Bring one unit to the last step."""
        unit_replay = self._unit_replay(base)
        for step in unit_replay.steps():
            with unit_replay.named_errors(step):
                self._update(base.unit, step)
            unit_replay.compare(base.unit, step, None)

    def in_slices(self, base: Base) -> SlicedReplay | None:
        """Return the replay of a unit in slices; None if it has only one, or if a replay in slices may give other
        bits."""
        unit = base.unit
        if self._slice_numel is None or unit.parameter.numel() <= self._slice_numel or len(unit.states) != 1:
            return None
        updates: dict[int, list[UpdateInSlices]] = {}
        for step in range(base.step + 1, self._to_step + 1):
            updates[step] = []
            for call, group_index in self._calls_of(unit, step):
                if is_left_alone(unit, call.consumed, call.optimizer):
                    continue
                update = update_in_slices(unit, call.consumed, group_index, call.optimizer, self._slice_numel)
                if update is None:
                    return None
                updates[step].append(update)
        return SlicedReplay(self._unit_replay(base), unit, updates, self._slice_numel)

    def _unit_replay(self, base: Base) -> UnitReplay:
        return UnitReplay(base, self._to_step, self._check, self.is_cancelled)

    def _update(self, unit: Unit, step: int) -> None:
        threads = self._updates[step].threads
        for call, group_index in self._calls_of(unit, step):
            update_unit(
                unit, call.consumed, group_index, call.optimizer, threads=threads, slice_numel=self._slice_numel
            )

    def _calls_of(self, unit: Unit, step: int) -> Iterator[tuple[_OptimizerCall, int]]:
        """Yield the calls in a step of the optimizers that have a unit, and the index of its group."""
        for call in self._calls[step]:
            group_index = call.group_indexes.get(unit.name)
            if group_index is not None:
                yield call, group_index


def _calls(update: ConsumedUpdate, optimizers: Mapping[int, PartialOptimizer]) -> list[_OptimizerCall]:
    """Return the calls of ``optimizer.step`` in an update, in their order. Raises ``ReplayError`` if the optimizer of a
    call is not given, or is of another class."""
    calls = []
    for consumed in update.optimizer_steps:
        optimizer = optimizers.get(consumed.optimizer)
        given = None if optimizer is None else recorded_name(optimizer.kind)
        if optimizer is None or given != consumed.class_name:
            found = "no optimizer is given" if optimizer is None else f"{given} is given"
            raise ReplayError(
                f"The update of step {update.step} was made by optimizer {consumed.optimizer}, a "
                f"{consumed.class_name}, and {found} in its place. Create the optimizers as in the training.",
                step=update.step,
            )
        calls.append(_OptimizerCall(consumed, optimizer, group_indexes_of(consumed)))
    return calls


def _replay_in_parallel(plan: _Plan, bases: Sequence[Base], workers: int) -> None:
    """Replay these units, and the slices of those that have some, in threads that use one intra-op thread each. The
    largest are the first."""
    if not bases:
        return
    parts: list[tuple[int, Callable[[], None]]] = []
    for base in bases:
        sliced = plan.in_slices(base)
        if sliced is None:
            parts.append((base.unit.parameter.nbytes, partial(plan.replay, base)))
        else:
            nbytes = base.unit.parameter.nbytes // len(sliced.parts)
            parts += [(nbytes, partial(sliced.replay, part)) for part in sliced.parts]
    ordered = [one for _, one in sorted(parts, key=itemgetter(0), reverse=True)]
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(
        min(workers, len(ordered)), "lightck-replay", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        futures = [pool.submit(one) for one in ordered]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
    except BaseException:
        plan.is_cancelled.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)  # the workers' calls also set the number for all threads that begin later
