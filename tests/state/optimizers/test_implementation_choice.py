"""Which code updates a parameter is what torch really calls, also where it chooses by itself."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from lightck.state.consumed_update import Implementation
from lightck.state.implementation_choice import chosen_implementations
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

                def spy(*args: Any, _is: Any = implementation, _call: Any = function, **kwargs: Any) -> Any:
                    called.append(_is)
                    return _call(*args, **kwargs)

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
