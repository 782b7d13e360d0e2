"""Rules 1 to 3 of "the state after step t": which event closes a checkpoint, and what it holds then.

Each test trains through the public API, notes what the loop itself had at the place where checkpoint t has to close,
and compares it, bit for bit, with what the pool holds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from toys import BIG, adam, crashed, everything, forward, is_step, net, same, settled, train

import lightck


def update(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    """Forward, backward, step. Nothing after it."""
    optimizer.zero_grad()
    forward(model, number).backward()
    optimizer.step()


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.1)


class Box:
    """An object for ``state`` that holds one value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


# -- 1. the boundary -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, BIG], ids=["small", "large"])
def test_no_parameter_is_read_before_the_boundary(pool, width):
    model = net(width)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(3):
            update(model, optimizer, number)
            clamp(model)  # as in a WGAN
            for p in model.parameters():
                optimizer.state[p]["exp_avg"].mul_(0.5)
            seen = everything(model, optimizer)
            forward(model, number + 1)
            session.flush()
            assert is_step(lightck.recover(pool), seen)


@pytest.mark.usefixtures("commits_early")
def test_next_training_forward_closes_the_checkpoint(pool):
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    update(model, optimizer)
    assert session.committed is None
    assert session.iteration == 0
    seen = everything(model, optimizer)
    forward(model, 1)
    assert (session.step, session.iteration) == (1, 1)
    settled(session, 1)
    assert is_step(lightck.recover(crashed(pool)), seen)
    session.close()


def test_evaluation_is_no_boundary(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        update(model, optimizer)
        model.eval()
        forward(model)
        loader = session.loader(DataLoader(torch.zeros(4, 4)))
        for _ in loader:
            pass
        model.train()
        with torch.no_grad():
            forward(model)
        assert session.iteration == 0
        clamp(model)
        seen = everything(model, optimizer)
        forward(model)
        assert session.iteration == 1
    assert is_step(lightck.recover(pool, step=1), seen)


def test_accumulation_is_no_boundary(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(12):
            forward(model, number).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert (session.step, session.iteration) == (4, 3)
        assert session.stats().checkpoints == 3
    assert lightck.recover(pool).iteration == 4


def test_pre_step_hook_is_the_last_resort(pool):
    """The root's forward never fires: somebody calls its parts, as Lightning does."""
    model = net()
    optimizer = adam(model)
    held = {}
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(3):
            optimizer.zero_grad()
            model[2](model[1](model[0](torch.ones(2, 4)))).sum().backward()
            optimizer.step()
            held[session.step] = everything(model, optimizer)
            assert session.iteration == number
    for step in (2, 3):
        assert is_step(lightck.recover(pool, step=step), held[step])


def test_forwards_of_a_closure_are_no_boundary(pool):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held = {}

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        before = session.iteration
        for _ in range(2):
            loss = forward(model, session.step)
        loss.backward()
        assert session.iteration == before
        return loss

    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(3):
            optimizer.step(closure)
            held[session.step] = everything(model, optimizer)
            assert (session.step, session.iteration) == (number + 1, number)
    for step in (2, 3):
        assert is_step(lightck.recover(pool, step=step), held[step])


def test_end_step_takes_over(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        update(model, optimizer, 0)
        session.end_step()
        for number in (1, 2):
            update(model, optimizer, number)
            forward(model, number)  # would be a boundary, were it not for the end_step
            clamp(model)
            seen = everything(model, optimizer)
            session.end_step()
            assert (session.step, session.iteration) == (number + 1, number + 1)
        forward(model)
        assert session.flush() == 3
        assert is_step(lightck.recover(pool), seen)


def test_end_step_takes_over_across_a_restart(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        update(model, optimizer)
        session.end_step()
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        update(model, optimizer, session.step)
        forward(model)
        clamp(model)
        assert session.iteration == 1
        seen = everything(model, optimizer)
        session.end_step()
    assert is_step(lightck.recover(pool), seen)


def test_optimizer_step_is_no_boundary_once_end_step_was_called(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        update(model, optimizer, 0)
        session.end_step()
        update(model, optimizer, 1)
        update(model, optimizer, 2)
        assert (session.step, session.iteration) == (3, 1)
        session.end_step()
        assert (session.step, session.iteration) == (3, 2)


def test_flush_counts_as_end_step(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(2):
            update(model, optimizer, number)
            clamp(model)
            seen = everything(model, optimizer)
            assert session.flush() == number + 1
            assert (session.committed, session.iteration) == (number + 1, number + 1)
            assert is_step(lightck.recover(pool), seen)
        forward(model)
        assert session.iteration == 2


def test_end_step_right_after_flush_counts_no_iteration(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(3):
            update(model, optimizer, number)
            session.flush()
            session.end_step()
            assert session.iteration == number + 1
        session.end_step()  # an iteration without an update counts
        assert session.iteration == 4


def test_flushes_in_one_iteration_count_it_once(pool):
    """A pin flushes too."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, slots=4) as session:
        for number in range(3):
            update(model, optimizer, number)
            session.flush()
            session.pin().release()
            session.flush()
            session.end_step()
            assert session.iteration == number + 1


def test_a_flush_does_not_hide_that_a_scaler_skipped(pool):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with lightck.attach(model, pool, optimizer=optimizer, state={"scaler": scaler}) as session:
        for number in range(4):
            optimizer.zero_grad()
            loss = forward(model, number) * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            session.flush()
        forward(model)
        assert (session.step, session.iteration) == (3, 4)


def test_flush_without_an_update_closes_nothing(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        update(model, optimizer)
        assert session.flush() == 1
        written = session.stats().bytes_written
        assert session.flush() == 1
        assert (session.iteration, session.stats().bytes_written) == (1, written)


def test_flush_before_the_first_update_saves_the_start(pool):
    model = net()
    optimizer = adam(model)
    seen = everything(model, optimizer)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        assert session.flush() == 0
        assert is_step(lightck.recover(pool), seen)
        update(model, optimizer)
    assert lightck.recover(pool).step == 1


def test_close_commits_the_current_step(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
        clamp(model)
        seen = everything(model, optimizer)
    assert is_step(lightck.recover(pool), seen)


# -- 1. loaders ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("commits_early")
def test_next_on_a_session_loader_closes_the_checkpoint(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        batches = iter(session.loader(DataLoader(torch.randn(6, 4), batch_size=2)))
        loss = model(next(batches)).sum()
        for number in range(2):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clamp(model)
            assert session.iteration == number
            seen = everything(model, optimizer)
            loss = model(next(batches)).sum()
            assert (session.step, session.iteration) == (number + 1, number + 1)
            settled(session, number + 1)
            assert is_step(lightck.recover(pool), seen)


def epochs(model: nn.Module, optimizer: Any, session: Any, loader: Any, log: list[Any], last: int = 3) -> Any:
    """The loop of the documentation, with an evaluation behind each pass. Yields after each update and pass."""
    for epoch in range(loader.epoch, last):
        for i, (x,) in enumerate(loader, loader.start):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            log.append((epoch, i, x.sum().item()))
            yield session.step
        log.append((epoch, "evaluation", model[0].weight.sum().item()))
        yield session.step


def test_resume_where_a_pass_ended_runs_the_code_behind_the_loop_again(pool):
    def start(path: Any, **options: Any) -> tuple[Any, ...]:
        model = net()
        optimizer = adam(model)
        session = lightck.attach(model, path, optimizer=optimizer, **options)
        data = TensorDataset(torch.arange(24.0).reshape(6, 4))
        return model, optimizer, session, session.loader(DataLoader(data, batch_size=2, shuffle=True))

    run, log = start(pool), []
    after = iter(epochs(*run, log))
    for _ in range(4):
        next(after)
    assert log[3][1] == "evaluation"
    settled(run[2], 3)
    image = crashed(pool)
    for _ in after:
        pass
    run[2].close()

    torch.manual_seed(999)
    again, log_again = start(image, resume=True), []
    loader = again[3]
    assert (again[2].step, loader.epoch, loader.start) == (3, 0, 3)
    for _ in epochs(*again, log_again):
        pass
    assert log_again == log[3:]
    assert same(everything(again[0], again[1]), everything(run[0], run[1]))
    again[2].close()


# -- 1. several optimizers -------------------------------------------------------------------------------------------


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Linear(4, 4)
        self.d = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.g(x))


def gan() -> tuple[Gan, Any, Any]:
    model = Gan()
    return model, torch.optim.Adam(model.g.parameters(), lr=0.1), torch.optim.Adam(model.d.parameters(), lr=0.1)


def turn(model: Gan, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_several_optimizers_are_one_round(pool):
    model, g, d = gan()
    with lightck.attach(model, pool) as session:
        assert set(session.found) == {"optimizer.0", "optimizer.1"}
        for number in (0, 2):
            turn(model, d)
            assert (session.step, session.iteration) == (number, number)
            turn(model, g)  # its forward is between the two steps: it closes nothing
            assert (session.step, session.iteration) == (number + 1, number)
            clamp(model)
            seen = everything(model, g, d)
            forward(model)
            assert session.iteration == number
            turn(model, d)  # the next step of any closes the round
            assert session.iteration == number + 1
            held = lightck.recover(pool, step=number + 1)
            assert is_step(held, seen)
            turn(model, g)
            session.flush()
            assert session.iteration == number + 2


def test_next_closes_a_round_of_several_optimizers(pool):
    model, g, d = gan()
    with lightck.attach(model, pool, optimizer=[g, d]) as session:
        batches = iter(session.loader(DataLoader(torch.zeros(8, 4))))
        for number in range(2):
            next(batches)
            turn(model, d)
            next(batches)
            assert session.iteration == number
            turn(model, g)
        next(batches)
        assert (session.step, session.iteration) == (2, 2)


def test_optimizers_of_different_rates_are_one_step_per_end_step(pool):
    model, g, d = gan()
    with lightck.attach(model, pool, optimizer=[g, d]) as session:
        for number in range(4):
            for _ in range(3):
                turn(model, d)
            if number % 2:
                turn(model, g)
            seen = everything(model, g, d)
            session.end_step()
            assert (session.step, session.iteration) == (number + 1, number + 1)
            session.flush()
            assert is_step(lightck.recover(pool), seen)


# -- 2. the post-step hook -------------------------------------------------------------------------------------------


class Position:
    """A loader that runs ahead of the loop, passed in ``state`` and not through ``session.loader``."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_loader_in_state_is_read_after_the_update_and_not_at_the_forward(pool):
    model = net()
    optimizer = adam(model)
    loader = Position()
    with lightck.attach(model, pool, optimizer=optimizer, state={"loader": loader}) as session:
        for number in range(3):
            assert next(loader) == number + 1
            update(model, optimizer, number)
        next(loader)
        forward(model)
        assert session.iteration == 3
    assert lightck.recover(pool).state == {"loader": {"at": 3}}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def test_buffers_are_those_of_the_update_where_the_next_update_closes_the_checkpoint(pool):
    """The forward of t+1 has run by then, unseen, and changed BatchNorm's running statistics."""
    model = Norm()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(3):
            optimizer.zero_grad()
            model.out(model.norm(torch.randn(5, 4) + number)).sum().backward()
            optimizer.step()
            seen = everything(model, optimizer)
            if number == 1:
                second = seen
        assert session.iteration == 2
        assert is_step(lightck.recover(pool), second)
    assert is_step(lightck.recover(pool), seen)


@pytest.mark.parametrize("closing", ["forward", "end_step", "flush"])
def test_buffers_are_those_of_the_boundary_elsewhere(pool, closing):
    model = Norm()
    model.register_buffer("updates", torch.zeros(()))
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(2):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            model.updates += 1  # the loop's own, after the update
            seen = everything(model, optimizer)
            if closing != "forward":
                getattr(session, closing)()
            model(torch.randn(5, 4))
            model.updates -= 10
            assert session.iteration == number + 1
            model.updates += 10
            if number == 0:
                model.norm.load_state_dict({k.split(".")[1]: v for k, v in seen["model"].items() if k[:4] == "norm"})
    held = lightck.recover(pool)
    assert is_step(held, seen)
    assert held.model["updates"] == 2


# -- 3. at the boundary ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closing", ["forward", "end_step", "next step"])
def test_checkpoint_holds_scheduler_as_it_is_at_the_boundary(pool, closing):
    model = net()
    optimizer = adam(model, lr=1.0)
    scheduler = ExponentialLR(optimizer, 0.5)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        assert session.found == {"scheduler": "ExponentialLR"}
        for number in range(2):
            update(model, optimizer, number)
            scheduler.step()
        if closing == "forward":
            forward(model)
        elif closing == "end_step":
            session.end_step()
        else:
            optimizer.step()
        assert session.iteration == 2
        if closing != "next step":
            session.flush()
        held = lightck.recover(pool)
        assert held.step == 2
        assert held.state["scheduler"]["last_epoch"] == 2
        assert held.optimizer["param_groups"][0]["lr"] == 0.25
    del scheduler


def test_checkpoint_holds_the_scaler_after_its_update(pool):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        assert session.found == {"scaler": "GradScaler"}
        for number in range(2):
            optimizer.zero_grad()
            scaler.scale(forward(model, number)).backward()
            scaler.step(optimizer)
            scaler.update()
        forward(model)
        assert session.flush() == 2
        assert lightck.recover(pool).state["scaler"]["scale"] == 16.0


@pytest.mark.parametrize("width", [8, BIG], ids=["small", "large"])
def test_checkpoint_holds_the_moving_average_after_its_update(pool, width):
    model = net(width)
    optimizer = adam(model)
    ema = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    with lightck.attach(model, pool, optimizer=optimizer, state={"ema": ema}) as session:
        for number in range(3):
            update(model, optimizer, number)
            ema.update_parameters(model)
            seen = {k: v.clone() for k, v in ema.state_dict().items()}
            forward(model, number)
            session.flush()
            assert same(dict(lightck.recover(pool).state["ema"]), seen)


def test_checkpoint_holds_user_state_of_the_boundary(pool):
    model = net()
    optimizer = adam(model)
    box = Box({"best": 0.0})
    with lightck.attach(model, pool, optimizer=optimizer, state={"box": box}) as session:
        update(model, optimizer)
        box.value["best"] = 0.5
        forward(model)
        box.value["best"] = 7.0
        assert session.committed in (1, None)
        update(model, optimizer)
        assert lightck.recover(pool, step=1).state == {"box": {"value": {"best": 0.5}}}
