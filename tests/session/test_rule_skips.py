"""Rule 7: what counts as an update, and what as an iteration only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from toys import adam, everything, forward, is_step, net, same, train

import lightck


def scaled(model: nn.Module, optimizer: Any, scaler: Any, number: int, overflow: bool = False) -> None:
    optimizer.zero_grad()
    loss = scaler.scale(forward(model, number))
    (loss * float("inf") if overflow else loss).backward()
    scaler.step(optimizer)
    scaler.update()


def mixed(fused: bool) -> tuple[nn.Module, Any, Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0)


OVERFLOWS = (False, True, True, False, False)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("close", ["forward", "end_step"])
def test_skipped_update_makes_no_checkpoint_and_counts_an_iteration(pool, fused, close):
    model, optimizer, scaler = mixed(fused)
    held = {}
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        counted = []
        for number, overflow in enumerate(OVERFLOWS):
            scaled(model, optimizer, scaler, number, overflow)
            held[session.step] = (everything(model, optimizer), scaler.get_scale())
            if close == "end_step":
                session.end_step()
            else:
                forward(model)
            counted.append((session.step, session.iteration))
            model.zero_grad()
        assert counted == [(1, 1), (1, 2), (1, 3), (2, 4), (3, 5)]
        assert session.stats().checkpoints <= 3
        assert session.stats().skipped == (2 if fused else 0)
    for step in (2, 3):
        checkpoint = lightck.recover(pool, step=step)
        assert is_step(checkpoint, held[step][0])
        assert checkpoint.state["scaler"]["scale"] == held[step][1] == 256.0
        assert checkpoint.iteration == step + 2


def test_skipped_first_update_makes_no_checkpoint(pool):
    model, optimizer, scaler = mixed(fused=True)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(2):
            scaled(model, optimizer, scaler, number, overflow=True)
        forward(model)
        assert (session.step, session.iteration, session.committed) == (0, 2, None)


def test_skipped_iteration_is_run_again_after_a_kill(pool):
    """Its scale was not saved: the resumed run meets the overflow again and backs off again."""
    model, optimizer, scaler = mixed(fused=False)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        scaled(model, optimizer, scaler, 0)
        session.flush()
        image = pool.read_bytes()
        for number in (1, 2):
            scaled(model, optimizer, scaler, number, overflow=number == 1)
        seen = everything(model, optimizer)
    pool.write_bytes(image)
    model, optimizer, scaler = mixed(fused=False)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        assert (session.step, session.iteration, scaler.get_scale()) == (1, 1, 1024.0)
        for number in range(session.iteration, 3):
            scaled(model, optimizer, scaler, number, overflow=number == 1)
    assert same(everything(model, optimizer), seen)


def test_disabled_scaler_is_not_looked_for(pool):
    model = net()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        assert session.found == {}
        scaled(model, optimizer, scaler, 0)
        assert session.step == 1


def test_dummy_step_of_distributed_checkpoint_is_none(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        get_optimizer_state_dict(model, optimizer)  # makes state by a step with lr 0 and zero gradients
        assert optimizer.state
        assert (session.step, session.iteration) == (0, 0)
        train(model, optimizer, 2)
        session.flush()
        get_optimizer_state_dict(model, optimizer)
        assert (session.step, session.committed) == (2, 2)
    assert lightck.recover(pool).step == 2


def test_dummy_step_between_update_and_boundary_changes_nothing(pool):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # has no state, so that each call makes the dummy step
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        get_optimizer_state_dict(model, optimizer)
        assert session.step == 2
        seen = everything(model, optimizer)
    assert is_step(lightck.recover(pool), seen)


class Twice(torch.optim.SGD):
    """Where a plain SGD was made before, torch has hooks around this ``step`` and around the one inside."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.clamp_(-0.2, 0.2)
        return loss


def test_step_that_calls_the_step_of_its_base_class_is_one_update(pool):
    model = net()
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Twice(model.parameters(), lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(3):
            train(model, optimizer, 1, start=number)
            assert session.step == number + 1
            seen = everything(model, optimizer)
            forward(model)
            session.flush()
            assert is_step(lightck.recover(pool), seen)


def test_step_that_raised_leaves_no_checkpoint(pool):
    model = net()

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.param_groups[0]["lr"] > 1:
                raise ZeroDivisionError("half-way")

    optimizer = Broken(model.parameters(), lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        seen = everything(model, optimizer)
        session.flush()
        optimizer.param_groups[0]["lr"] = 2.0
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer, 1)
        assert session.step == 2
        session.flush()
        checkpoint = lightck.recover(pool)
        assert checkpoint.step == 2
        assert is_step(checkpoint, seen)
        optimizer.param_groups[0]["lr"] = 0.1
        train(model, optimizer, 1)
        assert session.step == 3, "the next update counts again"
        seen = everything(model, optimizer)
    assert is_step(lightck.recover(pool), seen)
