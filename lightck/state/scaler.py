"""What a GradScaler tells of skipped updates: with an unfused optimizer it calls no step, and only its state moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class ScalerWatch:
    """The enabled GradScalers among the objects of ``state``, looked at once per boundary."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._seen: tuple[tuple[float, int], ...] | None = None
        self._stepped = False
        self.skipped()

    def stepped(self) -> None:
        """An optimizer stepped."""
        self._stepped = True

    def skipped(self) -> bool:
        """Whether one was updated since the last look without a step in between."""
        scalers = enabled(self._objects).values()
        seen = tuple((float(scaler.get_scale()), int(scaler._get_growth_tracker())) for scaler in scalers)
        stepped, self._stepped = self._stepped, False
        moved, self._seen = seen != self._seen, seen
        return moved and not stepped and bool(seen)


def enabled(objects: Mapping[str, Any]) -> dict[str, torch.amp.GradScaler]:
    """The GradScalers that scale, by name."""
    return {n: obj for n, obj in objects.items() if isinstance(obj, torch.amp.GradScaler) and obj.is_enabled()}
