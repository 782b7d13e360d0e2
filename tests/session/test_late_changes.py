"""What a loop changes after attach: names of parameters, a scaler, objects with large tensors, a compiled step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from toys import same

import lightck
from lightck.errors import DriftError, NoCheckpointError, PoolNotFoundError, StateValueError


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(torch.tanh(self.a(x)))


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * 0.9


def wrap(model: Any) -> None:
    model.a = nn.Sequential(model.a, nn.Dropout(0.1))


def swap(model: Any) -> None:
    model.a, model.b = model.b, model.a


def replace(model: Any) -> None:
    """The optimizer keeps the old parameter."""
    model.a.weight = nn.Parameter(model.a.weight.detach() * 0.9)


def tie(model: Any) -> None:
    model.b.weight = model.a.weight


def drop_bias(model: Any) -> None:
    model.a.bias = None


CHANGES: dict[str, Callable[[Any], object]] = {
    "prune": lambda model: prune.l1_unstructured(model.a, "weight", 0.25),
    "parametrize": lambda model: parametrize.register_parametrization(model.a, "weight", Scaled()),
    "wrap": wrap,
    "swap": swap,
    "replace": replace,
    "tie": tie,
    "drop a bias": drop_bias,
}


@pytest.mark.parametrize("name", CHANGES)
def test_parameters_that_get_other_names_in_mid_training_keep_their_optimizer_state(name, folder):
    """The script makes the same change again before attach, if the pool is beyond it."""

    def run(pool: Path, until: int) -> Any:
        torch.manual_seed(0)
        model = Pair()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        if newest_step(pool) >= 3:
            CHANGES[name](model)
        with lightck.attach(model, pool, optimizer=optimizer, resume=True, strict_data=True) as session:
            while session.step < until:
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                if session.step == 3:
                    CHANGES[name](model)
                session.end_step()
        return dict(model.state_dict())

    whole = run(folder / "whole.pool", 8)
    run(folder / "cut.pool", 5)
    assert same(run(folder / "cut.pool", 8), whole)


@pytest.mark.parametrize("change", [replace, tie, drop_bias])
def test_an_optimizer_that_holds_what_the_model_no_longer_has_is_refused_if_the_script_holds_it_still(change, pool):
    """Names, shapes and groups of the script are those of the first checkpoints. Before, its optimizer went on with the
    parameter that the interrupted run no longer trained."""
    model = Pair()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for step in range(4):
            model(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()
            if step == 1:
                change(model)
            session.end_step()
    again = Pair()
    with pytest.raises(DriftError, match=r"outside/\.\.\. names a parameter that an optimizer holds"):
        lightck.attach(again, pool, optimizer=torch.optim.Adam(again.parameters(), 1e-2), resume=True)


def end(session: lightck.Session, is_killed: bool) -> None:
    """``is_killed``: leave what a kill leaves, so that the step that is open is lost."""
    if is_killed:
        session.abandon()
    else:
        session.close()


def newest_step(pool: Path) -> int:
    try:
        return lightck.recover(pool).step
    except (NoCheckpointError, PoolNotFoundError):
        return 0


@pytest.mark.parametrize(("declined", "count"), [({}, 1), ({"scaler": None}, 0)])
def test_a_scaler_that_is_built_after_attach_is_named(declined, count, pool, caplog):
    model = Pair()
    optimizer = torch.optim.Adam(model.parameters())
    with lightck.attach(model, pool, optimizer=optimizer, state=declined) as session:
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            session.end_step()
    assert caplog.text.count("a GradScaler was built after attach and is not saved") == count


def averaged_late(optimizer: torch.optim.Optimizer, step: int, made: list[Any]) -> None:
    """Stochastic weight averaging as its tutorial has it: its scheduler is built when the averaging begins."""
    main = made[0]
    if step == 4:
        made.append(torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=4))
    (made[1] if step >= 4 else main).step()


def second_phase(optimizer: torch.optim.Optimizer, step: int, made: list[Any]) -> None:
    if step == 4:
        made.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    made[-1].step()


def own_rates(optimizer: torch.optim.Optimizer, step: int, made: list[Any]) -> None:
    optimizer.param_groups[0]["lr"] *= 0.9


def only_main(optimizer: torch.optim.Optimizer, step: int, made: list[Any]) -> None:
    made[0].step()


@pytest.mark.parametrize(
    ("schedule", "state", "count"),
    [
        (averaged_late, {}, 1),
        (second_phase, {}, 1),
        (averaged_late, {"scheduler": None}, 0),
        (own_rates, {}, 0),
        (only_main, {}, 0),
    ],
)
def test_a_scheduler_that_is_built_in_mid_training_is_named_once(schedule, state, count, pool, caplog):
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: list[Any] = [torch.optim.lr_scheduler.StepLR(optimizer, 3)]
    with lightck.attach(model, pool, optimizer=optimizer, state=state):
        for step in range(12):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            schedule(optimizer, step, made)
    assert caplog.text.count("was built after the first update and is not saved") == count
    if count:
        assert type(made[-1]).__name__ in caplog.text


def test_a_scheduler_that_was_left_out_at_the_first_update_is_not_named_later(pool, caplog):
    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    other = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with lightck.attach(model, pool, optimizer=optimizer, state={"scheduler": saved}):
        for _ in range(6):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            other.step()
    assert "was built after the first update" not in caplog.text


def test_a_callable_object_of_lambda_lr_that_holds_a_function_is_refused_with_its_cure(pool):
    class Warm:
        def __init__(self) -> None:
            self.rise = lambda step: min(1.0, step / 10)

        def __call__(self, step: int) -> float:
            return self.rise(step)

    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Warm())
    with pytest.raises(StateValueError, match=r"lr_lambdas/0/rise is a function.*make this one a method of its class"):
        lightck.attach(model, pool, optimizer=optimizer, state={"scheduler": scheduler})


class Visits(torch.utils.data.Sampler[int]):
    """Counts in place, in a tensor that is stored apart from the small state."""

    def __init__(self) -> None:
        self.at, self.visits = 0, torch.zeros(2048)

    def __next__(self) -> int:
        self.at += 1
        self.visits[self.at] += 1
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "visits": self.visits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.visits.copy_(state["visits"])


def test_large_tensors_of_a_sampler_are_of_the_same_moment_as_its_other_state(folder):
    def run(pool: Path, until: int, is_killed: bool = False) -> list[float]:
        torch.manual_seed(0)
        model, sampler = Pair(), Visits()
        optimizer = torch.optim.Adam(model.parameters())
        session = lightck.attach(model, pool, optimizer=optimizer, state={"sampler": sampler}, resume=True)
        while session.step < until:
            optimizer.zero_grad()
            model(torch.full((2, 4), float(next(sampler)))).square().mean().backward()
            optimizer.step()
        end(session, is_killed)
        return sampler.visits[:8].tolist()

    whole = run(folder / "whole.pool", 7)
    run(folder / "cut.pool", 4, is_killed=True)
    assert run(folder / "cut.pool", 7) == whole


class Averaged(Pair):
    """Writes a buffer after each update, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4, 4))


def test_buffers_that_the_loop_writes_after_the_updates_of_two_optimizers_belong_to_the_step(folder):
    def run(pool: Path, until: int, is_killed: bool = False) -> Any:
        torch.manual_seed(0)
        model = Averaged()
        optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.a, model.b)]
        session = lightck.attach(model, pool, optimizer=optimizers, resume=True, strict_data=True)
        while session.step < until:
            model.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():
                model.average.lerp_(model.a.weight, 0.1)
        end(session, is_killed)
        return dict(model.state_dict())

    whole = run(folder / "whole.pool", 7)
    run(folder / "cut.pool", 4, is_killed=True)
    assert same(run(folder / "cut.pool", 7), whole)


@pytest.mark.parametrize("is_whole_step_compiled", [True, False])
def test_a_compiled_function_that_calls_step_is_saved_and_goes_on(is_whole_step_compiled, folder):
    def run(pool: Path, until: int, is_killed: bool = False) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Pair()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        session = lightck.attach(model, pool, optimizer=optimizer, resume=True, strict_data=True)
        step = optimizer.step if is_whole_step_compiled else torch.compile(optimizer.step, backend="eager")

        def learn(x: torch.Tensor) -> None:
            model(x).square().mean().backward()
            step()
            optimizer.zero_grad()

        work = torch.compile(learn, backend="eager") if is_whole_step_compiled else learn
        while session.step < until:
            work(torch.randn(8, 4))
        end(session, is_killed)
        return dict(model.state_dict())

    whole = run(folder / "whole.pool", 6)
    run(folder / "cut.pool", 4, is_killed=True)
    assert newest_step(folder / "cut.pool") == 3
    assert same(run(folder / "cut.pool", 6), whole)


def test_state_of_parameters_that_left_the_groups_is_named_once(pool, caplog):
    model = Pair()
    optimizer = torch.optim.Adam([{"params": part.parameters()} for part in (model.a, model.b)])
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for step in range(4):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            session.end_step()
            if step == 1:
                removed = optimizer.param_groups.pop()
        optimizer.add_param_group(removed)
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    assert caplog.text.count("were removed from the param_groups of Adam") == 1
