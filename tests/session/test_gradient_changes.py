"""What changes in mid-training, or between training and recovery, with ``strategy=Gradients``: every committed
checkpoint is recovered with the bits of its step, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import crashed, everything, is_step, same

import lightck
from lightck.errors import StateValueError, UnsupportedError

Step = Callable[[int], None]


def deep(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8))


def backward(model: nn.Module, number: int, dtype: torch.dtype = torch.float32) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    model(x.to(dtype)).float().pow(2).mean().backward()


def wrong_steps(
    pool: Path, model: nn.Module, optimizers: list[Any], step: Step, n: int, *, base_every: int = 4, **options: Any
) -> list[int]:
    """Train ``n`` steps. Returns those after which a recovery gives another step or other bits."""
    wrong, strategy = [], lightck.Gradients(base_every=base_every, **options)
    with lightck.attach(model, pool, optimizer=optimizers, strategy=strategy) as session:
        for number in range(1, n + 1):
            step(number)
            session.flush()
            found = lightck.recover(crashed(pool))
            if found.step != number or not is_step(found, everything(model, *optimizers)):
                wrong.append(number)
    return wrong


# -- whose updates -----------------------------------------------------------------------------------------------------


class Clamping(torch.optim.AdamW):
    """Called like torch's class, and does more."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.clamp_(-0.1, 0.1)
        return found


Clamping.__name__ = "AdamW"


def trained_by(kind: Any, pool: Path, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = deep()
    optimizer = kind(model.parameters(), lr=0.05)
    strategy = lightck.Gradients(base_every=4, **options)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy) as session:
        for number in range(1, 8):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
        session.flush()
    return model, optimizer


def test_an_own_class_that_is_called_like_one_of_torch_is_not_replayed_by_that_of_torch(pool):
    model, optimizer = trained_by(Clamping, pool, own_optimizers=True)
    with pytest.raises(UnsupportedError, match=r"of class AdamW \(not that of torch\)"):
        lightck.recover(pool).model.keys()
    other = deep()
    own = Clamping(other.parameters(), lr=0.05)
    lightck.recover(pool, other, own)
    assert same(everything(other, own), everything(model, optimizer))


def test_updates_of_torch_are_replayed_by_torch_though_the_script_has_a_class_of_that_name_now(pool):
    model, optimizer = trained_by(torch.optim.AdamW, pool)
    other = deep()
    own = Clamping(other.parameters(), lr=0.05)
    lightck.recover(pool, other, own)
    assert same(everything(other, own), everything(model, optimizer))


# -- what changes in mid-training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("moves_at", [5, 6, 7, 8])
def test_a_parameter_that_moves_to_another_optimizer_with_its_state(pool, moves_at):
    model = deep()
    one = torch.optim.Adam([*model[0].parameters(), *model[4].parameters()], lr=0.01)
    other = torch.optim.Adam(model[2].parameters(), lr=0.001)

    def step(number: int) -> None:
        if number == moves_at:
            moved = list(model[4].parameters())
            one.param_groups[0]["params"] = [p for p in one.param_groups[0]["params"] if all(p is not q for q in moved)]
            other.add_param_group({"params": moved, "lr": 0.01})
            for p in moved:
                other.state[p] = one.state.pop(p)
        backward(model, number)
        for each in (one, other):
            each.step()
            each.zero_grad()

    assert wrong_steps(pool, model, [one, other], step, 14) == []


def test_updates_that_torch_does_not_reproduce_leave_no_record(pool):
    """Fused SGD with momentum of bfloat16, unfrozen in mid-training."""
    body, head = deep().to(torch.bfloat16).requires_grad_(False), deep()
    model = nn.ModuleList([body, head])
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step(number: int) -> None:
        if number == 7:
            body.requires_grad_(True)
            optimizer.add_param_group({"params": list(body.parameters())})
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        head(body(x.to(torch.bfloat16)).float()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert wrong_steps(pool, model, [optimizer], step, 14) == []


def test_sparse_state_is_refused_by_name(pool):
    model = nn.Sequential(nn.Embedding(64, 16, sparse=True), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = lightck.Gradients(base_every=4)
    with pytest.raises(StateValueError, match="momentum_buffer"):  # noqa: SIM117 - the error of the close too
        with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy):
            for number in range(3):
                model(torch.tensor([number, 2 * number])).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize(("how", "first"), [("data", 5), ("data", 6), ("numpy", 0), ("numpy", 4)])
def test_a_late_write_to_a_gradient_that_torch_does_not_count(pool, how, first):
    model = deep(256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)

    def step(number: int) -> None:
        backward(model, number)
        optimizer.step()
        if number > 12 and number % 7 == first:
            if how == "data":
                model[2].weight.grad.data[7].div_(2)
            else:
                model[2].weight.grad.numpy()[7] /= 2
        optimizer.zero_grad()

    assert wrong_steps(pool, model, [optimizer], step, 26, base_every=6) == []


# -- settings ----------------------------------------------------------------------------------------------------------


def test_a_first_update_is_replayed_with_float32_whatever_the_default_dtype_is(pool):
    model = deep()
    model[4].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=lightck.Gradients(base_every=6)) as session:
        for number in range(1, 12):
            model[4].requires_grad_(number > 9)
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
        session.flush()
        seen = everything(model, optimizer)
    torch.set_default_dtype(torch.float64)
    try:
        found = lightck.recover(pool)
        assert (found.step, is_step(found, seen), found.rejected) == (11, True, ())
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_check_of_the_bases_reads_the_records_between_checkpoints(pool, monkeypatch, caplog):
    monkeypatch.setenv("LIGHTCK_CHECK", "1")
    model = deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    strategy = lightck.Gradients(base_every=4)
    with (
        caplog.at_level(logging.INFO, "lightck"),
        lightck.attach(model, pool, optimizer=optimizer, strategy=strategy, interval=3),
    ):
        for number in range(1, 25):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
    assert "cannot check that the older copies" not in caplog.text
    assert "malformed" not in caplog.text
    found = lightck.recover(pool)
    assert (found.step, is_step(found, everything(model, optimizer))) == (24, True)


# -- names -------------------------------------------------------------------------------------------------------------


def test_parameters_may_be_named_like_the_parts_of_a_gradient(pool):
    """The pool has the entries ``NAME/indices`` and ``NAME/values`` for a gradient that is not dense."""
    torch.manual_seed(0)
    model = nn.Module()
    for name in ("table/values", "table/indices"):
        model.register_parameter(name, nn.Parameter(torch.randn(16, 16)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        (number * torch.stack(list(model.parameters())).pow(2).mean()).backward()
        optimizer.step()

    assert wrong_steps(pool, model, [optimizer], step, 6) == []


# -- tensors that an update changes, and no gradient of it explains ----------------------------------------------------


def averaged(is_announced: bool, is_trained: bool) -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    """The ``step`` of the first optimizer keeps a moving average of its first parameter in one that it does not list.
    ``is_trained``: this is a parameter of another optimizer."""
    model = deep()
    model.register_parameter("average", nn.Parameter(model[0].weight.detach().clone(), requires_grad=is_trained))

    class Averaging(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            if self.param_groups[0]["params"][0] is model[0].weight:  # else a trial step, or a replay
                average = model.average.detach() if is_announced else model.average.data
                average.lerp_(model[0].weight.detach(), 0.1)
            return found

    optimizer = Averaging((p for name, p in model.named_parameters() if name != "average"), lr=0.05)
    return model, [optimizer, *([torch.optim.AdamW([model.average], lr=0.05)] if is_trained else [])]


@pytest.mark.parametrize("is_trained", [False, True], ids=["of no optimizer", "of another"])
@pytest.mark.parametrize("is_announced", [True, False], ids=["counted", "by .data"])
def test_a_parameter_that_the_step_of_another_optimizer_writes_is_exact(pool, is_announced, is_trained, caplog):
    caplog.set_level(logging.INFO, "lightck")
    model, optimizers = averaged(is_announced, is_trained)
    strategy, wrong = lightck.Gradients(base_every=4, own_optimizers=True), []
    with lightck.attach(model, pool, optimizer=optimizers, strategy=strategy) as session:
        for number in range(1, 12):
            backward(model, number)
            if is_trained:
                model.average.pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            session.flush()
            found, others = averaged(is_announced, is_trained)
            lightck.recover(crashed(pool), found, others)
            if str(everything(found, *others)) != str(everything(model, *optimizers)):
                wrong.append(number)
    assert wrong == []
    assert "'model/average' was written inside the step() of an optimizer that does not have it" in caplog.text


@pytest.fixture
def converts_in_place() -> Iterator[None]:
    """``model.double()`` exchanges the contents of the parameters (``torch.utils.swap_tensors``)."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("converts_in_place")
def test_a_model_can_be_converted_in_place_between_updates(pool):
    model = deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step(number: int) -> None:
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
        if number % 4 == 0:
            model.double()
            model.float()

    assert wrong_steps(pool, model, [optimizer], step, 10) == []
