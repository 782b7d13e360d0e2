"""What is left after a fault: the same injectors for lightck and for every rival.

    python bench/trust.py [--only NAME]... [--kills N] [--flips N] [--cuts N] [--seed S] [--dir DIR] [--out DIR]

For each way of saving: SIGKILL at random instants while every step is saved; one random bit flipped in the files of a
finished run; a file cut short. Then it is loaded, and what comes back is compared, bit for bit, with what the training
had.
``--out bench/results`` writes trust.json and trust.md there; rivals that were not asked for keep their earlier rows,
with the machine, the versions and the date of these.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ in ("__main__", "__mp_main__"):
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: an installed lightck goes first

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU must not spoil CUDA for the children

import torch

import lightck
from bench import faults, forks, rivals, subject

PACKAGES = ("torch", "safetensors", "torchsnapshot", "torch_checkpointing", "lm-resiliency", "nvidia-resiliency-ext")


def machine() -> str:
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {platform.system()} {kernel}"


def checkpoints() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


FACTS = ("machine", "versions", "medium", "state_bytes", "date", "seed")
"""Where, with what and when a kind of fault was played: kept with it. The oldest files have them for all rows."""


def play(name: str, args: argparse.Namespace, table: list[str], facts: dict[str, Any]) -> dict[str, Any]:
    """One rival's row."""

    def say(line: str) -> None:
        print(f"  {name}: {line}", file=sys.stderr, flush=True)

    row: dict[str, Any] = {"rival": name, "use": rivals.named(name).use, "taken": {}}
    with tempfile.TemporaryDirectory(prefix="trust-", dir=args.dir) as folder:
        trials = faults.Trials(name, args.seed, Path(folder), args.minutes * 60)
        if args.kills:
            row["kills"] = asdict(faults.kills(trials, args.kills, table, say))
        for kind, count in (("flip", args.flips), ("cut", args.cuts)):
            if count:
                row[f"{kind}s"] = asdict(faults.damaged(trials, kind, count, say))
    row["taken"] = {kind: facts for kind, *_ in KINDS if kind in row}
    return row


KINDS = (
    (
        "kills",
        "SIGKILL while every step is saved",
        {
            "exact": "exact, none lost",
            "older": "older than reported",
            "nothing loads": "nothing loads",
            "wrong": "wrong values, silently",
        },
    ),
    (
        "flips",
        "One flipped bit in the files of a finished run",
        {
            "harmless": "harmless",
            "fell back": "fell back to the older one",
            "refused": "refused",
            "crashed": "loader crashed",
            "wrong": "**wrong values, silently**",
        },
    ),
    (
        "cuts",
        "A file cut short",
        {
            "harmless": "harmless",
            "fell back": "fell back to the older one",
            "refused": "refused",
            "crashed": "loader crashed",
            "wrong": "**wrong values, silently**",
        },
    ),
)
"""Each kind of fault, its title, and its outcomes with the heads of their columns."""


def markdown(result: dict[str, Any]) -> str:
    lines = ["# What is left after a fault", "", *_origins(_dated(result)), ""]
    lines[-2] += (
        " `python bench/trust.py` repeats it. Where a way of saving leaves it open, the last two finished checkpoints "
        "are kept, and the newest that loads without an error is taken."
    )
    for kind, title, outcomes in KINDS:
        if any(kind in row for row in result["rows"]):
            lines += [f"## {title}", "", *_table(result["rows"], kind, outcomes), ""]
    lines += ["How each was used:", ""]
    lines += [f"- {row['rival']}: {row['use']}" for row in result["rows"]]
    lines += [f"- {name}: not run: {why}" for name, why in result["not_run"].items()]
    return "\n".join(lines) + "\n"


def _dated(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, each kind of fault with its facts."""
    dated = []
    for row in result["rows"]:
        kinds = [kind for kind, *_ in KINDS if kind in row]
        of_all = {name: row.get(name, result.get(name)) for name in FACTS}
        taken = {kind: row.get("taken", {}).get(kind, of_all) for kind in kinds}
        dated.append({**{name: value for name, value in row.items() if name not in FACTS}, "taken": taken})
    return dated


def _origins(rows: list[dict[str, Any]]) -> list[str]:
    """What was taken where, with what and when; seeds apart. One line where it is the same for all."""
    found: dict[tuple[str, str], tuple[set[str], dict[str, list[str]]]] = {}
    for row in rows:
        for kind, facts in row["taken"].items():
            seeds, whose = found.setdefault(_origin(facts), (set(), {}))
            seeds.add(str(facts["seed"]))
            whose.setdefault(row["rival"], []).append(kind)
    lines = []
    for (where, when), (seeds, whose) in found.items():
        names = ", ".join(f"{rival} ({', '.join(kinds)})" for rival, kinds in whose.items())
        text = f"{where}; seed {', '.join(sorted(seeds))}; {when}."
        lines += [text if len(found) == 1 else f"{names}: {text}", ""]
    return lines[:-1] or [""]


def _origin(facts: dict[str, Any]) -> tuple[str, str]:
    checkpoints = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    state = f"{facts['state_bytes'] / 1e6:.1f} MB of state"
    return f"{facts['machine']}; {checkpoints}; files on {facts['medium']}; {state}", facts["date"]


def _table(rows: list[dict[str, Any]], kind: str, outcomes: dict[str, str]) -> Iterator[str]:
    """``in the newest``: trials that hit a file of the newest checkpoint; lightck's versions share one file."""
    heads = ["saved with", kind, *(["in the newest"] if kind != "kills" else []), *outcomes.values()]
    yield f"| {' | '.join(heads)} |"
    yield f"|---|{'--:|' * (len(heads) - 1)}"
    for row in rows:
        if kind not in row:
            continue
        tally = row[kind]
        cells = [row["rival"], f"{tally['trials']:,}"]
        if kind != "kills":
            cells.append("one file" if tally["in_newest"] is None else f"{tally['in_newest']:,}")
        cells += [f"{tally['outcomes'].get(outcome, 0):,}" for outcome in outcomes]
        yield f"| {' | '.join(cells)} |"


def merged(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Earlier rows stay for rivals that were not played now, and earlier kinds of fault within a row, with their facts.
    Why a rival without a row was not run is asked anew."""
    rows = {row["rival"]: row for row in result["rows"]}
    not_run = {}
    if path.exists():
        before = json.loads(path.read_text())
        not_run = before["not_run"]
        for row in _dated(before):
            new = rows.get(row["rival"], {})
            taken = {**row["taken"], **new.get("taken", {})}
            rows[row["rival"]] = {**row, **new, "taken": taken}
    now = {name: rivals.why_not(name) for name in rivals.TABLE if name not in rows}
    return {
        "rows": [rows[name] for name in rivals.TABLE if name in rows],
        "not_run": {name: why or not_run[name] for name, why in now.items() if why or name in not_run},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=rivals.TABLE, help="this rival; may be repeated")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10, help="for each rival and kind of fault, at most")
    parser.add_argument("--dir", default="/dev/shm", help="where checkpoints lie")
    parser.add_argument("--out", type=Path, help="a folder for trust.json and trust.md")
    args = parser.parse_args()
    result: dict[str, Any] = {"rows": [], "not_run": {}}
    facts: dict[str, Any] = {
        "machine": machine(),
        "versions": checkpoints(),
        "medium": "tmpfs" if args.dir == "/dev/shm" else args.dir,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "seed": args.seed,
    }
    warm_up()
    [(_, table)] = forks.results(lambda _: subject.digests(faults.LAST), [0], 300)
    [(_, facts["state_bytes"])] = forks.results(lambda _: state_bytes(), [0], 60)
    for name in args.only or rivals.TABLE:
        if why := rivals.why_not(name):
            result["not_run"][name] = why
            continue
        began = time.monotonic()
        result["rows"].append(play(name, args, table, facts))
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        keep(args.out, result)
    keep(args.out, result)
    print(markdown(result))


def keep(folder: Path | None, result: dict[str, Any]) -> None:
    """Written after each row: a run that is broken off leaves what it measured."""
    if folder is not None:
        whole = merged(folder / "trust.json", result)
        _replace(folder / "trust.json", json.dumps(whole, indent=1) + "\n")
        _replace(folder / "trust.md", markdown(whole))


def _replace(path: Path, text: str) -> None:
    """All of it or nothing."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


def warm_up() -> None:
    """Import here, and not in each child, what a first update and a first session import."""
    _ = lightck.attach  # with all that it needs: a public name is imported when it is first asked for
    torch.set_num_threads(1)
    model, optimizer = subject.build()
    subject.update(model, optimizer, 1)


def state_bytes() -> int:
    model, optimizer = subject.build()
    subject.update(model, optimizer, 1)
    return sum(len(packed) for _, packed in subject.parts(model, optimizer))


if __name__ == "__main__":
    main()
