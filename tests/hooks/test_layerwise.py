"""A layer-wise update: the same bits as ``optimizer.step()``, copies that begin in the backward, what is refused."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import BIG, batch, crashed, everything, is_step, kill_at, killed_child, same

import lightck
from lightck import _native
from lightck._native import lib
from lightck.errors import BackgroundError, LightckError, SessionError, StateChangedError, UnsupportedError
from lightck.pipeline import eager_copies
from lightck.pool.writer import PoolWriter
from lightck.profiler import events

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "SGD without state": lambda p: torch.optim.SGD(p, lr=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adam maximize": lambda p: torch.optim.Adam(p, lr=0.001, maximize=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


class Deep(nn.Module):
    """Layers of several sizes, two tied, one that some batches do not reach, one that is frozen."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(4, width)
        self.norm = nn.LayerNorm(width)
        self.middle = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width, bias=False))
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.middle[2].weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.seldom = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, seldom: bool = False) -> torch.Tensor:
        x = self.tied(self.middle(self.norm(self.inner(x))))
        x = self.frozen(x)
        return self.out(self.seldom(x) if seldom else x)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only, so that a layer has parameters of two groups."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if (p.dim() > 1) is wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": vectors, "lr": 0.002}]


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    model(batch(number), seldom=number % 3 == 2).square().sum().backward()
    optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=0.01)


def with_and_without(
    play: Callable[[Any, Any, Any], None], made: Callable[[Any], torch.optim.Optimizer] = adamw
) -> list[Any]:
    """What a training without layers and one with them end with. ``play`` gets the model, its optimizer, and the layers
    or None."""
    results = []
    for has_layers in (False, True):
        model = Deep()
        optimizer = made(model)
        play(model, optimizer, lightck.layerwise(model, optimizer) if has_layers else None)
        results.append(everything(model, optimizer))
    return results


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tensors each early copy took; small layers are not gathered here."""
    monkeypatch.setattr(eager_copies, "EAGER_JOB_NBYTES_MIN", 1)
    found: list[int] = []
    submit = PoolWriter.submit_part

    def counted(writer: Any, reservation: Any, records: Any, *args: Any) -> Any:
        found.append(len(records))
        return submit(writer, reservation, records, *args)

    monkeypatch.setattr(PoolWriter, "submit_part", counted)
    yield found
    lib.lck_fault(_native.lib.LCK_OP_COPY, 0, 0)


def started(pool: Any, width: int = 64, **options: Any) -> tuple[Any, Any, Any]:
    model = Deep(width)
    optimizer = adamw(model)
    lightck.layerwise(model, optimizer)
    return model, optimizer, lightck.attach(model, pool, **options)


# -- the same training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_layers_updated_one_by_one_are_those_that_step_makes(make):
    schedulers = {}

    def made(model: Any) -> torch.optim.Optimizer:
        optimizer = make(groups(model))
        schedulers[optimizer] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # wraps optimizer.step
        return optimizer

    def play(model: Any, optimizer: Any, layers: Any) -> None:
        for number in range(7):
            step(model, optimizer, number)
            schedulers[optimizer].step()

    assert same(*with_and_without(play, made))


def test_each_layer_is_updated_inside_the_backward_pass():
    model = Deep()
    optimizer = torch.optim.SGD(groups(model), lr=0.1)
    layers = lightck.layerwise(model, optimizer)
    assert layers.layers == ("inner", "norm", "middle.0", "middle.2", "seldom", "out")
    before = everything(model, optimizer)["model"]
    model(batch(0)).square().sum().backward()
    changed = {name for name, tensor in model.state_dict().items() if not same(tensor, before[name])}
    assert {"inner.weight", "middle.0.bias", "tied.weight", "out.weight"} <= changed
    after = everything(model, optimizer)["model"]
    optimizer.step()
    assert same(everything(model, optimizer)["model"], after), "step() had nothing left to do"


def test_gradients_are_still_there_after_step():
    model = Deep()
    optimizer = torch.optim.SGD(groups(model), lr=0.1)
    lightck.layerwise(model, optimizer)
    model(batch(0)).square().sum().backward()
    grads = {id(p): p.grad for p in model.parameters()}
    optimizer.step()
    assert all(p.grad is grads[id(p)] for p in model.parameters())


def test_a_hook_of_step_sees_the_gradients_whenever_it_was_registered():
    model = Deep()
    optimizer = torch.optim.SGD(groups(model), lr=0.1)
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.append(all(p.grad is not None for p in model.out.parameters()))

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    lightck.layerwise(model, optimizer)
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    step(model, optimizer, 0)
    assert seen == [True] * 4


def test_accumulated_gradients_are_used_once():
    def play(model: Any, optimizer: Any, layers: Any) -> None:
        for number in range(4):
            optimizer.zero_grad()
            with layers.accumulate() if layers is not None else nullcontext():
                model(batch(number)).square().sum().backward()
            model(batch(number + 50)).square().sum().backward()
            optimizer.step()

    assert same(*with_and_without(play))


def test_parameters_that_are_added_later_are_layers_too():
    def play(model: Any, optimizer: Any, layers: Any) -> None:
        torch.manual_seed(4)
        late = nn.Linear(2, 2)
        for number in range(4):
            if number == 1:
                model.late = late
                optimizer.add_param_group({"params": late.parameters(), "lr": 0.5})
            optimizer.zero_grad()
            out = model(batch(number))
            (out if number == 0 else late(out)).square().sum().backward()
            optimizer.step()

    assert same(*with_and_without(play, lambda model: torch.optim.SGD(groups(model), lr=0.01)))


class TwoNames(nn.Module):
    """One parameter that a module holds twice: weights that encode and decode."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Parameter(torch.ones(4, 4))
        self.decoder = self.encoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.encoder @ self.decoder.t()


def test_a_parameter_under_two_names_of_one_module_is_updated_once():
    weights = []
    for has_layers in (False, True):
        model = TwoNames()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if has_layers:
            lightck.layerwise(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 4) / 8).sum().backward()
            optimizer.step()
        weights.append(model.encoder.detach())
    assert torch.equal(*weights)


def test_layers_that_are_frozen_and_thawed_are_updated_as_step_would():
    def made(model: Any) -> torch.optim.Optimizer:
        model.middle.requires_grad_(False)
        return torch.optim.AdamW(model.parameters(), lr=0.01)  # the frozen ones too

    def play(model: Any, optimizer: Any, layers: Any) -> None:
        for number in range(8):
            if number == 3:
                model.middle.requires_grad_(True)
                model.norm.requires_grad_(False)
            step(model, optimizer, number)
        assert layers is None or layers.layers == ("inner", "middle.0", "middle.2", "seldom", "out")

    assert same(*with_and_without(play, made))


def test_a_restored_optimizer_is_the_one_that_is_stepped():
    """``load_state_dict`` puts another ``state`` in the place of the one that the layers shared."""

    def play(model: Any, optimizer: Any, layers: Any) -> None:
        step(model, optimizer, 0)
        optimizer.load_state_dict(optimizer.state_dict())
        step(model, optimizer, 1)

    assert same(*with_and_without(play))


def test_options_that_are_loaded_or_set_between_steps_are_used_at_once():
    def play(model: Any, optimizer: Any, layers: Any) -> None:
        step(model, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 0.3
        optimizer.load_state_dict(saved)
        step(model, optimizer, 1)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = 0.1
        step(model, optimizer, 2)
        optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.5})
        step(model, optimizer, 3)

    assert same(*with_and_without(play))


def test_one_optimizer_with_layers_serves_two_sessions(pool):
    models = [Deep(64), Deep(64)]
    optimizer = torch.optim.AdamW([p for model in models for p in model.parameters() if p.requires_grad], lr=0.01)
    lightck.layerwise(nn.ModuleList(models), optimizer)
    sessions = [lightck.attach(m, pool.with_name(f"{i}.pool"), optimizer=optimizer) for i, m in enumerate(models)]
    for number in range(5):
        optimizer.zero_grad()
        sum(model(batch(number)).square().sum() for model in models).backward()
        optimizer.step()
        for session in sessions:
            session.end_step()
    sessions.pop().close()
    for number in range(5, 8):
        optimizer.zero_grad()
        sum(model(batch(number)).square().sum() for model in models).backward()
        optimizer.step()
        sessions[0].end_step()
    sessions[0].close()
    assert same(dict(lightck.recover(pool.with_name("0.pool")).model), everything(models[0], optimizer)["model"])


def test_remove_gives_the_optimizer_back():
    model = Deep()
    optimizer = torch.optim.SGD(groups(model), lr=0.1)
    layers = lightck.layerwise(model, optimizer)
    assert lightck.layerwise(model, optimizer) is layers
    model(batch(0)).square().sum().backward()
    with pytest.raises(SessionError, match="step"):
        layers.remove()
    optimizer.step()
    layers.remove()
    before = everything(model, optimizer)["model"]
    model(batch(0)).square().sum().backward()
    assert same(everything(model, optimizer)["model"], before)
    assert lightck.layerwise(model, optimizer) is not layers


def test_nothing_is_kept_alive():
    model = Deep()
    optimizer = torch.optim.SGD(groups(model), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # wraps optimizer.step
    lightck.layerwise(model, optimizer)
    step(model, optimizer, 0)
    gone = weakref.ref(optimizer), weakref.ref(model.inner.weight)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# -- with a pool -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("check", ["0", "1"])
def test_every_step_is_in_the_pool_and_copies_begin_in_the_backward(pool, parts, monkeypatch, slots, check):
    monkeypatch.setenv("LIGHTCK_CHECK", check)
    model, optimizer, session = started(pool, slots=slots)
    seen = {}
    for number in range(1, 9):
        before = len(parts)
        optimizer.zero_grad()
        model(batch(number), seldom=number % 3 == 2).square().sum().backward()
        assert len(parts) > before or number < 3, "its tensors are known from the third step on"
        optimizer.step()
        seen[number] = everything(model, optimizer)
        session.end_step()
        held = lightck.recover(crashed(pool)) if number > slots else None
        assert held is None or (held.step >= number - slots + 1 and is_step(held, seen[held.step]))
    session.close()
    assert is_step(lightck.recover(pool), seen[8])
    assert session.stats().skipped == session.stats().recopied == 0


def test_discovery_finds_one_optimizer(pool):
    _model, _optimizer, session = started(pool)
    assert dict(session.found) == {"optimizer": "AdamW"}
    session.close()


def test_a_training_that_is_killed_at_any_block_of_an_eager_copy_goes_on_exactly(pool, parts, monkeypatch):
    def train(upto: int, kill: int = 0) -> Any:
        model, optimizer, session = started(pool, resume=True)
        for number in range(session.step, upto):
            if number == 4 and kill:
                kill_at("block", kill)
            step(model, optimizer, number)
            session.end_step()
        session.close()
        return everything(model, optimizer)

    whole = train(7)
    for kill in (1, 2, 3, 7):
        os.unlink(pool)
        killed_child(lambda kill=kill: train(7, kill))
        assert lightck.recover(pool).step in (3, 4)
        assert same(train(7), whole)


def test_what_is_written_between_update_and_boundary_is_in_the_checkpoint(pool, parts):
    """A clamp after ``step()``: the early copy of what it changed is made again."""
    model, optimizer, session = started(pool)
    for number in range(6):
        step(model, optimizer, number)
        with torch.no_grad():
            model.out.weight.clamp_(-0.01, 0.01)
            model.middle[0].weight.clamp_(-0.1, 0.1)
            optimizer.state[model.tied.weight]["exp_avg"].add_(1.0)
        session.end_step()
        seen = everything(model, optimizer)
        session.flush()
        assert is_step(lightck.recover(crashed(pool)), seen)
    assert parts
    assert session.stats().recopied >= 2
    session.close()


def test_state_that_is_replaced_after_the_update_is_in_the_checkpoint(pool, parts):
    model, optimizer, session = started(pool)
    for number in range(8):
        step(model, optimizer, number)
        if number % 2:
            for p in list(optimizer.state):
                optimizer.state[p]["exp_avg"] = torch.full_like(p, float(number))
        if number == 6:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        session.end_step()
        seen = everything(model, optimizer)
        session.flush()
        assert is_step(lightck.recover(crashed(pool)), seen)
    assert parts
    session.close()


@pytest.mark.parametrize("first", [0, 6])
def test_what_is_written_through_data_after_the_update_is_in_the_checkpoint(pool, parts, first):
    """It moves no version counter; and some loops begin to do it late."""
    model, optimizer, session = started(pool)
    for number in range(first + 6):
        step(model, optimizer, number)
        if number >= first:
            for p in filter(lambda p: p.requires_grad, model.parameters()):
                p.data.clamp_(-0.02, 0.02)
        session.end_step()
        seen = everything(model, optimizer)
        session.flush()
        assert is_step(lightck.recover(crashed(pool)), seen)
    assert parts
    assert session.stats().recopied
    session.close()


@pytest.mark.parametrize("fused", [False, True])
def test_updates_between_two_boundaries_leave_nothing_behind(pool, parts, fused):
    """``end_step()`` at every second update, and once a boundary that raises: what an update began that no checkpoint
    followed is no part of the next one. A fused kernel moves no version counter of the state."""

    class Moody:
        raises = False

        def state_dict(self) -> dict[str, Any]:
            if self.raises:
                raise ZeroDivisionError
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model, moody = Deep(64), Moody()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01, fused=fused)
    lightck.layerwise(model, optimizer)
    session = lightck.attach(model, pool, state={"moody": moody})
    for number in range(20):
        step(model, optimizer, number)
        if number == 9:
            moody.raises = True
            with pytest.raises(ZeroDivisionError):
                session.end_step()
            moody.raises = False
        elif number % 2:
            session.end_step()
            seen = everything(model, optimizer)
            session.flush()
            assert is_step(lightck.recover(crashed(pool)), seen)
    assert parts
    session.close()


@pytest.mark.parametrize("slots", [5, 6, 7, 8])
def test_eager_copies_leave_room_for_every_commit(tmp_path, parts, slots):
    """The engine holds so many jobs; on a disk, where each commit waits for two fdatasync, checkpoints pile up."""
    pool = tmp_path / "run.pool"
    model, optimizer, session = started(pool, slots=slots)
    for number in range(30):
        step(model, optimizer, number)
        session.end_step()
    session.close()
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_only_steps_that_will_be_saved_are_begun(pool, parts):
    model, optimizer, session = started(pool, interval=3)
    begun = []
    for number in range(1, 13):
        before = len(parts)
        step(model, optimizer, number)
        session.end_step()
        begun.append(len(parts) > before)
    session.close()
    assert [number for number, was in enumerate(begun, 1) if was] == [6, 9, 12]
    assert lightck.recover(pool).step == 12


def test_an_automatic_interval_begins_nothing_early(pool, parts):
    model, optimizer, session = started(pool, interval="auto")
    for number in range(8):
        step(model, optimizer, number)
    session.close()
    assert not parts
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_backward_that_dies_in_the_middle_leaves_the_last_step(pool, parts):
    model, optimizer, session = started(pool)
    for number in range(4):
        step(model, optimizer, number)
    seen = everything(model, optimizer)
    hook = model.inner.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, optimizer, 4)
    hook.remove()
    assert parts
    with pytest.raises(SessionError, match=r"between backward\(\) and step\(\)"):
        session.flush()
    assert is_step(lightck.recover(crashed(pool)), seen)
    session.close()
    assert is_step(lightck.recover(pool), seen)


def test_a_training_may_go_on_after_a_backward_that_died(pool, parts):
    model, optimizer, session = started(pool)
    for number in range(4):
        step(model, optimizer, number)
    hook = model.inner.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, optimizer, 4)
    hook.remove()
    with pytest.raises(UnsupportedError, match=r"A forward.*forget\(\)"):
        model(batch(5))
    with pytest.raises(UnsupportedError, match=r"second gradient.*forget\(\)"):
        model.forward(batch(5)).square().sum().backward()  # past the hooks of the model
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="gradients were changed"):
            optimizer.step()
    with pytest.raises(SessionError, match="between"):
        session.end_step()
    lightck.layerwise(model, optimizer).forget()
    assert session.step == 4
    step(model, optimizer, 5)
    session.close()
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_pin_between_update_and_step_waits_for_step(pool, parts):
    model, optimizer, session = started(pool)
    for number in range(4):
        step(model, optimizer, number)
    seen = everything(model, optimizer)
    optimizer.zero_grad()
    model(batch(4)).square().sum().backward()
    with pytest.raises(SessionError, match=r"step\(\)"):
        session.pin()
    optimizer.step()
    pin = session.pin()
    for number in range(5, 9):
        step(model, optimizer, number)
    session.close()
    assert pin.step == 5
    assert not is_step(lightck.recover(pool, step=5), seen)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_state_that_appears_while_copies_are_under_way_moves_the_pool(pool, parts):
    """The images of the slots are replaced: what was begun early is given up and written whole."""

    class Growing:
        def __init__(self) -> None:
            self.values = torch.zeros(10)

        def state_dict(self) -> dict[str, Any]:
            return {"values": self.values}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    growing = Growing()
    model, optimizer, session = started(pool, state={"growing": growing})
    for number in range(9):
        step(model, optimizer, number)
        growing.values = torch.full((10 + number % 4 * 3000 + number * 40_000,), float(number))
        session.end_step()
        session.flush()
        held = lightck.recover(crashed(pool))
        assert is_step(held, everything(model, optimizer))
        assert torch.equal(held.state["growing"]["values"], growing.values)
    session.close()


def test_nonfinite_steps_give_up_what_was_begun(pool, parts):
    model, optimizer, session = started(pool, pause_on_nonfinite=True)
    for number in range(4):
        step(model, optimizer, number)
    seen = everything(model, optimizer)
    optimizer.zero_grad()
    (model(batch(4)) * float("nan")).sum().backward()
    optimizer.step()
    session.end_step()
    assert session.paused_reason
    session.close()
    assert is_step(lightck.recover(pool), seen)


def test_paused_waits_for_eager_copies(pool, parts):
    model, optimizer, session = started(pool, BIG // 10)
    for number in range(5):
        optimizer.zero_grad()
        model(batch(number)).square().sum().backward()
        optimizer.step()
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        with session.paused(), torch.no_grad():
            for p in model.parameters():
                p.data.fill_(7.0)
            for name, p in model.named_parameters():
                p.data.copy_(kept[name])
        session.end_step()
    session.close()
    assert is_step(lightck.recover(pool), everything(model, optimizer))


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_failed_eager_copy_is_reported_and_the_checkpoint_before_is_intact(pool, parts, nth):
    model, optimizer, session = started(pool)
    for number in range(4):
        step(model, optimizer, number)
    seen = everything(model, optimizer)
    session.flush()
    assert lib.lck_fault(_native.lib.LCK_OP_COPY, nth, 5) == lib.LCK_OK
    with pytest.raises(BackgroundError, match="committed before are intact"):
        for number in range(4, 8):
            step(model, optimizer, number)
    with pytest.raises(BackgroundError):
        session.close()
    assert is_step(lightck.recover(pool), seen)


def test_several_optimizers_are_layered_and_saved(pool, parts):
    """Another one may write the same checkpoint's tensors still, so nothing is begun before the boundary."""
    model = Deep()
    first = torch.optim.SGD(model.inner.parameters(), lr=0.01, momentum=0.9)
    second = torch.optim.AdamW([*model.norm.parameters(), *model.out.parameters()], lr=0.01)
    for optimizer in (first, second):
        lightck.layerwise(model, optimizer)
    session = lightck.attach(model, pool, optimizer=[first, second])
    for number in range(5):
        first.zero_grad(), second.zero_grad()
        model(batch(number)).square().sum().backward()
        first.step(), second.step()
        session.end_step()
    session.close()
    assert not parts
    assert is_step(lightck.recover(pool), everything(model, first, second))


def test_a_trace_shows_the_update_of_each_layer(pool, tmp_path):
    model, optimizer, session = started(pool)
    step(model, optimizer, 0)
    with session.trace(tmp_path / "trace.json", steps=None):
        for number in range(1, 4):
            step(model, optimizer, number)
    session.close()
    trace = events.read(tmp_path / "trace.json")
    modules = {event.args.get("module") for event in trace.of(events.UPDATE)}
    assert modules >= {"inner", "middle.0", "out"}


def test_errors_that_a_loop_may_catch_wait_for_step(pool, monkeypatch):
    """A backward pass that ended there would have made some gradients, and not others."""
    model, optimizer, session = started(pool)
    step(model, optimizer, 0)
    gate, raised = session._pipeline.gate, []

    def once() -> None:
        if not raised:
            raised.append(True)
            raise StateChangedError("a tensor was written")
        gate()

    monkeypatch.setattr(session._pipeline, "gate", once)
    optimizer.zero_grad()
    model(batch(1)).square().sum().backward()
    with pytest.raises(StateChangedError):
        optimizer.step()
    optimizer.step()
    session.close()
    assert session.step == 2
    assert is_step(lightck.recover(pool), everything(model, optimizer))


# -- what is refused -------------------------------------------------------------------------------------------------


def test_gradients_that_are_clipped_are_refused(pool):
    model, optimizer, session = started(pool)
    model(batch(0)).square().sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    with pytest.raises(UnsupportedError, match=r"gradients were changed between.*Clipping"):
        optimizer.step()
    session.close()
    with pytest.raises(LightckError, match="no step"):
        lightck.recover(pool)


def scaled_lr(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def decayed_by_hand(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        model.inner.weight.mul_(0.9)


def clamped_through_data(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.clamp_(-1e-4, 1e-4)


def reloaded(model: nn.Module, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def forgotten(model: nn.Module, optimizer: Any) -> None:
    optimizer.state.clear()


def restarted(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def averaged_anew(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model.out.weight]["exp_avg"] = torch.zeros_like(model.out.weight)


BETWEEN = {
    "clip by norm": (lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "gradients were changed"),
    "clip by value": (lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1e-4), "gradients were changed"),
    "clamp of .data": (clamped_through_data, "gradients were changed"),
    "zero_grad": (lambda _, optimizer: optimizer.zero_grad(), "gradients were removed"),
    "another lr": (scaled_lr, "options .* were changed"),
    "decay by hand": (decayed_by_hand, "parameters were written"),
    "load_state_dict": (reloaded, "state was changed"),
    "state cleared": (forgotten, "state was changed"),
    "state written": (restarted, "state was changed"),
    "state replaced": (averaged_anew, "state was changed"),
}


@pytest.mark.parametrize(("change", "reported"), BETWEEN.values(), ids=BETWEEN)
def test_what_comes_between_backward_and_step_is_refused(pool, change, reported):
    model, optimizer, session = started(pool)
    step(model, optimizer, 0)
    seen = everything(model, optimizer)
    optimizer.zero_grad()
    model(batch(1)).square().sum().backward()
    change(model, optimizer)
    with pytest.raises(UnsupportedError, match=reported):
        optimizer.step()
    session.close()
    assert is_step(lightck.recover(pool), seen)


def test_clipping_in_a_hook_of_step_is_refused():
    """Whenever it was registered, it sees the gradients."""
    model = Deep()
    optimizer = torch.optim.SGD(groups(model), lr=0.01)
    lightck.layerwise(model, optimizer)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 1.0) and None)
    with pytest.raises(UnsupportedError, match="gradients were changed"):
        step(model, optimizer, 0)


def test_a_boundary_between_backward_and_step_is_refused(pool):
    model, optimizer, session = started(pool)
    step(model, optimizer, 0)
    optimizer.zero_grad()
    model(batch(1)).square().sum().backward()
    for boundary in (session.end_step, session.flush):
        with pytest.raises(SessionError, match=r"between backward\(\) and step\(\)"):
            boundary()
    optimizer.step()
    session.end_step()
    session.close()
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_backward_into_the_layers_of_another_optimizer_makes_no_checkpoint(pool):
    """As in a GAN: the generator's backward reaches the discriminator, whose gradients would be thrown away."""
    makes, judges = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.ModuleList([makes, judges])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
    for optimizer in optimizers:
        lightck.layerwise(model, optimizer)
    session = lightck.attach(model, pool, optimizer=optimizers)
    judges(makes(batch(0)).detach()).sum().backward()
    optimizers[1].step()
    judges(makes(batch(1))).sum().backward()
    optimizers[0].step()
    with pytest.raises(SessionError, match="layers of every layer-wise optimizer"):
        session.end_step()
    session.close()
    with pytest.raises(LightckError, match="no step"):
        lightck.recover(pool)


def test_layers_of_another_model_are_refused():
    model, other = Deep(), Deep()
    optimizer = torch.optim.SGD(groups(model), lr=0.01)
    lightck.layerwise(model, optimizer)
    with pytest.raises(SessionError, match="another model"):
        lightck.layerwise(other, optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_is_refused(pool, fused):
    model = Deep()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01, fused=fused)
    lightck.layerwise(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UnsupportedError, match="GradScaler"):
        lightck.attach(model, pool)
    scaler.scale(model(batch(0)).square().sum()).backward()
    with pytest.raises(UnsupportedError, match="GradScaler"):
        scaler.step(optimizer)
        scaler.scale(model(batch(0)).square().sum()).backward()


def test_a_scaler_that_is_not_enabled_changes_nothing(pool):
    """As in ``GradScaler(enabled=use_amp)``: it passes ``step`` on."""

    def play(model: Any, optimizer: Any, layers: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        with nullcontext() if layers is None else lightck.attach(model, pool):
            for number in range(4):
                optimizer.zero_grad()
                scaler.scale(model(batch(number)).square().sum()).backward()
                scaler.step(optimizer)
                scaler.update()

    without, having = with_and_without(play)
    assert same(without, having)
    assert is_step(lightck.recover(pool), having)


def test_a_second_backward_is_refused(pool):
    model, _, session = started(pool)
    model(batch(0)).square().sum().backward()
    with pytest.raises(UnsupportedError, match="accumulate"):
        model(batch(1)).square().sum().backward()
    session.close()


def test_a_second_backward_of_one_forward_is_refused():
    model = Deep()
    optimizer = torch.optim.SGD(groups(model), lr=0.01)
    lightck.layerwise(model, optimizer)
    loss = model.out(torch.ones(1, 16)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="second gradient"):
        loss.backward()


class Probed(nn.Module):
    """An encoder with a loss of its own, and a head that is trained on what it makes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_with_gradients_between_backward_and_step_is_refused(training):
    """It would be of the new encoder, and nothing of it is a second gradient for anyone."""
    model = Probed().train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lightck.layerwise(model, optimizer)
    model(batch(0)).square().sum().backward()
    with pytest.raises(UnsupportedError, match=r"A forward of the model began between backward\(\) and step\(\)"):
        model.head(model(batch(0)).detach()).square().sum().backward()
    optimizer.step()
    model.head(model(batch(0)).detach()).square().sum().backward()
    optimizer.step()


def test_forwards_that_take_nothing_from_the_update_may_come_before_step():
    """A look without gradients, and a copy of the model."""

    def play(model: Any, optimizer: Any, layers: Any) -> None:
        for number in range(3):
            optimizer.zero_grad()
            model(batch(number)).square().sum().backward()
            with torch.no_grad():
                model(batch(number))
            copy.deepcopy(model)(batch(number))
            optimizer.step()

    assert same(*with_and_without(play))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_model_that_is_computed_again_in_the_backward_pass_is_updated_as_step_would(use_reentrant):
    def play(model: Any, optimizer: Any, layers: Any) -> None:
        for number in range(4):
            optimizer.zero_grad()
            x = batch(number).requires_grad_()
            parts = [(x, number % 2 == 0)] if use_reentrant else [(x, True), (x * 2, False)]
            outs = [checkpoint(model, part, seldom, use_reentrant=use_reentrant) for part, seldom in parts]
            torch.stack(outs).square().sum().backward()
            optimizer.step()

    assert same(*with_and_without(play))


def test_a_closure_is_refused():
    model = Deep()
    optimizer = torch.optim.SGD(groups(model), lr=0.01)
    lightck.layerwise(model, optimizer)
    with pytest.raises(UnsupportedError, match="closure"):
        optimizer.step(lambda: 0.0)


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Wrapping(torch.optim.SGD):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, lr=0.1)
        self.inner = inner


def test_optimizers_that_need_all_gradients_are_refused():
    model = Deep()
    trained = [p for p in model.parameters() if p.requires_grad]
    for optimizer in (
        torch.optim.LBFGS(trained),
        OwnStep(trained, lr=0.1),
        Wrapping(torch.optim.SGD(trained, lr=0.1)),
        torch.optim.SGD(trained, lr=torch.tensor(0.1), differentiable=True),
    ):
        with pytest.raises(UnsupportedError):
            lightck.layerwise(model, optimizer)
    with pytest.raises(TypeError, match=r"torch\.optim"):
        lightck.layerwise(model, object())
    with pytest.raises(TypeError, match="model"):
        lightck.layerwise(torch.optim.SGD(trained, lr=0.1), model)


def test_several_ranks_are_refused():
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    model = Deep()
    optimizer = torch.optim.SGD(groups(model), lr=0.01)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    try:
        with pytest.raises(UnsupportedError, match="ranks"):
            lightck.layerwise(model, optimizer)
    finally:
        torch.distributed.destroy_process_group()


def test_layers_of_an_attached_model_are_refused(pool):
    model = Deep()
    optimizer = torch.optim.SGD(groups(model), lr=0.01)
    with lightck.attach(model, pool), pytest.raises(SessionError, match="before"):
        lightck.layerwise(model, optimizer)


def replaced_data(p: torch.Tensor) -> None:
    p.data = p.data.add(p.data, alpha=-0.01)


def written_by_numpy(p: torch.Tensor) -> None:
    p.detach().numpy()[...] *= 0.99


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize(
    "write", [lambda p: p.data.mul_(0.99), replaced_data, written_by_numpy], ids=["in place", "replaced", "numpy"]
)
def test_a_silent_write_to_a_parameter_between_backward_and_step_is_refused(monkeypatch, write, first):
    """It comes after the layer's update then, and before the update of ``step()`` without layers."""
    if first and write is not replaced_data:
        monkeypatch.setenv("LIGHTCK_CHECK", "1")  # else the layers take turns
    model = Deep()
    optimizer = adamw(model)
    lightck.layerwise(model, optimizer)
    with pytest.raises(UnsupportedError, match="parameters were written"):
        for number in range(first + 1):
            optimizer.zero_grad()
            model(batch(number)).square().sum().backward()
            if number >= first:
                write(model.inner.weight)
            optimizer.step()
    assert number == first


def test_a_silent_write_to_a_parameter_is_found_in_turn():
    model = Deep()
    optimizer = adamw(model)
    lightck.layerwise(model, optimizer)
    with pytest.raises(UnsupportedError, match="parameters were written"):
        for number in range(40):
            optimizer.zero_grad()
            model(batch(number), seldom=True).square().sum().backward()
            if number > 5:
                model.inner.weight.data.mul_(0.99)
            optimizer.step()


def test_a_saved_weight_that_a_fused_kernel_overwrites_is_seen_by_autograd():
    """The same weight as a constant of a later node: autograd has to refuse, not to use the new values."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(nn.functional.linear(self.first(x), self.last.weight.detach()))

    model = Shared()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    lightck.layerwise(model, optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(batch(0)).square().sum().backward()
