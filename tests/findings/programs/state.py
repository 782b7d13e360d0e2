"""What a training is besides weights and optimizer state: flags and options that move on the way."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from . import UPDATES, Run, program
from .plain import mlp


def unfreezes(run: Run, *, exactly: bool) -> None:
    """The last layer is trained alone at first; the others are unfrozen one after the other."""
    run.seed()
    model = mlp()
    layers = [model[4], model[2], model[0]]
    for layer in layers[1:]:
        layer.requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    while session.step < UPDATES:
        for i, layer in enumerate(layers[1:], 1):
            if session.step == 4 * i if exactly else session.step >= 4 * i:
                layer.requires_grad_(True)
        if session.step == 10:
            layers[0].bias.requires_grad_(False)
        loss = F.mse_loss(model(torch.randn(6, 8)), torch.zeros(6, 4))
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.updated(loss)
    run.finished(model, [opt])


@program()
def unfreezes_at_a_step(run: Run) -> None:
    unfreezes(run, exactly=True)


@program()
def unfreezes_from_a_step_on(run: Run) -> None:
    unfreezes(run, exactly=False)


@program()
def options_set_by_hand_and_by_a_scheduler(run: Run) -> None:
    run.seed()
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2:].parameters()}]
    opt = torch.optim.RAdam(groups, lr=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=UPDATES)
    session = run.attach(model)
    while session.step < UPDATES:
        opt.param_groups[1]["weight_decay"] = session.step / 100
        loss = F.mse_loss(model(torch.randn(6, 8)), torch.zeros(6, 4))
        loss.backward()
        opt.step()
        opt.zero_grad()
        opt.param_groups[0].setdefault("seen", []).append(float(loss.detach()))
        sched.step()
        run.updated(loss)
    run.finished(model, [opt], {"scheduler": sched})
