"""What a loop keeps to itself: a batch fetched ahead, a list, a hidden state, a counter. And the exact loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from . import UPDATES, Run, program
from .plain import mlp


def table(n: int = 30) -> TensorDataset:
    return TensorDataset(torch.randn(n, 8, generator=torch.Generator().manual_seed(3)))


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(table(), 6, shuffle=True, **options)


def start(run: Run, model: nn.Module, **options: Any) -> tuple[torch.optim.Optimizer, Any]:
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return opt, run.attach(model, optimizer=opt, **options)


def update(run: Run, opt: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    opt.step()
    opt.zero_grad()
    run.updated(loss)


# -- a batch that is fetched ahead ---------------------------------------------------------------------------------


@program()
def drawn_ahead(run: Run) -> None:
    """nanoGPT: the next batch is drawn while the device computes this one."""
    run.seed()
    model = mlp()
    opt, session = start(run, model)
    x = torch.randn(6, 8)
    while session.step < UPDATES:
        loss = model(x).pow(2).mean()
        x = torch.randn(6, 8)
        update(run, opt, loss)
    run.finished(model, [opt])


@program()
def fetched_ahead_without_an_optimizer(run: Run) -> None:
    run.seed()
    model = mlp()
    session = run.attach(model)
    x = torch.randn(6, 8)
    while session.step < UPDATES:
        loss = model(x).pow(2).mean()
        x = torch.randn(6, 8)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(0.1 * p.grad)
                p.grad = None
        run.updated(loss)
        session.end_step()
    run.finished(model, [])


@program()
def fetched_at_the_top(run: Run) -> None:
    """The same, exact: a batch is fetched behind the end of the step before it."""
    run.seed()
    model = mlp()
    opt, session = start(run, model)
    while session.step < UPDATES:
        x = torch.randn(6, 8)
        update(run, opt, model(x).pow(2).mean())
        session.end_step()
    run.finished(model, [opt])


class Ahead:
    """The batch that is fetched ahead, as something that is saved."""

    def __init__(self) -> None:
        self.x = torch.empty(0)

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.x}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.x = state["x"]


@program()
def fetched_ahead_and_saved(run: Run) -> None:
    """The same, exact: the batch that waits is a part of the state."""
    run.seed()
    model, ahead = mlp(), Ahead()
    opt, session = start(run, model, state={"ahead": ahead})
    if session.step == 0:
        ahead.x = torch.randn(6, 8)
    while session.step < UPDATES:
        loss = model(ahead.x).pow(2).mean()
        ahead.x = torch.randn(6, 8)
        update(run, opt, loss)
        session.end_step()
    run.finished(model, [opt])


@program()
def fetched_ahead_from_a_session_loader(run: Run) -> None:
    run.seed()
    model = mlp()
    opt, session = start(run, model)
    loader = session.loader(shuffled())
    for _ in range(loader.epoch, 3):
        batches = iter(loader)
        x = next(batches, None)
        while x is not None:
            loss = model(x[0]).pow(2).mean()
            x = next(batches, None)
            update(run, opt, loss)
    run.finished(model, [opt])


@program()
def fetched_behind_the_update(run: Run) -> None:
    """``next()`` as the last thing of an iteration closes the checkpoint before it fetches: exact."""
    run.seed()
    model = mlp()
    opt, session = start(run, model)
    loader = session.loader(shuffled())
    for _ in range(loader.epoch, 3):
        batches = iter(loader)
        x = next(batches, None)
        while x is not None:
            update(run, opt, model(x[0]).pow(2).mean())
            x = next(batches, None)
    run.finished(model, [opt])


# -- a list of batches ---------------------------------------------------------------------------------------------


@program()
def list_of_a_session_loader(run: Run) -> None:
    run.seed()
    model = mlp()
    opt, session = start(run, model)
    loader = session.loader(shuffled())
    for _ in range(loader.epoch, 3):
        for (x,) in list(loader):
            update(run, opt, model(x).pow(2).mean())
    run.finished(model, [opt])


# -- a hidden state ------------------------------------------------------------------------------------------------


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 48)
        self.out = nn.Linear(48, 4)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, hidden = self.rnn(x, hidden)
        return self.out(y), hidden


def text(step: int) -> torch.Tensor:
    return torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(step))


@program()
def hidden_state(run: Run) -> None:
    """word_language_model: the hidden state of one batch is where the next one starts."""
    run.seed()
    model = Memory()
    opt, session = start(run, model)
    hidden = torch.zeros(1, 6, 48)
    for step in range(session.step, UPDATES):
        y, hidden = model(text(step), hidden.detach())
        update(run, opt, y.pow(2).mean())
    run.finished(model, [opt])


class Carried:
    """What one iteration leaves to the next."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    def state_dict(self) -> dict[str, Any]:
        return {"hidden": self.hidden}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hidden = state["hidden"]


@program()
def carried_hidden_state(run: Run) -> None:
    run.seed()
    model, carried = Memory(), Carried(torch.zeros(1, 6, 48))
    opt, session = start(run, model, state={"carried": carried})
    for step in range(session.step, UPDATES):
        y, hidden = model(text(step), carried.hidden)
        carried.hidden = hidden.detach()
        update(run, opt, y.pow(2).mean())
        session.end_step()
    run.finished(model, [opt])


@program()
def hidden_state_beside_a_session_loader(run: Run) -> None:
    """The loader's batches are the same: the forward's other argument is not."""
    run.seed()
    model = Memory()
    opt, session = start(run, model)
    loader = session.loader(DataLoader(TensorDataset(torch.stack([text(i) for i in range(7)])), 1))
    for _ in range(loader.epoch, 2):
        hidden = torch.zeros(1, 6, 48)
        for (x,) in loader:
            y, hidden = model(x[0], hidden=hidden.detach())
            update(run, opt, y.pow(2).mean())
    run.finished(model, [opt])


# -- counters, environments ----------------------------------------------------------------------------------------


@program()
def counter_that_starts_over(run: Run) -> None:
    """It asks for its position, and does not use it."""
    run.seed()
    model = mlp()
    opt, session = start(run, model)
    number = 0
    while session.step < UPDATES:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
        update(run, opt, model(x).pow(2).mean())
        number += 1
    run.finished(model, [opt])


class Walk:
    """An environment with a generator of its own, as gymnasium's have."""

    def __init__(self) -> None:
        self.np_random = np.random.default_rng(7)
        self.at = np.zeros(8, np.float32)

    def step(self, action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self.at = (0.9 * self.at + 0.1 * action.sum() + self.np_random.normal(size=8)).astype(np.float32)
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.np_random.bit_generator.state, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.np_random.bit_generator.state, self.at = state["generator"], state["at"]


def _play(run: Run, is_saved: bool) -> None:
    run.seed()
    model, env = mlp(), Walk()
    opt, session = start(run, model, **({"state": {"env": env}} if is_saved else {}))
    while session.step < UPDATES:
        seen = torch.from_numpy(env.at.copy())[None]
        action = model(seen)
        env.step(action.detach().numpy())
        update(run, opt, F.mse_loss(action, torch.ones(1, 4)))
        session.end_step()
    run.finished(model, [opt])


@program()
def walk(run: Run) -> None:
    _play(run, is_saved=False)


@program()
def walk_in_state(run: Run) -> None:
    _play(run, is_saved=True)


@program()
def unwrapped_data_loader(run: Run) -> None:
    """Its pass begins anew after a resume in mid-epoch."""
    run.seed()
    model = mlp()
    opt, session = start(run, model)
    while session.step < UPDATES:
        for (x,) in shuffled():
            if session.step < UPDATES:
                update(run, opt, model(x).pow(2).mean())
    run.finished(model, [opt])


# -- right loops, which must be quiet ------------------------------------------------------------------------------


@program()
def two_loaders_accumulation_evaluation(run: Run) -> None:
    """Two session loaders of other lengths, three micro-batches for an update across the ends of passes, an evaluation
    over a session loader in eval mode, arguments by name."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, *, x: torch.Tensor, scale: float) -> torch.Tensor:
            y: torch.Tensor = self.body(x) * scale
            return y

    run.seed()
    model = Named()
    opt, session = start(run, model)
    loader = session.loader(shuffled(), name="labelled")
    other = session.loader(DataLoader(table(24), 4, shuffle=True), name="other")
    held_out = session.loader(DataLoader(table(), 10, shuffle=True), name="held out")
    micro = session.iteration and 0
    for _ in range(loader.epoch, 6):
        model.train()
        for (x,), (y,) in zip(loader, other, strict=False):
            loss = model(x=x, scale=0.5).pow(2).mean() + model(x=y, scale=0.25).mean()
            loss.backward()
            micro += 1
            if micro % 2 == 0:
                opt.step()
                opt.zero_grad()
                run.updated(loss)
        model.eval()
        with torch.no_grad():
            for (x,) in held_out:
                model(x=x, scale=1.0)
    run.finished(model, [opt])


class Numbers:
    """A batch without tensors."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"text": f"word {index}", "length": index}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 48)
        self.out = nn.Linear(48, 4)

    def forward(self, text: list[str], length: list[int]) -> torch.Tensor:
        y: torch.Tensor = self.out(self.table(torch.tensor([int(t.split()[1]) for t in text]))).sum(1)
        return y / (1 + torch.tensor(length))


def _as_lists(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


@program()
def batches_without_tensors(run: Run) -> None:
    run.seed()
    model = Words()
    opt, session = start(run, model)
    loader = session.loader(DataLoader(Numbers(30), 6, shuffle=True, collate_fn=_as_lists))  # type: ignore[arg-type]
    for _ in range(loader.epoch, 3):
        for batch in loader:
            update(run, opt, model(**batch).pow(2).mean())
    run.finished(model, [opt])


@program()
def looks_before_the_loop(run: Run) -> None:
    """A sample is printed, and the model is called once for its shapes: that is no pass, and no first batch."""
    run.seed()
    model = mlp()
    opt, session = start(run, model)
    data = shuffled()
    loader = session.loader(data)
    with torch.no_grad():
        model(torch.zeros(1, 8))
    for _ in range(loader.epoch, 3):
        for (x,) in loader:
            update(run, opt, model(x).pow(2).mean())
    run.finished(model, [opt])


@program()
def workers(run: Run) -> None:
    run.seed()
    model = mlp()
    opt, session = start(run, model)
    loader = session.loader(shuffled(num_workers=2))
    for _ in range(loader.epoch, 3):
        for (x,) in loader:
            update(run, opt, model(x).pow(2).mean())
    run.finished(model, [opt])


@program(loses=7)
def every_third_step(run: Run) -> None:
    run.seed()
    model = mlp()
    opt, session = start(run, model, interval=3, slots=3)
    loader = session.loader(shuffled())
    for _ in range(loader.epoch, 3):
        for (x,) in loader:
            update(run, opt, model(x).pow(2).mean())
    run.finished(model, [opt])


@program(loses=4)
def every_third_step_fetched_ahead(run: Run) -> None:
    run.seed()
    model = mlp()
    opt, session = start(run, model, interval=3)
    x = torch.randn(6, 8)
    while session.step < UPDATES:
        loss = model(x).pow(2).mean()
        x = torch.randn(6, 8)
        update(run, opt, loss)
    run.finished(model, [opt])


@program()
def updates_counted(run: Run) -> None:
    """timm's ``num_updates``, from which its schedulers compute the learning rate: counted by ``session.step``."""
    run.seed()
    model = mlp()
    opt, session = start(run, model)
    loader = session.loader(shuffled())
    for _ in range(loader.epoch, 3):
        for (x,) in loader:
            update(run, opt, model(x).pow(2).mean())
            for group in opt.param_groups:
                group["lr"] = 1e-2 / (1 + session.step)
    run.finished(model, [opt])
