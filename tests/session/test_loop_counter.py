"""The check of a resumed loop's counter looks at the variables of the loop, and leaves no trace in them."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

import lightck

PASS = 4
"""Updates of one pass."""


class Data(torch.utils.data.Dataset):
    def __getitem__(self, i):
        return torch.full((3,), float(i))

    def __len__(self):
        return 2 * PASS


def made(pool, resume):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = lightck.attach(model, pool, optimizer=optimizer, resume=resume)
    return model, optimizer, session, session.loader(torch.utils.data.DataLoader(Data(), 2))


def interrupted(pool):
    """Make a pool of a training that ended in the middle of its second pass."""
    model, optimizer, session, loader = made(pool, False)
    batches = iter(loader)
    for step in range(PASS + 2):
        if step == PASS:
            assert next(batches, None) is None
            batches = iter(loader)
        update(model, optimizer, next(batches))
    session.close()


def update(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def resumed(pool, holds_locals, seen):
    model, optimizer, session, loader = made(pool, True)
    held = locals() if holds_locals else None
    for epoch in range(3):  # noqa: B007 - a loop that counts from 0
        for x in loader:
            assert session.step >= 0
            update(model, optimizer, x)
            seen.append(weakref.ref(x))
        x = None
    gc.collect()
    alive = sum(batch() is not None for batch in seen)
    session.close()
    return model, held, alive


@pytest.mark.parametrize("holds_locals", [False, True])
def test_the_variables_of_a_loop_are_as_they_were(folder, caplog, holds_locals):
    interrupted(folder / "run.pool")
    seen: list[weakref.ref] = []
    with caplog.at_level(logging.WARNING, logger="lightck"):
        model, held, alive = resumed(folder / "run.pool", holds_locals, seen)
    assert any("and epoch was 0 in the restored pass and is 1 now" in record.getMessage() for record in caplog.records)
    if holds_locals:
        assert held["model"] is model
        assert held["seen"] is seen
    else:
        assert alive == 0
