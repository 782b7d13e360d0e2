"""Trainings saved by ``Gradients`` in which a seed draws what happens: the optimizer, which layers a step uses, and
what a loop does after an update, before the next one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from crash.gradient_workloads import seeded
from crash.recorded import Pair, Workload
from crash.recording import Recorder
from lightck.pool.gradient_log import records_min
from lightck.strategy.gradients import Gradients

STEPS = 10
SESSIONS = 3

OPTIMIZERS: tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    lambda parameters: torch.optim.Adam(parameters, lr=0.05, amsgrad=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, foreach=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9),
    lambda parameters: torch.optim.NAdam(parameters, lr=0.05),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
)


class Layers(nn.Module):
    """Layers of which ``used`` are used in the next step, and buffers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 3, bias=number == 1) for number in range(3))
        self.norm = nn.BatchNorm1d(3)
        self.used = {0, 1, 2}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = torch.stack([layer(x) for number, layer in enumerate(self.layers) if number in self.used]).sum(0)
        y: torch.Tensor = self.norm(summed)
        return y * torch.arange(3.0)


class Died(Exception):
    """The loop ends in the middle."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The training of a seed."""

    seed: int

    @property
    def strategy(self) -> Gradients:
        rng = random.Random(f"{self.seed} strategy")
        base_every = rng.choice((2, 3, 3, 4))
        return Gradients(base_every, rng.choice((None, None, records_min(base_every, self.interval))))

    @property
    def interval(self) -> int:
        return random.Random(f"{self.seed} interval").choice((1, 1, 2, 3, 6))

    def build(self) -> Pair:
        seeded()
        model = Layers()
        return model, random.Random(f"{self.seed} optimizer").choice(OPTIMIZERS)(list(model.parameters()))

    def workload(self) -> Workload:
        return Workload(self.run, self.build, options={"strategy": self.strategy, "interval": self.interval})

    def run(self, recorder: Recorder) -> None:
        rng = random.Random(f"{self.seed} events")
        for _ in range(rng.randint(1, SESSIONS)):
            model, optimizer = self.build()
            assert isinstance(model, Layers)
            with (
                suppress(Died),
                recorder.attach(
                    model, optimizer, strategy=self.strategy, interval=self.interval, resume=True
                ) as session,
            ):
                for number in range(session.step, session.step + rng.randint(3, STEPS)):
                    _step(rng, model, optimizer, number)
                    _between(rng, model, optimizer)
                    recorder.note(model, optimizer)
                    if rng.random() < 0.2:
                        session.flush()
                if rng.random() < 0.3:
                    raise Died
                if rng.random() < 0.2:
                    session.close(done=True)


def _step(rng: random.Random, model: Layers, optimizer: torch.optim.Optimizer, number: int) -> None:
    if rng.random() < 0.4:
        model.used = set(rng.sample(range(3), rng.randint(1, 3)))
    optimizer.zero_grad(set_to_none=rng.random() < 0.9)
    x = torch.tensor([[1.0, number], [0.5, -1.0], [number % 3, 0.25]])
    for _ in range(rng.choice((1, 1, 1, 2))):
        model(x).square().sum().backward()
    if rng.random() < 0.2:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _between(rng: random.Random, model: Layers, optimizer: torch.optim.Optimizer) -> None:
    """What a loop does after an update. Most of it makes the record of the update useless."""
    parameter = rng.choice(list(model.parameters()))
    what = rng.random()
    if what < 0.3:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    elif what < 0.36:
        with torch.no_grad():
            parameter.clamp_(-0.1, 0.1)
    elif what < 0.42:
        parameter.data.mul_(0.5)
    elif what < 0.48 and parameter.grad is not None:
        parameter.grad.zero_()
    elif what < 0.54:
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    elif what < 0.58:
        optimizer.load_state_dict(optimizer.state_dict())
    elif what < 0.62:
        parameter.requires_grad_(not parameter.requires_grad)
