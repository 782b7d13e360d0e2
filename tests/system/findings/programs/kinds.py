"""One loop of each kind that public training programs have, small and written here.

tests/system/public_programs runs the public ones by hand; these stand for them in the suite. Each kind is wired as a
user of the README would, and where that cannot be exact a second wiring is.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from . import UPDATES, Run, program
from .plain import mlp


def points(count: int = 30, seed: int = 3) -> TensorDataset:
    return TensorDataset(torch.randn(count, 8, generator=torch.Generator().manual_seed(seed)))


def descend(opt: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    opt.zero_grad()
    loss.backward()
    opt.step()


class Kept:
    """Named values that travel in ``state=``: what a user writes for what lightck cannot find."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


# ---- epochs over a DataLoader ------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Any]) -> float:
    model.eval()
    total = sum(float(model(x).pow(2).mean()) for (x,) in loader)
    model.train()
    return total


@program()
def classifier_with_a_shuffled_test(run: Run) -> None:
    """mnist, imagenet: an evaluation after each epoch whose loader draws, then a scheduler."""
    run.seed()
    model = nn.Sequential(nn.Linear(8, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 4))
    opt = torch.optim.Adadelta(model.parameters(), lr=0.5)
    rate = torch.optim.lr_scheduler.StepLR(opt, 1, 0.7)
    test = DataLoader(points(12, 4), 4, shuffle=True)
    session = run.attach(model)
    loader = session.loader(DataLoader(points(), 6, shuffle=True))
    for _ in range(loader.epoch, 3):
        for (x,) in loader:
            loss = (model(x) - 1).pow(2).mean()
            descend(opt, loss)
            run.updated(loss)
        evaluate(model, test)
        rate.step()
    run.finished(model, [opt], {"rate": rate})


@program()
def autoencoder_that_samples_after_each_epoch(run: Run) -> None:
    """vae: noise in forward, in the evaluation, and pictures drawn after it."""
    run.seed()
    encoder, decoder = nn.Linear(8, 6), nn.Linear(3, 8)
    model = nn.ModuleList([encoder, decoder])
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader = session.loader(DataLoader(points(), 6, shuffle=True))

    def through(x: torch.Tensor) -> torch.Tensor:
        mean, spread = encoder(x).chunk(2, -1)
        return decoder(mean + spread * torch.randn_like(mean))

    for _ in range(loader.epoch, 3):
        for (x,) in loader:
            loss = F.mse_loss(through(x), x)
            descend(opt, loss)
            run.updated(loss)
        with torch.no_grad():
            through(torch.ones(2, 8))
            decoder(torch.randn(4, 3))
    run.finished(model, [opt])


@program()
def adversaries(run: Run) -> None:
    """dcgan: two networks in one ModuleList, each with its optimizer, both updated on each batch."""
    run.seed()
    maker, judge = mlp(), nn.Sequential(nn.Linear(8, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    maker.append(nn.Linear(4, 8))
    both = nn.ModuleList([maker, judge])
    ofs = [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.999)) for net in (judge, maker)]
    session = run.attach(both)
    loader = session.loader(DataLoader(points(), 6, shuffle=True))
    for _ in range(loader.epoch, 3):
        for (x,) in loader:
            made = maker(torch.randn(len(x), 8))
            loss = F.softplus(-judge(x)).mean() + F.softplus(judge(made.detach())).mean()
            descend(ofs[0], loss)
            loss = F.softplus(-judge(made)).mean()
            descend(ofs[1], loss)
            run.updated(loss)
    run.finished(both, ofs)


@program()
def whole_model_saved_each_epoch(run: Run) -> None:
    """super_resolution: the module itself is pickled while the session has its hooks in it."""
    run.seed()
    model = mlp()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader = session.loader(DataLoader(points(), 6, shuffle=True))
    for _ in range(loader.epoch, 3):
        for (x,) in loader:
            loss = model(x).pow(2).mean()
            descend(opt, loss)
            run.updated(loss)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        with torch.no_grad():
            torch.load(file, weights_only=False)(torch.ones(1, 8))
    run.finished(model, [opt])


@program()
def batches_without_end(run: Run) -> None:
    """minGPT, makemore: ``next()`` by hand on a sampler with replacement, evaluation and sampling in between."""
    run.seed()
    data = points()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=10**9)
    batches = iter(session.loader(DataLoader(data, 6, sampler=sampler)))
    step = session.step
    while step < UPDATES:
        (x,) = next(batches)
        loss = model(x).pow(2).mean()
        descend(opt, loss)
        run.updated(loss)
        if step % 4 == 0:
            evaluate(model, DataLoader(points(12, 4), 4, shuffle=True))
            torch.multinomial(torch.ones(5), 2)
        step += 1
    run.finished(model, [opt])


# ---- loops of their own ------------------------------------------------------------------------------------------


@program()
def whole_graph_at_once(run: Run) -> None:
    """gcn, gat: one full batch, an evaluation of two parts after each update."""
    run.seed()
    model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Dropout(0.5), nn.Linear(48, 4))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    graph = points().tensors[0]
    parts = torch.randperm(30, generator=torch.Generator().manual_seed(2)).split(15)
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        model.train()
        loss = model(graph)[parts[0]].pow(2).mean()
        descend(opt, loss)
        run.updated(loss)
        model.eval()
        with torch.no_grad():
            model(graph)[parts[1]].mean()
    run.finished(model, [opt])


@program()
def closures(run: Run) -> None:
    """time_sequence_prediction: LBFGS in double precision, a prediction after each step."""
    run.seed()
    model = mlp().double()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    x = points().tensors[0].double()
    session = run.attach(model)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = (model(x) - x[:, :4]).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(session.step, 8):
        run.updated(opt.step(closure))
        with torch.no_grad():
            model(x + 1)
        session.end_step()
    run.finished(model, [opt])


def fetched_ahead(run: Run, keeps: bool, closes: bool) -> None:
    """nanoGPT: the next batch is drawn before this one's update; an evaluation at the loop's top draws too."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ahead = Kept(x=torch.randn(6, 8))
    session = run.attach(model, **({"state": {"ahead": ahead}} if keeps else {}))
    step = session.step
    while step < UPDATES:
        if step % 4 == 0:
            with torch.no_grad():
                model(torch.randn(6, 8))
        loss = model(ahead.x).pow(2).mean()
        ahead.x = torch.randn(6, 8)
        descend(opt, loss)
        run.updated(loss)
        step += 1
        if closes:
            session.end_step()
    run.finished(model, [opt])


@program()
def batch_fetched_ahead(run: Run) -> None:
    fetched_ahead(run, keeps=False, closes=False)


@program()
def batch_fetched_ahead_in_state(run: Run) -> None:
    fetched_ahead(run, keeps=True, closes=True)


class Shards:
    """A loader of the program's own: a position in a file of tokens, files one after another."""

    def __init__(self, sizes: tuple[int, ...] = (60, 90)) -> None:
        draw = torch.Generator().manual_seed(8)
        self.files = [torch.randn(size, 8, generator=draw) for size in sizes]
        self.file = self.at = 0

    def next_batch(self) -> torch.Tensor:
        batch = self.files[self.file][self.at : self.at + 6]
        self.at += 6
        if self.at + 6 > len(self.files[self.file]):
            self.file, self.at = (self.file + 1) % len(self.files), 0
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"file": self.file, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.file, self.at = state["file"], state["at"]


def own_loader(run: Run, keeps: bool, closes: bool) -> None:
    """build-nanogpt, llm.c: ``next_batch()`` at the loop's top."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shards = Shards()
    session = run.attach(model, **({"state": {"shards": shards}} if keeps else {}))
    for step in range(session.step, UPDATES):
        opt.zero_grad()
        for _ in range(2):
            (model(shards.next_batch()).pow(2).mean() / 2).backward()
        for group in opt.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        opt.step()
        run.updated(0.0)
        if closes:
            session.end_step()
    run.finished(model, [opt])


@program()
def loader_of_ones_own(run: Run) -> None:
    own_loader(run, keeps=False, closes=False)


@program()
def loader_of_ones_own_in_state_without_end_step(run: Run) -> None:
    own_loader(run, keeps=True, closes=False)


@program()
def loader_of_ones_own_in_state(run: Run) -> None:
    own_loader(run, keeps=True, closes=True)


@program()
def generator_over_a_loader(run: Run) -> None:
    """llama2.c: a generator moves batches to the device, and the loop asks it one batch ahead."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)

    def batches() -> Iterator[torch.Tensor]:
        loader = session.loader(DataLoader(points(600), 6, shuffle=True))
        for (x,) in loader:
            yield x + 0

    source = batches()
    x = next(source)
    while session.step < UPDATES:
        loss = model(x).pow(2).mean()
        x = next(source)
        descend(opt, loss)
        run.updated(loss)
    run.finished(model, [opt])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, hidden = self.cell(x, hidden)
        return self.head(out), hidden


def recurrent(run: Run, keeps: bool) -> None:
    """word_language_model: windows of a text in their order, the hidden state carried from one to the next."""
    run.seed()
    model = Recurrent()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randn(42, 3, 8, generator=torch.Generator().manual_seed(5))
    carried = Kept(hidden=torch.zeros(1, 3, 16))
    session = run.attach(model, **({"state": {"carried": carried}} if keeps else {}))
    per_epoch = 7
    while session.step < 2 * per_epoch:
        window = session.step % per_epoch
        hidden = carried.hidden if window else torch.zeros(1, 3, 16)
        x = text[6 * window : 6 * window + 6]
        out, hidden = model(x, hidden)
        loss = F.mse_loss(out[:-1], x[1:])
        descend(opt, loss)
        carried.hidden = hidden.detach()
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt])


@program()
def hidden_state_carried(run: Run) -> None:
    recurrent(run, keeps=False)


@program()
def hidden_state_in_state(run: Run) -> None:
    recurrent(run, keeps=True)


@program()
def no_optimizer_end_step(run: Run) -> None:
    """regression, word_language_model: no optimizer, ``p.data.add_``."""
    run.seed()
    model = mlp()
    session = run.attach(model)
    for _ in range(session.step, UPDATES):
        model.zero_grad()
        loss = model(torch.randn(6, 8)).pow(2).mean()
        loss.backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.05)
        run.updated(loss)
        session.end_step()
    run.finished(model, [])


@program()
def layers_in_turn_end_step(run: Run) -> None:
    """mnist_forward_forward: each layer has its optimizer, and all updates of one come before those of the next."""
    run.seed()
    layers = nn.ModuleList([nn.Linear(8, 48), nn.Linear(48, 48)])
    each = 10
    ofs = [torch.optim.Adam(layer.parameters(), lr=1e-2) for layer in layers]
    x = points().tensors[0]
    session = run.attach(layers)
    for number, (layer, opt) in enumerate(zip(layers, ofs, strict=True)):
        for _ in range(min(each, max(0, session.iteration - each * number)), each):
            loss = F.softplus(1 - F.relu(layer(x)).pow(2).mean())
            descend(opt, loss)
            run.updated(loss)
            session.end_step()
        x = F.relu(layer(x)).detach()
    run.finished(layers, ofs)


# ---- an environment ----------------------------------------------------------------------------------------------


class Walk:
    """An environment with a generator of its own: a walk that ends at random."""

    def __init__(self) -> None:
        self.draw = random.Random(11)

    def reset(self) -> torch.Tensor:
        self.at = [self.draw.gauss(0, 1) for _ in range(8)]
        return torch.tensor(self.at)

    def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        self.at = [a + (0.1 if action else -0.1) + 0.05 * self.draw.gauss(0, 1) for a in self.at]
        return torch.tensor(self.at), -abs(self.at[0]), self.draw.random() < 0.2

    def state_dict(self) -> dict[str, Any]:
        checkpoint, internal, spare = self.draw.getstate()
        return {"version": checkpoint, "internal": list(internal), "spare": spare}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draw.setstate((state["version"], tuple(state["internal"]), state["spare"]))


def episodes(run: Run, keeps: bool) -> None:
    """reinforce, actor_critic: one update after each episode."""
    run.seed()
    model = mlp()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    walk = Walk()
    session = run.attach(model, **({"state": {"walk": walk}} if keeps else {}))
    for _ in range(session.step, UPDATES):
        at, over, terms, rewards = walk.reset(), False, [], []
        while not over:
            chance = torch.distributions.Categorical(logits=model(at)[:2])
            action = chance.sample()
            at, reward, over = walk.step(int(action))
            terms.append(chance.log_prob(action))
            rewards.append(reward)
        loss = -sum(rewards) * torch.stack(terms).sum()
        descend(opt, loss)
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt])


@program()
def environment(run: Run) -> None:
    episodes(run, keeps=False)


@program()
def environment_in_state(run: Run) -> None:
    episodes(run, keeps=True)


@program()
def target_network(run: Run) -> None:
    """CleanRL's dqn: a second network that is written by ``.data`` every few updates."""
    run.seed()
    model, target = mlp(), mlp()
    target.load_state_dict(model.state_dict())
    both = nn.ModuleList([model, target])
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = run.attach(both, optimizer=opt)
    for step in range(session.step, UPDATES):
        x = torch.randn(6, 8)
        with torch.no_grad():
            aim = target(x + 0.1) * 0.9
        loss = F.mse_loss(model(x), aim + 1)
        descend(opt, loss)
        run.updated(loss)
        if step % 3 == 0:
            for old, new in zip(target.parameters(), model.parameters(), strict=True):
                old.data.copy_(new.data)
        session.end_step()
    run.finished(both, [opt])


@program()
def several_updates_on_one_rollout(run: Run) -> None:
    """CleanRL's ppo: a rollout, and then shuffled parts of it, twice; a resume begins a rollout."""
    run.seed()
    model = mlp()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    walk = Walk()
    session = run.attach(model)
    at = walk.reset()
    for _ in range(session.step // 4, 4):
        seen = []
        for _ in range(8):
            with torch.no_grad():
                action = int(model(at)[:2].argmax())
            at, _, over = walk.step(action)
            at = walk.reset() if over else at
            seen.append(at)
        rollout = torch.stack(seen)
        for _ in range(2):
            for part in torch.randperm(8).split(4):
                loss = model(rollout[part]).pow(2).mean()
                descend(opt, loss)
                run.updated(loss)
    run.finished(model, [opt])


# ---- trainers ----------------------------------------------------------------------------------------------------


class Noisy(Dataset[torch.Tensor]):
    """Augments with the global generator."""

    def __init__(self, count: int = 30) -> None:
        self.x = points(count).tensors[0]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index] + 0.1 * torch.randn(8)


class OneAhead:
    """Accelerate's and timm's loaders: the next batch is fetched before this one is given."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[torch.Tensor]:
        batches = iter(self.loader)
        ahead = next(batches)
        for following in batches:
            yield ahead
            ahead = following
        yield ahead


def one_ahead(run: Run, make: Callable[[], Dataset[torch.Tensor]]) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader = session.loader(OneAhead(DataLoader(make(), 6, shuffle=True)))
    for _ in range(loader.epoch, 3):
        for x in loader:
            loss = model(x).pow(2).mean()
            descend(opt, loss)
            run.updated(loss)
    run.finished(model, [opt])


@program()
def prepared_loader_one_ahead(run: Run) -> None:
    one_ahead(run, Noisy)


@program()
def trainer_that_begins_anew(run: Run) -> None:
    """HF's Trainer with an attach in a callback: the number of updates is resumed, the passes are not."""
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(points(), 6, shuffle=True, generator=torch.Generator().manual_seed(1))
    session = run.attach(model)
    done = session.step
    while done < UPDATES:
        for (x,) in loader:
            loss = model(x).pow(2).mean()
            descend(opt, loss)
            run.updated(loss)
            session.end_step()
            done += 1
            if done == UPDATES:
                break
    run.finished(model, [opt])


@program()
def rate_by_updates(run: Run) -> None:
    """timm: a rate by the number of updates, and an average of the weights in ``state=``."""
    run.seed()
    model = mlp()
    average = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model, state={"average": average})
    loader = session.loader(DataLoader(points(), 6, shuffle=True))
    for epoch in range(loader.epoch, 3):
        updates = epoch * len(loader) + loader.start
        for (x,) in loader:
            loss = model(x).pow(2).mean()
            descend(opt, loss)
            run.updated(loss)
            updates += 1
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)
            for group in opt.param_groups:
                group["lr"] = 1e-2 / (1 + updates)
    run.finished(model, [opt], {"average": average})
