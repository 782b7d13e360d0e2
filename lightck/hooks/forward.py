"""Whether the model's forward hook fires: where it does not, versions close later than they could."""

from __future__ import annotations

import logging

log = logging.getLogger("lightck")


class ForwardSeen:
    """Of one session."""

    def __init__(self) -> None:
        self.fires = False
        self._is_told = False

    def tell_missing(self, explicit: bool) -> None:
        """At an update that had to close the last version itself. ``explicit``: the loop closes versions."""
        if not self.fires and not self._is_told and not explicit:
            self._is_told = True
            log.info(
                "lightck: the model's forward hook does not fire (compiled before attach, or never called "
                "itself): versions close at the optimizer's step, and their copies are waited for there. "
                "session.loader() or session.end_step() closes them earlier"
            )
