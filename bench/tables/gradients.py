"""The rows of the table ``gradients``, and how it shows them.

The first rows sweep over ``base_every`` and the interval of ``lightck.Gradients``; then come rivals that save a whole
state at every step, and LowDiff's algorithms, which save gradients. Windows are as long as ``base_every`` or a divisor
or multiple of it, so that each parameter is due equally often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.running.rows import Row
from bench.tables.results import Rows, markdown, megabytes, milliseconds, percent

NS, INTERVALS, LAYERS, LAYERS_WITHOUT_AGAIN = (2, 3, 6, 12, 24), (2, 4), 4, 12
EVERY_N_WITH_INTERVALS = (6, 12)
WINDOW, ROUNDS = 12, 4
RIVALS = (
    "torch.save",
    "torch.save + rename",
    "dcp.async_save",
    "dcp.async_save (process)",
    "CheckFreq",
    "torchsnapshot.async_take",
    "torch_checkpointing (async)",
)
"""Those of ``rivals.TABLE`` that are compared here: the plainest, and those that write in the background."""
LIGHTCK = "lightck"


def rows(quick: bool, layers: int, pairs: int | None, rivals: Sequence[str]) -> list[Row]:
    """``pairs``: replaces the number of rounds."""
    base: dict[str, Any] = {"layers": layers, "interval": 1, "window": WINDOW, "warm_up": 2, "rounds": pairs or ROUNDS}
    base |= {"size": "full", "again": layers < LAYERS_WITHOUT_AGAIN}
    if quick:
        small = base | {"layers": 2, "size": "small", "again": True, "window": 6, "warm_up": 1, "rounds": pairs or 2}
        return [_gradients(small, 3, "quick gpt2"), _lowdiff(small, "LowDiff", "quick gpt2")]
    name = f"gpt2-{layers}"
    found = [_gradients(base, n, name) for n in NS]
    found += [_gradients(base | {"interval": i}, n, name) for n in EVERY_N_WITH_INTERVALS for i in INTERVALS]
    found += [_gradients(base, 6, name, topk=0.01)]
    found += [Row("gradients", f"{name} {rival}", base | {"saver": rival}) for rival in RIVALS if rival in rivals]
    differential = ("LowDiff", "LowDiff (one by one)", "LowDiff (top-k)", "LowDiff+")
    return found + [_lowdiff(base, rival, name) for rival in differential]


def _gradients(base: dict[str, Any], n: int, name: str, topk: float | None = None) -> Row:
    """``n`` above a window needs a longer warm-up: its first bases are full. The pool of 24 has no place for a second
    training without lightck beside it."""
    key, options = f"{name} Gradients({n})", {**base, "saver": LIGHTCK, "strategy": f"gradients {n}"}
    if n > base["window"]:
        options |= {"again": False, "warm_up": base["warm_up"] + 2}
    if topk is not None:
        options["strategy"] += f" topk {topk}"
        key += f" TopK({topk})"
    if base["interval"] > 1:
        key += f" interval {base['interval']}"
    return Row("gradients", key, options)


def _lowdiff(base: dict[str, Any], rival: str, name: str) -> Row:
    """A full state in each window, as in ``Gradients(12)``; batches of a third of it."""
    n = base["window"]
    options = {"persist_every": n} if rival == "LowDiff+" else {"base_every": n, "batch": n // 3}
    return Row("gradients", f"{name} {rival}", {**base, "saver": rival, "rival": options})


# -- how they are shown ----------------------------------------------------------------------------------------------

_HEADER = (
    "row",
    "bytes",
    "algebra",
    "CPU",
    "CPU added",
    "stall",
    "p50",
    "largest due",
    "step added",
    "A/A",
    "memory",
    "files",
    "algebra",
    "recovery",
    "updates",
    "loads back",
)


def view(rows_of: Rows) -> str:
    """Two lines per row: what it measures, and ``FullState()``, which took turns with it."""
    lines = []
    for key, row in rows_of.items():
        lines += [_line(key, row["result"], "saver"), _line(f"{key}: FullState()", row["result"], "full")]
    return markdown(_HEADER, lines) + "\n" + _legend(rows_of)


def _line(name: str, result: dict[str, Any], of: str) -> tuple[str, ...]:
    r, same = result[of], result["same"]
    added, cpu = r["step_added"], r["cpu_added"]
    is_full = of == "full"
    return (
        name,
        f"{r['bytes']:.3f} S",
        f"{r['predicted_bytes']:.3f} S" if "predicted_bytes" in r else "",
        f"{r['cpu']:.2f}" if "base_every" in r or is_full else "",
        f"{cpu['median']:.2f} ({cpu['low']:.2f} to {cpu['high']:.2f})",
        percent(r["stall_mean"]),
        percent(r["stall"]),
        percent(r["stall_of_largest"]) if "base_every" in r else "",
        f"{percent(added['median'])} ({percent(added['low'])} to {percent(added['high'])})"
        + ("" if added["resolved"] else " not resolved"),
        "" if is_full else f"{percent(same['low'])} to {percent(same['high'])}",
        f"{r['memory']:.2f} G",
        megabytes(r["files_bytes"]),
        megabytes(r["predicted_pool"]) if "predicted_pool" in r else "",
        milliseconds(r["recovery"]),
        f"{r['replayed']:.1f}",
        _loads_back(r),
    )


def _loads_back(r: dict[str, Any]) -> str:
    if r["exact"]:
        return "bit for bit"
    return f"{r['differing']} of {r['tensors']} tensors differ, parameters by {r['max_difference']:.1e}"


def _legend(rows_of: Rows) -> str:
    """What the units are, from the rows."""
    found = sorted(
        {
            (row["options"]["layers"], r["state_bytes"], r["gradient_bytes"], row["options"]["size"])
            for row in rows_of.values()
            for r in (row["result"],)
        }
    )
    sizes = "; ".join(
        f"GPT-2, {layers} layers{' (small)' if size == 'small' else ''}: "
        f"S = {megabytes(state)}, G = {megabytes(gradients)}"
        for layers, state, gradients, size in found
    )
    return (
        "\nAll figures are those of one update on average, also with an interval. S: parameters and optimizer state; "
        f"G: one set of gradients ({sizes}). CPU: of lightck's threads and hooks, in memcpys of S; CPU added: of the "
        "whole process, beside the training that saves nothing. Stall: mean, median, and median of the steps in which "
        "the largest parameter is due, as a share of a step. Updates: made again by a recovery."
    )
