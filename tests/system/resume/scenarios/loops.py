"""The plain loop, and what is commonly added to it: a scheduler, clipping, norm layers, evaluation, lr by hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

from ..run import Run
from . import add, scenario
from .parts import UPDATES, drawn_batch, fixed_batch, is_moved, mlp


def plain(run: Run, make_optimizer: Any, **arguments: Any) -> None:
    """The loop of the tutorials: fixed batches, nothing random after the initialisation."""
    run.seed()
    model = mlp()
    opt = make_optimizer(model.parameters())
    session = run.attach(model, **arguments)
    for step in range(session.step, UPDATES):
        x, y = fixed_batch(step)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        run.here("before optimizer.step")
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


_PLAIN = {
    "plain loop": partial(torch.optim.AdamW, lr=1e-2),
    "adamw single-tensor": partial(torch.optim.AdamW, lr=1e-2, foreach=False, fused=False),
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True, amsgrad=True),
    "adamw fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "sgd with momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "lr in a tensor": partial(torch.optim.AdamW, lr=torch.tensor(1e-2)),
}
for _name, _make in _PLAIN.items():
    add(_name, partial(plain, make_optimizer=_make), places=("before optimizer.step",))
_adamw = partial(plain, make_optimizer=_PLAIN["plain loop"])
add("interval of 3", partial(_adamw, interval=3), places=("before optimizer.step",), loses=3)
add("four slots", partial(_adamw, slots=4), places=("before optimizer.step",), loses=3)


@scenario(places=("before scheduler.step", "after scheduler.step"), sees={"lr moved": 12})
def scheduler(run: Run) -> None:
    """Warm-up, then cosine decay, at every update; one group has a one-cycle rate of its own."""
    run.seed()
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2:].parameters()}]
    opt = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    warmup = LinearLR(opt, 0.1, total_iters=4)
    sched = SequentialLR(opt, [warmup, CosineAnnealingLR(opt, UPDATES - 4)], milestones=[4])
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        x, y = fixed_batch(step)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        before = opt.param_groups[0]["lr"]
        run.here("before scheduler.step")
        sched.step()
        run.here("after scheduler.step")
        if opt.param_groups[0]["lr"] != before:
            run.saw("lr moved")
    run.finished(model, [opt], {"scheduler": sched})


@scenario(places=("after scheduler.step",), sees={"beta moved": 12})
def one_cycle_scheduler_moves_the_betas(run: Run) -> None:
    """OneCycleLR writes lr and Adam's first beta into the groups."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = OneCycleLR(opt, max_lr=0.05, total_steps=UPDATES + 1)
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        x, y = fixed_batch(step)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        before = opt.param_groups[0]["betas"]
        sched.step()
        run.here("after scheduler.step")
        if opt.param_groups[0]["betas"] != before:
            run.saw("beta moved")
    run.finished(model, [opt], {"scheduler": sched})


@scenario(places=("between micro-batches", "after clipping"), sees={"clipped": 5})
def accumulation_and_clipping(run: Run) -> None:
    """Three micro-batches for an update, drawn by hand, and the norm of the sum is clipped."""
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        opt.zero_grad()
        total = 0.0
        for micro in range(3):
            x, y = drawn_batch()
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            total += float(loss.detach())
            if micro == 1:
                run.here("between micro-batches")
        if nn.utils.clip_grad_norm_(model.parameters(), 0.3) > 0.3:
            run.saw("clipped")
        run.here("after clipping")
        opt.step()
        run.updated(total)
    run.finished(model, [opt])


@scenario(places=("after forward",), sees={"running mean moved": 14})
def batchnorm(run: Run) -> None:
    """Buffers that a forward moves: running mean and variance, and a counter."""
    run.seed()
    model = mlp(norm=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        x, y = fixed_batch(step)
        before = model[1].running_mean.clone()
        loss = F.cross_entropy(model(x), y)
        run.here("after forward")
        if is_moved(before, model[1].running_mean):
            run.saw("running mean moved")
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


@scenario(places=("after forward",), sees={"dropped": 14})
def dropout(run: Run) -> None:
    """The forward draws from torch's global generator."""
    run.seed()
    model = mlp(dropout=0.3)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        x, y = fixed_batch(step)
        before = torch.get_rng_state()
        loss = F.cross_entropy(model(x), y)
        run.here("after forward")
        if is_moved(before, torch.get_rng_state()):
            run.saw("dropped")
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


@scenario(places=("after the batch", "after forward"))
def batches_by_hand_without_end_step(run: Run) -> None:
    """Batches from python's, numpy's and torch's global generators, dropout in the forward, and no call in the loop."""
    run.seed()
    model = mlp(dropout=0.3, norm=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        x, y = drawn_batch()
        run.here("after the batch")
        loss = F.cross_entropy(model(x), y)
        run.here("after forward")
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


def evaluate(model: nn.Module, run: Run) -> float:
    """Draws its batches from the global generators, as nanoGPT does."""
    model.eval()
    with torch.no_grad():
        losses = []
        for i in range(2):
            x, y = drawn_batch()
            losses.append(float(F.cross_entropy(model(x), y)))
            if i:
                run.here("in evaluation")
    model.train()
    run.saw("evaluation")
    return sum(losses)


@scenario(places=("in evaluation", "after evaluation", "after end_step"), sees={"evaluation": 4})
def evaluation_with_end_step(run: Run) -> None:
    """An evaluation that draws from the global generators, and whose result is trained on; end_step() closes all."""
    run.seed()
    model = mlp(dropout=0.3, norm=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        x, y = drawn_batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        if step % 3 == 1:
            opt.param_groups[0]["lr"] = 1e-2 / (1.0 + evaluate(model, run))
            run.here("after evaluation")
        session.end_step()
        run.here("after end_step")
    run.finished(model, [opt])


def _rate(step: int) -> float:
    return 1e-2 * (step + 1) / 4 if step < 4 else 1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * (step - 4) / UPDATES))


@scenario(places=("after the rate", "in evaluation"), sees={"evaluation": 3})
def lr_by_hand_as_in_nanogpt(run: Run) -> None:
    """nanoGPT's loop: the rate is set, every few steps is evaluated, then come micro-batches, clipping, the update."""
    run.seed()
    model = mlp(dropout=0.1)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        for group in opt.param_groups:
            group["lr"] = _rate(step)
        run.here("after the rate")
        if step % 4 == 0:
            evaluate(model, run)
        total = 0.0
        for _ in range(2):
            x, y = drawn_batch()
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        run.updated(total)
        opt.zero_grad(set_to_none=True)
    run.finished(model, [opt])


def pseudo_labels(run: Run, explicit: bool) -> None:
    """A forward in training mode without gradients comes first, and moves BatchNorm's buffers too."""
    run.seed()
    model = mlp(dropout=0.1, norm=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        x, _y = drawn_batch()
        with torch.no_grad():
            labels = model(x)
        loss = F.mse_loss(model(1.1 * x), labels)
        run.here("after forward")
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        if explicit:
            session.end_step()
    run.finished(model, [opt])


add("pseudo-labels with end_step", partial(pseudo_labels, explicit=True), places=("after forward",))
add("pseudo-labels without end_step", partial(pseudo_labels, explicit=False), places=("after forward",), listed=False)


class Counting(nn.Module):
    """Extra state that each training forward moves and uses, as the amax history of fp8 training is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * float(x.detach().abs().max())
        return x / self.scale

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def extra_state(run: Run, call_root: bool) -> None:
    """``call_root`` False: only a submodule is called, so that each checkpoint closes at the next step's pre-hook."""
    run.seed()
    model = nn.Sequential(mlp(dropout=0.2, norm=True), Counting())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        x, y = drawn_batch()
        loss = F.cross_entropy(model(x) if call_root else model[1](model[0](x)), y)
        run.here("after forward")
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


add("extra state", partial(extra_state, call_root=True), places=("after forward",))
add(
    "root forward never called",
    partial(extra_state, call_root=False),
    places=("after forward",),
    logs=("forward hook does not fire",),
)


class TiedConv(nn.Module):
    """A convolution in channels_last and two linear layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 48, 3, padding=1)
        self.norm = nn.BatchNorm2d(48)
        self.one, self.two = nn.Linear(48, 48), nn.Linear(48, 48)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, :, None, None].expand(-1, -1, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.two(self.one(F.relu(self.norm(self.conv(image))).mean((2, 3))))


@scenario(places=("before optimizer.step",), sees={"channels_last": 1, "tied": 1})
def channels_last_and_tied_weights(run: Run) -> None:
    run.seed()
    model = TiedConv().to(memory_format=torch.channels_last)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        x, y = fixed_batch(step)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        run.here("before optimizer.step")
        opt.step()
        run.updated(loss)
    if not opt.state[model.conv.weight]["exp_avg"].is_contiguous():
        run.saw("channels_last")
    if model.one.weight is model.two.weight:
        run.saw("tied")
    run.finished(model, [opt])


class Lit(nn.Module):
    """As in Lightning: a step calls the net inside, and the root's forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(dropout=0.2, norm=True)

    def forward(self, *_: Any) -> Any:
        raise AssertionError("the root forward is never called in this loop")

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)


def lightning(run: Run, make_optimizer: Any) -> None:
    """Forward and backward run inside ``opt.step(closure)``: the only boundary is the next step's pre-hook."""
    run.seed()
    model = Lit()
    opt = make_optimizer(model.parameters())
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        x, y = drawn_batch()
        losses = []

        def closure(x: torch.Tensor = x, y: torch.Tensor = y, losses: list[Any] = losses) -> torch.Tensor:
            opt.zero_grad()
            loss = model.training_step(x, y)
            run.here("in the closure")
            loss.backward()
            losses.append(loss)
            return loss

        opt.step(closure)
        if len(losses) > 1:
            run.saw("several evaluations")
        run.updated(losses[0])
    run.finished(model, [opt])


_LIT = {"places": ("in the closure",), "logs": ("forward hook does not fire",)}
add("lightning-like closure", partial(lightning, make_optimizer=partial(torch.optim.AdamW, lr=1e-2)), **_LIT)
add(
    "lbfgs closure",
    partial(lightning, make_optimizer=partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=4)),
    sees={"several evaluations": 10},
    **_LIT,
)
