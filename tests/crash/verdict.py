"""Does ``lightck verify`` agree with recovery on an image?"""

from __future__ import annotations

from unittest.mock import patch

from crash.oracle import Outcome, Recovered
from lightck.cli import verify
from lightck.errors import LightckError

_WRITTEN = ("commit record", "header of slot")
"""Structures that a crash may leave torn: such structures look like damage."""


def disagreement(path: str, outcome: Outcome, is_harmed: bool) -> str | None:
    """Why the verdict of ``lightck verify --deep`` on this file does not fit what recovery made of it; None: it does.

    ``is_harmed``: something was not durable when the power was cut, or the medium lost something before.
    """
    try:
        with patch.object(verify, "_READS", 1):  # nobody writes to the file, so one read is enough
            facts = verify.pool_facts(path, None, deep=True)
    except LightckError as err:
        return None if not isinstance(outcome, Recovered) else f"verify refuses what was recovered: {err}"
    except Exception as err:
        return f"verify fails: {type(err).__name__}: {err}"
    step = outcome.step if isinstance(outcome, Recovered) else None
    if facts["recoverable_step"] != step:
        return f"verify calls step {facts['recoverable_step']} recoverable, recovery gives {step}"
    damaged = [s["name"] for s in facts["structures"] if s["damaged"]]
    if not is_harmed and not facts["ok"]:
        return f"verify calls a pool damaged that nothing happened to: {damaged} {facts['checkpoints']}"
    if any(not name.startswith(_WRITTEN) for name in damaged):
        return f"verify calls structures damaged that nobody wrote to: {damaged}"
    return None
