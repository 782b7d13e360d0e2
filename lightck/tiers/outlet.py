"""One tier, as the drain sees it: what was sent, what is planned, and when the next attempt may be made."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightck.tiers.drain_messages import TierSettings, TierState
from lightck.tiers.names import ManifestName
from lightck.tiers.rates import Pacer
from lightck.tiers.tier_manifest import TierManifest
from lightck.tiers.tier_writer import TierWriter

PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 1.0, 60.0
"""The pause after a failed attempt doubles from one to the other."""


@dataclass
class Outlet:
    """One tier."""

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
    is_fed: bool = False
    """Whether checkpoints come from a folder tier. No longer, once that tier did not keep one long enough."""
    to_feed: deque[TierManifest] = field(default_factory=deque)
    """The checkpoints of the folder tier that are to be sent; the first one is being sent."""
    sent: tuple[int, Mapping[str, float] | None] | None = None
    """Generation of the newest checkpoint that was sent, and the metrics with which it was."""

    def hashes(self) -> Mapping[ManifestName, bytes]:
        """SHA-256 of each manifest that was written."""
        return {} if self.writer is None else self.writer.hashes

    def is_due(self, now: float) -> bool:
        if self.state.is_superseded:
            return False
        is_timed = self.settings.every_seconds is not None or self.n_failures > 0
        return (is_timed and now >= self.next_at) or (self.lacks_first and not self.n_failures)


def pause_after(n_failures: int) -> float:
    """Return how many seconds to wait after so many failed attempts (1 or more) before the next one."""
    doublings = min(n_failures - 1, 16)  # a tier may fail for days
    return min(math.ldexp(PAUSE_SECONDS, doublings), _PAUSE_SECONDS_MAX) * random.uniform(0.5, 1.0)
