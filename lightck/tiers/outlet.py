"""One tier, as its drain sees it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from lightck.errors import TierClaimedError, TierError
from lightck.tiers.drain_messages import TierSettings, TierState
from lightck.tiers.due_steps import seconds_until_due
from lightck.tiers.names import ManifestName
from lightck.tiers.rates import Pacer
from lightck.tiers.tier_writer import TierWriter

_LOOK_SECONDS = 1.0
"""How long the process waits before it looks again, if a checkpoint is due and the training has saved none yet."""


@dataclass
class Outlet:
    """The settings of one tier, and what the drain has done for it."""

    settings: TierSettings
    pacer: Pacer
    writer: TierWriter | None = None
    """None: nothing was written yet."""
    state: TierState = field(default_factory=TierState)
    next_at: float = 0.0
    """When a checkpoint is due by time, or the next attempt may be made: seconds of ``time.monotonic``."""
    n_failures: int = 0
    """How many attempts have failed since the last success. Then the next one sends the newest checkpoint."""
    is_damage: bool = False
    """Whether the last attempt failed because the checkpoint is damaged, so that another attempt does not help."""
    lacks_first: bool = False
    """Whether the first checkpoint was committed while this process could not take it. Then it is due now."""
    sent: tuple[int, Mapping[str, float] | None] | None = None
    """Generation of the newest checkpoint that was sent, and the metrics with which it was."""

    def begin(self, now: float) -> None:
        """Plan when a checkpoint is due by time. What an earlier process has sent counts."""
        self.next_at = now + seconds_until_due(self.settings.every_seconds, self.settings.newest_age)

    def served(self, now: float) -> None:
        """What is due was sent, or has failed, or was not there. ``now``: when that began."""
        self.lacks_first = False
        if not self.n_failures:
            every = self.settings.every_seconds or 0.0
            self.next_at = now + (min(every, _LOOK_SECONDS) if self.sent is None else every)

    def clear_failures(self) -> None:
        """Forget the failures: there is nothing left to try again."""
        self.n_failures = 0
        if self.state.failing_since is not None:
            self.state.error = self.state.failing_since = None

    def end_if_superseded(self) -> None:
        """Ask the tier whether a higher claim exists, and set ``state.is_superseded`` if one does."""
        with suppress(TierError):
            try:
                if self.writer is not None:
                    self.writer.refuse_superseded()
            except TierClaimedError:
                self.state.is_superseded = True

    def hashes(self) -> Mapping[ManifestName, bytes]:
        """SHA-256 of each manifest that was written."""
        return {} if self.writer is None else self.writer.hashes

    def is_due(self, now: float) -> bool:
        if self.state.is_superseded:
            return False
        is_timed = self.settings.every_seconds is not None or self.n_failures > 0
        return (is_timed and now >= self.next_at) or (self.lacks_first and not self.n_failures)
