"""Whether a loop asks where it stands: one that counts from nothing makes as many passes again after a resume.

``for epoch in range(epochs)`` over a session loader goes on with the right batch and makes too many updates at the end.
Nothing in the data shows it. A loop that goes on as it should has asked for the step, or for the loader's epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightck.dataloader.loader import SessionLoader

log = logging.getLogger("lightck")


class Counted:
    """Of one resume."""

    def __init__(self, step: int, loaders: Sequence[SessionLoader], *, by_itself: bool) -> None:
        """``step``: 0 for a fresh start. ``by_itself``: an object in ``state=`` may hold the loop's own count."""
        self._step, self._loaders = step, loaders
        self.is_asked = by_itself or not step
        """That the session was asked for its step or iteration."""

    def before_update(self) -> None:
        """The first one after the resume. In the first pass over each loader ``range(epochs)`` is right."""
        later = [loader for loader in self._loaders if loader.restored_epoch]
        if self.is_asked or any(loader.was_asked for loader in self._loaders) or (self._loaders and not later):
            return
        self.is_asked = True
        where = f" in pass {later[0].restored_epoch + 1} over loader {later[0].name!r}" if later else ""
        log.warning(
            "lightck: The training goes on from step %d%s, and the loop did not ask for it. One that counts "
            "from nothing, as range(steps) or range(epochs), makes too many updates: count from session.step, "
            "or over a session loader for epoch in range(loader.epoch, epochs)",
            self._step,
            where,
        )
