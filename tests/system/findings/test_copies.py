"""Copies of a model that is attached have nothing of lightck in them: pickles, deep copies, torch.save."""

from __future__ import annotations

import copy
import copyreg
import gc
import io
import pickle
import pickletools
from typing import Any

import pytest
import torch
from toys import adam, forward, net, same, train, weights

import lightck
from lightck.errors import UnsupportedError


class Own(torch.nn.Sequential):
    """A class that says itself what is saved of it."""

    def __getstate__(self) -> Any:
        return {**self.__dict__, "said": 1}


class Slotted(torch.nn.Sequential):
    __slots__ = ("beside",)


def a_hook(module: Any, args: Any, kwargs: Any) -> None:
    module.seen = True


def saved(model: torch.nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def globals_in(model: torch.nn.Module) -> set[str]:
    return {str(arg) for opcode, arg, _ in pickletools.genops(pickle.dumps(model, 2)) if opcode.name == "GLOBAL"}


def test_a_saved_model_loads_where_lightck_is_not_known(pool):
    model = net()
    kinds = [torch.nn.Sequential, torch.nn.Linear, torch.nn.Tanh]
    with lightck.attach(model, pool, optimizer=adam(model)), torch.serialization.safe_globals(kinds):
        data = saved(model)
        loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert b"lightck" not in data
    assert same(weights(loaded), weights(model))


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_pickles_are_those_of_a_model_that_was_never_attached(pool, folder, layerwise, traced):
    model = net()
    before = globals_in(model)
    optimizer = adam(model)
    layers = lightck.layerwise(model, optimizer) if layerwise else None
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        if traced:
            with session.trace(folder / "out.json", steps=None):
                assert globals_in(model) == before
        assert globals_in(model) == before
    assert layers is None or globals_in(model) == before


@pytest.mark.parametrize("kind", [Own, Slotted])
def test_classes_that_say_what_is_saved_of_them(pool, kind):
    model = kind(*net())
    if kind is Slotted:
        model.beside = 3
    with lightck.attach(model, pool, optimizer=adam(model)):
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(model, 0))]
        for twin in twins:
            assert type(twin) is kind
            assert not twin._forward_pre_hooks
            assert not twin._forward_hooks
            assert getattr(twin, "said", 1) == 1
            assert getattr(twin, "beside", 3) == 3
            assert same(weights(twin), weights(model))
        if kind is Own:
            assert all(twin.said == 1 for twin in twins)


def test_hooks_of_the_user_stay_in_a_copy(pool):
    model = net()
    model.register_forward_pre_hook(a_hook, with_kwargs=True)
    with lightck.attach(model, pool, optimizer=adam(model)):
        later = model.register_forward_pre_hook(a_hook, with_kwargs=True)
        twin = pickle.loads(pickle.dumps(model))
        assert list(twin._forward_pre_hooks.values()) == [a_hook, a_hook]
        assert list(twin._forward_pre_hooks_with_kwargs) == list(twin._forward_pre_hooks)
        forward(twin)
        assert twin.seen
        later.remove()
    assert list(model._forward_pre_hooks.values()) == [a_hook]


def test_a_class_that_copyreg_knows_already(pool, monkeypatch):
    class Known(torch.nn.Sequential):
        pass

    def reduced(module: Any) -> Any:
        return torch.nn.Sequential, (), dict(module.__dict__)

    monkeypatch.setitem(copyreg.dispatch_table, Known, reduced)
    model = Known(*net())
    with lightck.attach(model, pool, optimizer=adam(model)):
        twin = copy.deepcopy(model)
        assert type(twin) is torch.nn.Sequential
        assert not twin._forward_hooks
        assert len(twin) == len(model)
    assert copyreg.dispatch_table[Known] is reduced


def test_nothing_is_left_when_the_last_session_of_a_class_ends(folder):
    gc.collect()
    assert torch.nn.Sequential not in copyreg.dispatch_table
    models = [net(seed=seed) for seed in range(2)]
    sessions = [lightck.attach(model, folder / f"{n}.pool", optimizer=adam(model)) for n, model in enumerate(models)]
    sessions[0].close()
    assert not copy.deepcopy(models[1])._forward_hooks
    del sessions, models  # the other one is forgotten
    gc.collect()
    assert torch.nn.Sequential not in copyreg.dispatch_table


def test_a_shallow_copy_trains_the_same_parameters_and_is_followed(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(copy.copy(model), optimizer, 3)
    assert session.committed == 3


def test_scripting_says_what_to_do(pool):
    model = net()
    with lightck.attach(model, pool, optimizer=adam(model)):
        with pytest.raises(UnsupportedError, match=r"torch\.jit\.script\(copy\.deepcopy\(model\)\)"):
            torch.jit.script(model)
        scripted = torch.jit.script(copy.deepcopy(model))
        assert same(forward(scripted).detach(), forward(model).detach())
        hooks = [*model._forward_pre_hooks.values(), *model._forward_hooks.values()]
        assert [getattr(hook, "__name__", None) for hook in hooks] == [None] * len(hooks)
    torch.jit.script(model)


def test_a_model_is_traced_as_if_nothing_were_attached(pool: Any) -> None:
    """In training mode, between an update and the next forward: a trace is no step of the loop, and torch's own check
    of it, which runs the model again, sees the same graph."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for _ in range(2):
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            traced = torch.jit.trace(model, torch.randn(3, 4))
            assert session.iteration == session.step - 1, "no boundary"
        x = torch.randn(3, 4)
        assert torch.equal(traced(x), model(x))
