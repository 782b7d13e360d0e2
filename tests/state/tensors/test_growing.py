"""Trainings whose tensors change while they run: each is killed, resumed, and ends as if it had never been killed."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import format_reference as reference
import pytest
import torch
from table import bits
from torch import nn
from toys import adam, batch, crashed, damage, everything, forward, net, same, train

import lightck
from lightck.errors import DriftError

CHANGE, STEPS = 3, 8
"""The iteration at which the training changes, and how many there are."""


class Growing:
    """A training that changes at one iteration. ``grown``: build it as it is after that."""

    def __init__(self, grown: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(4, 1500), nn.Tanh(), nn.Linear(1500, 2))
        self.build()
        if grown:
            self.change()

    def build(self) -> None:
        self.optimizer = adam(self.model)

    def change(self) -> None:
        raise NotImplementedError

    def iterate(self, number: int) -> None:
        if number == CHANGE:
            self.change()
        self.optimizer.zero_grad()
        forward(self.model, number).backward()
        self.optimizer.step()

    def seen(self) -> Any:
        return everything(self.model, self.optimizer)


class Unfrozen(Growing):
    """A frozen layer that the optimizer knows gets gradients."""

    def build(self) -> None:
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def change(self) -> None:
        self.model[0].requires_grad_(True)


class NewGroup(Growing):
    """A frozen layer is added to the optimizer later."""

    def build(self) -> None:
        self.model[0].requires_grad_(False)
        self.optimizer = adam(self.model)

    def change(self) -> None:
        self.model[0].requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.model[0].parameters()), "lr": 0.01})


class Experts(nn.Module):
    """The second expert is called only from iteration ``CHANGE`` on: before, its gradients are None."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 1500) for _ in range(2))
        self.awake = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([expert(x) for expert in self.experts[: self.awake]])


class LateExpert(Growing):
    def build(self) -> None:
        torch.manual_seed(0)
        self.model = Experts()
        self.optimizer = adam(self.model)

    def change(self) -> None:
        self.model.awake = 2


class Adapted(nn.Module):
    """A LoRA-like adapter around a frozen layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(5)
        self.down = nn.Parameter(torch.randn(3, base.in_features, generator=generator))
        self.up = nn.Parameter(torch.zeros(base.out_features, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Adapters(Growing):
    """All layers are frozen and wrapped under new names, and the optimizer gets other parameters."""

    def change(self) -> None:
        for index in (0, 2):
            self.model[index] = Adapted(self.model[index])
        old, fresh = self.optimizer, [p for p in self.model.parameters() if p.requires_grad]
        old.state.clear()
        old.param_groups[0]["params"] = fresh


class NewModules(Growing):
    def change(self) -> None:
        torch.manual_seed(7)
        self.model.append(nn.Linear(2, 1200))
        self.optimizer.add_param_group({"params": list(self.model[3].parameters())})


class Statistics(nn.Module):
    """One buffer is None at first and then counts, one grows with what it saw, and a third is removed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", None)
        self.register_buffer("history", torch.zeros(0, 2))
        self.register_buffer("warmup", torch.ones(2))
        self.register_buffer("mode", torch.zeros(3))

    def observe(self, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.count = torch.zeros(1500) if self.count is None else self.count + 1
            self.history = torch.cat([self.history, x])
            self.warmup = None
            self.mode = self.mode.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = 0.0 if self.count is None else self.count.mean() * self.mode.mean() + self.history.mean()
        return x + extra if self.warmup is None else x * self.warmup


class Buffers(Growing):
    """Resumed by a script that builds the buffers as every run does: small, or None."""

    def build(self) -> None:
        self.model.append(Statistics())
        self.optimizer = adam(self.model)

    def change(self) -> None:
        pass

    def iterate(self, number: int) -> None:
        super().iterate(number)
        if number >= CHANGE:
            self.model[3].observe(batch(number)[:, :2])


KINDS = [Unfrozen, NewGroup, LateExpert, Adapters, NewModules, Buffers]


@pytest.mark.parametrize("at", range(1, STEPS), ids=lambda at: f"killed_at_{at}")
@pytest.mark.parametrize("kind", KINDS)
def test_grown_training_resumes_bit_identical(pool, kind, at):
    whole = kind()
    for number in range(STEPS):
        whole.iterate(number)
    run = kind()
    with lightck.attach(run.model, pool, optimizer=run.optimizer) as session:
        for number in range(at):
            run.iterate(number)
            session.end_step()
        run.iterate(at)
        image = crashed(pool)
    done = lightck.recover(image).step
    assert done in (at, at - 1)
    again = kind(grown=done > CHANGE, seed=9)
    with lightck.attach(again.model, image, optimizer=again.optimizer, resume=True) as session:
        assert session.step == done
        for number in range(done, STEPS):
            again.iterate(number)
            session.end_step()
    assert same(again.seen(), whole.seen())
    assert same(dict(lightck.recover(image).model), dict(again.model.state_dict()))


def test_buffer_of_another_size_that_never_changed_is_drift(pool):
    model = net()
    model.register_buffer("mask", torch.ones(3))
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
    other = net()
    other.register_buffer("mask", torch.ones(4))
    with pytest.raises(DriftError, match=r"of another shape: model/mask: \[3\] saved, \[4\] live"):
        lightck.recover(pool, other)


def test_size_of_a_buffer_is_that_of_the_older_checkpoint_where_the_newest_is_damaged(pool):
    def build() -> Any:
        model = net()
        model.register_buffer("seen", None)
        return model

    model = build()
    optimizer = adam(model)
    sizes = {}
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(4):
            train(model, optimizer, 1, start=number)
            if number:
                model.seen = torch.rand(2000 * number)
                sizes[number + 1] = model.seen
            session.flush()
    damage(pool, "model/seen", steps=[4])
    other = build()
    assert lightck.recover(pool, other).step == 3
    assert same(other.seen, sizes[3])


# -- room ------------------------------------------------------------------------------------------------------------


class Parts:
    """An object for ``state=`` whose tensors appear and disappear."""

    def __init__(self) -> None:
        self.parts: dict[str, torch.Tensor] = {}

    def set(self, name: str, count: int, value: int) -> None:
        self.parts[name] = torch.full((count,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.parts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts = dict(state)


def files_used(pool: Any, steps: int, change: Callable[[Parts, int], None]) -> tuple[list[int], int]:
    """Return the pool's inode after each step of a training whose state changes at each step, and its final size."""
    model, parts, inodes = net(), Parts(), []
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, state={"parts": parts}) as session:
        for number in range(steps):
            train(model, optimizer, 1, start=number)
            change(parts, number)
            session.flush()
            inodes.append(pool.stat().st_ino)
            if number % 10 == 0 or number == steps - 1:
                assert same(lightck.recover(crashed(pool)).state["parts"], parts.parts)
        session.flush()
    again, other = net(seed=3), Parts()
    with lightck.attach(again, pool, optimizer=adam(again), state={"parts": other}, resume=True) as session:
        assert session.step == steps
        assert same(other.parts, parts.parts)
    return inodes, pool.stat().st_size


def relayouts(inodes: list[int]) -> int:
    return sum(a != b for a, b in itertools.pairwise(inodes))


def test_tensor_that_grows_at_every_step_causes_few_relayouts(pool):
    """From 40 KB to 4 MB: the number of relayouts follows the logarithm of the size, not the number of steps."""
    inodes, size = files_used(pool, 100, lambda p, n: p.set("a", 10_000 * (n + 1), n))
    assert relayouts(inodes) <= 8
    assert size <= 2 * 4 * 4_000_000 + (8 << 20), "room for about twice the tensor beside it, in each of two slots"


def test_tensor_that_alternates_between_two_shapes_needs_no_new_file(pool):
    inodes, _ = files_used(pool, 60, lambda p, n: p.set("a", 20_000 - 7 * (n % 2), n))
    assert relayouts(inodes[3:]) == 0


def test_names_that_come_and_go_need_no_new_file(pool):
    """A state keeps the last two of its tensors, each under a name of its own."""

    def change(parts: Parts, number: int) -> None:
        parts.set(f"step {number}", 9000, number)
        parts.parts.pop(f"step {number - 2}", None)

    inodes, size = files_used(pool, 60, change)
    assert relayouts(inodes) == 0
    assert size <= 8 << 20
    assert {v.manifest["step"] for v in reference.Pool(pool.read_bytes()).checkpoints()} == {59, 60}


def test_names_that_are_only_added_cause_few_relayouts(pool):
    inodes, _ = files_used(pool, 120, lambda p, n: p.set(f"part {n}", 6000, n))
    assert relayouts(inodes) <= 8


def test_model_that_grows_by_a_module_at_every_step(pool):
    model = net()
    optimizer = adam(model)
    inodes = []
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(40):
            model.append(nn.Linear(2, 2))
            optimizer.add_param_group({"params": list(model[-1].parameters())})
            train(model, optimizer, 1, start=number)
            session.flush()
            inodes.append(pool.stat().st_ino)
        assert same(dict(lightck.recover(crashed(pool)).model), dict(model.state_dict()))
    assert relayouts(inodes) <= 3


def test_tensor_that_is_gone_is_not_kept_alive(pool):
    model = net()
    model.append(nn.Linear(2, 2000))
    kept = weakref.ref(model[3].weight)
    optimizer = adam(model[:3])
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        del model[3]
        for number in range(2, 5):
            train(model, optimizer, 1, start=number)
            session.flush()
        gc.collect()
        assert kept() is None
    assert "3.weight" not in lightck.recover(pool).model


def test_changing_shapes_of_many_tensors_keep_left_out_tensors_exact(pool):
    """Extents pass from name to name while frozen parameters are left out: each checkpoint is exact."""
    model = net()
    frozen = nn.ParameterList(nn.Parameter(torch.rand(2000), requires_grad=False) for _ in range(4))
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 1)
        session.flush()
        model[0].frozen = frozen  # added after the layout
        for number in range(24):
            train(model, optimizer, 1, start=number)
            model.register_buffer("odd", torch.rand(200_000 + 40_000 * (number % 5)))  # one block, or two
            if number % 6 == 5:
                which = number // 6
                frozen[which] = nn.Parameter(torch.rand(3000 - 900 * (number % 2)), requires_grad=False)
            session.flush()
            assert same(dict(lightck.recover(pool).model), dict(model.state_dict()))
        assert session.stats().left_out >= 3
        independent = reference.Pool(pool.read_bytes()).checkpoints()
        assert len(independent) == 2
        assert independent[0].tensors["model/0.frozen.3"] == bits(frozen[3])
