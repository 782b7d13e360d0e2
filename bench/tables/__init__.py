"""The tables: the rows of each, and how it shows them. Tables may share rows, which are measured only once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from bench.running.rows import DISK, TMPFS, Row
from bench.tables import gradients, views
from bench.tables.results import Rows

NAMES = ("resnet18", "vgg16", "inception_v3", "alexnet", "gpt2", "bert_large")
LIGHTCK, TORCH_SAVE, NOTHING = "lightck", "torch.save", "nothing"
PAIRS, RIVAL_PAIRS, QUICK = 30, 10, "quick"
METHODS = ("direct", "host", "device")
"""Transfer methods out of a device: names of ``savers.STAGING``, which needs torch."""
STAGED = ("gpt2", "vgg16")
"""Workloads for comparing the transfer methods with each other and with rivals on a device."""
OTHER_MEDIA = ("gpt2", "resnet18")
"""Workloads that are also saved to PMDK pools and to a disk."""
BUSY = ("alexnet", "bert_large")
"""Workloads that leave copy threads no processor; also measured with OpenMP threads that always sleep while waiting."""
SLEEPING = {"GOMP_SPINCOUNT": "1000"}


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a run."""

    rivals: Sequence[str] = (TORCH_SAVE,)
    quick: bool = False
    pairs: int | None = None
    layers: int = gradients.LAYERS
    """Layers of the GPT-2 in the rows of ``gradients``."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table. ``time``: how long all its rows take on two cores."""

    name: str
    says: str
    time: str
    measure: str
    """The measure of its rows; several tables may have the same."""
    rows: Callable[[Plan], list[Row]]
    show: Callable[[Rows], str]


def _key(*words: str) -> str:
    return " ".join(words)


# -- a checkpoint at every step --------------------------------------------------------------------------------------


def _step(
    workload: str,
    saver: str,
    pairs: int,
    *,
    batch: int = 0,
    backend: str = "file",
    medium: str = TMPFS,
    prefix: str = "",
    env: dict[str, str] | None = None,
) -> Row:
    options: dict[str, Any] = {"workload": workload, "size": "full", "saver": saver, "pairs": pairs}
    name = f"{workload}-batch{batch}" if batch else workload
    words = [prefix] if prefix else []
    words += [name, saver]
    if env:
        options["env"] = env
        words += [f"{key}={value}" for key, value in env.items()]
    if batch:
        options["batch"] = batch
    if backend != "file":
        options["backend"] = backend
        words.append(backend)
    if medium != TMPFS:
        words.append(medium)
    return Row("steps", _key(*words), options, medium)


def _step_rows(plan: Plan) -> list[Row]:
    if plan.quick:
        return [_step("resnet18", saver, plan.pairs or 4, batch=2, prefix=QUICK) for saver in (LIGHTCK, TORCH_SAVE)]
    pairs, rival_pairs = plan.pairs or PAIRS, plan.pairs or RIVAL_PAIRS
    found = [_step(name, LIGHTCK, pairs) for name in NAMES]
    found += [_step(name, rival, rival_pairs) for name in NAMES for rival in plan.rivals]
    found += [_step("resnet18", saver, pairs, batch=1) for saver in (LIGHTCK, TORCH_SAVE)]
    found += [_step(name, LIGHTCK, rival_pairs, backend="pmdk") for name in OTHER_MEDIA]
    found += [_step(name, LIGHTCK, rival_pairs, medium=DISK) for name in OTHER_MEDIA]
    found += [_step(name, LIGHTCK, pairs, env=SLEEPING) for name in BUSY]
    return found


# -- the others ------------------------------------------------------------------------------------------------------


def _recovery_rows(plan: Plan) -> list[Row]:
    if plan.quick:
        return [_recovery("resnet18", 3, prefix=QUICK)]
    return [*(_recovery(name, 5) for name in NAMES), _recovery("gpt2", 5, backend="pmdk")]


def _recovery(workload: str, rounds: int, *, backend: str = "file", prefix: str = "") -> Row:
    options: dict[str, Any] = {"workload": workload, "size": "full", "batch": 1 if prefix else 2, "rounds": rounds}
    words = [*([prefix] if prefix else []), workload]
    if backend != "file":
        options["backend"] = backend
        words.append(backend)
    return Row("recovery", _key(*words), options)


def _bandwidth_rows(plan: Plan) -> list[Row]:
    if plan.quick:
        options = {"workload": "resnet18", "size": "full", "rounds": 5}
        return [Row("bandwidth", _key(QUICK, "resnet18", "file"), {**options, "backend": "file"})]
    return [
        Row("bandwidth", _key(name, backend), {"workload": name, "size": "full", "rounds": 15, "backend": backend})
        for name in ("gpt2", "vgg16")
        for backend in ("file", "pmdk")
    ]


def _memory_rows(plan: Plan) -> list[Row]:
    def row(name: str, saver: str, steps: int, *prefix: str, **more: Any) -> Row:
        options = {"workload": name, "size": "full", "saver": saver, "steps": steps, **more}
        return Row("memory", _key(*prefix, name, saver), options)

    if plan.quick:
        return [row("resnet18", saver, 4, QUICK, batch=2) for saver in (NOTHING, LIGHTCK)]
    return [row(name, saver, 6) for name in NAMES for saver in (NOTHING, LIGHTCK, *plan.rivals)]


def _flat_rows(plan: Plan) -> list[Row]:
    if plan.quick:
        return [Row("flat", _key(QUICK, "alexnet"), {"workload": "alexnet", "saver": LIGHTCK, "steps": 200})]
    options = {"workload": "alexnet", "steps": 10_000}
    found = [Row("flat", _key("alexnet", saver), {**options, "saver": saver}) for saver in (LIGHTCK, NOTHING)]
    ours = {**options, "saver": LIGHTCK, "strategy": "gradients 6"}
    return [*found, Row("flat", _key("alexnet", LIGHTCK, "Gradients(6)"), ours)]


def _many_rows(plan: Plan) -> list[Row]:
    if plan.quick:
        return [Row("many", QUICK, {"tensors": 10_000, "steps": 9, "layers": 100})]
    return [Row("many", "full", {"tensors": 100_000, "steps": 30, "layers": 1_000})]


_SHORT = {"half-ms": (32, 400), "5-ms": (4_500, 200), "50-ms": (45_000, 60)}
"""Row -> batch of the small model, and steps in a turn."""


def _short_rows(plan: Plan) -> list[Row]:
    if plan.quick:
        return [Row("short", _key(QUICK, "half-ms"), {"batch": 32, "steps": 100, "turns": 3})]
    return [
        Row("short", name, {"batch": batch, "steps": steps, "turns": plan.pairs or 10})
        for name, (batch, steps) in _SHORT.items()
    ]


def _gpu_rows(plan: Plan) -> list[Row]:
    """None without a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return []

    def row(name: str, saver: str, pairs: int, *prefix: str, **more: Any) -> Row:
        options = {"workload": name, "size": "full", "saver": saver, "pairs": pairs, "device": "cuda", **more}
        words = [*prefix, name, saver, *([more["staging"]] if "staging" in more else [])]
        return Row("gpu", _key(*words), options)

    if plan.quick:
        return [row("resnet18", LIGHTCK, plan.pairs or 4, QUICK, batch=2)]
    pairs, rival_pairs = plan.pairs or PAIRS, plan.pairs or RIVAL_PAIRS
    found = [row(name, LIGHTCK, pairs) for name in NAMES]
    found += [row(name, LIGHTCK, pairs, staging=method) for name in STAGED for method in METHODS]
    return found + [row(name, rival, rival_pairs) for name in STAGED for rival in plan.rivals]


def _gradient_rows(plan: Plan) -> list[Row]:
    """The quick ones only where transformers is installed, since all others of a quick run need torch alone."""
    if plan.quick and find_spec("transformers") is None:
        return []
    return gradients.rows(plan.quick, plan.layers, plan.pairs, plan.rivals)


def _calibrate_rows(plan: Plan) -> list[Row]:
    if plan.quick:
        return []
    return [Row("calibrate", name, {"workload": name, "size": "full", "steps": 3}) for name in NAMES]


TABLES = {
    table.name: table
    for table in (
        Table(
            "overhead",
            "a checkpoint at every step, lightck's and the rivals'",
            "2 to 4 h",
            "steps",
            _step_rows,
            views.overhead,
        ),
        Table(
            "stall",
            "wall time on the training thread per step",
            "the rows of overhead",
            "steps",
            _step_rows,
            views.stall,
        ),
        Table(
            "interval",
            "the smallest interval within 5 % (LightCheck's Table I)",
            "the rows of overhead",
            "steps",
            _step_rows,
            views.interval,
        ),
        Table("recovery", "to the next step, against torch.load", "15 min", "recovery", _recovery_rows, views.recovery),
        Table(
            "bandwidth",
            "against memcpy, a non-temporal one, libpmem's",
            "5 min",
            "bandwidth",
            _bandwidth_rows,
            views.bandwidth,
        ),
        Table("memory", "private memory beyond the same loop", "60 min", "memory", _memory_rows, views.memory),
        Table("flat", "10,000 steps of a small model", "10 min", "flat", _flat_rows, views.flat),
        Table("many", "100,000 tiny tensors; 1,000 layers", "3 min", "many", _many_rows, views.many),
        Table("short", "what is added to steps of 0.5, 5 and 50 ms", "5 min", "short", _short_rows, views.short),
        Table(
            "gpu",
            "a checkpoint at every step of a training on a CUDA device",
            "45 min",
            "gpu",
            _gpu_rows,
            views.overhead,
        ),
        Table(
            "gradients",
            "checkpoints from gradients, FullState() in turn beside them, and rivals at every step",
            "2 h",
            "gradients",
            _gradient_rows,
            gradients.view,
        ),
        Table("calibrate", "seconds of a step by batch size", "15 min", "calibrate", _calibrate_rows, views.calibrate),
    )
}
