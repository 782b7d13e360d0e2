"""Which code updates a parameter is what torch really calls, also where it chooses by itself; and whether it writes
into the gradients."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightck.state.consumed_update import Implementation
from lightck.state.implementation_choice import chosen_implementations, writes_gradients
from lightck.state.torch_classes import TORCH_CLASSES

CODE = {
    "_single_tensor_": Implementation.FOR_LOOP,
    "_multi_tensor_": Implementation.FOREACH,
    "_fused_": Implementation.FUSED,
}
WAYS: list[dict[str, Any]] = [
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"fused": False},
    {"lr": torch.tensor(0.1)},
    {"differentiable": True},
]


class Renamed(nn.Parameter):
    """A parameter of a class for which torch has no foreach code."""


def called_by(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> Implementation:
    """The code that the next step of the optimizer calls."""
    name = type(optimizer).__name__
    file = {"AdamW": "adam", "Adafactor": "_adafactor", "Muon": "_muon"}.get(name, name.lower())
    module = importlib.import_module(f"torch.optim.{file}")
    called: list[Implementation] = []
    for name, function in list(vars(module).items()):
        for prefix, implementation in CODE.items():
            if name.startswith(prefix) and callable(function):

                def spy(*_: Any, _is: Any = implementation, **__: Any) -> None:
                    called.append(_is)

                monkeypatch.setattr(module, name, spy)
    optimizer.step()
    return called[0]


@pytest.mark.parametrize("is_default_foreach", [False, True])
@pytest.mark.parametrize("parameter", [nn.Parameter, Renamed])
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("name", sorted(set(TORCH_CLASSES) - {"LBFGS", "SparseAdam"}))
def test_it_is_the_code_that_torch_calls(name, options, parameter, is_default_foreach, monkeypatch):
    if is_default_foreach:  # as on a GPU
        module = importlib.import_module("torch.optim.optimizer")
        monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    ps = [nn.Parameter(torch.ones(2, 3)), parameter(torch.ones(3, 2)), Renamed(torch.ones(2, 2))]
    for p in ps[:2]:
        p.grad = torch.ones_like(p).detach()  # what has no gradient does not count
    try:
        optimizer = TORCH_CLASSES[name](ps, **options)
    except (TypeError, ValueError):
        pytest.skip("the class does not take it")
    chosen, exceptions = chosen_implementations(type(optimizer), optimizer.param_groups[0], ["a", "b", "c"], {})
    assert chosen is called_by(optimizer, monkeypatch)
    assert exceptions == {}


class _Foreign(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:
        pass


def test_of_a_class_that_is_not_torchs_nothing_is_known() -> None:
    foreign = _Foreign([nn.Parameter(torch.ones(2))], {"foreach": True})
    assert not writes_gradients(_Foreign, foreign.param_groups[0], Implementation.FOREACH, has_scale=False)


# -- which updates write gradients -------------------------------------------------------------------------------------

FUSED = ("Adam", "AdamW", "Adagrad", "SGD")
CLASSES = sorted(set(TORCH_CLASSES) - {"LBFGS", "SparseAdam"})


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
                implementation, _ = chosen_implementations(type(optimizer), group, ["a", "b"], optimizer.state)
                expected = writes_gradients(type(optimizer), group, implementation, scale is not None)
                optimizer.step()
                is_written = any(bool((p.grad != 0.25).any()) for p in params)
                assert is_written == expected, (options, scale)


def test_a_decay_that_requires_gradients_is_added_in_place():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    decay = torch.tensor(0.5, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=0.1, weight_decay=decay, foreach=False)
    (group,) = optimizer.param_groups
    assert writes_gradients(type(optimizer), group, Implementation.FOR_LOOP, has_scale=False)
    optimizer.step()
    assert torch.equal(p.grad, torch.full((3,), 1.5))
