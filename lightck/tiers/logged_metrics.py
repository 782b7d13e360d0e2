"""What the user logs of a training (``Session.log``), for the tiers that keep the best checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from lightck.tiers.tier import Tier

log = logging.getLogger("lightck")
_N_STEPS_MAX = 100
"""Of how many steps the metrics are remembered."""


class LoggedMetrics:
    """The metrics of the last steps, and whether the metrics that the tiers ask for were logged."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.wanted = frozenset(tier.keep_best[0] for tier in tiers if tier.keep_best is not None)
        self.of_steps: dict[int, dict[str, float]] = {}
        self._is_logged = self._has_warned_of_others = False
        """Whether a metric for which a tier asks was logged, and whether the user was warned that only others were."""

    def add(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add what was logged at a step, and return all metrics of the step. Numbers that are not finite are left
        out."""
        self._is_logged |= not self.wanted.isdisjoint(metrics)
        if self.wanted and not self._is_logged and not self._has_warned_of_others:
            self._has_warned_of_others = True
            log.warning(
                "lightck: session.log() got %s, and keep_best= asks for %s",
                ", ".join(metrics),
                ", ".join(sorted(self.wanted)),
            )
        found = self.of_steps.setdefault(step, {})
        found.update({name: value for name, value in metrics.items() if math.isfinite(value)})
        for old in sorted(self.of_steps)[:-_N_STEPS_MAX]:
            del self.of_steps[old]
        return dict(found)

    def at(self, step: int) -> dict[str, float] | None:
        """Return the metrics of a step; None if nothing was logged."""
        found = self.of_steps.get(step)
        return None if found is None else dict(found)

    def warn_of_missing(self) -> None:
        """Warn if no metric was logged for which a tier asks."""
        if self.wanted and not self._is_logged:
            log.warning(
                "lightck: a tier has keep_best=, and its metric was never logged, so no checkpoint was kept for it: "
                "call session.log(name=value)"
            )
