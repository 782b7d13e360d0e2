"""Beside a training: send the newest checkpoint when training and drain are gone (``lightck drain --follow``).

    wait     until the pool is there, and as long as a training has it open or a drain holds ``POOL.drain``
    send     what ``late_drain.py`` says, once for each new state of the pool, while this process holds ``POOL.drain``
    end      at a signal: wait for the drain of a training, send what is lacking, and end

While a training lives, nothing is sent here, even if its drain was killed: the training starts its drain again by
itself, and two drains would disturb each other. Its claim is looked up in the tiers, so that a wrong tier is named at
once, and not when it is too late. At the end this process waits only for a drain, not for a training.

If a checkpoint from before the start of this process is refused, that is said once, and this process waits: the
training that it was started beside may claim the tiers anew. If a checkpoint that was committed since is refused, this
process ends, unless the checkpoint is damaged, or the training with the newer claim went on from it.

Failure cases: a tier takes nothing (more attempts follow, after growing pauses; this is said once); this process is
killed (the next one finds out what the tier lacks); a training begins while a checkpoint is sent (it is sent to its
end, as by the drain of a killed training; the drain of the new one waits for that for half a minute at most).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightck.errors import (
    CorruptPoolError,
    LightckError,
    NoCheckpointError,
    PoolError,
    PoolNotFoundError,
    PoolPathError,
    RankError,
    TierClaimedError,
    TierError,
    UnsupportedError,
)
from lightck.pool.format.structures import KIND_CHECKPOINT, DamagedError
from lightck.tiers.late_drain import Delivered, LateDrain, NewestRecord, Pools, SupersededError
from lightck.tiers.pauses import pause_after

_POLL_SECONDS, _LOCK_POLL_SECONDS = 1.0, 0.1
_PAUSE_SECONDS_MAX_AT_END = 5.0
_PASSING = (TierError, PoolError, RankError)
"""Errors after which another attempt may succeed, except those of ``_REFUSED``."""
_REFUSED = (TierClaimedError, UnsupportedError, CorruptPoolError)
"""Errors after which no further attempt follows until the pool has changed."""


@dataclass(frozen=True)
class Report:
    """What is called to say what happens."""

    sent: Callable[[Delivered], None]
    waiting: Callable[[str], None]
    failed: Callable[[str], None]


@dataclass
class _TierState:
    """What was done for one tier."""

    drain: LateDrain
    done_for: tuple[NewestRecord, ...] | None = None
    """The state of the pools for which nothing is left to do now."""
    is_sent: bool = False
    """Whether its checkpoint is in the tier. (Else it was refused.)"""
    next_at: float = 0.0
    """When the next attempt may be made, on the monotonic clock."""
    n_failures: int = 0


class Follower:
    """Serves one pool, or the pools in one directory, and some tiers."""

    def __init__(self, pools: Pools, drains: Sequence[LateDrain], report: Report, wait_seconds: float) -> None:
        """``wait_seconds``: how long the end waits for the drain of a training, and for tiers that fail."""
        self._pools, self._report, self._wait_seconds = pools, report, wait_seconds
        self._tiers = [_TierState(each) for each in drains]
        self._stop = threading.Event()
        self._first: tuple[NewestRecord, ...] | None = None
        """The state of the pools at the first look; None: there was no look."""
        self._said = ""
        """What was said last, if it still holds."""
        self._is_claim_known = False
        """Whether the claim of the training that lives now was looked up."""

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Let ``follow`` come to its end, and end the limit of the rate, because little time may be left. A signal
        handler may call this."""
        self._stop.set()
        for each in self._tiers:
            each.drain.lift_rate()

    def follow(self) -> None:
        """Serve until ``stop`` is called, and then send what is lacking. Raises as ``finish`` does, and also for a
        refusal before that (see the text of this module)."""
        while not self._stop.is_set():
            self._look()
            self._stop.wait(_POLL_SECONDS)
        self.finish(tries_again=True)

    # -- while trainings come and go

    def _look(self) -> None:
        if self._pools.have_moved():
            self._is_claim_known = False
        if self._is_claim_known and self._pools.is_in_use():
            return  # before anything is read: a training may go on for weeks
        newest = self._newest()
        if self._first is None:
            self._first = newest
        if not newest:
            return
        if self._pools.is_in_use():
            if not self._is_claim_known and self._was_committed_since(newest):
                self._look_up_claim()
            return
        self._is_claim_known = False
        now = time.monotonic()
        due = [each for each in self._tiers if each.done_for != newest and now >= each.next_at]
        if not due:
            return
        with self._pools.locked_for_sending() as is_alone:
            if is_alone and not self._pools.is_in_use():
                for each in due:
                    self._send(each, newest)

    def _newest(self) -> tuple[NewestRecord, ...]:
        """Return the state of the pools; () if there is no checkpoint, or none that can be read now."""
        try:
            self._pools.find()
            return self._pools.newest()
        except (PoolNotFoundError, PoolPathError, NoCheckpointError):
            self._say(self._report.waiting, f"waiting for the first checkpoint in {self._pools.path}")
        except (PoolError, RankError) as err:
            self._say(self._report.failed, str(err))
        return ()

    def _was_committed_since(self, newest: tuple[NewestRecord, ...]) -> bool:
        """Whether a training has committed the newest checkpoint since this process began."""
        return newest != self._first and any(each.kind == KIND_CHECKPOINT for each in newest)

    def _look_up_claim(self) -> None:
        self._is_claim_known = True
        for each in self._tiers:
            try:
                each.drain.refuse_foreign()
            except (TierClaimedError, UnsupportedError):
                raise
            except (*_PASSING, DamagedError):
                pass  # found again, and said, when the checkpoint is to be sent

    def _send(self, tier: _TierState, newest: tuple[NewestRecord, ...]) -> None:
        try:
            done = tier.drain.send()
        except _REFUSED as err:
            may_pass = isinstance(err, CorruptPoolError) or (isinstance(err, SupersededError) and err.went_on)
            if self._was_committed_since(newest) and not may_pass:
                raise
            tier.is_sent = False
            self._say(self._report.waiting, f"waiting for a training: {err}")
        except _PASSING as err:
            tier.n_failures += 1
            tier.next_at = time.monotonic() + pause_after(tier.n_failures)
            self._say(self._report.failed, f"{err} The next attempt follows.")
            return
        else:
            self._said, tier.is_sent = "", True
            for each in done:
                self._report.sent(each)
        tier.done_for, tier.n_failures, tier.next_at = newest, 0, 0.0

    def _say(self, how: Callable[[str], None], text: str) -> None:
        if text != self._said:
            how(text)
        self._said = text

    # -- at the end

    def finish(self, *, tries_again: bool) -> None:
        """Wait for the drain of a training, send what the tiers lack, and return. ``tries_again``: whether to go on
        after a failure, for ``wait_seconds`` at most. Raises the first error of the tiers that lack the checkpoint."""
        until = time.monotonic() + self._wait_seconds
        while True:
            self._pools.find()
            newest = self._pools.newest()
            with self._pools.locked_for_sending() as is_alone:
                if is_alone:
                    self._send_rest(newest, until if tries_again else 0.0)
                    return
            if time.monotonic() >= until:
                raise TierError(
                    f"After {self._wait_seconds:g} seconds the drain of a training (its process that sends to tiers) "
                    f"still holds the lock {self._pools.path}.drain. It sends the newest checkpoint itself when the "
                    "training ends. Wait for longer (--wait), or end the training."
                )
            self._say(self._report.waiting, "waiting for the drain of a training, which sends the newest checkpoint")
            time.sleep(_LOCK_POLL_SECONDS)

    def _send_rest(self, newest: tuple[NewestRecord, ...], until: float) -> None:
        left = [each for each in self._tiers if each.done_for != newest or not each.is_sent]
        refused: list[LightckError] = []
        n_attempts = 0
        while left:
            failed: list[LightckError] = []
            for each in [*left]:
                try:
                    for one in each.drain.send():
                        self._report.sent(one)
                except _REFUSED as err:
                    refused.append(err)
                except _PASSING as err:
                    failed.append(err)
                    continue
                left.remove(each)
            n_attempts += 1
            if failed and time.monotonic() < until:
                self._say(self._report.failed, f"{failed[0]} The next attempt follows.")
                time.sleep(min(pause_after(n_attempts), _PAUSE_SECONDS_MAX_AT_END))
                continue
            refused += failed
            break
        for other in refused[1:]:
            self._report.failed(str(other))
        if refused:
            raise refused[0]
