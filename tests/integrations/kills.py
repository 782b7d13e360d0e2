"""What the tests of several frameworks share: a run that is killed, and the difference between two runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toys import in_child, killed_child, same

import lightck
from lightck.tiers.decisions import complete
from lightck.tiers.folder import FolderStore


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of what differs between two runs. Their numbers of events may differ."""
    return [name for name in one if name != "events" and not same(one[name], other[name])]


def lost_pools_are_fetched(run: Callable[..., dict[str, Any]], folder: Path, pool: Path, kills: Sequence[int]) -> None:
    """``run``: that of a framework. The training has a tier. After a kill its pool is lost, or an older one is back:
    the next run continues from the tier, and ends like one that was not killed."""
    first, second, third = kills
    options = {"tiers": [lightck.Tier(folder / "tier", every=1)]}
    expected = in_child(lambda: run("plain", folder / "plain", None))
    killed_child(lambda: run("plain", folder / "out", pool, first, options))
    wait_until_sent(pool, folder / "tier")
    old = pool.read_bytes()
    pool.unlink()
    killed_child(lambda: run("plain", folder / "out", pool, second, options))
    wait_until_sent(pool, folder / "tier")
    pool.write_bytes(old)
    killed_child(lambda: run("plain", folder / "out", pool, third, options))
    wait_until_sent(pool, folder / "tier")
    resumed = in_child(lambda: run("plain", folder / "out", pool, None, options))
    assert difference(resumed, expected) == []


def steps_in(tier: Path) -> list[int]:
    return sorted(each.step for each in complete(FolderStore(str(tier)).listing()))


def wait_until_sent(pool: Path, tier: Path) -> None:
    """Wait until the drain of a killed training has sent the newest checkpoint."""
    newest = lightck.recover(pool).step
    until = time.monotonic() + 60
    while newest not in steps_in(tier):
        assert time.monotonic() < until, f"step {newest} is not in the tier"
        time.sleep(0.05)


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
