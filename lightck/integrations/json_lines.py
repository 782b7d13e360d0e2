"""What lightck logs, as JSON lines: for Loki, Datadog and others that read one JSON object from each line.

    logger "lightck" -> handler of ``log_to`` -> ``JsonFormatter`` -> a file or a stream
    session.on_commit -> ``log_commits`` -> the same logger

A line holds what lightck says and counts: paths, steps, times, sizes, and the constants that the program passes. No
other attribute of a log record is written, so nothing that a program attaches to its records gets into a line.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import datetime, timezone
from typing import TextIO

from torch.utils.hooks import RemovableHandle

import lightck

Constant = str | int | float | bool
_FIELDS = "lightck_fields"
"""The attribute of a log record with the fields of its event."""


class JsonFormatter(logging.Formatter):
    """Formats each log record as one line of JSON.

    The fields: ``time`` (UTC, ISO 8601, milliseconds), ``level``, ``logger``, ``event`` (``"message"`` or
    ``"commit"``), ``message``; after an exception ``error`` (its class) and ``traceback``; those of the event; and the
    constants.
    """

    def __init__(self, **constants: Constant) -> None:
        """``constants``: fields that every line gets, such as ``run="gpt-7"``."""
        super().__init__()
        self._constants = constants

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            **self._constants,
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "event": "message",
            "message": record.getMessage(),
        }
        line |= getattr(record, _FIELDS, {})
        if record.exc_info and record.exc_info[0] is not None:
            line |= {"error": record.exc_info[0].__name__, "traceback": self.formatException(record.exc_info)}
        return json.dumps(line, ensure_ascii=True)


def log_to(
    target: str | os.PathLike[str] | TextIO, *, level: int = logging.INFO, **constants: Constant
) -> logging.Handler:
    """Write what lightck logs to ``target`` as JSON lines, from now on.

    As long as the logger ``lightck`` has no handler, Python writes its warnings to standard error. With this handler,
    they appear there only if the program has configured logging itself.

    Args:
        target: a file, to which lines are appended, or an open text stream such as ``sys.stdout``. Each rank needs a
            file of its own.
        level: the least level that is written. The logger ``lightck`` gets it too, if its effective one is higher.
        constants: fields that every line gets, such as ``run="gpt-7"``.

    Returns:
        The handler: ``logging.getLogger("lightck").removeHandler(handler)`` ends it.
    """
    handler: logging.Handler
    if isinstance(target, (str, os.PathLike)):
        handler = logging.FileHandler(target, encoding="utf-8")
    else:
        handler = logging.StreamHandler(target)
    handler.setLevel(level)
    handler.setFormatter(JsonFormatter(**constants))
    logger = logging.getLogger("lightck")
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > level:
        logger.setLevel(level)
    return handler


def log_commits(session: lightck.Session, every: int = 100) -> RemovableHandle:
    """Log a line of level INFO for each ``every``-th commit from now on, with the session's counters.

    The fields of the event ``commit``: ``step``, ``pool``, ``rank``, ``commits``, ``lag_steps``, ``in_flight``,
    ``stall_seconds``, ``wait_seconds``, ``written_bytes``, ``skipped``, ``holds_honored``, ``holds_overrun``,
    ``pool_damaged`` and ``tiers``: of each tier ``tier``, ``step``, ``sent_at`` (Unix time), ``checkpoints``,
    ``sent_bytes``, ``failures``, ``is_failing``, ``rounds``, ``damaged`` and ``mended``.

    Args:
        session: an open session.
        every: the number of commits for one line.

    Returns:
        The handle of ``session.on_commit``: ``handle.remove()`` ends the lines.

    Raises:
        ValueError: ``every`` is less than 1.
        SessionError: the session is closed.
    """
    if every < 1:
        raise ValueError(f"every={every!r}: pass how many commits make a line, 1 or more.")
    logger, n_commits = logging.getLogger("lightck"), 0

    def committed(step: int) -> None:
        nonlocal n_commits
        n_commits += 1
        if n_commits % every == 0 and logger.isEnabledFor(logging.INFO):
            fields = {"event": "commit", "step": step, "pool": session.path, "rank": session.rank}
            logger.info(
                "lightck: step %d is committed", step, extra={_FIELDS: {**fields, **_counters(session.stats())}}
            )

    return session.on_commit(committed)


def _counters(stats: lightck.Stats) -> dict[str, object]:
    return {
        "commits": stats.checkpoints,
        "lag_steps": max(0, stats.step - (stats.committed or 0)),
        "in_flight": stats.in_flight,
        "stall_seconds": stats.stall_seconds,
        "wait_seconds": stats.wait_seconds,
        "written_bytes": stats.bytes_written,
        "skipped": stats.skipped,
        "holds_honored": stats.holds_honored,
        "holds_overrun": stats.holds_overrun,
        "pool_damaged": stats.pool_damaged,
        "tiers": [
            {
                "tier": tier.root,
                "step": tier.step,
                "sent_at": tier.sent_at,
                "checkpoints": tier.checkpoints,
                "sent_bytes": tier.bytes_sent,
                "failures": tier.failures,
                "is_failing": tier.failing_since is not None,
                "rounds": tier.rounds,
                "damaged": tier.damaged,
                "mended": tier.mended,
            }
            for tier in stats.tiers
        ],
    }
