"""How OpenMP's threads wait while a version is copied: as they always do, or passively.

Threads of GNU OpenMP that wait for each other spin, which keeps copy threads of idle priority off a processor that does
nothing. Then the training thread copies at the gate, and that is a stall. Waiting passively (``native/src/openmp.c``)
cures it where steps are long, and slows a training of many small operations down. So it is tried where the gate had to
copy much: versions with and without take turns, and what is slower, or no shorter a wait, is not kept. What is computed
is the same either way.
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
OPENMP_OF = "libtorch_cpu.so"
TRIAL, PASSIVE = "trial", "passive"
_CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_INCOMPATIBLE_VARIABLES = ("OMP_STACKSIZE", "GOMP_STACKSIZE", "OMP_DISPLAY_AFFINITY")
"""With these set, one more team might be too large, or be announced at every version."""

_STARVED_SHARE, _STARVED_NBYTES = 0.1, 16 << 20
"""A version was starved where the waiting thread copied as much of it."""
_STARVED_CHECKPOINTS, _OF_THE_LAST = 3, 5
"""So many of them are worth a trial."""
_CHECKPOINTS_UNTIL_NEXT = 1000
"""After a trial; twice as many after each further one. Trainings change, but seldom."""

_AS_EVER, _PASSIVELY = False, True
_NO_SLOWER, _LESS_WAITING = Margin(-0.01), Margin(0.5)
"""Passive waiting is kept where the way from boundary to gate is at most 1 % longer by it, and the part of it that is
waited at the gate less than half. Steps scatter by a few percent, and the difference is mostly less: so many rounds."""
_ROUNDS = 16
_MUCH_SLOWER, _ROUNDS_MIN = 1.1, 5
"""After so many rounds a trial ends where passive waiting makes the way so much longer."""


class WaitPolicy:
    """Watches how versions reach the gate, and decides. ``is_on=False``: nothing is ever changed."""

    def __init__(self, engine: Engine, meter: Meter, *, is_on: bool = True) -> None:
        self._engine, self._meter = engine, meter
        self._is_on = is_on and not any(name in os.environ for name in (*_CHOSEN_BY_USER, *_INCOMPATIBLE_VARIABLES))
        self._is_passive = False
        self._trial: Trial[bool] | None = None
        """Whether OpenMP waits passively. Figures: seconds to the gate, seconds waited there."""
        self._window: tuple[float, float] | None = None
        """Of a trial's version under way: the time when it began, and the seconds waited so far."""
        self._has_begun_eagerly = False
        self._was_starved = False
        self._starved: deque[bool] = deque(maxlen=_OF_THE_LAST)
        self._checkpoints = 0
        self._next_trial, self._pause = 0, _CHECKPOINTS_UNTIL_NEXT

    def checkpoint_begins(self, *, eager: bool = False) -> None:
        """Its copies begin now; ``eager``: those of its first layers, before its boundary."""
        has_begun, self._has_begun_eagerly = self._has_begun_eagerly, eager
        if has_begun or not self._is_on:
            return
        self._window = None
        if self._trial is None:
            wanted = self._is_passive and _has_thread_per_processor()
        else:
            if not _has_thread_per_processor():
                self._trial.give_up()
            wanted = self._trial.begin()
            self._decide_if_over(self._trial)
        if not self._engine.set_passive_waiting(wanted):
            log.info("lightck: OpenMP's threads wait as they always do: no thread more can be started")
            self._is_on, self._is_passive, self._trial = False, False, None
            self._tell()
        elif self._trial is not None:
            self._window = time.perf_counter(), self._meter.wait_seconds

    def checkpoint_ended(self, nbytes: int, nbytes_helped: int) -> None:
        """It is committed; so many of its bytes were copied by a thread that waited."""
        self._checkpoints += 1
        self._was_starved = nbytes_helped >= max(_STARVED_NBYTES, _STARVED_SHARE * nbytes)

    def gate_passed(self) -> None:
        """Copies have ended, and the update may begin."""
        window, self._window = self._window, None
        self._starved.append(self._was_starved)
        self._was_starved = False
        if self._trial is None:
            self._consider()
        elif window is not None:
            trial, (began, waited) = self._trial, window
            trial.note(time.perf_counter() - began, self._meter.wait_seconds - waited)
            if trial.rounds >= _ROUNDS_MIN and trial.medians(_PASSIVELY)[0] > _MUCH_SLOWER * trial.medians(_AS_EVER)[0]:
                trial.withdraw(_PASSIVELY)
            self._decide_if_over(trial)

    def _consider(self) -> None:
        """A trial, where there is reason for one."""
        due = self._is_on and self._checkpoints >= self._next_trial
        if due and (self._is_passive or sum(self._starved) >= _STARVED_CHECKPOINTS) and _has_thread_per_processor():
            self._is_on = find_openmp(OPENMP_OF)
            if self._is_on:
                self._trial = Trial((_AS_EVER, _PASSIVELY), (_NO_SLOWER, _LESS_WAITING), rounds=_ROUNDS)
            self._tell()

    def _decide_if_over(self, trial: Trial[bool]) -> None:
        if not trial.is_over:
            return
        waits = "wait passively" if trial.turn else "wait as they always do"
        log.info("lightck: OpenMP's threads %s while versions are copied: %s", waits, _reported(trial))
        self._trial, self._is_passive = None, trial.turn
        self._starved.clear()
        self._next_trial, self._pause = self._checkpoints + self._pause, 2 * self._pause
        self._engine.set_passive_waiting(self._is_passive)
        self._tell()

    def _tell(self) -> None:
        self._meter.wait_policy = TRIAL if self._trial is not None else PASSIVE if self._is_passive else None


def _reported(trial: Trial[bool]) -> str:
    """By which times it was decided."""
    with_, without = ([1e3 * seconds for seconds in trial.medians(one)] for one in (_PASSIVELY, _AS_EVER))
    if not with_ or not without:
        return "too few versions of the trial reached an update"
    times = "{:.1f} ms to the gate, {:.1f} ms of it waiting there"
    return f"{times.format(*with_)}; without {times.format(*without)}"


def _has_thread_per_processor() -> bool:
    """Else a processor is left for the copies, and libgomp has no reason to let its threads sleep."""
    return torch.get_num_threads() >= len(os.sched_getaffinity(0))
