"""What a run of the public programs found: as words, as a table, as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

Result = dict[str, Any]
IDENTICAL, WARNED, ALARM, FAILED, SILENT = (
    "identical",
    "differs, warned",
    "identical, warned",
    "stopped",
    "SILENTLY WRONG",
)


def outcome(chain: dict[str, Any]) -> str:
    """Of one chain of processes."""
    if chain["error"] is not None:
        return f"{FAILED} in the {chain['error_in']}"
    if chain["differs"] is None:
        return f"{FAILED}: no end"
    if chain["differs"]:
        return WARNED if chain["warnings"] else SILENT
    return ALARM if chain["warnings"] else IDENTICAL


def outcomes(result: Result) -> Counter[str]:
    return Counter(outcome(chain) for chain in result.get("chains", []))


def said(result: Result) -> list[str]:
    """Each warning and error once, in the order in which they came."""
    found: dict[str, None] = {}
    for chain in [result.get("whole"), *result.get("chains", [])]:
        if chain is not None:
            texts = [*chain["warnings"], *([chain["error"]] if chain["error"] else [])]
            found |= dict.fromkeys(re.sub(r"step \d+", "step n", text) for text in texts)
    return list(found)


def in_words(result: Result) -> str:
    if "not run" in result:
        return f"{result['program']}: NOT RUN: {result['not run']}"
    lines = [f"{result['program']} [{result['wiring']}]: not killed: {outcome(result['whole'])}; {_counted(result)}"]
    for chain in result["chains"]:
        if outcome(chain) in (SILENT, WARNED) or chain["error"]:
            differs = f"{len(chain['differs'])} differ" if chain["differs"] else chain["error"]
            lines.append(f"    {outcome(chain)}: killed at {', '.join(chain['kills'])}: {differs}")
    lines += [f"    said: {text}" for text in said(result)]
    return "\n".join(lines)


def _counted(result: Result) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(outcomes(result).items()))


def table(results: list[Result]) -> list[str]:
    lines = [
        "| program | its commit | lightck | wiring | lines of ours | kills | outcome after kills | what lightck said |",
        "|---|---|---|---|---:|---:|---|---|",
    ]
    for result in results:
        name, commit = result["program"], f"{result['commit'][:10]} | {result['lightck'][:10]}"
        where = f"{result['repository']}/{result['script']}" if result["repository"] else "a script of ours"
        if "not run" in result:
            lines.append(
                f"| {name} ({where}) | {commit} | {result['wiring']} | | | not run: {_cell(result['not run'])} | |"
            )
            continue
        kills = sum(chain["came"] for chain in result["chains"])
        words = "<br>".join(_cell(text) for text in said(result)) or "nothing"
        lines.append(
            f"| {name} ({where}) | {commit} | {result['wiring']} | {result['lines']} | {kills} "
            f"| {_counted(result)} | {words} |"
        )
    return lines


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 300 else text[:297] + "..."


def _first(names: list[str] | None) -> list[str] | None:
    return names if names is None or len(names) <= 5 else [*names[:4], f"and {len(names) - 4} more"]


PAGE = """# Public training programs under SIGKILL

Made by `python -m public_programs.run` in `tests/system/`, by hand. Each program ran once without lightck and once
with it, and was then killed in {chains} chains of processes: in mid-epoch, at an epoch's end and at the next one's
start, in an evaluation, at random instants, and again and again. *Identical*: weights and optimizer state at the end
have the bits of the run that never imported lightck. *Differs, warned*: they have not, and lightck said so.
*Stopped*: an error was raised. Data are made up and small; sizes and wiring are in
`tests/system/public_programs/catalog/`.

"""


def save(folder: Path, results: list[Result]) -> None:
    """Results of programs that were run earlier stay where they are not run again."""
    kept = folder / "public-programs"
    kept.mkdir(parents=True, exist_ok=True)
    if (kept / "results.json").exists():
        new = {result["program"]: result for result in results}
        older = json.loads((kept / "results.json").read_text())
        results = [new.pop(result["program"], result) for result in older] + list(new.values())
    for chain in (chain for result in results for chain in [*result.get("chains", []), result.get("whole")] if chain):
        for key in ("differs", "differs_from_whole"):
            chain[key] = _first(chain[key])
    (kept / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    chains = sum(len(result.get("chains", [])) for result in results)
    (folder / "public-programs.md").write_text(PAGE.format(chains=chains) + "\n".join(table(results)) + "\n")
