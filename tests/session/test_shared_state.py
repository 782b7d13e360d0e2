"""Tensors in ``state=`` that share memory come back apart, and a warning says so."""

from __future__ import annotations

import pytest
import torch
from toys import adam, net, train

import lightck

SHARED = "holds tensors that share memory"


class Kept:
    def __init__(self, **values) -> None:
        self.values = values

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state) -> None:
        self.values = state["values"]


def attached(pool, caplog, obj) -> str:
    model = net()
    optimizer = adam(model)
    with caplog.at_level("WARNING"), lightck.attach(model, pool, optimizer=optimizer, state={"kept": obj}):
        train(model, optimizer, 2)
    return caplog.text


def test_a_tensor_under_two_keys_and_a_view_are_named(pool, caplog):
    values = torch.zeros(5)
    text = attached(pool, caplog, Kept(one=values, deep=[{"other": values[1:]}]))
    assert "state['kept'] holds tensors that share memory (values/one and values/deep/0/other)" in text
    assert text.count(SHARED) == 1


@pytest.mark.parametrize(
    "obj",
    [
        Kept(one=torch.zeros(5), other=torch.zeros(5)),
        Kept(one=torch.zeros(0), other=torch.zeros(0)),
        Kept(one=3, other=[1, "text"]),
        torch.optim.swa_utils.AveragedModel(net()),
    ],
    ids=["apart", "empty", "numbers", "module"],
)
def test_others_are_not(pool, caplog, obj):
    assert SHARED not in attached(pool, caplog, obj)
