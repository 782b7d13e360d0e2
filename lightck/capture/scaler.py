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
        seen = tuple((float(obj.get_scale()), int(obj._get_growth_tracker())) for obj in enabled(self._objects))
        stepped, self._stepped = self._stepped, False
        moved, self._seen = seen != self._seen, seen
        return moved and not stepped and bool(seen)


def enabled(objects: Mapping[str, Any]) -> list[torch.amp.GradScaler]:
    """The GradScalers that scale."""
    return [obj for obj in objects.values() if isinstance(obj, torch.amp.GradScaler) and obj.is_enabled()]
