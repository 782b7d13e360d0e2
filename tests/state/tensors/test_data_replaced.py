"""``p.data = ...``: the same parameter with other memory, or with another memory layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from toys import in_child

import lightck

WIDTH = 3000
"""So wide that its copies are not done when the loop goes on, and that freed memory returns to the system."""


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, WIDTH, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()


def best_weights(model: nn.Module) -> Callable[[], object]:
    best = parameters_to_vector(model.parameters()).detach().clone()
    return lambda: vector_to_parameters(best, model.parameters())


@pytest.mark.parametrize("replace", [best_weights, lambda model: model.bfloat16], ids=["vector", "dtype"])
@pytest.mark.parametrize("layerwise", [False, True], ids=["whole", "layerwise"])
def test_memory_that_is_replaced_while_it_is_copied_is_not_freed(pool, replace, layerwise):
    def training() -> tuple[int | None, int]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if layerwise:
            lightck.layerwise(model, optimizer)
        session = lightck.attach(model, pool, optimizer=optimizer)
        for _ in range(2):
            update(model, optimizer)
        change = replace(model)
        session.end_step()
        change()
        update(model, optimizer)
        session.close()
        return session.committed, session.stats().skipped

    assert in_child(training) == (3, 1)
    assert lightck.recover(pool).step == 3


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda data: data.view(torch.float16), torch.ones(96, 96, dtype=torch.bfloat16)),
        (lambda data: data.t(), torch.randn(96, 96)),
        (lambda data: data.t(), torch.randn(96, 192)[:, ::2]),
        (lambda data: data.conj(), torch.randn(96, 96, dtype=torch.complex64)),
        (lambda data: data.view(torch.int32).view(torch.float32).view(48, 192), torch.randn(96, 96)),
    ],
    ids=["dtype", "transposed", "transposed with gaps", "conjugated", "shape"],
)
def test_data_with_another_memory_layout_is_saved_with_it(pool, change, first, trains):
    model = nn.Module()
    model.p = nn.Parameter(first, requires_grad=trains)
    model.other = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([model.p, model.other] if trains else [model.other], lr=0.0)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(9):
            if number == 5:
                model.p.data = change(model.p.data)
            for param in (model.p, model.other):
                param.grad = torch.ones_like(param) if param.requires_grad else None
            optimizer.step()
            session.end_step()
            session.flush()
            held = lightck.recover(pool)
            assert held.step == number + 1
            assert held.model["p"].dtype == model.p.dtype
            assert torch.equal(held.model["p"], model.p.detach().resolve_conj().resolve_neg()), number
