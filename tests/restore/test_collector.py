"""Python's garbage collector during a recovery, and after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from toys import everything, net, pool_with, same

import lightck
from lightck.errors import DriftError

MANY = 3000
"""Parameters: some ten objects each, of which every 700th begins a collection."""


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.full((2,), float(n)) for n in range(MANY)])

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.parts)).sum()


@pytest.fixture
def begun() -> Iterator[list[int]]:
    """The generation of each collection that begins."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.enable()


def test_no_collection_begins_while_many_tensors_are_recovered(pool, begun):
    """All that is made is kept: each would pass over it, and over all that was there before, for nothing."""
    model = Many()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lightck.attach(model, pool, optimizer=optimizer):
        model().backward()
        optimizer.step()
    live = Many()
    gc.collect()
    begun.clear()
    lightck.recover(pool, live, torch.optim.SGD(live.parameters(), 0.1))
    assert begun in ([], [0])  # the one that was due when it was on again
    assert same(everything(live), everything(model))


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_afterwards_as_it_was(pool, begun, on):
    model, _ = pool_with(pool, 2)
    live = net()
    (gc.enable if on else gc.disable)()
    lightck.recover(pool, live)
    assert gc.isenabled() == on
    assert same(everything(live), everything(model))
    with pytest.raises(DriftError):
        lightck.recover(pool, nn.Linear(2, 2))
    assert gc.isenabled() == on
