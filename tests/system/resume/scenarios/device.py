"""Trainings on a CUDA device: half precision, graphs, streams, compiled models, batches that workers pinned.

They are run by ``tests/gpu``. ``LIGHTCK_TEST_DEVICE=cpu`` runs those that need nothing of CUDA.
Kernels are deterministic, so that two runs can be compared at all. Batches and noise are drawn on the device too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightck

from ..run import Run
from . import add
from .loaders import Items
from .parts import BATCH, FEATURES, UPDATES, drawn_batch, mlp

DEVICE = os.environ.get("LIGHTCK_TEST_DEVICE", "cuda")
WIDTH = 1024
"""A layer of 4 MiB: what is sent beside the computation."""
Pair = tuple[torch.Tensor, torch.Tensor]


def begin(run: Run) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    run.seed()


def net(**options: Any) -> nn.Sequential:
    return mlp(width=WIDTH, **{"dropout": 0.2, "norm": True} | options).to(DEVICE)


def batch() -> Pair:
    x, y = (part.to(DEVICE) for part in drawn_batch())
    return x + 0.1 * torch.randn(x.shape, device=DEVICE), y


def train(run: Run, model: Any, opt: Any, call: Any = None, draw: Callable[[], Pair] = batch, **options: Any) -> None:
    """The plain loop, as all scenarios that are about model or optimizer have it."""
    session = run.attach(model, **options)
    for _ in range(session.step, UPDATES):
        x, y = draw()
        loss = F.cross_entropy((call or model)(x), y)
        run.here("after forward")
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


def scaled_float16(run: Run, fused: bool, **options: Any) -> None:
    """The scale is so large that gradients overflow at first, and again when it has grown. Gradients are clipped."""
    begin(run)
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**30, growth_interval=2)
    session = run.attach(model, **options)
    while session.step < UPDATES:
        x, y = batch()
        with torch.autocast(DEVICE, torch.float16):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        before = scaler.get_scale()
        run.here("between step and scaler.update")
        scaler.update()
        if scaler.get_scale() < before:
            run.skipped(loss)
        else:
            run.updated(loss)
    run.finished(model, [opt], {"scaler": scaler})


def optimizer_of(make: Callable[..., Any]) -> Callable[..., None]:
    def scenario(run: Run, **options: Any) -> None:
        begin(run)
        model = net()
        train(run, model, make(model.parameters()), **options)

    return scenario


def with_lr_in_a_tensor(run: Run, **options: Any) -> None:
    begin(run)
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device=DEVICE), capturable=True)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.9**epoch)
    session = run.attach(model, **options)
    for _ in range(session.step, UPDATES):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        run.updated(loss)
    run.finished(model, [opt], {"scheduler": sched})


def closure(run: Run, **options: Any) -> None:
    begin(run)
    model = mlp(width=64).to(DEVICE)
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)
    session = run.attach(model, **options)
    for _ in range(session.step, UPDATES):
        x, y = batch()

        def loss_of(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        run.updated(opt.step(loss_of))
    run.finished(model, [opt])


class Images(nn.Module):
    """Convolutions in the order of channels last, weights in half precision, a buffer that grows with each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3)
        self.norm = nn.BatchNorm2d(64)
        self.out = nn.Linear(64, 4).to(torch.bfloat16)
        self.register_buffer("history", torch.zeros(1 << 18))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history += 1
        images = x[:, :3, None, None] + torch.arange(64.0, device=x.device).view(8, 8)
        seen = self.norm(self.conv(images.contiguous(memory_format=torch.channels_last)))
        return self.out(F.dropout(seen.mean((2, 3)), 0.1).to(torch.bfloat16)).float()


def channels_last(run: Run, **options: Any) -> None:
    begin(run)
    model = Images().to(DEVICE).to(memory_format=torch.channels_last)
    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)


def graphed_callables(run: Run, **options: Any) -> None:
    begin(run)
    model = net(norm=False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    torch.cuda.make_graphed_callables(model, (torch.randn(BATCH, FEATURES, device=DEVICE),))
    train(run, model, opt, **options)


def graph_by_hand(run: Run, **options: Any) -> None:
    """Forward and backward are replayed; dropout draws in the graph."""
    begin(run)
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = (part.clone() for part in batch())
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            opt.zero_grad(set_to_none=True)
            F.cross_entropy(model(x), y).backward()
    torch.cuda.current_stream().wait_stream(aside)
    opt.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    session = run.attach(model, **options)
    for _ in range(session.step, UPDATES):
        for target, source in zip((x, y), batch(), strict=True):
            target.copy_(source)
        graph.replay()
        opt.step()
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt])


def compiled(run: Run, mode: str, **options: Any) -> None:
    begin(run)
    model = net(norm=False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(run, model, opt, torch.compile(model, mode=mode), **options)


def pinned_batches(run: Run, **options: Any) -> None:
    """Two workers augment by their own generators; batches are pinned and sent without waiting."""
    begin(run)
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True)
    loader = DataLoader(
        Items(augment=True), BATCH, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True
    )
    session = run.attach(model, **options)
    batches = session.loader(loader)
    for _ in range(batches.epoch, 3):
        for host_x, host_y in batches:
            x, y = host_x.to(DEVICE, non_blocking=True), host_y.to(DEVICE, non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            run.here("after forward")
            opt.zero_grad()
            loss.backward()
            opt.step()
            run.updated(loss)
    run.finished(model, [opt])


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one: torch.Tensor = checkpoint(self.first, x, use_reentrant=False)
        other: torch.Tensor = checkpoint(self.second, x, use_reentrant=True)
        return one + other


def recomputed(run: Run, **options: Any) -> None:
    """Activations are computed twice, with the same random numbers."""
    begin(run)
    model = Recomputed()
    draw = partial(_requiring_gradients, batch)
    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-3), draw=draw, **options)


def _requiring_gradients(draw: Callable[[], Pair]) -> Pair:
    x, y = draw()
    return x.requires_grad_(), y


def on_a_stream(run: Run, **options: Any) -> None:
    """The whole loop, attach too, on a stream of its own."""
    begin(run)
    with torch.cuda.stream(torch.cuda.Stream()):
        model = net()
        train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)
        torch.cuda.current_stream().synchronize()


def prefetched(run: Run, **options: Any) -> None:
    """The next batch is sent on a stream beside while this one is trained on."""
    begin(run)
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = run.attach(model, **options)
    batches = session.loader(DataLoader(Items(augment=False), BATCH, shuffle=True, pin_memory=True))
    for _ in range(batches.epoch, 3):
        for x, y in _ahead(batches):
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            run.updated(loss)
            session.end_step()
    run.finished(model, [opt])


def _ahead(batches: Any) -> Iterator[Pair]:
    """Copy each batch on a stream of its own, and give it out when the computation's stream waits for it."""
    aside = torch.cuda.Stream()
    for host in batches:
        with torch.cuda.stream(aside):
            pair = tuple(part.to(DEVICE, non_blocking=True) for part in host)
        torch.cuda.current_stream().wait_stream(aside)
        for part in pair:
            part.record_stream(torch.cuda.current_stream())
        yield pair  # type: ignore[misc]


def by_default_device(run: Run, **options: Any) -> None:
    torch.set_default_device(DEVICE)
    begin(run)
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 4))

    def draw() -> Pair:
        return torch.randn(BATCH, FEATURES), torch.randint(4, (BATCH,))

    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-3), draw=draw, **options)


class OnBothSides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, FEATURES)
        self.rest = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, 0].cpu().abs() * 100).long() % 2000
        return self.rest(F.dropout(self.table(rows), 0.1).to(DEVICE) + x)


def on_both_sides(run: Run, **options: Any) -> None:
    begin(run)
    model = OnBothSides()
    train(run, model, torch.optim.Adam(model.parameters(), lr=1e-3), **options)


def accumulated(run: Run, **options: Any) -> None:
    """Three backward passes per update, a scheduler, and an average of the weights in ``state=``."""
    begin(run)
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=UPDATES + 1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    session = run.attach(model, state={"average": average}, **options)
    for _ in range(session.step, UPDATES):
        opt.zero_grad()
        for micro in range(3):
            x, y = batch()
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            if micro == 1:
                run.here("between backward passes")
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        sched.step()
        average.update_parameters(model)
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt], {"scheduler": sched, "average": average})


class Average:
    """As many scripts have it: it takes the tensors that it gets, wherever they lie."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.history = [torch.zeros((), device=DEVICE)]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.values[name].lerp_(p, 0.1)
        self.history.append(self.history[-1] + self.values["0.bias"].sum())

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values), "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.history = state["values"], state["history"]
        assert all(value.device.type == DEVICE for value in self.values.values())


def own_average(run: Run, **options: Any) -> None:
    begin(run)
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = Average(model)
    session = run.attach(model, state={"average": average}, **options)
    for _ in range(session.step, UPDATES):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        average.update(model)
        session.end_step()
        run.updated(loss)
    run.finished(model, [opt], {"average": average})


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 256)
        self.block = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.1, batch_first=True)
        self.down = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.block(self.up(x)[:, None].expand(-1, 32, -1))).mean(1)


def attention(run: Run, **options: Any) -> None:
    begin(run)
    model = Attention().to(DEVICE)
    half = torch.autocast(DEVICE, torch.bfloat16)

    def call(x: torch.Tensor) -> torch.Tensor:
        with half:
            return model(x).float()  # type: ignore[no-any-return]

    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), call, **options)


def frozen_part(run: Run, **options: Any) -> None:
    begin(run)
    model = nn.Sequential(net().requires_grad_(False), nn.Linear(4, 4).to(DEVICE))
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(run, model, opt, **options)


def two_models(run: Run, **options: Any) -> None:
    """A generator and a discriminator, each with its optimizer; two updates in an iteration."""
    begin(run)
    model = nn.ModuleDict({"g": nn.Linear(FEATURES, FEATURES), "d": mlp(width=WIDTH)}).to(DEVICE)
    opt_g = torch.optim.Adam(model["g"].parameters(), lr=1e-3, foreach=True)
    opt_d = torch.optim.Adam(model["d"].parameters(), lr=1e-3, fused=DEVICE != "cpu")
    session = run.attach(model, **options)
    for _ in range(session.step, UPDATES):
        x, y = batch()
        opt_d.zero_grad()
        (F.cross_entropy(model["d"](x), y) - model["d"](model["g"](x).detach()).square().mean() * 0.1).backward()
        opt_d.step()
        run.here("between optimizers")
        opt_g.zero_grad()
        loss = F.cross_entropy(model["d"](model["g"](torch.randn_like(x))), y)
        loss.backward()
        opt_g.step()
        session.end_step()
        run.updated(loss)
    run.finished(model, [opt_g, opt_d])


def interval_and_slots(run: Run, **options: Any) -> None:
    begin(run)
    model = net()
    train(run, model, torch.optim.AdamW(model.parameters(), lr=1e-3), interval=2, **options)


_FORWARD: dict[str, Any] = {"places": ("after forward",), "brief": True, "listed": False}
_PLAIN: dict[str, Any] = {"brief": True, "listed": False}
_SCALED: dict[str, Any] = {
    "listed": False,
    "places": ("between step and scaler.update",),
    "sees": {"skip": 4},
    "kills": 1,
}
HOST, DIRECT, COPY = lightck.Host(), lightck.Direct(), lightck.Device()

add("device float16", partial(scaled_float16, fused=False), **_SCALED)
add("device float16 fused", partial(scaled_float16, fused=True, staging=DIRECT), **_SCALED)
for _name, _make in {
    "adamw fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "adamw capturable": partial(torch.optim.AdamW, lr=1e-3, capturable=True),
    "adam amsgrad foreach": partial(torch.optim.Adam, lr=1e-3, amsgrad=True, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
}.items():
    add(f"device {_name}", optimizer_of(_make), **_FORWARD)
add("device lr in a tensor", partial(with_lr_in_a_tensor, staging=HOST), **_PLAIN)
add("device closure", closure, **_PLAIN)
add("device channels last", partial(channels_last, staging=DIRECT, slots=3), **_FORWARD)
add("device graphed callables", graphed_callables, **_FORWARD)
add("device graph by hand", graph_by_hand, **_PLAIN)
add("device compiled", partial(compiled, mode="default"), **_FORWARD, compiles=True)
add("device compiled with graphs", partial(compiled, mode="reduce-overhead"), **_FORWARD, compiles=True)
add("device pinned batches", pinned_batches, **{**_FORWARD, "brief": False, "kills": 2})
add("device recomputed", partial(recomputed, staging=COPY, slots=3), **_FORWARD)
add("device on a stream", on_a_stream, **_FORWARD)
add("device prefetched", partial(prefetched, staging=HOST, slots=3), **_PLAIN)
add("device by default", by_default_device, **_FORWARD)
add("device on both sides", partial(on_both_sides, staging=DIRECT), **_FORWARD)
add("device accumulated", partial(accumulated, staging=COPY, slots=3), **_PLAIN, places=("between backward passes",))
add("device own average", own_average, **_PLAIN)
add("device attention", attention, **{**_FORWARD, "brief": False, "kills": 2})
add("device frozen part", partial(frozen_part, staging=DIRECT), **_FORWARD)
add("device two models", two_models, **_PLAIN, places=("between optimizers",))
add("device interval 2", partial(interval_and_slots, slots=4), **_FORWARD, loses=6)
NEEDS_CUDA = ("graph", "stream", "prefetched", "capturable", "lr-in-a-tensor")
"""Parts of the names of scenarios that run on no other device."""
