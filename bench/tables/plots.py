"""Plots of the kept results, one SVG each for some of the tables. Only this module needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.tables import LIGHTCK, NAMES, QUICK
from bench.tables.results import Results, Rows, reading
from bench.tables.views import smallest_within
from lightck.errors import BenchError

_WIDTH = 0.8


def draw(results: Results, folder: Path) -> Iterator[Path]:
    """Write the plots that have results; returns their paths."""
    plt = _pyplot()
    for name, picture in _PICTURES.items():
        with reading(name):
            axes = picture(plt, results)
        if axes is not None:
            path = folder / f"{name}.svg"
            axes.figure.tight_layout()
            # No date and a fixed salt, so that the same results give the same file.
            axes.figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
            plt.close(axes.figure)
            yield path


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError(
            f"Plots need matplotlib, which is not installed ({error}). Install it: pip install 'lightck[bench]'."
        ) from error
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "lightck"
    import matplotlib.pyplot

    return matplotlib.pyplot


def _by_saver(rows: Rows) -> dict[str, dict[str, dict[str, Any]]]:
    """saver -> workload -> result, for the rows with the frozen batch sizes on tmpfs."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for key, row in rows.items():
        name, _, saver = key.partition(" ")
        if name in NAMES and name != QUICK and saver == row["options"]["saver"]:
            found.setdefault(saver, {})[name] = row["result"]
    return found


def _bars(
    plt: Any,
    results: Results,
    value: Callable[[dict[str, Any]], float],
    label: str,
    scale: str,
    line: tuple[float, str] | None,
) -> Any | None:
    """A group per workload, a bar per saver."""
    savers = _by_saver(results.rows("steps"))
    if not savers:
        return None
    workloads = [name for name in NAMES if any(name in found for found in savers.values())]
    _, axes = plt.subplots(figsize=(12, 4.5))
    width = _WIDTH / len(savers)
    colors = plt.get_cmap("tab20").colors
    for i, (saver, found) in enumerate(savers.items()):
        at = [x + (i - (len(savers) - 1) / 2) * width for x, name in enumerate(workloads) if name in found]
        heights = [value(found[name]) for name in workloads if name in found]
        axes.bar(at, heights, width, label=saver, color="black" if saver == LIGHTCK else colors[i % len(colors)])
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_yscale(scale)
    axes.set_ylabel(label)
    if line is not None:
        axes.axhline(line[0], color="black", linewidth=0.8, linestyle="--", label=line[1])
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return axes


def _overhead(plt: Any, results: Results) -> Any | None:
    return _bars(
        plt, results, lambda r: 100 * float(r["difference"]["share"]), "step time added, %", "symlog", (5.0, "bar: 5 %")
    )


def _stall(plt: Any, results: Results) -> Any | None:
    return _bars(
        plt, results, lambda r: 100 * float(r["stall"]["share"]), "stall (p50), % of the step", "log", (1.0, "bar: 1 %")
    )


def _interval(plt: Any, results: Results) -> Any | None:
    return _bars(
        plt,
        results,
        lambda r: smallest_within(r, "median", "seconds"),
        "smallest interval within 5 %, steps",
        "log",
        None,
    )


def _flat(plt: Any, results: Results) -> Any | None:
    rows = {key: row for key, row in results.rows("flat").items() if not key.startswith(QUICK)}
    if not rows:
        return None
    _, axes = plt.subplots(figsize=(10, 4))
    for key, row in rows.items():
        memory = row["result"]["parts"]["anonymous_bytes"]
        steps = [row["result"]["steps"] * (i + 1) / len(memory) for i in range(len(memory))]
        axes.plot(steps, [nbytes / 2**20 for nbytes in memory], label=key)
    axes.set_xlabel("steps")
    axes.set_ylabel("private memory, MiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    return axes


_PICTURES: dict[str, Callable[[Any, Results], Any | None]] = {
    "overhead": _overhead,
    "stall": _stall,
    "interval": _interval,
    "flat": _flat,
}
