"""Computes the value of each bar from the kept rows, with a note for the reader and the rows that it comes from.

A metric over several rows (a rival's and lightck's, on each workload) has no value where one of them is missing, and
does not combine rows of different machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.tables.results import Results, megabytes, milliseconds, percent, times
from bench.tables.views import beyond, beyond_in_flight

LIGHTCK, NOTHING = "lightck", "nothing"
PAIRS = 30
"""Fewer pairs are mentioned in the note."""
STEPS_ALIKE = 0.1
"""A larger difference between the plain steps of two rows is mentioned: other load slowed one of them."""
_MACHINE = {"cpu": "processors", "cores": "numbers of cores", "threads": "numbers of threads"}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reached:
    """The value for one of a bar's ``over``: the worst, if it comes from several rows."""

    what: str
    value: float | None
    """None: not measured."""
    note: str = ""
    blur: float = 0.0
    """Half the width of its A/A line: the noise between equal windows."""
    refused: str = ""
    """Why the value does not count, or ""."""
    end: float | None = None
    """The value at the worse ends of its intervals; None: it has no interval."""
    rows: tuple[Row, ...] = ()
    """The rows that it comes from."""


def _joined(parts: Sequence[str], between: str = "; ") -> str:
    return between.join(part for part in parts if part)


def _missing(what: str, keys: Sequence[str], note: str = "", rows: Sequence[Row] = ()) -> Reached:
    return Reached(what, None, _joined([f"no row {', '.join(keys)}", note]), rows=tuple(rows))


def _apart(rows: Sequence[Row]) -> str:
    """Why these rows cannot be combined, or ""."""
    for fact, things in _MACHINE.items():
        found = {str(row["machine"].get(fact)) for row in rows}
        if len(found) > 1:
            return f"rows of different {things} ({', '.join(sorted(found))})"
    return ""


def _conditions(*rows: Row) -> list[str]:
    """A note on the windows: too few pairs, unsettled windows, or plain steps that differ from the rival's."""
    results, said = [row["result"] for row in rows], []
    if min(r["pairs"] for r in results) < PAIRS:
        said.append(" and ".join(str(r["pairs"]) for r in results) + " pairs")
    if any(r.get("unsettled") for r in results):
        said.append(" and ".join(str(r.get("unsettled") or 0) for r in results) + " windows unsettled")
    steps = [r["step"]["median"] for r in results]
    if max(steps) > (1 + STEPS_ALIKE) * min(steps):
        said.append("plain steps " + " and ".join(map(milliseconds, steps)))
    return said


# -- a checkpoint at every step --------------------------------------------------------------------------------------


def _direct(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    key = f"{what} {LIGHTCK}"
    row = results.rows("steps").get(key)
    if row is None:
        return _missing(what, [key])
    return Reached(what, row["result"]["direct"], _joined(_conditions(row)), rows=(row,))


def _difference(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    key = f"{what} {LIGHTCK}"
    row = results.rows("steps").get(key)
    if row is None:
        return _missing(what, [key])
    d = row["result"]["difference"]
    note = _joined(
        [
            f"{percent(d['share_low'])} to {percent(d['share_high'])}",
            f"A/A {percent(d['same_low'])} to {percent(d['same_high'])}",
            "" if d["resolved"] else "not resolved",
            *_conditions(row),
        ]
    )
    return Reached(what, d["share"], note, (d["same_high"] - d["same_low"]) / 2, end=d["share_high"], rows=(row,))


def _stall(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    key = f"{what} {LIGHTCK}"
    row = results.rows("steps").get(key)
    if row is None:
        return _missing(what, [key])
    stall = row["result"]["stall"]
    note = _joined([f"p99 {percent(stall['share_p99'])}", *_conditions(row)])
    return Reached(what, stall["share"], note, rows=(row,))


@dataclass(frozen=True, slots=True)
class _Ratio:
    """A rival's cost over lightck's, on one workload."""

    value: float
    end: float | None = None
    is_resolved: bool = True


def _stall_of_rivals(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> _Ratio:
        return _Ratio(theirs["stall"]["median"] / ours["stall"]["median"])

    return _over_ours(results, what, each_of, ratio)


def _cpu_of_rivals(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    """CPU added by both; for lightck at least the measured CPU of its own threads and hooks."""

    def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> _Ratio:
        mine, its, own = ours["cpu_difference"], theirs["cpu_difference"], ours["own_cpu_seconds"]
        return _Ratio(
            its["median"] / max(mine["median"], own),
            its["low"] / max(mine["high"], own),
            mine["resolved"] and its["resolved"],
        )

    return _over_ours(results, what, each_of, ratio)


def _over_ours(
    results: Results, rival: str, workloads: Sequence[str], ratio: Callable[[dict[str, Any], dict[str, Any]], _Ratio]
) -> Reached:
    """The smallest of the workloads' ratios, each between two rows."""
    kept = results.rows("steps")
    found: list[_Ratio] = []
    used: list[Row] = []
    said, missing, refused = [], [], []
    for name in workloads:
        keys = [f"{name} {saver}" for saver in (LIGHTCK, rival)]
        missing += [key for key in keys if key not in kept]
        if not all(key in kept for key in keys):
            continue
        ours, theirs = rows = [kept[key] for key in keys]
        used += rows
        found.append(ratio(ours["result"], theirs["result"]))
        said.append(_said(name, found[-1], _conditions(*rows)))
        refused += [f"{name}: {why}" for why in [_apart(rows)] if why]
    note = ", ".join(said)
    if missing or not found:
        return _missing(rival, missing, note, used)
    ends = [one.end for one in found if one.end is not None]
    return Reached(
        rival,
        min(one.value for one in found),
        note,
        refused=_joined(refused),
        end=min(ends, default=None),
        rows=tuple(used),
    )


def _said(name: str, one: _Ratio, conditions: list[str]) -> str:
    beside = _joined(
        [
            "" if one.end is None else f"{times(one.end)} at the intervals' ends",
            "" if one.is_resolved else "not resolved",
            *conditions,
        ]
    )
    return f"{name} {times(one.value)}" + (f" ({beside})" if beside else "")


# -- the others ------------------------------------------------------------------------------------------------------


def _of(measure: str, name: str) -> Callable[[Results, str, Sequence[str]], Reached]:
    """A value that a row of this measure holds."""

    def metric(results: Results, what: str, each_of: Sequence[str]) -> Reached:
        row = results.rows(measure).get(what)
        return _missing(what, [what]) if row is None else Reached(what, row["result"][name], rows=(row,))

    return metric


def _recovery_of_memcpy(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    row = results.rows("recovery").get(what)
    if row is None:
        return _missing(what, [what])
    r = row["result"]
    note = ""
    if "of_memcpy_on_threads" in r:
        note = f"of one on {r['memcpy_on_threads']['threads']} threads {times(r['of_memcpy_on_threads'])}"
    return Reached(what, r["of_memcpy"], note, rows=(row,))


def _recovery_of_torch(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    row = results.rows("recovery").get(what)
    if row is None:
        return _missing(what, [what])
    faster = {name: row["result"]["faster_than"][name] for name in each_of}
    note = ", ".join(f"{name} {times(ratio)}" for name, ratio in faster.items())
    return Reached(what, min(faster.values()), note, rows=(row,))


def _memory(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    """The larger of the memory without and with an in-flight checkpoint, if the rows have both."""
    kept, keys = results.rows("memory"), [f"{what} {saver}" for saver in (LIGHTCK, NOTHING)]
    if missing := [key for key in keys if key not in kept]:
        return _missing(what, missing)
    rows = tuple(kept[key] for key in keys)
    settled, flying = beyond(kept, keys[0]), beyond_in_flight(kept, keys[0])
    assert settled is not None, "both rows are there"
    note = "" if flying is None else f"{megabytes(settled)}, with an in-flight checkpoint {megabytes(flying)}"
    return Reached(what, settled if flying is None else max(settled, flying), note, refused=_apart(rows), rows=rows)


def _fits(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    """Memory of every measured saver, at least of those in ``needs``: each has the machine for itself."""
    rows = {key.partition(" ")[2]: row for key, row in results.rows("memory").items() if key.partition(" ")[0] == what}
    peaks = {name: row["result"]["peak_with_files_bytes"] for name, row in rows.items()}
    note = "measured: " + ", ".join(f"{name} {megabytes(peak)}" for name, peak in peaks.items())
    if missing := [f"{what} {name}" for name in each_of if name not in peaks]:
        return _missing(what, missing, note if peaks else "", list(rows.values()))
    return Reached(what, max(peaks.values()), note, rows=tuple(rows.values()))


def _flat(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    """Growth of memory; a growth of descriptors or threads beyond that of the loop alone is a failure."""
    kept, keys = results.rows("flat"), [f"{what} {saver}" for saver in (LIGHTCK, NOTHING)]
    if missing := [key for key in keys if key not in kept]:
        return _missing(what, missing)
    rows = tuple(kept[key] for key in keys)
    ours, plain = (row["result"] for row in rows)
    grown = [
        f"{things} grew by {ours[name]:.0f}"
        for things, name in (("descriptors", "descriptor_growth"), ("threads", "thread_growth"))
        if ours[name] > max(0, plain[name])
    ]
    note = f"descriptors {ours['descriptor_growth']:+d}, threads {ours['thread_growth']:+d}"
    return Reached(
        what,
        ours["memory_growth_bytes"] - max(0.0, plain["memory_growth_bytes"]),
        note,
        refused=_joined([*grown, _apart(rows)]),
        rows=rows,
    )


def _many(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    row = results.rows("many").get(what)
    if row is None:
        return _missing(what, [what])
    return Reached(what, row["result"]["seconds_per_tensor"], f"of {row['result']['tensors']:,} tensors", rows=(row,))


def _short(loop: str, value: Callable[[Any], float]) -> Callable[[Results, str, Sequence[str]], Reached]:
    """A value of one of the loops with lightck in the measure of short steps."""

    def metric(results: Results, what: str, each_of: Sequence[str]) -> Reached:
        row = results.rows("short").get(what)
        if row is None:
            return _missing(what, [what])
        return Reached(what, value(row["result"][loop]), rows=(row,))

    return metric


def _short_auto(results: Results, what: str, each_of: Sequence[str]) -> Reached:
    """The share beyond the budget and the A/A line; 0 if a warning said that the fixed cost alone is above it."""
    row = results.rows("short").get(what)
    if row is None:
        return _missing(what, [what])
    r = row["result"]
    same = max(abs(r["same"]["low"]), abs(r["same"]["high"]))
    beyond_budget = max(r["auto"]["share"] - r["budget"] - same, 0.0)
    note = f"{percent(r['auto']['share'])} of {percent(r['budget'])}" + (", warned" if r["warned"] else "")
    return Reached(what, 0.0 if r["warned"] else beyond_budget, note, rows=(row,))


METRICS: dict[str, Callable[[Results, str, Sequence[str]], Reached]] = {
    "direct": _direct,
    "difference": _difference,
    "stall": _stall,
    "stall_of_rivals": _stall_of_rivals,
    "cpu_of_rivals": _cpu_of_rivals,
    "write": _of("bandwidth", "write_of_nt"),
    "recovery_of_memcpy": _recovery_of_memcpy,
    "recovery_of_torch": _recovery_of_torch,
    "memory": _memory,
    "fits": _fits,
    "flat": _flat,
    "many": _many,
    "layers": _of("many", "layers"),
    "short_idle": _short("idle", lambda idle: float(idle["added"]["median"])),
    "short_every": _short("every", lambda every: float(every["added"]["median"])),
    "short_stats": _short("every", lambda every: float(every["stats_share"])),
    "short_auto": _short_auto,
}
"""(results, one of a bar's ``over``, the rows that the bar needs for it) -> the value."""
