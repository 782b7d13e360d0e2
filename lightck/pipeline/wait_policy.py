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
from dataclasses import dataclass, field
from statistics import median

import torch

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


@dataclass(slots=True)
class Trial:
    """Pairs of versions, one with passive waiting and one without, in turn as to which is first.

    It ends after 5 pairs where passive waiting is much slower, after 8 where it is no slower, and after 16 at the
    latest: steps scatter by a few percent, and the difference is mostly less.
    """

    PAIRS, PAIRS_MAX = 8, 16
    MUCH_SLOWER, LEAD = 1.05, 5
    SLOWER_MAX, SHORTER = 1.01, 0.5

    begun: int = 0
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """From boundary to gate, by whether OpenMP waited passively."""
    waits: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """The part of it that was waited at the gate."""

    @property
    def pairs(self) -> int:
        return min(len(self.seconds[True]), len(self.seconds[False]))

    @property
    def next(self) -> bool:
        """Whether the next version is one with passive waiting."""
        first = self.pairs % 2 == 0
        return first if len(self.seconds[first]) == self.pairs else not first

    def begins(self) -> bool:
        """One more version begins. False where so many never reached a gate that this leads nowhere."""
        self.begun += 1
        return self.begun <= 4 * self.PAIRS_MAX

    def passed(self, passive: bool, seconds: float, waited: float) -> bool | None:
        """A version took so long from its boundary to the gate, waiting there for ``waited`` of it. The verdict, once
        there is one: is passive waiting better?"""
        self.seconds[passive].append(seconds)
        self.waits[passive].append(waited)
        if len(self.seconds[True]) != len(self.seconds[False]):
            return None
        ratios = [on / off for on, off in zip(self.seconds[True], self.seconds[False], strict=True)]
        much_slower = sum(ratio > self.MUCH_SLOWER for ratio in ratios)
        if 2 * much_slower - self.pairs >= self.LEAD:
            return False
        if self.pairs < self.PAIRS or (median(ratios) > 1 and self.pairs < self.PAIRS_MAX):
            return None
        return median(ratios) <= self.SLOWER_MAX and median(self.waits[True]) < median(self.waits[False]) * self.SHORTER

    def __str__(self) -> str:
        if not self.pairs:
            return "no version of the trial reached an update"
        with_, without = (
            f"{median(self.seconds[on]) * 1e3:.1f} ms to the gate, {median(self.waits[on]) * 1e3:.1f} ms "
            "of it waiting there"
            for on in (True, False)
        )
        return f"{with_}; without {without}"


class WaitPolicy:
    """Watches how versions reach the gate, and decides. ``is_on=False``: nothing is ever changed."""

    def __init__(self, engine: Engine, meter: Meter, *, is_on: bool = True) -> None:
        self._engine, self._meter = engine, meter
        self._is_on = is_on and not any(name in os.environ for name in (*_CHOSEN_BY_USER, *_INCOMPATIBLE_VARIABLES))
        self._is_passive = False
        self._trial: Trial | None = None
        self._window: tuple[bool, float, float] | None = None
        """Of a trial's version under way: whether OpenMP waits passively, the time, and the seconds waited so far."""
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
        if self._trial is not None and not (_has_thread_per_processor() and self._trial.begins()):
            self._decide(self._trial, False)
        wanted = self._trial.next if self._trial is not None else self._is_passive and _has_thread_per_processor()
        if not self._engine.wait_passively(wanted):
            log.info("lightck: OpenMP's threads wait as they always do: no thread more can be started")
            self._is_on, self._is_passive, self._trial = False, False, None
            self._tell()
        elif self._trial is not None:
            self._window = wanted, time.perf_counter(), self._meter.wait_seconds

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
            passive, began, waited = window
            took = time.perf_counter() - began
            verdict = self._trial.passed(passive, took, self._meter.wait_seconds - waited)
            if verdict is not None:
                self._decide(self._trial, verdict)

    def _consider(self) -> None:
        """A trial, where there is reason for one."""
        due = self._is_on and self._checkpoints >= self._next_trial
        if due and (self._is_passive or sum(self._starved) >= _STARVED_CHECKPOINTS) and _has_thread_per_processor():
            self._is_on = find_openmp(OPENMP_OF)
            self._trial = Trial() if self._is_on else None
            self._tell()

    def _decide(self, trial: Trial, passive: bool) -> None:
        log.info(
            "lightck: OpenMP's threads %s while versions are copied: %s",
            "wait passively" if passive else "wait as they always do",
            trial,
        )
        self._trial, self._is_passive = None, passive
        self._starved.clear()
        self._next_trial, self._pause = self._checkpoints + self._pause, 2 * self._pause
        self._engine.wait_passively(passive)
        self._tell()

    def _tell(self) -> None:
        self._meter.wait_policy = TRIAL if self._trial is not None else PASSIVE if self._is_passive else None


def _has_thread_per_processor() -> bool:
    """Else a processor is left for the copies, and libgomp has no reason to let its threads sleep."""
    return torch.get_num_threads() >= len(os.sched_getaffinity(0))
