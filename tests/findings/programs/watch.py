"""Loops in which nothing was saved, or in which a checkpoint held what the loop does once more after a resume."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from . import UPDATES, Run, program
from .plain import mlp


def mean_square(model: torch.nn.Module) -> torch.Tensor:
    return F.mse_loss(model(torch.randn(6, 8)), torch.zeros(6, 4))


# -- no optimizer is followed ----------------------------------------------------------------------------------------


@program()
def by_hand_through_data(run: Run) -> None:
    """Writes through ``.data`` move no version counter. The last layer is updated at every third step only, so it
    looks frozen to who does not compare."""
    run.seed()
    model = mlp()
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        loss = mean_square(model)
        loss.backward()
        for name, p in model.named_parameters():
            if not name.startswith("2.") or run.updates % 3 == 2:
                p.data.add_(p.grad, alpha=-0.05)
            p.grad = None
        run.updated(loss)
        session.end_step()
    run.finished(model, [])


class Momentum:
    """An optimizer that only looks like one."""

    def __init__(self, params: Any, lr: float) -> None:
        self.params = list(params)
        self.lr = lr
        self.speed = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self) -> None:
        for p, v in zip(self.params, self.speed, strict=True):
            v.mul_(0.9).add_(p.grad)
            p -= self.lr * v
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"speed": self.speed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.speed = [v.clone() for v in state["speed"]]


@program()
def optimizer_of_its_own_kind(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = Momentum(model.parameters(), 0.02)
    session = run.attach(model, state={"momentum": opt})
    for _ in range(session.step, UPDATES):
        loss = mean_square(model) + mean_square(model)  # two forwards in each iteration
        loss.backward()
        opt.step()
        run.updated(loss)
        session.end_step()
    run.finished(model, [], {"momentum": opt})


@program(loses=4)
def by_hand_at_an_interval(run: Run) -> None:
    run.seed()
    model = torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(4))
    session = run.attach(model, optimizer=[], interval=3)
    for _ in range(session.step, UPDATES):
        loss = mean_square(model)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
                p.grad = None
        run.updated(loss)
        session.end_step()
    run.finished(model, [])
