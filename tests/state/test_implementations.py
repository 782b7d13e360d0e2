"""Which implementation torch runs, and which updates write gradients: compared with torch itself, class by class."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightck.state.implementations import Implementation, implementation_of, writes_gradients

FUSED = ("Adam", "AdamW", "Adagrad", "SGD")
CLASSES = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta"),
    *("Adamax", "RMSprop", "ASGD", "Rprop", "Adafactor", "Muon"),
)


class Own(nn.Parameter):
    """A subclass, for which torch does not choose foreach by itself."""


def functional_name(kind: str) -> str:
    return {"AdamW": "adam"}.get(kind, kind.lower())


def implementation_that_runs(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Step, and return which of torch's functions ran."""
    name, ran = functional_name(type(optimizer).__name__), set()
    file = {"adafactor": "_adafactor", "muon": "_muon"}.get(name, name)
    module = sys.modules[f"torch.optim.{file}"]
    functions = {"_single_tensor_": "for-loop", "_multi_tensor_": "foreach", "_fused_": "fused"}
    with monkeypatch.context() as patch:
        for prefix, found in functions.items():
            if hasattr(module, prefix + name):
                patch.setattr(module, prefix + name, lambda *_, found=found, **__: ran.add(found))
        optimizer.step()
    return ran


def optimizers(kind: str) -> Iterator[tuple[torch.optim.Optimizer, bool]]:
    """All options that decide, and whether torch is made to believe that the CPU is a device with foreach kernels."""
    chosen: list[dict[str, Any]] = [{}]
    if kind != "Muon":
        chosen += [{"foreach": True}, {"foreach": False}]
        if kind != "Adafactor":
            chosen += [{"differentiable": True}]
    if kind in FUSED:
        chosen += [{"fused": True}, {"fused": False}]
    if kind in ("Adam", "AdamW"):
        chosen += [{"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.1), "foreach": False}]
    for options, cls, has_kernels in itertools.product(chosen, (nn.Parameter, Own), (False, True)):
        params = [nn.Parameter(torch.ones(4, 3)), cls(torch.ones(4, 3))]
        for p in params:
            p.grad = torch.ones(4, 3)
        yield getattr(torch.optim, kind)(params, **options), has_kernels


@pytest.mark.parametrize("kind", CLASSES)
def test_the_implementation_is_the_one_that_torch_runs(kind, monkeypatch):
    seen = set()
    for optimizer, has_kernels in optimizers(kind):
        (group,) = optimizer.param_groups
        with monkeypatch.context() as patch:
            if has_kernels:
                devices = lambda: ["cpu"]  # noqa: E731
                patch.setattr(sys.modules["torch.optim.optimizer"], "_get_foreach_kernels_supported_devices", devices)
            expected = implementation_of(optimizer, group, group["params"]).value
            assert implementation_that_runs(optimizer, patch) == {expected}, (group, has_kernels)
        seen.add(expected)
    every = {"for-loop"} | ({"foreach"} if kind != "Muon" else set()) | ({"fused"} if kind in FUSED else set())
    assert seen == every


def test_subclasses_and_foreign_optimizers():
    class Sub(torch.optim.Adam):
        pass

    class Foreign(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            pass

    params = [nn.Parameter(torch.ones(2))]
    sub, foreign = Sub(params, fused=True), Foreign(params, {"foreach": True})
    assert implementation_of(sub, sub.param_groups[0], params) is Implementation.FUSED
    assert implementation_of(foreign, foreign.param_groups[0], params) is Implementation.OWN
    assert not writes_gradients(foreign, foreign.param_groups[0], Implementation.OWN, has_scale=True)


def grid(kind: str) -> Iterator[dict[str, Any]]:
    """Options that could decide whether ``step`` writes gradients."""
    names: dict[str, tuple[Any, ...]] = {"maximize": (False, True), "weight_decay": (0, 0.1)}
    if kind == "SGD":
        names |= {"momentum": (0, 0.9), "nesterov": (False, True)}
    elif kind in ("Adam", "AdamW"):
        names |= {"amsgrad": (False, True)}
    elif kind in ("NAdam", "RAdam"):
        names |= {"decoupled_weight_decay": (False, True)}
    elif kind == "RMSprop":
        names |= {"momentum": (0, 0.9), "centered": (False, True)}
    elif kind == "Rprop":
        names.pop("weight_decay")
    elif kind == "Muon":
        names = {"weight_decay": (0, 0.1), "nesterov": (False, True)}
    ways = [{}] if kind == "Muon" else [{"foreach": False}, {"foreach": True}]
    for choice in itertools.product(*names.values()):
        options = dict(zip(names, choice, strict=True))
        if not (options.get("nesterov") and options.get("momentum") == 0):
            yield from ({**options, **one} for one in [*ways, *([{"fused": True}] if kind in FUSED else [])])


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_says_which_updates_write_gradients(kind, dtype):
    for options in grid(kind):
        for scale in (None, torch.tensor(4.0)) if options.get("fused") else (None,):
            params = [nn.Parameter(torch.full((5, 3), 0.5, dtype=dtype)) for _ in range(2)]
            optimizer = getattr(torch.optim, kind)(params, lr=0.1, **options)
            for _ in range(2):
                for p in params:
                    p.grad = torch.full((5, 3), 0.25, dtype=dtype)
                if options.get("fused"):
                    optimizer.grad_scale, optimizer.found_inf = scale, torch.tensor(0.0)
                (group,) = optimizer.param_groups
                implementation = implementation_of(optimizer, group, params)
                expected = writes_gradients(optimizer, group, implementation, scale is not None)
                optimizer.step()
                is_written = any(bool((p.grad != 0.25).any()) for p in params)
                assert is_written == expected, (options, scale)


def test_a_decay_that_requires_gradients_is_added_in_place():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    decay = torch.tensor(0.5, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=0.1, weight_decay=decay, foreach=False)
    (group,) = optimizer.param_groups
    assert writes_gradients(optimizer, group, Implementation.FOR_LOOP, has_scale=False)
    optimizer.step()
    assert torch.equal(p.grad, torch.full((3,), 1.5))
