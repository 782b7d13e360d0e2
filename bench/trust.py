"""What can be loaded after a fault: the same faults for lightck and for every rival.

    python bench/trust.py [--only NAME]... [--kills N] [--flips N] [--cuts N] [--seed S] [--dir DIR] [--out DIR]

For each way of saving: SIGKILL at random moments while every step is saved; one random bit flipped in the files of a
finished run; a truncated file. Then the state is loaded and compared, bit for bit, with that of the training. ``--out
bench/results`` writes trust.json and trust.md there; rivals that were not selected keep their earlier rows, with the
machine, the software versions and the date of those.
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
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # last, so that an installed lightck is used

os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # so that checking for a GPU does not initialize CUDA before the forks

import torch

import lightck
from bench import faults, forks, rivals, subject

PACKAGES = ("torch", "safetensors", "torchsnapshot", "torch_checkpointing", "lm-resiliency", "nvidia-resiliency-ext")


def machine() -> str:
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {platform.system()} {kernel}"


def software_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


FACTS = ("machine", "versions", "medium", "state_bytes", "date", "seed")
"""The conditions of a kind of fault, kept with its results. The oldest files have them once for all rows."""


def play(name: str, args: argparse.Namespace, table: list[str], facts: dict[str, Any]) -> dict[str, Any]:
    """Run all trials of one rival."""

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
"""Each kind of fault: its key, its title, and its outcomes with their column heads."""


def markdown(result: dict[str, Any]) -> str:
    lines = ["# What is left after a fault", "", *_origins(_dated(result)), ""]
    lines[-2] += (
        " `python bench/trust.py` repeats it. Where a library does not decide it, the last two finished checkpoints "
        "are kept, and the newest that loads without an error is used."
    )
    for kind, title, outcomes in KINDS:
        if any(kind in row for row in result["rows"]):
            lines += [f"## {title}", "", *_table(result["rows"], kind, outcomes), ""]
    lines += ["How each was used:", ""]
    lines += [f"- {row['rival']}: {row['use']}" for row in result["rows"]]
    lines += [f"- {name}: not run: {why}" for name, why in result["not_run"].items()]
    return "\n".join(lines) + "\n"


def _dated(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, with the conditions of each kind of fault."""
    dated = []
    for row in result["rows"]:
        kinds = [kind for kind, *_ in KINDS if kind in row]
        of_all = {name: row.get(name, result.get(name)) for name in FACTS}
        taken = {kind: row.get("taken", {}).get(kind, of_all) for kind in kinds}
        dated.append({**{name: value for name, value in row.items() if name not in FACTS}, "taken": taken})
    return dated


def _origins(rows: list[dict[str, Any]]) -> list[str]:
    """The conditions of the results, one line if they are the same for all; seeds are listed, not compared."""
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
    software = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    state = f"{facts['state_bytes'] / 1e6:.1f} MB of state"
    return f"{facts['machine']}; {software}; files on {facts['medium']}; {state}", facts["date"]


def _table(rows: list[dict[str, Any]], kind: str, outcomes: dict[str, str]) -> Iterator[str]:
    """``in the newest``: trials that hit a file of the newest checkpoint; lightck's checkpoints share one file."""
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
    """Merge with the results in ``path``: rivals and kinds of fault that were not run now keep their earlier rows.

    Why a rival without a row cannot be run is checked again.
    """
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
    parser.add_argument("--only", action="append", choices=rivals.TABLE, help="run this rival only; may be repeated")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10, help="the most minutes for each rival and kind of fault")
    parser.add_argument("--dir", default="/dev/shm", help="the folder for checkpoints")
    parser.add_argument("--out", type=Path, help="the folder for trust.json and trust.md")
    args = parser.parse_args()
    result: dict[str, Any] = {"rows": [], "not_run": {}}
    facts: dict[str, Any] = {
        "machine": machine(),
        "versions": software_versions(),
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
    """Write the results; called after each row, so that an interrupted run keeps them."""
    if folder is not None:
        whole = merged(folder / "trust.json", result)
        _replace(folder / "trust.json", json.dumps(whole, indent=1) + "\n")
        _replace(folder / "trust.md", markdown(whole))


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


def warm_up() -> None:
    """Import in this process, instead of in each child, what a first update and a first session import."""
    _ = lightck.attach  # public names are imported on first use
    torch.set_num_threads(1)
    model, optimizer = subject.build()
    subject.update(model, optimizer, 1)


def state_bytes() -> int:
    model, optimizer = subject.build()
    subject.update(model, optimizer, 1)
    return sum(len(packed) for _, packed in subject.parts(model, optimizer))


if __name__ == "__main__":
    main()
