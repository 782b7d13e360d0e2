"""A tensor that changes its place or its name in the model is saved where it is now."""

import random

import pytest
import torch

import lightck


def param_becomes_buffer(model: torch.nn.Module) -> None:
    value = model.bias.detach()
    del model.bias
    model.register_buffer("bias", value)


def buffer_becomes_param(model: torch.nn.Module) -> None:
    value = model.kept
    del model.kept
    model.register_parameter("kept", torch.nn.Parameter(value))


def buffer_becomes_persistent(model: torch.nn.Module) -> None:
    model.register_buffer("temporary", model.temporary, persistent=True)


def buffer_becomes_temporary(model: torch.nn.Module) -> None:
    model.register_buffer("kept", model.kept, persistent=False)


def child_is_renamed(model: torch.nn.Module) -> None:
    model.add_module("renamed", model._modules.pop("child"))


def children_swap_names(model: torch.nn.Module) -> None:
    modules = model._modules
    modules["child"], modules["other"] = modules["other"], modules["child"]


@pytest.mark.parametrize(
    "change",
    [
        param_becomes_buffer,
        buffer_becomes_param,
        buffer_becomes_persistent,
        buffer_becomes_temporary,
        child_is_renamed,
        children_swap_names,
    ],
)
def test_the_checkpoint_after_the_change_holds_the_state_dict_of_then(tmp_path, change):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("kept", torch.full((2,), 3.0))
    model.register_buffer("temporary", torch.full((2,), 4.0), persistent=False)
    model.add_module("child", torch.nn.Linear(2, 2))
    model.add_module("other", torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with lightck.attach(model, str(tmp_path / "run.pool"), optimizer=optimizer) as session:
        for step in range(1, 4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if step == 2:
                change(model)
            session.end_step()
        session.flush()
        saved = lightck.recover(session.path).model
    expected = model.state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


def test_a_whole_number_as_cached_normal_number_of_random_can_be_recovered(tmp_path):
    before = random.getstate()
    try:
        random.setstate((*random.Random(1).getstate()[:2], 2))
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lightck.attach(model, str(tmp_path / "run.pool"), optimizer=optimizer):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        lightck.recover(str(tmp_path / "run.pool"), model, optimizer)
        assert random.gauss(1, 1) == 3
    finally:
        random.setstate(before)
