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


# -- random numbers ----------------------------------------------------------------------------------------------------


def rows(n: int = 18) -> torch.utils.data.DataLoader:
    data = torch.utils.data.TensorDataset(torch.randn(n, 8, generator=torch.Generator().manual_seed(3)))
    return torch.utils.data.DataLoader(data, 6, shuffle=True)


def passes(run: Run, *, uses_its_draw: bool = False, evaluates: bool = False) -> None:
    """Draws at the top of each epoch, before ``iter()``; and dropout, so that any other random state shows."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader, other = session.loader(rows()), rows()
    for _ in range(loader.epoch, 5):
        scale = torch.rand(())
        for (x,) in loader:
            y = model(F.dropout(x, 0.3))
            loss = (y * scale if uses_its_draw else y).pow(2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            run.updated(loss)
        if evaluates:
            model.eval()
            with torch.no_grad():
                for (x,) in other:
                    model(x)
            model.train()
    run.finished(model, [opt])


@program()
def draws_at_the_top_of_an_epoch(run: Run) -> None:
    passes(run)


@program()
def draws_at_the_top_of_an_epoch_and_evaluates(run: Run) -> None:
    passes(run, evaluates=True)


@program()
def uses_what_it_drew_at_the_top_of_an_epoch(run: Run) -> None:
    passes(run, uses_its_draw=True)


def forked(run: Run, *, seeded: bool, where: str) -> None:
    """An update whose random numbers leave those of the loop alone."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader = session.loader(rows()) if where == "session loader" else None

    def update(x: torch.Tensor) -> None:
        with torch.random.fork_rng(devices=[]):
            if seeded:
                torch.manual_seed(session.step)
            loss = model(F.dropout(x, 0.3)).pow(2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        run.updated(loss)
        if where == "end_step":
            session.end_step()

    if loader is not None:
        for _ in range(loader.epoch, 4):
            for (x,) in loader:
                update(x)
    else:
        while session.step < UPDATES:
            update(torch.randn(6, 8))
    run.finished(model, [opt])


for _where in ("session loader", "end_step", "by hand"):
    for _seeded in (False, True):
        program(name=f"forked-{_where.replace(' ', '-')}{'-seeded' * _seeded}")(
            lambda run, seeded=_seeded, where=_where: forked(run, seeded=seeded, where=where)
        )


def seeds(run: Run, *, anew: bool) -> None:
    """What each iteration draws depends on its seed alone."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    while session.step < UPDATES:
        torch.manual_seed(session.step if anew else 7)
        loss = model(F.dropout(torch.randn(6, 8), 0.3)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.updated(loss)
    run.finished(model, [opt])


@program()
def seeds_each_iteration(run: Run) -> None:
    seeds(run, anew=False)


@program()
def seeds_each_iteration_anew(run: Run) -> None:
    seeds(run, anew=True)
