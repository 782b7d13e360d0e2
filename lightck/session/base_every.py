"""``Gradients(base_every="auto")``: each unit is written whole, as a new base, once in n steps.

    n = min(2 r, what half of the free space holds, n*), at least 2

G: bytes of the gradients. r: how many bytes an update changes for each byte of gradients. A checkpoint writes
G + r G / n bytes, so an n beyond 2 r saves less than a half of G more, and each increase of n by 1 needs two more
record slots in the pool.

n* minimizes the cost of a step, a S / n + (t / M) q n / 2: the time that copies take, plus the replay of n / 2 updates
after each failure. So n* = sqrt(2 a S M / (t q)), where

    a   seconds that the copy of a byte takes: of copy threads, and of the training that waits for them
    S   bytes that an update changes
    M   seconds between failures (``mtbf=``)
    t   seconds of a step
    q   seconds of an update. (A replay takes about as long: no forward, no backward.)

Source: the interval of Young (Commun. ACM 17(9), 1974), with the replay in place of the lost work.

    attach            a new pool: n from r and the free space, and with it the number of records. An existing pool: n
                      from r and its records
    steps 4 to 10     a, t and q are measured
    after step 10     if n* is smaller, the next checkpoint is full, and n is lowered with it. The pool stays as it is

Invariant: n grows in no pool, so the records suffice; it changes with a full checkpoint only.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import NamedTuple

from lightck.events import StepListener
from lightck.pipeline.gradient_pools import worthwhile_base_every
from lightck.pool.create import pool_nbytes
from lightck.pool.format.layout import Entry
from lightck.pool.gradient_log import BASE_EVERY_MIN, records_default
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.devdax import DevdaxBackend
from lightck.strategy.gradients import Gradients

log = logging.getLogger("lightck")
AUTO = "auto"
WARM_UP, MEASURED = 3, 10
"""The steps after attach after which the measurement begins and ends. The first steps make optimizer state and full
checkpoints."""


def base_every_given(strategy: Gradients) -> int | None:
    """Return ``base_every`` as the user chose it; None: ``"auto"``. Raises ``TypeError`` for what is neither."""
    base_every = strategy.base_every
    if base_every == AUTO:
        return None
    if type(base_every) is not int:
        raise TypeError(f'base_every={base_every!r} is a {type(base_every).__name__}. Pass a whole number, or "auto".')
    return base_every


def refuse_wrong_mtbf(strategy: Gradients) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a ``mtbf`` that cannot be, or that nothing would use."""
    mtbf = strategy.mtbf
    if mtbf is None:
        return
    if isinstance(mtbf, bool) or not isinstance(mtbf, (int, float)):
        raise TypeError(f"mtbf={mtbf!r} is a {type(mtbf).__name__}. Pass the mean time between failures in seconds.")
    if not mtbf > 0:
        raise ValueError(f"mtbf={mtbf!r}: pass the mean time between failures in seconds, above 0, or None.")
    if base_every_given(strategy) is not None:
        raise ValueError(
            f"mtbf={mtbf!r} chooses base_every, and base_every={strategy.base_every!r} is given. Leave out mtbf=, or "
            'pass base_every="auto".'
        )


# -- a new pool --------------------------------------------------------------------------------------------------------


def records_of_new_pool(laid_out: Sequence[Entry], state_nbytes: int, free_nbytes: int) -> int:
    """Return the number of record slots of a new pool. laid_out: its entries. state_nbytes: bytes of small state.
    free_nbytes: how many bytes are free on the medium."""
    for base_every in range(worthwhile_base_every(laid_out), BASE_EVERY_MIN, -1):
        n_records = records_default(base_every)
        if pool_nbytes(laid_out, slots=n_records, state_nbytes=state_nbytes) <= free_nbytes // 2:
            return n_records
    return records_default(BASE_EVERY_MIN)


def free_nbytes(path: str, backend: Backend) -> int:
    """Return how many bytes are free where a new pool is made. What lies at its path counts as free, because the new
    pool replaces it."""
    if isinstance(backend, DevdaxBackend):
        return backend.size_and_durability(path)[0]
    free = free_beside(path)
    with suppress(OSError):
        there = os.lstat(path)
        if stat.S_ISREG(there.st_mode):
            free += there.st_blocks * 512
    return free


def free_beside(path: str) -> int:
    """Return how many bytes are free beside the pool at this path."""
    return shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free


# -- while training runs -----------------------------------------------------------------------------------------------


class CopyCosts(NamedTuple):
    """What a session has spent so far. copy_seconds: of copy threads, and of the training that waited for them.
    copied_nbytes: how much was written. update_seconds: of the optimizers' ``step``."""

    copy_seconds: float
    copied_nbytes: int
    update_seconds: float


def best_base_every(costs: CopyCosts, *, changed_nbytes: int, step_seconds: float, mtbf: float) -> float:
    """Return n*. ``costs``: ``update_seconds`` is that of one update. Infinity, that is no upper limit, if a cost is
    zero or not known."""
    a = costs.copy_seconds / costs.copied_nbytes if costs.copied_nbytes else 0.0
    t_times_q = step_seconds * costs.update_seconds
    if a <= 0 or t_times_q <= 0:
        return math.inf
    return math.sqrt(2 * a * changed_nbytes * mtbf / t_times_q)


class BaseEveryTuner(StepListener):
    """Measures steps 4 to 10 after attach, and then lowers ``base_every`` to n*, if that is smaller."""

    def __init__(
        self,
        mtbf: float,
        *,
        costs: Callable[[], CopyCosts],
        changed_nbytes: Callable[[], int],
        base_every: Callable[[], int | None],
        lower: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``costs``: returns what was spent until now. ``changed_nbytes``: returns S. ``base_every``: returns the
        present one. ``lower``: takes a smaller one. ``clock``: returns the time in seconds."""
        self._mtbf, self._costs, self._changed_nbytes = mtbf, costs, changed_nbytes
        self._base_every, self._lower, self._clock = base_every, lower, clock
        self._n_steps = 0
        self._samples: list[tuple[float, CopyCosts]] = []
        """Time and costs at the ends of the steps that are measured."""

    def step_ended(self, step: int) -> None:
        self._n_steps += 1
        if WARM_UP <= self._n_steps <= MEASURED:
            self._samples.append((self._clock(), self._costs()))
        if self._n_steps == MEASURED:
            self._decide()
            self._samples.clear()

    def _decide(self) -> None:
        pairs = list(zip(self._samples, self._samples[1:], strict=False))
        step_seconds = median(after[0] - before[0] for before, after in pairs)
        update_seconds = median(after[1].update_seconds - before[1].update_seconds for before, after in pairs)
        first, last = self._samples[0][1], self._samples[-1][1]
        copy_seconds, copied_nbytes = last.copy_seconds - first.copy_seconds, last.copied_nbytes - first.copied_nbytes
        costs = CopyCosts(copy_seconds, copied_nbytes, update_seconds)
        found = best_base_every(
            costs, changed_nbytes=self._changed_nbytes(), step_seconds=step_seconds, mtbf=self._mtbf
        )
        now = self._base_every()
        if now is None or found >= now - 0.5:
            return
        lowered = max(round(found), BASE_EVERY_MIN)
        if lowered < now:
            log.info(
                "lightck: base_every is lowered from %d to %d, so tensors are written whole more often: with a failure "
                "every %g s, and %.3g s to make an update again, shorter recoveries save more time than these copies "
                "cost",
                now,
                lowered,
                self._mtbf,
                update_seconds,
            )
            self._lower(lowered)
