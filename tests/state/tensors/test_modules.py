"""Modules whose parameters are computed, normalised or of a subclass resume bit-identically."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import bits
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from toys import BIG, adam, crashed, net, same, train

import lightck

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T if x.shape[0] == x.shape[1] else x * 0.5


class Named(nn.Parameter):
    """A parameter subclass with an attribute."""

    note = "kept by the class"


class Watchful(torch.Tensor):
    """A subclass that sees every torch function, and otherwise is a plain array of bytes."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


def parametrized(model: nn.Sequential) -> None:
    parametrize.register_parametrization(model[0], "weight", Symmetric())


def weight_norm(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[0])


def old_weight_norm(model: nn.Sequential) -> None:
    nn.utils.weight_norm(model[0])


def spectral_norm(model: nn.Sequential) -> None:
    """Its vectors are buffers that each training forward changes."""
    parametrizations.spectral_norm(model[0])
    parametrizations.spectral_norm(model[2])


def old_spectral_norm(model: nn.Sequential) -> None:
    nn.utils.spectral_norm(model[0])


def orthogonal(model: nn.Sequential) -> None:
    parametrizations.orthogonal(model[2])


def parameter_class(model: nn.Sequential) -> None:
    model[0].weight = Named(model[0].weight.detach())


def buffer_class(model: nn.Sequential) -> None:
    model[0].scale = nn.Buffer(torch.rand(5))
    model[0].watched = nn.Buffer(torch.rand(2000).as_subclass(Watchful))
    model[0].scratch = nn.Buffer(torch.rand(5), persistent=False)


def batch_norm(model: nn.Sequential) -> None:
    model.insert(1, nn.BatchNorm1d(model[0].out_features))


CHANGES = [
    parametrized,
    weight_norm,
    old_weight_norm,
    spectral_norm,
    old_spectral_norm,
    orthogonal,
    parameter_class,
    buffer_class,
    batch_norm,
]


def built(change: Callable[[nn.Sequential], None], width: int, seed: int) -> tuple[nn.Module, Any]:
    model = net(width, seed)
    change(model)
    return model, adam(model)


@pytest.mark.parametrize("width", [8, BIG], ids=["small", "large"])
@pytest.mark.parametrize("explicit", [False, True], ids=["hooks", "end_step"])
@pytest.mark.parametrize("change", CHANGES)
def test_module_resumes_bit_identical(pool, change, explicit, width):
    if change is orthogonal and width == BIG:
        width = 200  # factorising 3000 columns is slow
    model, optimizer = built(change, width, 0)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 3)
        if explicit:
            session.end_step()
        session.flush()
        image = crashed(pool)
        train(model, optimizer, 3, start=3)
    other, other_optimizer = built(change, width, 7)
    with lightck.attach(other, image, optimizer=other_optimizer, resume=True) as session:
        assert session.step == 3
        train(other, other_optimizer, 3, start=3)
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    now, then = other.state_dict(), model.state_dict()
    assert now.keys() == then.keys()
    for name, tensor in then.items():
        assert type(now[name]) is type(tensor)
        assert bits(now[name]) == bits(tensor), name
