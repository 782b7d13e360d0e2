"""The structure of a module tree: every change that gives tensors other names or places is seen."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightck.errors import StateValueError
from lightck.state.inventory import ModelView
from lightck.state.module_tree import TreeStructure, modules_of


class Other(nn.Linear):
    pass


def tree() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()), nn.Linear(2, 2))


def exchange(model: nn.Sequential) -> None:
    model[0], model[2] = model[2], model[0]


def parameter_to_buffer(model: nn.Sequential) -> None:
    weight = model[0]._parameters.pop("weight")
    model[0].register_buffer("weight", weight.detach())


def other_order(model: nn.Sequential) -> None:
    model[0]._parameters["weight"] = model[0]._parameters.pop("weight")


def as_another_class(model: nn.Sequential) -> None:
    model[0].__class__ = Other


def other_dict(model: nn.Sequential) -> None:
    model[0]._parameters = dict(model[0]._parameters)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "added module": lambda model: model.append(nn.ReLU()),
    "added module below": lambda model: model[1].append(nn.ReLU()),
    "removed module": lambda model: model.pop(0),
    "module in its place": lambda model: model.__setitem__(0, nn.Linear(2, 2)),
    "exchanged modules": exchange,
    "renamed module": lambda model: model.add_module("last", model._modules.pop("2")),
    "added parameter": lambda model: model[0].register_parameter("more", nn.Parameter(torch.ones(1))),
    "added parameter that is None": lambda model: model[0].register_parameter("more", None),
    "removed parameter": lambda model: model[0]._parameters.pop("bias"),
    "parameters in another order": other_order,
    "added buffer": lambda model: model[0].register_buffer("more", torch.ones(1)),
    "buffer not persistent": lambda model: model[1][0]._non_persistent_buffers_set.add("running_mean"),
    "parameter becomes a buffer": parameter_to_buffer,
    "another class": as_another_class,
    "another dict": other_dict,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_structure_is_seen(change):
    model = tree()
    structure = TreeStructure(model.modules())
    assert not structure.has_changed()
    change(model)
    assert structure.has_changed()
    assert not TreeStructure(model.modules()).has_changed()


def test_other_tensors_in_the_same_places_are_no_other_structure():
    model = tree()
    structure = TreeStructure(model.modules())
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    model[1][0].running_mean = None
    model.eval()
    assert not structure.has_changed()


def test_names_of_buffers_in_another_order_are_no_other_structure():
    """Caches that a forward registers again: a set may return the same names in another order then."""
    model = nn.Module()
    names = [f"cache{i}" for i in range(20)]
    for name in names:
        model.register_buffer(name, torch.ones(1), persistent=False)
    structure = TreeStructure(model.modules())
    for order in (names[::-1], names):
        model._non_persistent_buffers_set.clear()
        model._non_persistent_buffers_set.update(f"other{i}" for i in range(200))
        model._non_persistent_buffers_set.clear()
        model._non_persistent_buffers_set.update(order)
        assert not structure.has_changed()


def test_a_view_finds_all_places_again_after_a_search_that_failed():
    """The failed search had emptied its lists, and the repaired model has the structure of the search before."""
    model = tree()
    view = ModelView(model)
    names = [live.name for live in view.tensors(None)]
    model[1].itself = model
    for _ in range(2):
        with pytest.raises(StateValueError, match="contains itself"):
            view.refresh()
    del model[1].itself
    assert view.refresh()
    assert [live.name for live in view.tensors(None)] == names
    assert not view.refresh()


def test_one_name_moves_to_the_module_after_it():
    """All names in a row are the same as before."""
    model = nn.Sequential(nn.Module(), nn.Module())
    model[0].register_parameter("weight", None)
    structure = TreeStructure(model.modules())
    model[1].register_parameter("weight", model[0]._parameters.pop("weight"))
    assert structure.has_changed()


def shared() -> nn.Module:
    one = nn.Linear(2, 2)
    return nn.ModuleDict(OrderedDict(a=one, b=nn.Sequential(one, nn.ReLU(), one), c=nn.ModuleList([nn.ReLU(), one])))


def with_itself() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].parent = model
    return model


def with_none() -> nn.Module:
    model = tree()
    model.register_module("none", None)
    return model


@pytest.mark.parametrize("made", [tree, shared, with_itself, with_none, nn.ReLU])
def test_the_modules_are_those_of_torch_in_torch_s_order(made):
    model = made()
    assert list(map(id, modules_of(model))) == list(map(id, model.modules()))


def test_a_copy_has_its_own_structure():
    model = tree()
    structure = TreeStructure(model.modules())
    copy.deepcopy(model).append(nn.ReLU())
    assert not structure.has_changed()
