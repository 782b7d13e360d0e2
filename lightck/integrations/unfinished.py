"""The end of a run that a request to stop has ended before its training was finished."""

from __future__ import annotations

import logging

import lightck

log = logging.getLogger("lightck")


def close_unfinished(session: lightck.Session, reason: str) -> None:
    """Close the session without its last step, in which the hooks at the end of a run have run, and warn. The next
    start continues from the checkpoint before, as if nobody had asked to stop. ``reason``: the first sentences of the
    warning. Raises what ``Session.close`` raises."""
    try:
        session.close(drop_current=True)
    finally:
        committed = session.committed
        place = "begins anew, because no step is saved yet" if committed is None else f"continues from step {committed}"
        log.warning("lightck: %s The training is not declared finished: the next start %s", reason, place)
