"""Ranks that give up different checkpoints, because something wrote to a tensor unannounced, still go on together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranked import die, everything, run_ranks, values
from torch import nn

import lightck
from lightck.pool.storage import emulation
from lightck.pool.storage.emulation import Profile

from .trainings import batch

UPDATES, WIDTH = 9, 150
"""So wide that each checkpoint is compared whole with its sources: less than 1 MiB."""


def body(pools: Path | None, writes: dict[int, dict[int, int]], *, ends_in_kill: bool = False):
    """Each rank trains on its own, in step with the others. ``writes``: rank -> step -> number of the layer to which
    the loop writes behind torch's back in the iteration after that step, while its copy is under way."""

    def run(rank: int) -> tuple[int, int, list[torch.Tensor]]:
        torch.manual_seed(rank)
        emulation.use(Profile("slow", 2_000_000, 1_000_000_000, 0, 64, "made up"))  # a copy lasts 0.4 s
        model = nn.Sequential(nn.Linear(3, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        layers = list(model)[1:]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        session = None
        if pools is not None:
            session = lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=30)
        began = 0 if session is None else session.step
        step = began

        def write(*_: object) -> None:
            """Right after the boundary, which is the forward of the whole model."""
            number = writes.get(rank, {}).get(step)
            if number is not None:
                layers[number].weight.data.view(-1)[-1] += 1.0

        model[0].register_forward_pre_hook(write)
        for step in range(began, UPDATES):
            loss = model(batch(rank, step)).pow(2).mean()
            dist.barrier()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if ends_in_kill:
            dist.barrier()  # both have passed the last gate, so the checkpoint of the step before is common
            die()
        if session is None:
            return began, 0, everything(model, optimizer)
        session.close()
        return began, session.stats().skipped, everything(model, optimizer)

    return run


WRITES = {
    "one rank, one step": {1: {2: 3}},
    "one rank, four in a row": {1: {2: 3, 3: 2, 4: 1, 5: 0}},
    "in turn": {0: {2: 3, 4: 2, 6: 1}, 1: {3: 3, 5: 2, 7: 1}},
    "both": {0: {2: 3, 3: 2}, 1: {2: 2, 3: 3}},
}


@pytest.mark.parametrize("name", WRITES)
def test_ranks_that_give_up_checkpoints_go_on_together(pool, name):
    pools, writes = pool.parent / "pools", WRITES[name]
    whole = values(run_ranks(2, body(None, writes)))
    runs = values(run_ranks(2, body(pools, writes)))
    for (_, skipped, state), (_, _, expected), rank in zip(runs, whole, (0, 1), strict=True):
        assert (skipped > 0) == (rank in writes)
        assert all(map(torch.equal, state, expected))


@pytest.mark.parametrize("name", WRITES)
def test_after_a_kill_they_come_back_together(pool, name):
    pools, writes = pool.parent / "pools", WRITES[name]
    whole = values(run_ranks(2, body(None, writes)))
    run_ranks(2, body(pools, writes, ends_in_kill=True))
    runs = values(run_ranks(2, body(pools, writes)))
    assert runs[0][0] == runs[1][0] >= UPDATES - 2
    for (_, _, state), (_, _, expected) in zip(runs, whole, strict=True):
        assert all(map(torch.equal, state, expected))
