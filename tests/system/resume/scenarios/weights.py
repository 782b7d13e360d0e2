"""Weights that somebody else than the optimizer writes: clamps, EMA, swaps, momentum encoders, masters in fp32."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from ..run import Run
from . import add, scenario
from .parts import UPDATES, drawn_batch, fixed_batch, fixed_data, is_moved, mlp


def clamp(run: Run, by_data: bool) -> None:
    """WGAN's weight clipping, right after the update; ``.data`` moves no version counter."""
    run.seed()
    model = mlp()
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        x, y = fixed_batch(step)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        run.here("before the clamp")
        before = model[2].weight.detach().clone()
        for p in model.parameters():
            if by_data:
                p.data.clamp_(-0.1, 0.1)
            else:
                with torch.no_grad():
                    p.clamp_(-0.1, 0.1)
        run.here("after the clamp")
        if is_moved(before, model[2].weight):
            run.saw("clamped")
    run.finished(model, [opt])


_CLAMP: dict[str, Any] = {"places": ("before the clamp", "after the clamp"), "sees": {"clamped": 10}}
add("weight clamp", partial(clamp, by_data=False), **_CLAMP)
add("weight clamp by data", partial(clamp, by_data=True), **_CLAMP)


class Ema:
    """Shadow weights with a decay that grows, as in many training scripts: large tensors and numbers in ``state``."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0
        self._backup: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(0.9, (1 + self.updates) / (10 + self.updates))
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p, 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in state["shadow"].items():
            self.shadow[name].copy_(tensor)
        self.updates = state["updates"]

    @torch.no_grad()
    def swap_in(self, model: nn.Module, by_data: bool = False) -> None:
        self._backup = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            (p.data if by_data else p).copy_(self.shadow[name])

    @torch.no_grad()
    def swap_out(self, model: nn.Module, by_data: bool = False) -> None:
        for name, p in model.named_parameters():
            (p.data if by_data else p).copy_(self._backup[name])


@scenario(places=("before ema.update", "after ema.update"))
def ema_in_state(run: Run) -> None:
    run.seed()
    model = mlp(dropout=0.1)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = Ema(model)
    session = run.attach(model, state={"ema": ema})
    for _ in range(session.step, UPDATES):
        x, y = drawn_batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        run.here("before ema.update")
        ema.update(model)
        run.here("after ema.update")
    run.finished(model, [opt], {"ema": ema})


@scenario(places=("before update_parameters", "in evaluation"), sees={"evaluation": 4})
def averaged_model_in_state(run: Run) -> None:
    """torch's own EMA, a module with buffers of its own, evaluated every few steps."""
    run.seed()
    model = mlp(norm=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    session = run.attach(model, state={"ema": ema})
    for step in range(session.step, UPDATES):
        x, y = fixed_batch(step)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        run.here("before update_parameters")
        ema.update_parameters(model)
        if step % 3 == 0:
            ema.eval()
            with torch.no_grad():
                ema(x)
            run.here("in evaluation")
            run.saw("evaluation")
    run.finished(model, [opt], {"ema": ema})


def ema_swap(run: Run, when: str, by_data: bool, paused: bool) -> None:
    """The EMA's weights are swapped in for an evaluation and out again."""
    run.seed()
    model = mlp(dropout=0.1, norm=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = Ema(model)
    session = run.attach(model, state={"ema": ema})

    def evaluate() -> None:
        before = model[0].weight.detach().clone()
        with session.paused() if paused else nullcontext():
            ema.swap_in(model, by_data)
            if is_moved(before, model[0].weight):
                run.saw("swapped")
            model.eval()
            run.here("during the swap")
            with torch.no_grad():
                model(fixed_batch(0)[0])
            model.train()
            ema.swap_out(model, by_data)

    for step in range(session.step, UPDATES):
        if when == "before the batch" and step % 2:
            evaluate()
        x, y = drawn_batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        ema.update(model)
        if when == "after the update" and step % 2:
            evaluate()
            run.here("after the swap")
    run.finished(model, [opt], {"ema": ema})


add(
    "ema swapped in after the update",
    partial(ema_swap, when="after the update", by_data=False, paused=False),
    places=("during the swap", "after the swap"),
    sees={"swapped": 6},
)
add(
    "ema swapped in before the batch",
    partial(ema_swap, when="before the batch", by_data=False, paused=False),
    places=("during the swap",),
    sees={"swapped": 6},
)
add(
    "ema swapped in by data after the update",
    partial(ema_swap, when="after the update", by_data=True, paused=False),
    places=("during the swap", "after the swap"),
    sees={"swapped": 6},
)
add(
    "ema swapped in by data while paused",
    partial(ema_swap, when="before the batch", by_data=True, paused=True),
    places=("during the swap",),
    sees={"swapped": 6},
)


def ema_swap_behind_a_boundary(run: Run, paused: bool) -> None:
    """The weights are swapped in and out again after ``next()`` closed the checkpoint, while its copies run."""
    run.seed()
    model = mlp(dropout=0.1, norm=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = Ema(model)
    session = run.attach(model, state={"ema": ema})
    loader = session.loader(DataLoader(TensorDataset(*fixed_data(30)), 6, shuffle=True))

    def evaluate(place: str) -> None:
        before = model[0].weight.detach().clone()
        with session.paused() if paused else nullcontext():
            ema.swap_in(model)
            if is_moved(before, model[0].weight):
                run.saw("swapped")
            model.eval()
            run.here(place)
            with torch.no_grad():
                model(fixed_batch(0)[0])
            model.train()
            ema.swap_out(model)

    for _ in range(loader.epoch, 3):
        for i, (x, y) in enumerate(loader, loader.start):
            if i % 2:
                evaluate("during the swap")
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            run.updated(loss)
            ema.update(model)
        evaluate("during the swap behind the pass")
    run.finished(model, [opt], {"ema": ema})


_BEHIND: dict[str, Any] = {
    "places": ("during the swap", "during the swap behind the pass"),
    "sees": {"swapped": 8},
}
add("ema swapped in behind a boundary while paused", partial(ema_swap_behind_a_boundary, paused=True), **_BEHIND)
# If the swapped weights were copied, the checkpoint is given up: nothing shows that the weights were restored.
add(
    "ema swapped in behind a boundary unannounced",
    partial(ema_swap_behind_a_boundary, paused=False),
    loses=2,
    **_BEHIND,
)


class Contrast(nn.Module):
    """A query encoder that is trained, a key encoder that follows it, and a queue of keys (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.q = mlp()
        self.k = copy.deepcopy(self.q)
        for p in self.k.parameters():
            p.requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 32))
        self.register_buffer("head", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = F.normalize(self.q(x))
        with torch.no_grad():
            key = F.normalize(self.k(x + 0.1 * torch.randn_like(x)))
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        at = int(self.head)
        self.queue[:, at : at + len(x)] = key.T[:, : 32 - at]
        self.head[0] = (at + len(x)) % 32
        return F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))


def momentum_encoder(run: Run, in_place: bool) -> None:
    run.seed()
    model = Contrast()
    opt = torch.optim.SGD(model.q.parameters(), lr=0.3, momentum=0.9)
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        x, _ = drawn_batch()
        loss = model(x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
        run.here("before the key encoder follows")
        before = model.k[2].weight.detach().clone()
        for q, k in zip(model.q.parameters(), model.k.parameters(), strict=True):
            if in_place:
                k.data.mul_(0.9).add_(q.data, alpha=0.1)
            else:
                k.data = k.data * 0.9 + q.data * 0.1
        run.here("after the key encoder followed")
        if is_moved(before, model.k[2].weight):
            run.saw("followed")
    run.finished(model, [opt])


_MOCO: dict[str, Any] = {
    "places": ("before the key encoder follows", "after the key encoder followed"),
    "sees": {"followed": 14},
}
add("momentum encoder by new data", partial(momentum_encoder, in_place=False), **_MOCO)
add("momentum encoder by data in place", partial(momentum_encoder, in_place=True), **_MOCO)


class MasterAdam(torch.optim.Optimizer):
    """Adam for bf16 parameters with master weights and moments in fp32, as training scripts have it."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["master"] = p.float()
                    state["exp_avg"] = torch.zeros_like(state["master"])
                    state["exp_avg_sq"] = torch.zeros_like(state["master"])
                state["step"] += 1
                b1, b2 = group["betas"]
                grad = p.grad.float()
                state["exp_avg"].lerp_(grad, 1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
                rate = group["lr"] * (1 - b2 ** state["step"]) ** 0.5 / (1 - b1 ** state["step"])
                state["master"].addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-rate)
                p.copy_(state["master"])


@scenario(places=("before optimizer.step",), sees={"fp32 state of a bf16 parameter": 1})
def bf16_parameters_with_fp32_state(run: Run) -> None:
    run.seed()
    model = mlp().to(torch.bfloat16)
    opt = MasterAdam(model.parameters())
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        x, y = fixed_batch(step)
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        opt.zero_grad()
        loss.backward()
        run.here("before optimizer.step")
        opt.step()
        run.updated(loss)
    weight = model[2].weight
    if weight.dtype == torch.bfloat16 and opt.state[weight]["master"].dtype == torch.float32:
        run.saw("fp32 state of a bf16 parameter")
    run.finished(model, [opt])


@scenario(places=("after the change",), sees={"unfrozen": 1, "frozen": 1})
def layers_frozen_and_unfrozen_in_mid_training(run: Run) -> None:
    """The middle layer joins at update 6 (its state appears then), the first one rests from update 9 on."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for step in range(session.step, UPDATES):
        model[2].requires_grad_(step >= 6)
        model[0].requires_grad_(step < 9)
        if step in (6, 9):
            run.here("after the change")
            run.saw("unfrozen" if step == 6 else "frozen")
        x, y = fixed_batch(step)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])
