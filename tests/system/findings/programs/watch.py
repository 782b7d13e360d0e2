"""Loops in which nothing was saved, or in which a checkpoint held what the loop does once more after a resume."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional as F

from . import UPDATES, Run, program
from .plain import mlp


def mean_square(model: torch.nn.Module) -> torch.Tensor:
    return F.mse_loss(model(torch.randn(6, 8)), torch.zeros(6, 4))


# -- no optimizer is followed ----------------------------------------------------------------------------------------


@program(loses=1)
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


@program(loses=1)
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


@program(loses=3)
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


# -- what the loop moves at its top ----------------------------------------------------------------------------------


class TokensLite:
    """As in nanoGPT's successors: no iterator, a position, and a method that gives the next batch."""

    def __init__(self) -> None:
        self.tokens = torch.randn(700, 8, generator=torch.Generator().manual_seed(5))
        self.position = 0

    def next_batch(self) -> torch.Tensor:
        self.position += 6
        return self.tokens[self.position - 6 : self.position]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def tokens_lite(run: Run, *, ends_step: bool) -> None:
    run.seed()
    model, data = mlp(), TokensLite()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model, state={"data": data})
    for _ in range(session.step, UPDATES):
        loss = model(data.next_batch()).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        if ends_step:
            session.end_step()
    run.finished(model, [opt], {"data": data})


@program()
def batches_from_an_object(run: Run) -> None:
    tokens_lite(run, ends_step=False)


@program()
def batches_from_an_object_with_end_step(run: Run) -> None:
    tokens_lite(run, ends_step=True)


def scheduled(run: Run, *, at_top: bool) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        if at_top and step:
            sched.step()
        loss = mean_square(model)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        if not at_top:
            sched.step()
    run.finished(model, [opt], {"sched": sched})


@program()
def scheduler_at_the_top(run: Run) -> None:
    scheduled(run, at_top=True)


@program()
def scheduler_at_the_end(run: Run) -> None:
    scheduled(run, at_top=False)


@program()
def weight_decay_at_the_top(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        for p in model.parameters():
            p.data.mul_(0.99)
        loss = mean_square(model)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


@program()
def rate_at_the_top(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        opt.param_groups[0]["lr"] *= 0.9
        loss = mean_square(model)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


@program()
def rate_by_step_at_the_top(run: Run) -> None:
    """Right: what is set there depends on the step alone."""
    run.seed()
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        opt.param_groups[0]["lr"] = 5e-2 * 0.9 ** (step + 1)
        loss = mean_square(model)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


class Meter:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def update(self, loss: Any) -> None:
        self.seen.append(float(loss))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def parts_are_called(run: Run, *, meters_before_the_step: bool) -> None:
    """The model's own forward never fires, so a checkpoint closes at the step of the optimizer."""
    run.seed()
    model, meter = torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(4)), Meter()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model, state={"meter": meter})
    for _ in range(session.step, UPDATES):
        loss = (model[1](model[0](torch.randn(6, 8))) - 1).pow(2).mean()
        if meters_before_the_step:
            meter.update(loss.detach())
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        if not meters_before_the_step:
            meter.update(loss.detach())
    run.finished(model, [opt], {"meter": meter})


@program()
def meter_before_the_step(run: Run) -> None:
    parts_are_called(run, meters_before_the_step=True)


@program()
def meter_behind_the_step(run: Run) -> None:
    parts_are_called(run, meters_before_the_step=False)


def two_optimizers(run: Run, *, meters_before_the_step: bool) -> None:
    """With two a forward closes nothing: a checkpoint closes at the first step of the next round."""
    run.seed()
    meter = Meter()
    model = torch.nn.ModuleDict({"body": mlp(), "head": torch.nn.Linear(4, 1)})
    body = torch.optim.Adam(model["body"].parameters(), lr=1e-2)
    head = torch.optim.SGD(model["head"].parameters(), lr=1e-2, momentum=0.9)
    session = run.attach(model, state={"meter": meter})
    for _ in range(session.step, UPDATES):
        loss = (model["head"](model["body"](torch.randn(6, 8))) - 1).pow(2).mean()
        if meters_before_the_step:
            meter.update(loss.detach())
        loss.backward()
        for opt in (body, head):
            opt.step()
            opt.zero_grad()
        run.updated(loss)
        if not meters_before_the_step:
            meter.update(loss.detach())
    run.finished(model, [body, head], {"meter": meter})


@program()
def meter_before_the_steps_of_two(run: Run) -> None:
    two_optimizers(run, meters_before_the_step=True)


@program()
def meter_behind_the_steps_of_two(run: Run) -> None:
    two_optimizers(run, meters_before_the_step=False)


@program()
def pseudo_labels_at_the_top(run: Run) -> None:
    """A forward in training mode without gradients moves the running statistics."""
    run.seed()
    model = torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(4))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        x = torch.randn(6, 8)
        with torch.no_grad():
            labels = model(x).sign()
        loss = (model(x) - labels).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


# -- several optimizers ----------------------------------------------------------------------------------------------


@program()
def optimizer_that_never_steps(run: Run) -> None:
    """An optional loss that is switched off: its optimizer is there, and no round of all is ever complete."""
    run.seed()
    model = torch.nn.ModuleDict({"body": mlp(), "extra": torch.nn.Linear(4, 1)})
    body = torch.optim.Adam(model["body"].parameters(), lr=1e-2)
    extra = torch.optim.SGD(model["extra"].parameters(), lr=1e-2)
    session = run.attach(model)
    for _ in range(session.step, 115):
        loss = model["body"](torch.randn(6, 8)).pow(2).mean()
        loss.backward()
        body.step()
        body.zero_grad()
        run.updated(loss)
    run.finished(model, [body, extra])


# -- a post-step hook of the user's ----------------------------------------------------------------------------------


class TooSteepError(Exception):
    pass


@program()
def post_step_hook_that_raises(run: Run) -> None:
    """The update was made, whatever a hook says behind it."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def complain(*_: Any) -> None:
        if run.updates % 3 == 1:
            raise TooSteepError

    opt.register_step_post_hook(complain)
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        loss = mean_square(model)
        opt.zero_grad()
        loss.backward()
        with suppress(TooSteepError):
            opt.step()
        run.updated(loss)
    run.finished(model, [opt])


@program()
def post_step_hook_that_draws(run: Run) -> None:
    """Noise and a running buffer, written by hooks around attach: they are part of the update."""
    run.seed()
    model = torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(4))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def noise(*_: Any) -> None:
        model[1].running_mean.add_(torch.randn(4) * 0.1)

    opt.register_step_post_hook(noise)
    session = run.attach(model)
    opt.register_step_post_hook(noise)
    for _ in range(session.step, UPDATES):
        loss = (model[1](model[0](torch.randn(6, 8))) - 1).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])
