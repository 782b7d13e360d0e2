"""GradScaler on the CPU, with an unfused and a fused optimizer, and updates that it skips."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..run import Run
from . import add
from .parts import UPDATES, drawn_batch, mlp


def _iterate(run: Run, model: Any, opt: Any, scaler: Any, poison: float = 1.0) -> None:
    """One iteration as in torch's AMP recipe. ``poison``: what the gradients are multiplied with."""
    x, y = drawn_batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    scaler.scale(loss * poison).backward()
    steps = run.session.step
    scaler.step(opt)
    # Read from the scaler: its update halves the scale after a skip.
    run.here("between step and scaler.update")
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < before:
        run.here("after a skip")
        run.skipped(loss)
    else:
        run.updated(loss)
    assert run.session.step - steps == (scaler.get_scale() >= before) or run.is_reference


def natural_skips(run: Run, fused: bool, call_root: bool = True) -> None:
    """The scale is so large that gradients overflow at first, and again whenever it has grown."""
    run.seed()
    net = mlp(dropout=0.1, norm=True)
    model = net if call_root else nn.Sequential(net)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**112, growth_interval=2)
    session = run.attach(model)
    while session.step < UPDATES:
        _iterate(run, net, opt, scaler, 2.0**20)
    run.finished(model, [opt], {"scaler": scaler})


def forced_skips(run: Run, fused: bool, explicit: bool) -> None:
    """Every fourth iteration is made to overflow; the loop counts iterations, not updates."""
    run.seed()
    model = mlp(dropout=0.1)
    opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    session = run.attach(model, state={"amp": scaler})
    for i in range(session.iteration, UPDATES + 4):
        _iterate(run, model, opt, scaler, float("inf") if i % 4 == 2 else 1.0)
        if explicit:
            session.end_step()
    run.finished(model, [opt], {"scaler": scaler})


_PLACES = ("between step and scaler.update", "after a skip")
for _fused in (False, True):
    _kind = "fused" if _fused else "unfused"
    add(f"gradscaler {_kind}", partial(natural_skips, fused=_fused), places=_PLACES, sees={"skip": 6})
    add(
        f"gradscaler {_kind} forced skips",
        partial(forced_skips, fused=_fused, explicit=False),
        places=_PLACES,
        sees={"skip": 4},
    )
    add(
        f"gradscaler {_kind} forced skips with end_step",
        partial(forced_skips, fused=_fused, explicit=True),
        places=_PLACES,
        sees={"skip": 4},
    )

_BLIND: dict[str, Any] = {"places": _PLACES, "sees": {"skip": 6}, "logs": ("forward hook does not fire",)}
add("gradscaler fused while the root is never called", partial(natural_skips, fused=True, call_root=False), **_BLIND)
add(
    "gradscaler unfused while the root is never called",
    partial(natural_skips, fused=False, call_root=False),
    listed=False,
    **_BLIND,
)
