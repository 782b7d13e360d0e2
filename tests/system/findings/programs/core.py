"""Writes to tensors that nobody announces: by ``.data``, by numpy, by a forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from . import UPDATES, Run, program
from .plain import mlp


class Frozen(nn.Module):
    """A head on frozen parts of 16 KiB each: more than what is copied at once at the boundary."""

    def __init__(self, parts: int = 5) -> None:
        super().__init__()
        self.base = nn.ParameterList(nn.Parameter(torch.rand(512, 8), requires_grad=False) for _ in range(parts))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.base:
            x = x + part[: len(x)]
        return self.head(x)


def iterate(run: Run, session: Any, model: nn.Module, opt: Any, top: Any, loss_of: Any) -> None:
    """``top`` is called with the number of the update that comes next."""
    while run.updates < UPDATES:
        number = run.updates
        top(number)
        loss = loss_of(number)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt])


@program(loses=3)
def frozen_weight_scaled_once_by_data(run: Run) -> None:
    run.seed()
    model = Frozen()
    opt = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    session = run.attach(model)

    def top(number: int) -> None:
        if number == 6:
            model.base[3].data.mul_(0.5)

    iterate(run, session, model, opt, top, lambda _: model(torch.randn(6, 8)).pow(2).mean())


@program(loses=3)
def frozen_weight_scaled_behind_the_update(run: Run) -> None:
    """Before the boundary: the checkpoint of this step must hold it already."""
    run.seed()
    model = Frozen()
    opt = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    session = run.attach(model)
    while run.updates < UPDATES:
        loss = model(torch.randn(6, 8)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if run.updates == 6:
            model.base[3].data.mul_(0.5)
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt])


@program(loses=3)
def lora_merged_for_an_evaluation(run: Run) -> None:
    """Merged and taken apart again by ``.data``: the base's last bits are not what they were."""
    run.seed()
    model = Frozen()
    opt = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    delta = torch.rand(512, 8, generator=torch.Generator().manual_seed(5)) * 1e-3
    session = run.attach(model)
    while run.updates < UPDATES:
        loss = model(torch.randn(6, 8)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if (run.updates + 1) % 4 == 0:
            for part in model.base:
                part.data.add_(delta)
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 8))
            model.train()
            for part in model.base:
                part.data.sub_(delta)
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt])


class WithTarget(nn.Module):
    """An online network and its target, as in DQN."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = mlp(), mlp()
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.online(x) - self.target(x.flip(0))


@program(loses=3)
def target_network_copied_by_data(run: Run) -> None:
    run.seed()
    model = WithTarget()
    opt = torch.optim.Adam(model.online.parameters(), lr=1e-2)
    session = run.attach(model)
    while run.updates < UPDATES:
        loss = model(torch.randn(6, 8)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if (run.updates + 1) % 5 == 0:
            for to, by in zip(model.target.parameters(), model.online.parameters(), strict=True):
                to.data.copy_(by.data)
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt])


@program(loses=3)
def bf16_weights_from_a_master(run: Run) -> None:
    """The optimizer updates fp32 copies outside the model; the model's own weights follow by ``.data``."""
    run.seed()
    model = mlp().bfloat16()
    master = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    opt = torch.optim.AdamW(master, lr=1e-2)
    session = run.attach(model, optimizer=opt)
    while run.updates < UPDATES:
        loss = model(torch.randn(6, 8).bfloat16()).float().pow(2).mean()
        loss.backward()
        for to, by in zip(master, model.parameters(), strict=True):
            to.grad, by.grad = by.grad.float(), None
        opt.step()
        for to, by in zip(model.parameters(), master, strict=True):
            to.data.copy_(by.data)
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt])


class Replay:
    """A buffer of transitions that lies in numpy, as in most RL programs."""

    def __init__(self) -> None:
        self.data, self.at = np.zeros((512, 8), np.float32), 0

    def push(self, x: torch.Tensor) -> None:
        for row in x.numpy():
            self.data[self.at % len(self.data)] = row
            self.at += 1

    def sample(self) -> torch.Tensor:
        return torch.from_numpy(self.data[np.random.randint(0, min(self.at, len(self.data)), 6)].copy())

    def state_dict(self) -> dict[str, Any]:
        return {"data": torch.from_numpy(self.data), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data[:] = state["data"].numpy()
        self.at = state["at"]


@program(loses=3)
def replay_buffer_written_through_numpy(run: Run) -> None:
    run.seed()
    model, buffer = mlp(), Replay()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model, state={"buffer": buffer})
    while run.updates < UPDATES:
        buffer.push(torch.randn(40, 8))
        loss = F.mse_loss(model(buffer.sample()), torch.zeros(6, 4))
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt], {"buffer": buffer})


class Decayed(nn.Module):
    """Its weight is scaled through ``.data`` at the start of each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = nn.Linear(8, 64), nn.Parameter(torch.rand(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classes.data.mul_(0.99)
        return torch.tanh(self.body(x)) @ self.classes.t()


class Normalised(nn.Module):
    """Its weight is normalised through ``.data`` at the start of each forward, as in ArcFace."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = nn.Linear(8, 64), nn.Parameter(torch.rand(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classes.data.div_(self.classes.data.norm(dim=1, keepdim=True))
        return torch.tanh(self.body(x)) @ self.classes.t()


@program(loses=3)
def weights_normalised_by_the_forward(run: Run) -> None:
    run.seed()
    model = Normalised()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = run.attach(model)
    iterate(run, session, model, opt, lambda _: None, lambda _: model(torch.randn(6, 8)).pow(2).mean())


@program(loses=3)
def weights_scaled_by_the_forward(run: Run) -> None:
    """The boundary is the forward itself: no ``end_step()``."""
    run.seed()
    model = Decayed()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model)
    while run.updates < UPDATES:
        loss = model(torch.randn(6, 8)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.updated(loss)
    run.finished(model, [opt])


class Average:
    def __init__(self, model: nn.Module) -> None:
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for value, p in zip(self.values, model.parameters(), strict=True):
            value.data.mul_(0.9).add_(p.data, alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)


@program(loses=3)
def average_updated_at_the_top(run: Run) -> None:
    """Behind ``end_step()``: a resumed loop makes this update again, from what the checkpoint holds."""
    run.seed()
    model = mlp()
    average = Average(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model, state={"average": average})

    def top(number: int) -> None:
        if number:
            average.update(model)

    def loss_of(_: int) -> torch.Tensor:
        return model(torch.randn(6, 8)).pow(2).mean()

    while run.updates < UPDATES:
        top(run.updates)
        loss = loss_of(run.updates)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt], {"average": average})
