"""The bars: ``bars.json`` says what must hold, a metric here finds what was reached in the kept results.

A bar without a result is not reached, and neither is one whose A/A line is wider than the bar. Where a difference does
not stand out of a narrower line, that is said beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightck.bench.results import Results, megabytes, milliseconds, percent, times
from lightck.bench.views import beyond

FILE = Path(__file__).with_name("bars.json")
UNITS: dict[str, Callable[[float], str]] = {
    "times": times, "share": percent, "bytes": megabytes, "seconds": lambda s: f"{1e6 * s:.2f} us" if s < 1e-3 else
    milliseconds(s), "count": lambda n: f"{n:,.0f}",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that must hold, for each of ``over``."""

    name: str
    says: str
    metric: str
    over: tuple[str, ...]
    limit: float
    is_maximum: bool
    aim: float | None
    unit: str

    def holds(self, one: Reached) -> bool:
        """Not where nothing was measured, nor where equal things differ by as much as the bar allows."""
        if one.value is None or one.blur > self.limit:
            return False
        return one.value <= self.limit if self.is_maximum else one.value >= self.limit

    def text(self, value: float) -> str:
        return UNITS[self.unit](value)

    @property
    def wanted(self) -> str:
        return f"{'at most' if self.is_maximum else 'at least'} {self.text(self.limit)}"


@dataclass(frozen=True, slots=True)
class Reached:
    """What was reached for one of a bar's ``over``: the worst, where that is several rows."""

    what: str
    value: float | None
    """None: not measured."""
    note: str = ""
    blur: float = 0.0
    """Half the width of its A/A line: what equal things differ by too."""


def bars(file: Path = FILE) -> list[Bar]:
    return [_bar(**facts) for facts in json.loads(file.read_text())]


def _bar(*, name: str, says: str, metric: str, over: Sequence[str], unit: str, at_most: float | None = None,
         at_least: float | None = None, aim: float | None = None) -> Bar:  # fmt: skip
    limits = [limit for limit in (at_most, at_least) if limit is not None]
    if len(limits) != 1 or metric not in METRICS or unit not in UNITS:
        raise ValueError(f"the bar {name!r} needs one limit, a known metric and a known unit")
    return Bar(name, says, metric, tuple(over), limits[0], at_most is not None, aim, unit)


def reached(bar: Bar, results: Results) -> list[Reached]:
    return [METRICS[bar.metric](results, what) for what in bar.over]


# -- metrics: (results, one of a bar's ``over``) -> what was reached ---------------------------------------------------


def _of(results: Results, measure: str, key: str) -> dict[str, Any] | None:
    row = results.rows(measure).get(key)
    return None if row is None else row["result"]


def _direct(results: Results, what: str) -> Reached:
    r = _of(results, "steps", f"{what} lightck")
    return Reached(what, None if r is None else r["direct"])


def _difference(results: Results, what: str) -> Reached:
    r = _of(results, "steps", f"{what} lightck")
    if r is None:
        return Reached(what, None)
    d = r["difference"]
    interval = f"{percent(d['share_low'])} to {percent(d['share_high'])}"
    same = f"A/A {percent(d['same_low'])} to {percent(d['same_high'])}"
    return Reached(what, d["share"], f"{interval}; {same}" + ("" if d["resolved"] else "; not resolved"),
                   (d["same_high"] - d["same_low"]) / 2)  # fmt: skip


def _stall(results: Results, what: str) -> Reached:
    r = _of(results, "steps", f"{what} lightck")
    if r is None:
        return Reached(what, None)
    return Reached(what, r["stall"]["share"], f"p99 {percent(r['stall']['share_p99'])}")


def _pairs(results: Results, rival: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(workload, lightck's row, the rival's) at the frozen batch sizes."""
    for key, row in results.rows("steps").items():
        name, _, saver = key.partition(" ")
        ours = _of(results, "steps", f"{name} lightck")
        if saver == rival and ours is not None and "batch" not in row["options"]:
            yield name, ours, row["result"]


def _worst(what: str, ratios: dict[str, float], unresolved: Collection[str] = ()) -> Reached:
    if not ratios:
        return Reached(what, None)
    note = [f"{n} {times(ratio)}{' (not resolved)' if n in unresolved else ''}" for n, ratio in ratios.items()]
    return Reached(what, min(ratios.values()), ", ".join(note))


def _stall_of_rivals(results: Results, what: str) -> Reached:
    found = {n: theirs["stall"]["median"] / ours["stall"]["median"] for n, ours, theirs in _pairs(results, what)}
    return _worst(what, found)


def _cpu_of_rivals(results: Results, what: str) -> Reached:
    """Both by the difference of process CPU; ours at least what its threads and hooks are known to have used."""

    def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
        used: float = max(ours["cpu_difference"]["median"], ours["own_cpu_seconds"])
        return float(theirs["cpu_difference"]["median"]) / used

    found = list(_pairs(results, what))
    unresolved = [n for n, *rows in found if not all(row["cpu_difference"]["resolved"] for row in rows)]
    return _worst(what, {n: ratio(ours, theirs) for n, ours, theirs in found}, unresolved)


def _write(results: Results, what: str) -> Reached:
    r = _of(results, "bandwidth", what)
    return Reached(what, None if r is None else r["write_of_nt"])


def _recovery_of_memcpy(results: Results, what: str) -> Reached:
    r = _of(results, "recovery", what)
    return Reached(what, None if r is None else r["of_memcpy"])


def _recovery_of_torch(results: Results, what: str) -> Reached:
    r = _of(results, "recovery", what)
    return Reached(what, None) if r is None else _worst(what, r["faster_than"])


def _memory(results: Results, what: str) -> Reached:
    rows, key = results.rows("memory"), f"{what} lightck"
    return Reached(what, beyond(rows, key) if key in rows else None)


def _fits(results: Results, what: str) -> Reached:
    """Of every saver: each has the machine for itself."""
    peaks = {
        key.partition(" ")[2]: row["result"]["peak_with_files_bytes"]
        for key, row in results.rows("memory").items()
        if key.partition(" ")[0] == what
    }
    note = ", ".join(f"{name} {megabytes(peak)}" for name, peak in peaks.items())
    return Reached(what, max(peaks.values(), default=None), note)


def _flat(results: Results, what: str) -> Reached:
    ours, plain = (_of(results, "flat", f"{what} {saver}") for saver in ("lightck", "nothing"))
    if ours is None or plain is None:
        return Reached(what, None)
    note = f"descriptors {ours['descriptor_growth']:+d}, threads {ours['thread_growth']:+d}"
    return Reached(what, ours["memory_growth_bytes"] - max(0.0, plain["memory_growth_bytes"]), note)


def _many(results: Results, what: str) -> Reached:
    r = _of(results, "many", what)
    return Reached(what, None) if r is None else Reached(what, r["seconds_per_tensor"], f"of {r['tensors']:,} tensors")


def _layers(results: Results, what: str) -> Reached:
    r = _of(results, "many", what)
    return Reached(what, None if r is None else r["layers"])


METRICS: dict[str, Callable[[Results, str], Reached]] = {
    "direct": _direct, "difference": _difference, "stall": _stall, "stall_of_rivals": _stall_of_rivals,
    "cpu_of_rivals": _cpu_of_rivals, "write": _write, "recovery_of_memcpy": _recovery_of_memcpy,
    "recovery_of_torch": _recovery_of_torch, "memory": _memory, "fits": _fits, "flat": _flat, "many": _many,
    "layers": _layers,
}  # fmt: skip
