"""Trainings whose batches follow rightly and whose updates do not: something that the loss or the optimizer depends on
is in no checkpoint, or is changed at an epoch's top."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from . import Run, program
from .plain import mlp

EPOCHS = 3


def data() -> torch.utils.data.TensorDataset:
    made = torch.Generator().manual_seed(3)
    return torch.utils.data.TensorDataset(torch.randn(30, 8, generator=made), torch.randn(30, 4, generator=made))


def batches(run: Run, session: Any, at_top: Callable[[int, Any], None] = lambda epoch, loader: None) -> Iterator[Any]:
    """Of a session loader, epoch by epoch, as users write it."""
    loader = session.loader(torch.utils.data.DataLoader(data(), 6, shuffle=True))
    for epoch in range(loader.epoch, EPOCHS):
        at_top(epoch, loader)
        yield from loader


def update(run: Run, opt: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    opt.zero_grad()
    loss.backward()
    opt.step()
    run.updated(loss)


# -- what an epoch's top does is done twice after a kill in mid-epoch


@program()
def top_steps_scheduler(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    session = run.attach(model)
    for x, y in batches(run, session, lambda epoch, _: scheduler.step() if epoch else None):
        update(run, opt, F.mse_loss(model(x), y))
    run.finished(model, [opt])


@program()
def top_steps_scheduler_at_begin_only(run: Run) -> None:
    """Right: the cure that the warning names."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    session = run.attach(model)

    def top(epoch: int, loader: Any) -> None:
        if epoch and loader.start == 0:
            scheduler.step()

    for x, y in batches(run, session, top):
        update(run, opt, F.mse_loss(model(x), y))
    run.finished(model, [opt])


@program()
def top_halves_lr(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    session = run.attach(model)

    def top(epoch: int, _: Any) -> None:
        if epoch:
            for group in opt.param_groups:
                group["lr"] *= 0.5

    for x, y in batches(run, session, top):
        update(run, opt, F.mse_loss(model(x), y))
    run.finished(model, [opt])


@program()
def top_sets_lr_by_epoch(run: Run) -> None:
    """Right: what is set does not depend on what was there. Warm-up sets it once more behind next()."""
    run.seed()
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    session = run.attach(model)

    def top(epoch: int, _: Any) -> None:
        opt.param_groups[0]["lr"] = 0.1 / (epoch + 1)

    steps = session.step
    for x, y in batches(run, session, top):
        if steps < 8:
            opt.param_groups[0]["lr"] = 0.01 * steps
        update(run, opt, F.mse_loss(model(x), y))
        steps += 1
    run.finished(model, [opt])


@program()
def top_clears_optimizer_state(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for x, y in batches(run, session, lambda epoch, _: opt.state.clear()):
        update(run, opt, F.mse_loss(model(x), y))
    run.finished(model, [opt])


@program()
def top_resets_head(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for x, y in batches(run, session, lambda epoch, _: torch.nn.init.zeros_(model[4].weight) if epoch else None):
        update(run, opt, F.mse_loss(model(x), y))
    run.finished(model, [opt])


class Average(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)

    @torch.no_grad()
    def follow(self, model: torch.nn.Module, weight: float) -> None:
        for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, weight)


@program()
def top_resets_average(run: Run) -> None:
    run.seed()
    model = mlp()
    average = Average(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model, state={"average": average})
    for x, y in batches(run, session, lambda epoch, _: average.follow(model, 1.0)):
        update(run, opt, F.mse_loss(model(x), y))
        average.follow(model, 0.1)
    run.finished(model, [opt], {"average": average})


# -- what the loss depends on is in no checkpoint


@program()
def teacher_outside(run: Run) -> None:
    run.seed()
    model = mlp()
    teacher = Average(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for x, _ in batches(run, session):
        with torch.no_grad():
            y = teacher.model(x)
        update(run, opt, F.mse_loss(model(x), 1 - y))
        teacher.follow(model, 0.5)
    run.finished(model, [opt])


@program()
def teacher_in_state(run: Run) -> None:
    """Right: the cure that the warning names."""
    run.seed()
    model = mlp()
    teacher = Average(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model, state={"teacher": teacher})
    for x, _ in batches(run, session):
        with torch.no_grad():
            y = teacher.model(x)
        loss = F.mse_loss(model(x), 1 - y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        teacher.follow(model, 0.5)
        run.updated(loss)
    run.finished(model, [opt])


class Tempered(torch.nn.Module):
    """Its temperature is a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) / self.temperature
        return found


@program()
def number_of_a_module(run: Run) -> None:
    run.seed()
    model = Tempered()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for x, y in batches(run, session):
        update(run, opt, F.mse_loss(model(x), y))
        model.temperature *= 1.1
    run.finished(model, [opt])


class Tokens(torch.nn.Module):
    """Most rows of its first gradient are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3000, 16)
        self.scale = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 4)
        self.temperature = [1.0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.scale(self.table(tokens))) / self.temperature[0]
        return found


@program()
def number_behind_an_embedding(run: Run) -> None:
    run.seed()
    model = Tokens()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for x, y in batches(run, session):
        update(run, opt, F.mse_loss(model((x[:, 0] * 1000).long().abs() % 3000), y))
        model.temperature[0] *= 1.1
    run.finished(model, [opt])


@program()
def generator_of_the_loss(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    noise = torch.Generator().manual_seed(9)
    for x, y in batches(run, session):
        update(run, opt, F.mse_loss(model(x), y + torch.randn(y.shape, generator=noise)))
    run.finished(model, [opt])


@program()
def gradients_that_are_never_cleared(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = run.attach(model)
    for x, y in batches(run, session):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


# -- right loops whose gradients come in other ways


@program()
def zeroed_gradients(run: Run) -> None:
    """Zeros stay between the updates, to which a gradient is added: negative zeros differ, and nothing else."""
    run.seed()
    model = torch.nn.Sequential(torch.nn.Linear(8, 48), torch.nn.ReLU(), torch.nn.Linear(48, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for x, y in batches(run, session):
        opt.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(x).relu(), y)
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


@program()
def two_optimizers(run: Run) -> None:
    """As of a generator and its critic: the second one's gradients come after the first one's step."""
    run.seed()
    model = mlp()
    opts = [torch.optim.AdamW(model[:2].parameters(), lr=1e-2), torch.optim.SGD(model[2:].parameters(), lr=1e-2)]
    session = run.attach(model, optimizer=opts)
    for x, y in batches(run, session):
        for opt in opts:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            opt.step()
        run.updated(loss)
    run.finished(model, opts)


@program()
def closures_of_lbfgs(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    session = run.attach(model)
    for x, y in batches(run, session):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        run.updated(opt.step(closure))
    run.finished(model, [opt])


@program()
def clipped_and_accumulated(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)
    session = run.attach(model)
    for i, (x, y) in enumerate(batches(run, session)):
        loss = F.mse_loss(model(x), y) / 2
        loss.backward()
        if i % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
            scheduler.step()
            run.updated(loss)
    run.finished(model, [opt])


# -- numbers that modules keep, loops that count from nothing, forwards that are only looked at


class Queue(torch.nn.Module):
    """Its pointer matters where it wraps round, long after the first update."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("keys", torch.zeros(5, 4))
        self.pointer = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) + 0.1 * self.keys.mean(0)
        return found

    @torch.no_grad()
    def push(self, key: torch.Tensor) -> None:
        self.keys[self.pointer] = key
        self.pointer = (self.pointer + 1) % len(self.keys)


@program()
def pointer_of_a_queue(run: Run) -> None:
    run.seed()
    model = Queue()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for x, y in batches(run, session):
        out = model(x)
        update(run, opt, F.mse_loss(out, y))
        model.push(out[0])
    run.finished(model, [opt])


@program()
def pointer_that_the_loop_sets(run: Run) -> None:
    """Right."""
    run.seed()
    model = Queue()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    session = run.attach(model)
    model.pointer = session.step % len(model.keys)
    for x, y in batches(run, session):
        out = model(x)
        opt.zero_grad()
        loss = F.mse_loss(out, y)
        loss.backward()
        opt.step()
        model.push(out[0])
        run.updated(loss)
    run.finished(model, [opt])


@program()
def epochs_from_nothing(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader = session.loader(torch.utils.data.DataLoader(data(), 6, shuffle=True))
    for _ in range(EPOCHS):
        for x, y in loader:
            update(run, opt, F.mse_loss(model(x), y))
    run.finished(model, [opt])


@program()
def epochs_from_nothing_with_its_step_printed(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader = session.loader(torch.utils.data.DataLoader(data(), 6, shuffle=True))
    print(f"starts at step {session.step}")
    for _ in range(EPOCHS):
        for x, y in loader:
            update(run, opt, F.mse_loss(model(x), y))
    run.finished(model, [opt])


@program()
def epochs_from_nothing_with_its_steps_logged(run: Run) -> None:
    """The loop reads its step all the time, and not to count by it."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader = session.loader(torch.utils.data.DataLoader(data(), 6, shuffle=True))
    for epoch in range(EPOCHS):
        for x, y in loader:
            print(f"step {session.step} begins")
            update(run, opt, F.mse_loss(model(x), y))
        print(f"epoch {epoch} ended at step {session.step}")
    run.finished(model, [opt])


@program()
def steps_over_an_endless_loader(run: Run) -> None:
    """Right: the loop counts updates from session.step, and takes batches from passes without an end."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader = session.loader(torch.utils.data.DataLoader(data(), 6, shuffle=True))

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless()
    for _step in range(session.step, 5 * EPOCHS):
        x, y = next(batches)
        update(run, opt, F.mse_loss(model(x), y))
    run.finished(model, [opt])


@program()
def while_step_is_below(run: Run) -> None:
    """Right: the loop over epochs ends by session.step, and never asks for the loader's epoch."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader = session.loader(torch.utils.data.DataLoader(data(), 6, shuffle=True))
    while session.step < 5 * EPOCHS:
        for x, y in loader:
            update(run, opt, F.mse_loss(model(x), y))
    run.finished(model, [opt])


@program()
def steps_from_nothing(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for _ in range(14):
        update(run, opt, model(torch.randn(6, 8)).pow(2).mean())
        session.end_step()
    run.finished(model, [opt])


@program()
def logged_forward(run: Run) -> None:
    """Right: a forward in training mode, with gradients, behind the update, that is only looked at."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for i, (x, y) in enumerate(batches(run, session)):
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 3 == 1:
            model(x).mean().item()
        run.updated(loss)
    run.finished(model, [opt])


@program()
def evaluated_on_fake_tensors(run: Run) -> None:
    """Right: counting what a forward costs touches no checkpoint."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    while session.step < 14:
        loss = model(torch.randn(6, 8)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model(mode.from_tensor(torch.ones(2, 8)))
        run.updated(loss)
    run.finished(model, [opt])


# -- what fresh eyes found: two sides of a model, and more right loops


class TwoSides(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(), mlp()


@program()
def target_of_one_side(run: Run) -> None:
    """The teacher is in the gradients of the critic only, and the actor comes first."""
    run.seed()
    model = TwoSides()
    target = Average(model.critic)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for x, y in batches(run, session):
        with torch.no_grad():
            aim = target.model(x)
        update(run, opt, F.mse_loss(model.actor(x), y) + F.mse_loss(model.critic(x), 1 - aim))
        target.follow(model.critic, 0.5)
    run.finished(model, [opt])


@program()
def channels_last_behind_attach(run: Run) -> None:
    run.seed()
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 1, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    model.to(memory_format=torch.channels_last)
    for x, _ in batches(run, session):
        images = torch.cat([x, x, x, x], 1).view(-1, 2, 4, 4).to(memory_format=torch.channels_last)
        update(run, opt, model(images).pow(2).mean())
    run.finished(model, [opt])


@program()
def scheduler_set_to_the_epoch_at_top(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=1e-1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 2)
    session = run.attach(model)
    for i, (x, y) in enumerate(batches(run, session, lambda epoch, _: scheduler.step(epoch)), session.step):
        scheduler.step(i / 5)
        update(run, opt, F.mse_loss(model(x), y))
    run.finished(model, [opt])


class Longest(torch.nn.Module):
    """Keeps the longest input so far, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.longest = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.longest = max(self.longest, 2 + len(x) // 2)
        found: torch.Tensor = self.inner(x)
        return found


@program()
def experts_and_zeroed_gradients(run: Run) -> None:
    """Plain SGD leaves a parameter alone whose gradient is zero, as one that has none."""
    run.seed()
    model = torch.nn.ModuleList([mlp(), mlp()])
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    session = run.attach(model)
    for i, (x, y) in enumerate(batches(run, session), session.step):
        opt.zero_grad(set_to_none=False)
        loss = F.mse_loss(model[i % 2](x), y)
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


@program()
def top_clears_the_state_of_one_of_two(run: Run) -> None:
    """Two optimizers of one class: the first one's state is looked at too."""
    run.seed()
    model = mlp()
    opts = [torch.optim.SGD(part.parameters(), lr=1e-2, momentum=0.9) for part in (model[:2], model[2:])]
    session = run.attach(model, optimizer=opts)
    for x, y in batches(run, session, lambda epoch, _: opts[0].state.clear() if epoch else None):
        for opt in opts:
            opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for opt in opts:
            opt.step()
        run.updated(loss)
    run.finished(model, opts)
