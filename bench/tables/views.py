"""Formats rows as Markdown tables."""

from __future__ import annotations

from typing import Any

from bench.measures.figures import smallest_interval
from bench.tables.results import Rows, markdown, megabytes, milliseconds, percent, rate, times

NOTHING = "nothing"


def _mid_batch(difference: dict[str, Any]) -> str:
    """A share with its interval, and the A/A line if the share does not exceed it."""
    text = f"{percent(difference['share'])} ({percent(difference['share_low'])} to {percent(difference['share_high'])})"
    return text if difference["resolved"] else text + " not resolved"


def _pairs(result: dict[str, Any]) -> str:
    """The number of pairs, and how many of the windows fell into a trial."""
    unsettled = result.get("unsettled")
    return f"{result['pairs']}" + (f" ({unsettled} windows unsettled)" if unsettled else "")


def overhead(rows: Rows) -> str:
    """Difference and A/A line of step time and CPU, and the saver's own CPU."""
    header = ("row", "state", "step", "pairs", "step time added", "A/A", "CPU added", "own CPU", "of memcpy", "helped")
    lines = []
    for key, row in rows.items():
        r = row["result"]
        helped = "" if r["helped_share"] is None else percent(r["helped_share"])
        same = f"{percent(r['difference']['same_low'])} to {percent(r['difference']['same_high'])}"
        lines.append(
            (
                key,
                megabytes(r["nbytes"]),
                milliseconds(r["step"]["median"]),
                _pairs(r),
                _mid_batch(r["difference"]),
                same,
                _mid_batch(r["cpu_difference"]),
                milliseconds(r["own_cpu_seconds"]),
                times(r["direct"]),
                helped,
            )
        )
    return markdown(header, lines)


def stall(rows: Rows) -> str:
    header = ("row", "step", "stall p50", "p99", "of the step p50", "p99", "n")
    lines = []
    for key, row in rows.items():
        r = row["result"]
        s = r["stall"]
        lines.append(
            (
                key,
                milliseconds(r["step"]["median"]),
                milliseconds(s["median"]),
                milliseconds(s["p99"]),
                percent(s["share"]),
                percent(s["share_p99"]),
                str(s["n"]),
            )
        )
    return markdown(header, lines)


def interval(rows: Rows) -> str:
    """The smallest interval, from the time that one checkpoint adds; in brackets from the upper end of that time."""
    header = ("row", "step", "a checkpoint adds", "smallest interval within 5 %", "at the interval's upper end")
    lines = []
    for key, row in rows.items():
        r = row["result"]
        median, high = smallest_within(r, "median", "seconds"), smallest_within(r, "high", "high")
        lines.append(
            (
                key,
                milliseconds(r["step"]["median"]),
                milliseconds(max(0.0, r["difference"]["median"])),
                str(median),
                str(high),
            )
        )
    return markdown(header, lines)


def smallest_within(result: dict[str, Any], at_every_step: str, spread_out: str) -> int:
    """A saver whose background work outlasts a step costs less if nothing waits for it. That cost was measured in
    longer windows, and applies to intervals of at least that length."""
    step = result["step"]["median"]
    found = smallest_interval(result["difference"][at_every_step], step)
    longer = result.get("spread_out")
    if longer is None or found <= longer["span"]:
        return found
    return min(found, max(int(longer["span"]), smallest_interval(longer[spread_out], step)))


def recovery(rows: Rows) -> str:
    """Includes the memcpy on as many threads as lightck uses, if a row has it (old rows do not)."""
    on_threads = any("of_memcpy_on_threads" in row["result"] for row in rows.values())
    header = [
        "row",
        "state",
        "lightck",
        "torch.load",
        "mmap",
        "of memcpy",
        *(["on threads"] if on_threads else []),
        "faster than torch.load",
        "than mmap",
    ]
    lines = []
    for key, row in rows.items():
        r = row["result"]
        seconds = [milliseconds(r[n]["to_next_step"]["median"]) for n in ("lightck", "torch.load", "torch.load mmap")]
        faster = [times(r["faster_than"][n]) for n in ("torch.load", "torch.load mmap")]
        lines.append(
            (
                key,
                megabytes(r["nbytes"]),
                *seconds,
                times(r["of_memcpy"]),
                *([_on_threads(r)] if on_threads else []),
                *faster,
            )
        )
    return markdown(header, lines)


def _on_threads(result: dict[str, Any]) -> str:
    if "of_memcpy_on_threads" not in result:
        return ""
    return f"{times(result['of_memcpy_on_threads'])} ({result['memcpy_on_threads']['threads']})"


def bandwidth(rows: Rows) -> str:
    """One line per direction and kind, of wall time and of the thread's CPU time."""
    header = ("row", "kind", "wall", "CPU", "lightck over it")
    lines = []
    for key, row in rows.items():
        for direction in ("write", "read"):
            kinds = row["result"][direction]
            ours = kinds["lightck"]["cpu"]["median"]
            for kind, found in kinds.items():
                lines.append(
                    (
                        f"{key} {direction}",
                        kind,
                        rate(found["wall"]["median"]),
                        rate(found["cpu"]["median"]),
                        times(ours / found["cpu"]["median"]),
                    )
                )
    return markdown(header, lines)


def beyond(rows: Rows, key: str) -> float | None:
    """The private bytes of a row beyond those of the same loop without saving."""
    plain = _plain(rows, key)
    if plain is None:
        return None
    settled: float = rows[key]["result"]["settled_bytes"] - plain["settled_bytes"]
    return settled


def beyond_in_flight(rows: Rows, key: str) -> float | None:
    """The same with an in-flight checkpoint: the largest of the samples; None if a row lacks them."""
    plain, ours = _plain(rows, key), rows[key]["result"].get("in_flight_bytes")
    if plain is None or ours is None or "in_flight_bytes" not in plain:
        return None
    return max(float(nbytes - plain["in_flight_bytes"][moment]) for moment, nbytes in ours.items())


def _plain(rows: Rows, key: str) -> dict[str, Any] | None:
    """The result of the same loop without saving."""
    saver = rows[key]["options"]["saver"]
    plain = rows.get(key.removesuffix(saver) + NOTHING)
    return None if plain is None or saver == NOTHING else plain["result"]


def memory(rows: Rows) -> str:
    """Includes the memory with an in-flight checkpoint, if a row has it (old rows do not)."""
    flying = {key: more for key in rows if (more := beyond_in_flight(rows, key)) is not None}
    header = [
        "row",
        "state",
        "private",
        "beyond the loop",
        *(["in flight"] if flying else []),
        "peak",
        "peak with files",
        "attach",
        "populate",
    ]
    lines = []
    for key, row in rows.items():
        r, more = row["result"], beyond(rows, key)
        start = [milliseconds(r[n]) if n in r else "" for n in ("attach_seconds", "populate_seconds")]
        lines.append(
            (
                key,
                megabytes(r["nbytes"]),
                megabytes(r["settled_bytes"]),
                "" if more is None else megabytes(more),
                *([megabytes(flying[key]) if key in flying else ""] if flying else []),
                megabytes(r["peak_bytes"]),
                megabytes(r["peak_with_files_bytes"]),
                *start,
            )
        )
    return markdown(header, lines)


def flat(rows: Rows) -> str:
    header = ("row", "steps", "private memory grew", "descriptors", "threads", "stall first", "stall last")
    lines = []
    for key, row in rows.items():
        r = row["result"]
        stalls = r["parts"]["stall_seconds"]
        lines.append(
            (
                key,
                f"{r['steps']:,}",
                megabytes(r["memory_growth_bytes"]),
                f"{r['descriptor_growth']:+d}",
                f"{r['thread_growth']:+d}",
                milliseconds(stalls[0]),
                milliseconds(stalls[-1]),
            )
        )
    return markdown(header, lines)


def many(rows: Rows) -> str:
    header = ("row", "tensors", "per tensor and step", "p99", "stall", "layers", "stall with them")
    lines = []
    for key, row in rows.items():
        r = row["result"]
        lines.append(
            (
                key,
                f"{r['tensors']:,}",
                f"{1e6 * r['seconds_per_tensor']:.2f} us",
                f"{1e6 * r['seconds_per_tensor_p99']:.2f} us",
                milliseconds(r["stall_seconds"]),
                f"{r['layers']:,}",
                milliseconds(r["layers_stall_seconds"]),
            )
        )
    return markdown(header, lines)


def short(rows: Rows) -> str:
    header = ("row", "step", "A/A", "nothing saved", "stats()", "every step", "stats()", "auto", "interval", "warned")
    lines = []
    for key, row in rows.items():
        r = row["result"]
        idle, every, auto = r["idle"], r["every"], r["auto"]
        lines.append(
            (
                key,
                milliseconds(r["seconds"]),
                f"{percent(r['same']['low'])} to {percent(r['same']['high'])}",
                f"{1e6 * idle['added']['median']:.0f} us",
                f"{idle['stats_share']:.2f}",
                f"{1e6 * every['added']['median']:.0f} us",
                f"{every['stats_share']:.2f}",
                f"{percent(auto['share'])} of {percent(r['budget'])}",
                str(auto["interval"]),
                "yes" if r["warned"] else "no",
            )
        )
    return markdown(header, lines)


def calibrate(rows: Rows) -> str:
    from bench.workloads import FULL  # needs torch

    header = ("row", "batch 8", "batch 16", "batch 32", "by the rule", "frozen")
    lines = []
    for key, row in rows.items():
        r = row["result"]
        seconds = [milliseconds(r["seconds"][n]) if n in r["seconds"] else "" for n in ("8", "16", "32")]
        lines.append((key, *seconds, str(r["batch"]), str(FULL[key].batch)))
    return markdown(header, lines)
