"""Several optimizers: a GAN with several critic steps, and one in which both step at each batch."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..run import Run
from . import scenario
from .parts import FEATURES, UPDATES, drawn_batch, fixed_data


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, FEATURES))
        self.d = nn.Sequential(nn.Linear(FEATURES, 48), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(48, 1))


@scenario(
    places=("between critic steps", "before the generator's step", "before end_step", "after end_step"),
    sees={"critic step": 42},
)
def gan_with_several_critic_steps_and_end_step(run: Run) -> None:
    """WGAN: three critic steps with a clamp, then one of the generator, each with a scheduler's rate of its own."""
    run.seed()
    gan = Gan()
    opt_d = torch.optim.RMSprop(gan.d.parameters(), lr=5e-3)
    opt_g = torch.optim.AdamW(gan.g.parameters(), lr=1e-2, betas=(0.5, 0.9))
    sched_g = torch.optim.lr_scheduler.ExponentialLR(opt_g, 0.9)
    session = run.attach(gan)
    for _ in range(session.step, UPDATES):
        for i in range(3):
            real, _ = drawn_batch()
            fake = gan.g(torch.randn(len(real), 4)).detach()
            loss_d = gan.d(fake).mean() - gan.d(real).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            for p in gan.d.parameters():
                p.data.clamp_(-0.1, 0.1)
            run.saw("critic step")
            if i == 1:
                run.here("between critic steps")
        loss_g = -gan.d(gan.g(torch.randn(6, 4))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        run.here("before the generator's step")
        opt_g.step()
        run.updated(loss_d + loss_g)
        sched_g.step()
        run.here("before end_step")
        session.end_step()
        run.here("after end_step")
    run.finished(gan, [opt_d, opt_g], {"scheduler": sched_g})


@scenario(places=("between the optimizers",))
def gan_whose_optimizers_alternate(run: Run) -> None:
    """One step of each for a batch of ``session.loader``: whose ``next()`` alone closes the checkpoint."""
    run.seed()
    gan = Gan()
    opt_d = torch.optim.Adam(gan.d.parameters(), lr=1e-2, betas=(0.5, 0.9))
    opt_g = torch.optim.Adam(gan.g.parameters(), lr=1e-2, betas=(0.5, 0.9))
    session = run.attach(gan)
    loader = session.loader(DataLoader(TensorDataset(fixed_data(30)[0]), 6, shuffle=True))
    bce = nn.functional.binary_cross_entropy_with_logits
    for _ in range(loader.epoch, 3):
        for (real,) in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = gan.g(torch.randn(len(real), 4))
            loss_d = bce(gan.d(real), ones) + bce(gan.d(fake.detach()), zeros)
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            run.here("between the optimizers")
            loss_g = bce(gan.d(fake), ones)
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            run.updated(loss_d + loss_g)
    run.finished(gan, [opt_d, opt_g])
