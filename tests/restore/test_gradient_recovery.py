"""A checkpoint in a pool with gradient records is recovered bit for bit, as the training had it; what cannot be is
named."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from gradient_trainings import Trained, TrainedPool
from hostile_updates import hostile
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import batch, everything, is_step, net, poke, same, weights

import lightck
from lightck.cli import main
from lightck.errors import CorruptPoolError, FormatError, LightckError, NoCheckpointError, ReplayError, UnsupportedError

STEPS = 9
_open: list[Trained] = []


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def trained(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Trained:
    found = Trained(model, *optimizers)
    _open.append(found)
    return found


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = STEPS) -> Trained:
    found = trained(model, *optimizers)
    dtype = next(model.parameters()).dtype
    for number in range(steps):
        found.update(batch(number).to(dtype))
    return found


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, **options)


def momentum(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


def assert_recovers(path: Path, found: Trained, step: int = STEPS, make: Callable[[], Any] | None = None) -> None:
    """The newest checkpoint is the one of ``step``: loaded, and restored in place into a model and optimizers."""
    seen = found.steps[step - 1].everything
    loaded = lightck.recover(path)
    assert (loaded.step, is_step(loaded, seen)) == (step, True)
    kinds = {name: name in dict(found.model.named_buffers()) for name in loaded.model}
    assert [name for name in loaded.model if not kinds[name]] == [name for name in seen["model"] if not kinds[name]]
    if make is not None:
        model, *optimizers = make()
        checkpoint = lightck.recover(path, model, optimizers)
        assert checkpoint.step == step
        assert same(everything(model, *optimizers), seen)
        assert not checkpoint.drift


# -- the same bits ---------------------------------------------------------------------------------------------------

WAYS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "default": {}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", [adamw, momentum])
def test_recovered_state_is_that_of_the_training(pool, optimizer, dtype, way):
    if optimizer is momentum and way == "fused" and dtype is torch.bfloat16:
        pytest.skip("torch computes other bits at each run")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net(width=37).to(dtype)
        return model, optimizer(model, **WAYS[way])

    found = train(*make())
    made = TrainedPool(found)
    assert {made.base_step(unit, STEPS) for unit in made.units} == {7, 8, 9}, "the bases are of several ages"
    assert_recovers(made.write(pool), found, make=make)


@pytest.mark.parametrize("n", [2, 4, 5])
def test_bases_of_several_ages(pool, n):
    found = train(model := net(), adamw(model))
    assert_recovers(TrainedPool(found, n=n).write(pool), found, make=lambda: (model := net(), adamw(model)))


def test_learning_rate_schedules(pool):
    model = net()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    found = trained(model, optimizer)
    for number in range(STEPS):
        found.update(batch(number))
        schedule.step()
    # The checkpoint of a step holds the options before the scheduler: the training closed its steps there.
    assert len({step.everything["optimizers"][0]["param_groups"][0]["lr"] for step in found.steps}) > 3
    assert_recovers(TrainedPool(found).write(pool), found, make=lambda: (model := net(), adamw(model)))


class Sleepers(nn.Module):
    """Its parameters have gradients in some steps only; one has its first one late, so its state is created late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, awake: tuple[int, ...]) -> torch.Tensor:
        return sum(self.parts[i](x) for i in awake)


AWAKE = ((0, 1), (1,), (0, 1), (1, 2), (0,), (0, 2), (3, 0), (0, 1), (0, 3))


@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("last", [6, 7, 8, 9])
def test_absent_gradients_and_state_that_is_created_late(pool, last, way):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Sleepers()
        return model, adamw(model, **WAYS[way])

    found = trained(*make())
    for number, awake in enumerate(AWAKE[:last]):
        found.update(batch(number), awake)
    assert_recovers(TrainedPool(found).write(pool), found, last, make)


def test_state_that_is_created_by_the_replay(pool):
    """The base of the parameter was written before its first update, and has no state."""
    found = trained(model := Sleepers(), adamw(model))
    for number, awake in enumerate(((0,), (0,), (0,), (0, 3), (0,))):
        found.update(batch(number), awake)
    made = TrainedPool(found, n=4)
    assert made.base_step("parts.3.weight", 5) < 4
    assert_recovers(made.write(pool), found, 5, lambda: (model := Sleepers(), adamw(model)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 6, sparse=True)
        self.out = nn.Linear(6, 2)
        self.mean = nn.BatchNorm1d(2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.mean(self.out(self.table(words))).square()


def words(number: int) -> torch.Tensor:
    return torch.randint(0, 50, (5 + number,), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad], ids=["SGD", "Adagrad"])
def test_sparse_gradients_two_optimizers_and_buffers(pool, kind):
    def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
        model = Words()
        others = [*model.out.parameters(), *model.mean.parameters()]
        return model, kind(model.table.parameters(), lr=0.1), torch.optim.AdamW(others, lr=0.1)

    found = trained(*make())
    for number in range(8):
        found.update(words(number))
    made = TrainedPool(found)
    assert made.base_step("table.weight", 8) == 6
    assert_recovers(made.write(pool), found, 8, make)


def test_optimizers_are_found_by_their_parameters_and_not_by_their_order(pool):
    def make() -> tuple[Any, ...]:
        model = net()
        return model, momentum(model[0]), adamw(model[2])

    found = train(*make())
    path = TrainedPool(found).write(pool)
    model, first, second = make()
    lightck.recover(path, model, [second, first])
    assert same(everything(model, first, second), found.steps[-1].everything)


def test_memory_in_another_order(pool):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
        return model, adamw(model)

    found = trained(*make())
    for number in range(STEPS):
        found.update(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(number)))
    assert_recovers(TrainedPool(found).write(pool), found, make=make)


def test_unit_that_lies_whole_in_a_record(pool):
    """Its weight was written outside of ``step``, so no gradient leads to it."""
    found = trained(model := net(), adamw(model))
    for number in range(STEPS):
        if number in (4, 8):
            found.model[0].weight.data.mul_(0.5)
        found.update(batch(number), outside=["0.weight"] if number in (4, 8) else [])
    assert_recovers(TrainedPool(found).write(pool), found, make=lambda: (model := net(), adamw(model)))


@pytest.mark.parametrize("step", range(6, 10))
def test_unit_whose_gradient_was_overwritten_lies_whole_in_its_record(pool, step):
    found = train(model := net(), adamw(model))
    made = TrainedPool(found, whole={step: ["0.weight", "2.bias"]})
    assert_recovers(made.write(pool), found, make=lambda: (model := net(), adamw(model)))


class Halving(torch.optim.Optimizer):
    """A class of the user. It reads an attribute of the parameter, and keeps a count that is no tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["sum"] = state.get("sum", torch.zeros_like(p)) * 0.5 + p.grad
                    p.sub_(state["sum"] * group["lr"] * p.weight_of_it / state["count"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


def test_tied_weights_and_a_parameter_that_only_the_optimizer_has(pool):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Tied()
        extra = nn.Parameter(torch.arange(5.0))
        model.register_forward_hook(lambda module, args, out: out * extra.sum().mul(0.1).tanh())
        return model, torch.optim.AdamW([*model.parameters(), extra], lr=0.01)

    found = train(*make())
    made = TrainedPool(found)
    assert "outside/0/0/3" in made.units
    model, optimizer = make()
    lightck.recover(made.write(pool), model, optimizer)
    assert same(everything(model, optimizer), found.steps[-1].everything)
    assert same(optimizer.param_groups[0]["params"][3], found.optimizers[0].param_groups[0]["params"][3])


def test_model_alone_is_recovered_without_its_optimizer(pool):
    found = train(model := net(), adamw(model))
    other = net(seed=1)
    lightck.recover(TrainedPool(found).write(pool), other)
    assert same(weights(other), weights(model))


def test_class_of_the_user_makes_its_updates_again(pool):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        for number, p in enumerate(model.parameters()):
            p.weight_of_it = 1 + number
        return model, Halving(model.parameters(), 0.1)

    found = train(*make())
    path = TrainedPool(found).write(pool)
    model, optimizer = make()
    assert lightck.recover(path, model, optimizer).step == STEPS
    assert same(everything(model, optimizer), found.steps[-1].everything)
    for arguments in ((), (net(),), (net(), None)):
        with pytest.raises(UnsupportedError, match="an optimizer of class Halving, which is not a class of"):
            lightck.recover(path, *arguments)


# -- which checkpoint ------------------------------------------------------------------------------------------------


def test_earlier_step_is_recovered_on_request(pool):
    found = train(model := net(), adamw(model))
    path = TrainedPool(found).write(pool)
    for step in (6, 7, 8):
        checkpoint = lightck.recover(path, step=step)
        assert is_step(checkpoint, found.steps[step - 1].everything)
    with pytest.raises(NoCheckpointError, match="does not hold step 1"):
        lightck.recover(path, step=1)


def without_commit_records(pool: TrainedPool, *steps: int) -> TrainedPool:
    """The pool after the commit records of these steps were overwritten: only chains name their checkpoints."""
    for position, record in pool.records.items():
        if record.step in steps:
            pool.put(pool.sb.commit_record_offset(position), bytes(64))
    return pool


def test_step_that_only_a_chain_names_is_recovered_on_request(pool):
    found = train(model := net(), adamw(model))
    path = without_commit_records(TrainedPool(found, n=4), 7, 8).write(pool)
    checkpoint = lightck.recover(path, step=8)
    assert (checkpoint.step, is_step(checkpoint, found.steps[7].everything)) == (8, True)
    assert_recovers(path, found)


def test_commands_show_a_step_that_only_a_chain_names(pool):
    found = train(model := net(), adamw(model))
    path = without_commit_records(TrainedPool(found, n=4), 7, 8).write(pool)
    shown = CliRunner().invoke(main, ["inspect", "--json", str(path)])
    states = {one["step"]: one["state"] for one in json.loads(shown.stdout)["checkpoints"]}
    assert {step: states[step] for step in (6, 7, 8, 9)} == {
        6: "committed",
        7: "recorded",
        8: "recorded",
        9: "committed",
    }
    for step in states:
        assert lightck.recover(path, step=step).step == step
    done = CliRunner().invoke(main, ["verify", "--deep", "--replay", str(path)])
    assert done.exit_code == 0, done.output
    assert "step 8 (without an intact commit record)  OK" in done.stdout


def test_record_that_was_never_committed_is_no_checkpoint(pool):
    """It need not hold what no update consumed."""
    found = train(model := net(), adamw(model))
    path = TrainedPool(found, n=4, interval=3).write(pool)
    with pytest.raises(NoCheckpointError, match="does not hold step 8"):
        lightck.recover(path, step=8)
    shown = CliRunner().invoke(main, ["inspect", "--json", str(path)])
    assert {one["step"] for one in json.loads(shown.stdout)["checkpoints"]} >= {6, 9}
    assert not {one["step"] for one in json.loads(shown.stdout)["checkpoints"]} & {7, 8}
    assert_recovers(path, found)


def test_restored_checkpoint_is_read_again_from_the_pool(pool):
    found = train(model := net(), adamw(model))
    path = TrainedPool(found).write(pool)
    other = net()
    optimizer = adamw(other)
    checkpoint = lightck.recover(path, other, optimizer)
    optimizer.step()
    with torch.no_grad():
        other[0].weight.zero_()
    assert is_step(checkpoint, found.steps[-1].everything)


def test_restored_training_goes_on_bit_for_bit(pool):
    model = net()
    found = trained(model, adamw(model))
    for number in range(STEPS):
        found.update(batch(number))
    made = TrainedPool(found)
    for number in range(STEPS, STEPS + 3):
        found.update(batch(number))
    other = net(seed=1)
    optimizer = adamw(other)
    lightck.recover(made.write(pool), other, optimizer)
    for number in range(STEPS, STEPS + 3):
        optimizer.zero_grad()
        other(batch(number)).sum().backward()
        optimizer.step()
    assert same(weights(other), weights(model))


# -- damage ----------------------------------------------------------------------------------------------------------


def damaged(path: Path, at: int, data: bytearray) -> None:
    poke(path, at, bytes([data[at] ^ 0x10]))


def test_damaged_base_is_replaced_by_the_older_one(pool, caplog):
    found = train(model := net(), adamw(model))
    made = TrainedPool(found)
    path = made.write(pool)
    for name in ("model/0.weight", "optimizer/2.bias/exp_avg_sq"):
        offset, nbytes = made.base_of(name, STEPS)
        damaged(path, offset + nbytes - 1, made.data)
    with caplog.at_level(logging.WARNING):
        assert_recovers(path, found, make=lambda: (model := net(), adamw(model)))
    assert "the newest copy of '0.weight' in the pool" in caplog.text
    assert "'2.bias'" in caplog.text


def test_damaged_record_costs_the_steps_from_it_on(pool):
    found = train(model := net(), adamw(model))
    made = TrainedPool(found)
    path = made.write(pool)
    damaged(path, made.in_record("gradient/0.bias", 8), made.data)
    oldest = made.base_step("0.bias", STEPS)
    assert oldest < 8
    assert_recovers(path, found, 7, lambda: (model := net(), adamw(model)))
    rejected = lightck.recover(path).rejected
    assert [one.step for one in rejected] == [9, 8]
    assert "the gradient record of step 8 cannot be used: block 0 of 'gradient/0.bias'" in rejected[0].reason


def test_damaged_buffer_costs_its_step(pool):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Words()
        return model, torch.optim.Adagrad(model.parameters(), 0.1)

    found = trained(*make())
    for number in range(STEPS):
        found.update(words(number))
    made = TrainedPool(found)
    path = made.write(pool)
    damaged(path, made.in_record("model/mean.running_mean", STEPS), made.data)
    assert_recovers(path, found, STEPS - 1, make)


def test_any_one_damaged_place_costs_at_most_two_updates(pool):
    """With the default number of records, as GRADIENTS.md, section 6, promises for n = 3."""
    found = train(model := net(), momentum(model))
    made = TrainedPool(found)
    path, lost = made.write(pool), []
    spots = [at for at in range(0, len(made.data), 97) if made.data[at]]
    for at in spots[:: max(len(spots) // 60, 1)]:
        damaged(path, at, made.data)
        checkpoint = lightck.recover(path)
        assert is_step(checkpoint, found.steps[checkpoint.step - 1].everything)
        lost.append(STEPS - checkpoint.step)
        poke(path, at, bytes([made.data[at]]))
    assert max(lost) <= 2
    assert len(set(lost)) > 1


# -- a replay that is not exact --------------------------------------------------------------------------------------


def test_write_outside_of_step_that_nobody_noticed_is_named(pool):
    found = trained(model := net(), adamw(model))
    for number in range(STEPS):
        if number == 7:
            model[0].bias.data.mul_(1.5)
        found.update(batch(number))
    made = TrainedPool(found)
    assert made.base_step("0.bias", STEPS) == 7
    path = made.write(pool)
    assert_recovers(path, found, 7, lambda: (model := net(), adamw(model)))
    shown = [CliRunner().invoke(main, ["verify", *how, str(path)]) for how in ((), ("--replay",))]
    assert [one.exit_code for one in shown] == [0, 1]
    assert "OK: every byte that step 9 needs is intact." in shown[0].stdout
    assert "DAMAGED. Step 7 is intact" in shown[1].stdout
    reasons = [one.reason for one in lightck.recover(path).rejected]
    assert len(reasons) == 2
    assert all(
        "The replay of the parameter '0.bias' differs from the training after the update of step 8: page 0 of" in one
        for one in reasons
    )


def test_other_conditions_are_a_warning(pool, caplog):
    found = train(model := net(), adamw(model))
    found.steps[-1].state["fingerprint"]["torch"] = "1.0"
    with caplog.at_level(logging.WARNING):
        assert_recovers(TrainedPool(found).write(pool), found)
    assert f"replayed under other conditions than in the training (torch 1.0 -> {torch.__version__})" in caplog.text


def test_process_that_flushes_denormals_is_named(pool):
    found = train(model := net(), adamw(model))
    path = TrainedPool(found).write(pool)
    torch.set_flush_denormal(True)
    try:
        with pytest.raises(ReplayError, match=r"Call torch.set_flush_denormal"):
            lightck.recover(path)
    finally:
        torch.set_flush_denormal(False)


def test_without_sentinels_the_write_is_not_noticed(pool):
    """So the test above shows that they are compared."""
    found = trained(model := net(), adamw(model))
    for number in range(STEPS):
        if number == 7:
            model[0].bias.data.mul_(1.5)
        found.update(batch(number))
    checkpoint = lightck.recover(TrainedPool(found, has_sentinels=False).write(pool))
    assert checkpoint.step == STEPS
    assert not is_step(checkpoint, found.steps[-1].everything)


def test_nothing_that_can_be_recovered_is_an_error_with_all_reasons(pool):
    found = train(model := net(), adamw(model))
    made = TrainedPool(found)
    path = made.write(pool)
    for slot, place in itertools.product(range(len(made.sb.slots)), (0, 1)):
        poke(path, made.sb.manifest_at(slot, place), bytes(8))
    with pytest.raises(CorruptPoolError, match=r"No checkpoint in the pool .* can be used: step 9"):
        lightck.recover(path)


# -- hostile values --------------------------------------------------------------------------------------------------


@functools.cache
def small() -> Trained:
    found = trained(model := Words(), torch.optim.SGD(model.table.parameters(), 0.1), adamw(model.out, fused=True))
    for number in range(5):
        found.update(words(number))
    _open.pop().close()
    return found


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_hostile_update_value_costs_its_step_or_raises_an_error_of_the_tree(data):
    """The value of the last update is replaced by another, with right checksums everywhere."""
    found = copy.copy(small())
    value = hostile(copy.deepcopy(found.steps[-1].state["update"]), data)
    last = replace(found.steps[-1], state={**found.steps[-1].state, "update": value})
    found.steps = [*found.steps[:-1], last]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = TrainedPool(found).write(Path(folder) / "run.pool")
        for command in (["inspect"], ["verify"], ["verify", "--replay"]):
            done = CliRunner().invoke(main, [*command, str(path)])
            assert "Traceback" not in done.output
            assert done.exit_code in (0, 1, 2)
        try:
            checkpoint = lightck.recover(path)
        except LightckError:
            return
    assert checkpoint.step in (4, 5)
    if checkpoint.step == 4:
        assert is_step(checkpoint, found.steps[3].everything)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_what_cannot_make_updates_again_refuses_the_pool_by_name(pool):
    found = train(model := net(), adamw(model))
    path = TrainedPool(found).write(pool)
    with pytest.raises(FormatError, match=r"holds gradient records: .*without lazy="):
        lightck.recover(path, lazy=True)
    with pytest.raises(FormatError, match="holds gradient records"):
        lightck.attach(model, path, resume=True)
    done = CliRunner().invoke(main, ["inspect", "--pieces", str(path)])
    assert done.exit_code == 2
    assert "with gradient records" in done.stderr


def test_recovered_checkpoint_is_exported(pool):
    found = train(model := net(), adamw(model))
    file = pool.with_name("model.pt")
    done = CliRunner().invoke(main, ["export", str(TrainedPool(found).write(pool)), str(file)])
    assert done.exit_code == 0, done.stderr
    assert same(dict(torch.load(file)), weights(model))
