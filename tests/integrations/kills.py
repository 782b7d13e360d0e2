"""What the tests of several frameworks share: a run that is killed, and the difference between two runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toys import killed_child, same


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of what differs between two runs. Their numbers of events may differ."""
    return [name for name in one if name != "events" and not same(one[name], other[name])]


def killed_or_ended(work: Callable[[], object], folder: Path) -> None:
    """Run a training that kills itself at an event. A resumed run has fewer events, and may end before the kill."""
    ended = folder / "ended"

    def to_the_end() -> None:
        work()
        ended.touch()

    try:
        killed_child(to_the_end)
    except AssertionError:
        if not ended.exists():
            raise
