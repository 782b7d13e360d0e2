"""How OpenMP's threads wait for each other while a checkpoint is copied: actively (which is usual) or passively.

A waiting thread of GNU OpenMP spins: it uses its processor although it has nothing to do. Copy threads have idle
priority, so they do not get this processor. The training thread must then copy at the gate, which stalls the training.
Passive waiting (``native/src/openmp.c``: the threads sleep) avoids this stall if steps are long, but slows down a
training of many small operations. So lightck tries passive waiting if the training thread had to copy much at the gate:
checkpoints with active and passive waiting take turns. Passive waiting stays only if steps take no longer with it and
the wait at the gate is shorter. The results of the training are the same in both cases.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque

import torch

from lightck.pipeline.trial import Margin, Trial
from lightck.pool.engine import Engine, find_openmp
from lightck.stats import Meter

log = logging.getLogger("lightck")
LIBRARY_WITH_OPENMP = "libtorch_cpu.so"
"""The library whose OpenMP threads can be made to wait passively."""
TRIAL, PASSIVE = "trial", "passive"
"""Values of ``Meter.wait_policy``: a trial is running; passive waiting was chosen. None: the threads wait actively."""
_CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Passive waiting is not tried if one of these environment variables is set: the user has chosen how threads wait."""
_INCOMPATIBLE_VARIABLES = ("OMP_STACKSIZE", "GOMP_STACKSIZE", "OMP_DISPLAY_AFFINITY")
"""Passive waiting is not tried if one of these is set. To make threads wait passively, ``native/src/openmp.c`` keeps a
second OpenMP team, which might then need too much memory, or print at every checkpoint."""

_STARVED_SHARE, _STARVED_NBYTES = 0.1, 16 << 20
"""A checkpoint was starved (its copy threads had too little processor time) if a thread that waited for the copies
(usually the training thread, at the gate) made at least the share ``_STARVED_SHARE`` of them itself, and at least
``_STARVED_NBYTES`` bytes."""
_STARVED_CHECKPOINTS, _STARVED_WINDOW = 3, 5
"""While threads wait actively, a trial begins when at least ``_STARVED_CHECKPOINTS`` of the last ``_STARVED_WINDOW``
gates had a starved checkpoint. While they wait passively, it begins as soon as ``_next_trial`` allows."""
_CHECKPOINTS_UNTIL_NEXT = 1000
"""Number of checkpoints from the end of the first trial to the second trial. It doubles after each trial, because
trainings seldom change."""

_WAIT_ACTIVELY, _WAIT_PASSIVELY = False, True
"""The alternatives of a trial: whether the threads wait passively."""
_NO_SLOWER, _LESS_WAITING = Margin(-0.01), Margin(0.5)
"""Passive waiting stays if the time from boundary to gate is at most 1 % longer, and the wait at the gate less than
half as long."""
_ROUNDS = 16
"""Rounds of a trial. Many are needed, because step times scatter by a few percent, which is usually more than the
difference between the two alternatives."""
_MUCH_SLOWER, _ROUNDS_MIN = 1.1, 5
"""A trial ends after ``_ROUNDS_MIN`` or more rounds if the time from boundary to gate with passive waiting is more than
``_MUCH_SLOWER`` times the time with active waiting."""


class WaitPolicy:
    """Decides how OpenMP's threads wait during copies, by the time that checkpoints cost from the boundary to the gate.
    ``is_on=False``: the threads always wait actively."""

    def __init__(self, engine: Engine, meter: Meter, *, is_on: bool = True) -> None:
        self._engine, self._meter = engine, meter
        self._is_on = is_on and not any(name in os.environ for name in (*_CHOSEN_BY_USER, *_INCOMPATIBLE_VARIABLES))
        self._is_passive = False
        self._trial: Trial[bool] | None = None
        """Its alternatives: active and passive waiting. Its costs: the seconds from boundary to gate, and how many of
        these the training thread waited for copies."""
        self._at_begin: tuple[float, float] | None = None
        """The time when the checkpoint in flight began, and ``Meter.wait_seconds`` at that time. None if no checkpoint
        that is part of a trial is in flight."""
        self._has_begun_eagerly = False
        """Whether the next checkpoint began with its eager copies, and so does not begin at its boundary."""
        self._was_starved = False
        """Whether the newest checkpoint that was committed since the last gate was starved. False if no checkpoint was
        committed since."""
        self._starved: deque[bool] = deque(maxlen=_STARVED_WINDOW)
        """``_was_starved`` at the last gates."""
        self._checkpoints = 0
        """Number of checkpoints that were committed, and of gradient records that were stored without a commit."""
        self._next_trial, self._trial_interval = 0, _CHECKPOINTS_UNTIL_NEXT
        """No trial begins while ``_checkpoints`` is less than ``_next_trial``. At the end of a trial, ``_next_trial``
        is set to ``_trial_interval`` checkpoints later."""

    def checkpoint_begins(self, *, eager: bool = False) -> None:
        """The copies of a checkpoint begin now. ``eager``: they are eager copies, before the boundary of the
        checkpoint."""
        has_begun, self._has_begun_eagerly = self._has_begun_eagerly, eager
        if has_begun or not self._is_on:
            return
        self._at_begin = None
        if self._trial is None:
            wanted = self._is_passive and _has_thread_per_processor()
        else:
            if not _has_thread_per_processor():
                self._trial.cancel()
            wanted = self._trial.begin()
            self._decide_if_over(self._trial)
        if not self._engine.set_passive_waiting(wanted):
            log.info(
                "lightck: a helper thread could not be started, so OpenMP's threads keep using the processor while "
                "they wait, and copies may be slower. If that matters, allow the process more threads (ulimit -u)"
            )
            self._is_on, self._is_passive, self._trial = False, False, None
            self._update_stats()
        elif self._trial is not None:
            self._at_begin = time.perf_counter(), self._meter.wait_seconds

    def checkpoint_ended(self, nbytes: int, nbytes_helped: int) -> None:
        """A checkpoint is committed, or a gradient record is stored. ``nbytes``: its bytes. ``nbytes_helped``: how many
        of these were copied by a thread that waited for the copies, and not by a copy thread."""
        self._checkpoints += 1
        self._was_starved = nbytes_helped >= max(_STARVED_NBYTES, _STARVED_SHARE * nbytes)

    def gate_passed(self) -> None:
        """All copies have ended, and the update may begin."""
        at_begin, self._at_begin = self._at_begin, None
        self._starved.append(self._was_starved)
        self._was_starved = False
        if self._trial is None:
            self._start_trial_if_due()
        elif at_begin is not None:
            trial, (began, waited) = self._trial, at_begin
            trial.finish(time.perf_counter() - began, self._meter.wait_seconds - waited)
            if (
                trial.rounds >= _ROUNDS_MIN
                and trial.medians(_WAIT_PASSIVELY)[0] > _MUCH_SLOWER * trial.medians(_WAIT_ACTIVELY)[0]
            ):
                trial.withdraw(_WAIT_PASSIVELY)
            self._decide_if_over(trial)

    def _start_trial_if_due(self) -> None:
        due = self._is_on and self._checkpoints >= self._next_trial
        if due and (self._is_passive or sum(self._starved) >= _STARVED_CHECKPOINTS) and _has_thread_per_processor():
            self._is_on = find_openmp(LIBRARY_WITH_OPENMP)
            if self._is_on:
                self._trial = Trial((_WAIT_ACTIVELY, _WAIT_PASSIVELY), (_NO_SLOWER, _LESS_WAITING), rounds=_ROUNDS)
            self._update_stats()

    def _decide_if_over(self, trial: Trial[bool]) -> None:
        if not trial.is_over:
            return
        waits = "sleep instead of spinning" if trial.current else "go on spinning, as usual,"
        log.info(
            "lightck: OpenMP's idle threads %s while checkpoints are copied, because %s",
            waits,
            _reason(trial),
        )
        self._trial, self._is_passive = None, trial.current
        self._starved.clear()
        self._next_trial, self._trial_interval = self._checkpoints + self._trial_interval, 2 * self._trial_interval
        self._engine.set_passive_waiting(self._is_passive)
        self._update_stats()

    def _update_stats(self) -> None:
        self._meter.wait_policy = TRIAL if self._trial is not None else PASSIVE if self._is_passive else None


def _reason(trial: Trial[bool]) -> str:
    """Return what decided the trial, with the median times, for a message."""
    passive, active = ([1e3 * seconds for seconds in trial.medians(one)] for one in (_WAIT_PASSIVELY, _WAIT_ACTIVELY))
    if len(trial.alternatives) > 1 and trial.rounds < _ROUNDS:  # it was cancelled
        return "the trial ended before sleeping and spinning could be compared"
    result = "that costs less here" if trial.current is _WAIT_PASSIVELY else "sleeping does not cost clearly less here"
    return (
        "{}. Medians of the time from a checkpoint to the next update: {:.1f} ms with sleeping threads, of which the "
        "training waited {:.1f} ms for the copy; {:.1f} ms with spinning threads, of which it waited {:.1f} ms".format(
            result, *passive, *active
        )
    )


def _has_thread_per_processor() -> bool:
    """Whether torch uses at least one thread per processor. If not, a processor is free for the copies anyway."""
    return torch.get_num_threads() >= len(os.sched_getaffinity(0))
