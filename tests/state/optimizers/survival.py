"""One check for every optimizer: does a training that was killed end with the bytes of one that was not?

``survives`` runs the same small training three times: without lightck; with it, while its pool is copied in
mid-training (what a kill leaves behind); and from that copy, in fresh objects. Losses, weights, every optimizer's
``state`` and groups are compared bit for bit. Optimizers are read through ``state`` and ``param_groups``, never
``state_dict``.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from toys import batch, checkpoints, crashed, killed_child, net, same, weights

import lightck
from lightck.pool.reader import open_pool

WIDTH = 400
"""Rows of the hidden layer: its state is too large to be copied at the boundary itself, all else is small."""
STEPS, MORE = 3, 3

Make = Callable[[nn.Module], Sequence[Any]]
"""A fresh optimizer, or several, for a model."""
Iterate = Callable[[nn.Module, Sequence[Any], int], torch.Tensor]
"""One iteration: its loss."""


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    weight = next(model.parameters())
    return model(batch(number).to(weight.dtype)).float().square().mean()


def plain(model: nn.Module, optimizers: Sequence[Any], number: int) -> torch.Tensor:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = loss_of(model, number)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss


def closure_of(model: nn.Module, optimizer: Any, number: int) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        return loss

    return closure


def with_closure(model: nn.Module, optimizers: Sequence[Any], number: int) -> torch.Tensor:
    (optimizer,) = optimizers
    return optimizer.step(closure_of(model, optimizer, number))


def small_net(seed: int) -> nn.Module:
    return net(WIDTH, seed)


@dataclass
class Training:
    """A model, its optimizers and how they step."""

    make: Make
    iterate: Iterate = plain
    build: Callable[[int], nn.Module] = small_net
    seed: int = 0

    def __post_init__(self) -> None:
        self.model = self.build(self.seed)
        self.optimizers = list(self.make(self.model))
        self.losses: dict[int, torch.Tensor] = {}

    def again(self) -> Training:
        """Return the training of another process: the same program, with other initial weights."""
        return Training(self.make, self.iterate, self.build, self.seed + 7)

    def learn(self, start: int, steps: int) -> None:
        for number in range(start, start + steps):
            self.losses[number] = self.iterate(self.model, self.optimizers, number).detach().clone()

    def bytes(self) -> dict[str, Any]:
        """Return the whole state of the training, by parameter position."""
        return copy.deepcopy({"model": weights(self.model), "optimizers": list(map(raw_state, self.optimizers))})


def raw_state(optimizer: Any) -> dict[str, Any]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "state": {i: optimizer.state[p] for i, p in enumerate(params) if p in optimizer.state},
        "rest": {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)},
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
    }


Options = Mapping[str, Any]


def open_session(training: Training, pool: Path, **options: Any) -> lightck.Session:
    options.setdefault("optimizer", training.optimizers)
    return lightck.attach(training.model, pool, **options)


def survives(
    pool: Path,
    training: Training,
    *,
    attach: Callable[[Training], Options] = lambda training: {},
    steps: int = STEPS,
    more: int = MORE,
) -> lightck.Checkpoint:
    """Assert that the training survives. Return the checkpoint that it continued from."""
    never_killed = Training(training.make, training.iterate, training.build, training.seed)
    never_killed.learn(0, steps + more)
    held = {}
    with open_session(training, pool, **attach(training)) as session:
        for number in range(steps):
            training.learn(number, 1)
            held[number + 1] = training.bytes()
        wait_for(session, steps - 1)
        image = crashed(pool)
        training.learn(steps, more)
    assert_same(training, never_killed, "lightck disturbed the training")
    checkpoint = lightck.recover(image)
    assert checkpoint.step in (steps - 1, steps), checkpoint
    goes_on(image, training.again(), never_killed, checkpoint.step, attach, held)
    return checkpoint


def wait_for(session: lightck.Session, step: int) -> None:
    """Wait until this step is committed, or a later one (a forward of the loop itself may have closed it)."""
    deadline = time.monotonic() + 20
    while (session.committed or 0) < step:
        assert time.monotonic() < deadline, f"step {step} was not committed, {session.committed} was"
        time.sleep(0.0005)


def goes_on(
    image: Path,
    training: Training,
    never_killed: Training,
    step: int,
    attach: Callable[[Training], Options],
    held: Mapping[int, Any] | None = None,
) -> None:
    """Assert that a fresh training on this pool begins at ``step`` and ends as the other one did."""
    with open_session(training, image, resume=True, **attach(training)) as session:
        assert session.step == step
        if held is not None:
            assert_equal(training.bytes(), held[step], "what was restored")
        training.learn(step, max(never_killed.losses) + 1 - step)
    assert_same(training, never_killed, "the resumed training differs")


def survives_kill_9(
    pool: Path,
    training: Training,
    *,
    attach: Callable[[Training], Options] = lambda training: {},
    steps: int = STEPS,
    more: int = MORE,
) -> None:
    """As ``survives``, with a process that is really killed."""
    never_killed = Training(training.make, training.iterate, training.build, training.seed)
    never_killed.learn(0, steps + more)

    def work() -> None:
        open_session(training, pool, **attach(training))
        training.learn(0, steps)
        os.kill(os.getpid(), signal.SIGKILL)

    killed_child(work)
    step = lightck.recover(pool).step
    assert step in (steps - 1, steps)
    goes_on(pool, training.again(), never_killed, step, attach)


def assert_same(one: Training, other: Training, what: str) -> None:
    for number, loss in one.losses.items():
        assert same(loss, other.losses[number]), f"{what}: loss {number} is {loss}, not {other.losses[number]}"
    assert_equal(one.bytes(), other.bytes(), what)


def assert_equal(one: Any, other: Any, what: str) -> None:
    assert same(one, other), f"{what}: {', '.join(differences(one, other))}"


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Describe where two values differ, for a message."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [d for k in one for d in differences(one[k], other[k], f"{path}/{k}")]
    if isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{path}/{i}")]
    return [] if same(one, other) else [f"{path}: {brief(one)} against {brief(other)}"]


def brief(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() > 4:
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} {value!r:.80}"


def loads_by_itself(checkpoint: lightck.Checkpoint, training: Training) -> None:
    """Assert that the optimizer's own ``load_state_dict`` accepts ``ckpt.optimizer``, and training continues from
    there."""
    fresh = training.again()
    fresh.model.load_state_dict(checkpoint.model)
    saved = checkpoint.optimizer
    for optimizer, state in zip(fresh.optimizers, saved if isinstance(saved, list) else [saved], strict=True):
        optimizer.load_state_dict(state)
    fresh.learn(checkpoint.step, max(training.losses) + 1 - checkpoint.step)
    assert_same(fresh, training, "loaded by load_state_dict")


def was_predicted(pool: Path) -> None:
    """Whether every tensor of the newest checkpoint lies in the table that was laid out at attach."""
    checkpoint = checkpoints(pool)[0]
    table = {entry.name: entry for entry in checkpoint.reader.entries}
    for name, entry in checkpoint.entries.items():
        assert name in table, f"{name} was not foreseen"
        assert table[name].can_hold(entry), f"{entry} was foreseen as {table[name]}"


def pool_uuid(pool: Path) -> bytes:
    """Return the pool's UUID, which is another one after each relayout."""
    reader = open_pool(str(pool))
    try:
        return reader.superblock.uuid
    finally:
        reader.close()
