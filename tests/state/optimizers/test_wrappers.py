"""Optimizers that contain optimizers: each state is saved, and one step of the outermost one is one update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lookalikes as wild
import pytest
import torch
from survival import Make, Training, assert_equal, closure_of, loss_of, plain, survives, survives_kill_9
from torch import nn

import lightck


def sam(model: nn.Module) -> Sequence[Any]:
    return [wild.Sam(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)]


def lookahead(model: nn.Module) -> Sequence[Any]:
    return [wild.Lookahead(torch.optim.AdamW(model.parameters(), lr=0.05))]


def inner_state(model: nn.Module) -> Sequence[Any]:
    return [wild.InnerState(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))]


def both(model: nn.Module) -> Sequence[Any]:
    return [wild.Both([p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() < 2])]


def thrice(model: nn.Module) -> Sequence[Any]:
    return [wild.Lookahead(sam(model)[0])]


def passing(kind: type) -> Make:
    return lambda model: [kind(torch.optim.AdamW(model.parameters(), lr=0.05))]


def climbing(model: nn.Module, optimizers: Sequence[Any], number: int) -> torch.Tensor:
    """SAM's two passes, the second one in the closure."""
    (optimizer,) = optimizers
    closure = closure_of(model, optimizer, number)
    loss = closure()
    optimizer.step(closure)
    return loss


def two_steps(model: nn.Module, optimizers: Sequence[Any], number: int) -> torch.Tensor:
    """The same by hand: ``step`` of the wrapper is never called."""
    (optimizer,) = optimizers
    optimizer.zero_grad()
    loss = loss_of(model, number)
    loss.backward()
    optimizer.first_step()
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.second_step()
    return loss


WRAPPED = [
    pytest.param(sam, climbing, ["Sam", "SGD"], id="sam"),
    pytest.param(sam, two_steps, ["Sam", "SGD"], id="sam-by-hand"),
    pytest.param(lookahead, plain, ["Lookahead", "AdamW"], id="lookahead"),
    pytest.param(inner_state, plain, ["InnerState", "SGD"], id="lookahead-in-the-inner-state"),
    pytest.param(both, plain, ["Both", "Muon", "AdamW"], id="container"),
    pytest.param(thrice, climbing, ["Lookahead", "Sam", "SGD"], id="three-deep"),
    pytest.param(passing(wild.Passing), plain, ["AdamW"], id="passing-on"),
    pytest.param(passing(wild.Accelerated), plain, ["AdamW"], id="accelerate"),
    pytest.param(passing(wild.Lightning), plain, ["AdamW"], id="lightning"),
]


def test_wrapper_that_is_no_optimizer_survives_where_it_is_passed(pool):
    run = Training(lambda model: [wild.NoOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))])
    checkpoint = survives(pool, run)
    assert [o.class_name for o in checkpoint.contents.optimizers] == ["NoOptimizer", "AdamW"]


@pytest.mark.parametrize(("make", "iterate", "classes"), WRAPPED)
def test_wrapped_optimizer_survives(pool, make, iterate, classes):
    checkpoint = survives(pool, Training(make, iterate))
    assert [o.class_name for o in checkpoint.contents.optimizers] == classes


@pytest.mark.parametrize(("make", "iterate", "classes"), WRAPPED[:4])
def test_wrapped_optimizer_survives_a_real_kill(pool, make, iterate, classes):
    survives_kill_9(pool, Training(make, iterate))


@pytest.mark.parametrize(("make", "iterate", "classes"), WRAPPED)
def test_wrapper_and_wrapped_are_found_together(pool, make, iterate, classes):
    checkpoint = survives(pool, Training(make, iterate), attach=lambda training: {"optimizer": None})
    assert [o.class_name for o in checkpoint.contents.optimizers] == classes


def test_found_shows_which_optimizer_contains_which(pool):
    run = Training(sam, climbing)
    with lightck.attach(run.model, pool) as session:
        assert session.found == {"optimizer": "Sam around SGD"}


def test_order_of_wrapper_and_wrapped_does_not_matter(pool):
    """They are passed in both orders."""

    def reversed_order(training: Training) -> dict[str, Any]:
        (outer,) = training.optimizers
        return {"optimizer": [outer.optimizer.base_optimizer, outer.optimizer, outer]}

    survives(pool, Training(thrice, climbing), attach=reversed_order)


def test_state_of_the_wrapped_optimizer_fits_it_alone(pool):
    """A model is fine-tuned without the wrapper: the base optimizer gets its own state."""
    run = Training(sam, climbing)
    checkpoint = survives(pool, run)
    fresh = run.again()
    base = fresh.optimizers[0].base_optimizer
    taken = lightck.recover(pool, fresh.model, base, strict=False)
    assert [o["momentum_buffer"].shape for o in base.state.values()] == [p.shape for p in fresh.model.parameters()]
    assert not taken.drift
    with pytest.raises(lightck.errors.SessionError, match="the Sam"):
        lightck.attach(fresh.model, pool, optimizer=base)
    assert checkpoint.step in (2, 3)


def test_found_names_containers(pool):
    run = Training(both)
    with lightck.attach(run.model, pool) as session:
        assert session.found == {"optimizer": "Both around Muon, AdamW"}


def test_one_step_of_a_wrapper_is_one_update(pool):
    for make, iterate in ((sam, climbing), (sam, two_steps), (lookahead, plain), (both, plain), (thrice, climbing)):
        run = Training(make, iterate)
        with lightck.attach(run.model, pool, optimizer=run.optimizers, overwrite=True) as session:
            run.learn(0, 3)
            assert (session.step, session.iteration) == (3, 2)


def test_checkpoint_has_a_state_dict_for_each(pool):
    run = Training(sam, climbing)
    checkpoint = survives(pool, run)
    outer, inner = checkpoint.optimizer
    fresh = run.again()
    fresh.model.load_state_dict(checkpoint.model)
    fresh.optimizers[0].base_optimizer.load_state_dict(inner)
    fresh.optimizers[0].param_groups = fresh.optimizers[0].base_optimizer.param_groups
    assert set(outer["state"][0]) == {"old_p"}
    assert set(inner["state"][0]) == {"momentum_buffer"}
    fresh.learn(checkpoint.step, 6 - checkpoint.step)
    for number, loss in fresh.losses.items():
        assert torch.equal(loss, run.losses[number])


def test_scheduler_on_the_wrapper_or_on_what_it_wraps_is_found(pool):
    for make, scheduled in (
        (sam, lambda outer: outer),
        (sam, lambda outer: outer.base_optimizer),
        (lookahead, lambda outer: outer),
        (lookahead, lambda outer: outer.optimizer),
    ):
        run = Training(make)
        scheduler = torch.optim.lr_scheduler.StepLR(scheduled(run.optimizers[0]), 1)
        with lightck.attach(run.model, pool, overwrite=True) as session:
            assert session.found["scheduler"] == "StepLR"
        del scheduler


def test_another_class_inside_is_refused_before_anything_changes(pool):
    run = Training(sam, climbing)
    survives(pool, run)
    other = Training(lambda model: [wild.Sam(model.parameters(), torch.optim.AdamW, lr=0.05)], seed=3)
    before = other.bytes()
    with pytest.raises(lightck.errors.DriftError, match="AdamW"):
        lightck.recover(pool, other.model, other.optimizers)
    assert_equal(other.bytes(), before, "refused")


def test_two_independent_optimizers_on_the_same_parameters_are_ambiguous(pool):
    run = Training(lookahead)
    second = torch.optim.SGD(run.model.parameters(), lr=0.1)
    with pytest.raises(lightck.errors.AmbiguousError):
        lightck.attach(run.model, pool, optimizer=[*run.optimizers, second])


def test_wrapper_made_after_attach_is_followed_with_what_it_contains(pool):
    model = Training(sam).model
    with lightck.attach(model, pool) as session:
        (optimizer,) = sam(model)
        for number in range(3):
            climbing(model, [optimizer], number)
        assert session.step == 3
    assert [o.class_name for o in lightck.recover(pool).contents.optimizers] == ["Sam", "SGD"]


def test_a_container_may_step_what_was_passed_without_it(pool):
    """torchtitan's container is such a wrapper. Its optimizers alone can be predicted in a group of ranks."""
    run = Training(both)
    (container,) = run.optimizers
    with lightck.attach(run.model, pool, optimizer=container.parts) as session:
        run.learn(0, 3)
        assert session.step == 3
    assert [o.class_name for o in lightck.recover(pool).contents.optimizers] == ["Muon", "AdamW"]


def test_a_wrapper_that_makes_state_around_what_was_passed_is_refused(pool):
    run = Training(sam, climbing)
    (wrapper,) = run.optimizers
    session = lightck.attach(run.model, pool, optimizer=[wrapper.base_optimizer])
    with pytest.raises(lightck.errors.LateError, match="Sam"):
        run.learn(0, 3)
    session.abandon()
