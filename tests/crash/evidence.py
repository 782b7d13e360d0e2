"""What campaigns found, as files that are kept: ``docs/evidence/CAMPAIGN-BACKEND.json``.

A page that cites a number cites it from here; ``tests/system/test_evidence.py`` compares.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crash.campaign import Order, Tally


@dataclass(frozen=True, slots=True)
class Result:
    """One finished campaign."""

    campaign: str
    backend: str
    seed: int
    trials: int
    counts: dict[str, int]
    findings: tuple[str, ...]
    seconds: int
    machine: str
    date: str

    def command(self) -> str:
        """What repeats it."""
        options = f"--backend {self.backend} --seed {self.seed} --count {self.trials}"
        return f"python -m crash {self.campaign} {options}"


def result(name: str, order: Order, tally: Tally, seconds: float) -> Result:
    counts = dict(sorted(tally.counts.items()))
    findings = tuple(map(str, tally.findings))
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return Result(
        name, order.backend, order.seed, len(order.trials), counts, findings, round(seconds), machine(), today
    )


def machine() -> str:
    """The kind of machine, for example ``2 cores, x86_64, Linux 6.1``: no name of it."""
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {platform.system()} {kernel}"


HEADLINES = {
    "power-cut": ("distinct images", "recoveries", "trainings that went on"),
    "gradient-power-cut": ("distinct images", "recoveries", "trainings that went on"),
    "gradient-kills": ("kills", "ends that were bit-identical"),
    "gradient-kill-twice": (
        "kills in a recovery after a kill",
        "kills in an adoption after a kill",
        "kills about a move to a new file",
        "kills while the pool was made",
        "flips of a closed pool that lost no more than is promised",
        "the tmpfs was full: refused, the version before is exact",
    ),
    "kill-writer": ("kills", "pools"),
    "kill-training": ("kills", "ends that were bit-identical"),
    "flips": ("damages that there are", "newest, exact", "older, exact", "nothing recovered: CorruptPoolError"),
    "fuzz": ("inputs to the whole reader", "inputs to single parsers"),
}
"""Which of a campaign's counts a page cites; of others all."""


def table(folder: Path) -> list[str]:
    """The kept results as lines of Markdown, as ``docs/guarantees.md`` has them."""
    lines = ["| campaign | pools | trials | of these | findings | last run |", "|---|---|--:|---|--:|---|"]
    for one in map(kept, sorted(folder.glob("*.json"))):
        cited = [n for n in HEADLINES.get(one.campaign, tuple(one.counts)) if n in one.counts]
        counts = ", ".join(f"{one.counts[name]:,} {name}" for name in cited)
        cells = (one.campaign, one.backend, f"{one.trials:,}", counts, str(len(one.findings)), one.date)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def keep(folder: Path, kept: Result) -> Path:
    """Write the result into the folder, over an earlier one of the same campaign and backend."""
    path = folder / f"{kept.campaign}-{kept.backend}.json"
    path.write_text(json.dumps(asdict(kept), indent=2) + "\n")
    return path


def kept(path: Path) -> Result:
    facts: dict[str, Any] = json.loads(path.read_text())
    return Result(**{**facts, "findings": tuple(facts["findings"])})
