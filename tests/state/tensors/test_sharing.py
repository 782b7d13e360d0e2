"""Tensors that share memory: tied tensors are stored once and remain tied, overlapping ones are each exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toys import adam, checkpoints, crashed, damage, everything, same, train

import lightck
from lightck.errors import DriftError, SessionError

ROWS = 1500


class Net(nn.Module):
    """An embedding-like table and a head of the same shape; each test ties them in its own way."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Linear(4, ROWS, bias=False)
        self.body = nn.Linear(ROWS, 4)
        self.head = nn.Linear(4, ROWS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.table(x))))


def by_object(model: Net) -> None:
    model.head.weight = model.table.weight


def by_data(model: Net) -> None:
    model.head.weight.data = model.table.weight.data


def tied(how: Any, seed: int = 0) -> tuple[Net, Any]:
    model = Net(seed)
    how(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)


def payload(pool: Any, name: str) -> int:
    return sum(entry.nbytes for key, entry in checkpoints(pool)[0].entries.items() if key == name)


@pytest.mark.parametrize("how", [by_object, by_data])
def test_tied_weights_are_stored_once_and_resume_bit_identical(pool, how):
    model, optimizer = tied(how)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 3)
        session.flush()
        image = crashed(pool)
        train(model, optimizer, 2, start=3)
    assert payload(image, "model/table.weight") == model.table.weight.nbytes
    assert payload(image, "model/head.weight") == 0
    loaded = lightck.recover(image).model
    assert loaded["head.weight"] is loaded["table.weight"]
    other, other_optimizer = tied(how, seed=9)
    with lightck.attach(other, image, optimizer=other_optimizer, resume=True):
        train(other, other_optimizer, 2, start=3)
    assert other.head.weight.data_ptr() == other.table.weight.data_ptr()
    assert same(everything(other, other_optimizer), everything(model, optimizer))


def test_pool_of_tied_weights_restores_into_untied_ones(pool):
    model, optimizer = tied(by_data)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
    other = Net(seed=9)
    lightck.recover(pool, other)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other.head.weight.data_ptr() != other.table.weight.data_ptr()


@pytest.mark.parametrize("how", [by_object, by_data])
def test_a_resume_without_the_tie_that_was_saved_names_it_and_changes_nothing(pool, how):
    """The tie may have been made in mid-training, or by a function that the script no longer calls."""
    model, optimizer = tied(how)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
    other = Net(seed=9)
    other_optimizer = torch.optim.SGD([other.table.weight, *other.body.parameters()], lr=0.01, momentum=0.5)
    if how is by_data:
        other_optimizer = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.5)
    seen = everything(other, other_optimizer)
    with pytest.raises(DriftError, match=r"model/head\.weight was tied to model/table\.weight"):
        lightck.attach(other, pool, optimizer=other_optimizer, resume=True)
    assert same(everything(other, other_optimizer), seen)
    lightck.recover(pool, other)
    with pytest.raises(SessionError, match=r"head\.weight was tied to model/table\.weight"):
        lightck.attach(other, pool, optimizer=other_optimizer)


@pytest.mark.parametrize("how", [by_object, by_data])
def test_different_values_are_refused_for_tied_weights_and_nothing_changes(pool, how):
    model, optimizer = tied(lambda model: None)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
    other, other_optimizer = tied(how, seed=9)
    seen = everything(other, other_optimizer)
    with pytest.raises(DriftError, match=r"table\.weight"):
        lightck.recover(pool, other)
    with pytest.raises(DriftError, match=r"head\.weight"):
        lightck.recover(pool).restore(other)
    assert same(everything(other, other_optimizer), seen)


def test_ties_are_the_same_in_whatever_order_they_were_registered(pool):
    model, optimizer = tied(by_object)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
    other = nn.Module()
    other.head, other.body, other.table = (getattr(Net(seed=9), name) for name in ("head", "body", "table"))
    other.table.weight = other.head.weight
    lightck.recover(pool, other)
    assert other.table.weight is other.head.weight
    assert same({**other.state_dict()}, {k: model.state_dict()[k] for k in other.state_dict()})


def test_tie_to_another_tensor_than_when_it_was_saved_is_drift(pool):
    def three(to: str) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        model[2].weight = model[int(to)].weight
        return model

    model = three("0")
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 1)
    with pytest.raises(DriftError, match=r"2\.weight is tied to model/1\.weight"):
        lightck.recover(pool, three("1"))


def test_weights_that_are_untied_in_mid_training_keep_their_values(pool):
    """The second name keeps its memory: only its alias shows that it needs an extent of its own now."""
    model, optimizer = tied(by_object)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        model.table.weight = nn.Parameter(model.table.weight.detach() + 1.0)
        optimizer.add_param_group({"params": [model.table.weight]})
        train(model, optimizer, 2, start=2)
        session.flush()
        assert same(dict(lightck.recover(pool).model), dict(model.state_dict()))
        by_object(model)  # and tied again
        train(model, optimizer, 1, start=4)
        session.flush()
        loaded = lightck.recover(pool).model
        assert loaded["head.weight"] is loaded["table.weight"]
        assert same(dict(loaded), dict(model.state_dict()))


def test_transposed_tie_is_exact_on_both_sides(pool):
    def flipped(model: Net) -> None:
        model.body.weight.data = model.table.weight.data.t()

    model, optimizer = tied(flipped)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 3)
    other, other_optimizer = tied(flipped, seed=9)
    lightck.recover(pool, other, other_optimizer)
    assert other.body.weight.data_ptr() == other.table.weight.data_ptr()
    assert same(everything(other, other_optimizer), everything(model, optimizer))


def flat(seed: int = 0, apart: bool = False) -> nn.Module:
    """Buffers that overlap in one memory: runs, every second element, an expanded row, other dtypes."""
    base = torch.rand(3001, generator=torch.Generator().manual_seed(seed))
    model = nn.Sequential(nn.Linear(4, 2))
    views = {
        "whole": base,
        "front": base[:2000],
        "back": base[1001:],
        "even": base[::2],
        "odd": base[1::2],
        "grid": base[1:].view(50, 60).t(),
        "wide": base[7:8].expand(40),
        "raw": base[3:].view(torch.uint8),
        "wholes": base[1:].view(torch.int32),
    }
    for name, view in views.items():
        model.register_buffer(name, view.clone() if apart else view)
    return model


def test_overlapping_tensors_are_each_exact(pool):
    model = flat()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 1)
        session.end_step()
        model.front.mul_(2.0)
        train(model, optimizer, 1, start=1)
    assert same(dict(lightck.recover(pool).model), dict(model.state_dict()))
    for other in (flat(seed=5), flat(seed=5, apart=True)):
        lightck.recover(pool, other)
        assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other.front.data_ptr() != other.whole.data_ptr()


def test_overlapping_tensors_refuse_values_that_contradict_each_other(pool):
    model = flat(apart=True)
    model.odd[3] += 1.0
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 1)
    other = flat(seed=5)
    before = everything(other)
    with pytest.raises(DriftError, match="share memory"):
        lightck.recover(pool, other)
    assert same(everything(other), before)
    lightck.recover(pool, flat(apart=True))


def test_the_two_tensors_that_contradict_each_other_are_named_and_the_cure_helps(pool):
    """Three parts lie in one memory. Two of them were saved as they lie there."""
    whole = torch.rand(30)
    model = nn.Sequential(nn.Linear(4, 2))
    for name, values in {"c": whole[20:] + 1.0, "a": whole[:10], "b": whole[10:20], "whole": whole}.items():
        model.register_buffer(name, values.clone())
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 1)
    other = nn.Sequential(nn.Linear(4, 2))
    memory = torch.zeros(30)
    for name, view in {"c": memory[20:], "a": memory[:10], "b": memory[10:20], "whole": memory}.items():
        other.register_buffer(name, view)
    with pytest.raises(DriftError, match=r"model/c and model/whole share memory now"):
        lightck.recover(pool, other)
    other.c.data = other.c.data.clone()
    lightck.recover(pool, other)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_expanded_tensor_takes_memory_of_its_own_for_values_that_differ(pool):
    model = nn.Sequential(nn.Linear(4, 2))
    model.register_buffer("wide", torch.rand(5, 1000))
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 1)
    other = nn.Sequential(nn.Linear(4, 2))
    other.register_buffer("wide", torch.zeros(1, 1000).expand(5, 1000))
    lightck.recover(pool, other)
    assert same(other.wide, model.wide)


@pytest.mark.parametrize("frozen", ["first", "second"])
def test_frozen_view_of_trained_memory_is_saved_at_each_step(pool, frozen):
    model = Net()
    by_data(model)
    frozen_part, trained_part = (model.table, model.head) if frozen == "first" else (model.head, model.table)
    frozen_part.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number, lr in enumerate((0.01, 0.0, 0.0, 0.0, 0.01, 0.01)):  # unchanged for three steps
            optimizer.param_groups[0]["lr"] = lr
            train(model, optimizer, 1, start=number)
            session.flush()
            loaded = lightck.recover(pool).model
            assert same(loaded["table.weight"], trained_part.weight.detach())
            assert same(loaded["head.weight"], trained_part.weight.detach())


def test_failed_restore_changes_nothing_also_in_odd_memory(pool):
    """NaN everywhere, also in memory that torch does not fill by itself."""
    model = Net()
    optimizer = adam(model)
    model.register_buffer("four", torch.zeros(5, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
    damage(pool, "model/head.weight")
    other = Net(seed=9)
    other.register_buffer("four", torch.zeros(5, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    other.table.weight = nn.Parameter(torch.ones(1).expand(ROWS, 4), requires_grad=False)
    with pytest.raises(lightck.LightckError):
        lightck.recover(pool, other)
    assert all(bool(p.isnan().all()) for p in other.parameters())
    with pytest.raises(SessionError):
        lightck.attach(other, pool, optimizer=adam(other))
