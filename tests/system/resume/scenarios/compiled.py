"""torch.compile: the module compiled before and after attach, in place, attached itself; with inductor once."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ..run import Run
from . import add
from .parts import UPDATES, drawn_batch, fixed_data, mlp


def compiled(run: Run, when: str, how: str, backend: str = "aot_eager") -> None:
    """``when``: before or after attach, or called before it, too. ``how``: a function, in place, or itself attached."""
    run.seed()
    model = mlp(dropout=0.2, norm=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called: Any = model

    def compile_it() -> Any:
        if how == "in place":
            model.compile(backend=backend)
            return model
        return torch.compile(model, backend=backend)

    if when != "after":
        called = compile_it()
    if when == "called before":
        x, y = drawn_batch()
        F.cross_entropy(called(x), y).backward()
    session = run.attach(called if how == "itself" else model)
    if when == "after":
        called = compile_it()
    frames = torch._dynamo.utils.counters["stats"]
    for _ in range(session.step, UPDATES):
        x, y = drawn_batch()
        loss = F.cross_entropy(called(x), y)
        run.here("after forward")
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    if frames["unique_graphs"] >= 1:
        run.saw("graph")
    run.finished(model, [opt])


def compiled_over_a_loader(run: Run) -> None:
    """No hook of the model fires, and ``next()`` closes each checkpoint."""
    run.seed()
    model = mlp(dropout=0.2, norm=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called = torch.compile(model, backend="aot_eager")
    session = run.attach(model)
    train = session.loader(DataLoader(TensorDataset(*fixed_data(30)), 6, shuffle=True))
    for _ in range(train.epoch, 3):
        for x, y in train:
            loss = F.cross_entropy(called(x), y)
            run.here("after forward")
            opt.zero_grad()
            loss.backward()
            opt.step()
            run.updated(loss)
    run.finished(model, [opt])


_SETTINGS: dict[str, Any] = {"places": ("after forward",), "sees": {"graph": 1}, "compiles": True, "brief": True}
_BLIND: dict[str, Any] = {**_SETTINGS, "logs": ("forward hook does not fire",)}
add("compiled before attach", partial(compiled, when="before", how="function"), **_BLIND)
add("compiled and called before attach", partial(compiled, when="called before", how="function"), **_BLIND)
add("compiled after attach", partial(compiled, when="after", how="function"), **_BLIND)
add("compiled in place before attach", partial(compiled, when="before", how="in place"), **_BLIND)
add("compiled in place after attach", partial(compiled, when="after", how="in place"), **_BLIND)
add("compiled over a loader", compiled_over_a_loader, **{**_SETTINGS, "sees": {}})
add("compiled module itself attached", partial(compiled, when="before", how="itself"), **_SETTINGS)
if shutil.which("c++") or shutil.which("g++"):
    _inductor = partial(compiled, when="before", how="function", backend="inductor")
    add("compiled with inductor", _inductor, **_BLIND)
