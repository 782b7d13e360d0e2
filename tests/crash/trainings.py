"""Real trainings, small: four kinds of loop as users write them, with all that has to go on after a kill.

Each builds everything, calls ``follow.attach`` where a user calls ``lightck.attach``, reports each update with its
loss, and ends with a digest of weights, optimizer, scheduler and random states. Without lightck the same loop is the
reference: ``Follow`` then attaches nothing.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from topk_by_hand import TopKByHand
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightck
from crash.oracle import digest, truth
from crash.victims import Tell
from lightck.pipeline import eager_copies
from lightck.strategy.topk import TopK

UPDATES = 16


class Unfollowed:
    """What stands where a session is, in the reference."""

    step = 0

    def loader(self, loader: Any) -> Any:
        return _Loader(loader)

    def end_step(self) -> None: ...

    def close(self) -> None: ...


class _Loader:
    epoch = 0

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class Follow:
    """One process of a training. ``path`` None: the reference, whose gradients are compressed by hand."""

    def __init__(self, tell: Tell, path: str | None, seed: int, options: dict[str, Any]) -> None:
        """``seed`` differs in each process after the first: what is not restored would show."""
        self._tell, self._path, self._options = tell, path, options
        warnings.filterwarnings("ignore", "Detected call of")  # a resume at the end of an epoch: the scheduler is first
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)
        self.session: Any = Unfollowed()
        self._update = 0

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, **state: Any) -> Any:
        self._tell("attaches", 0)
        if self._path is None:
            if topk := compression_of(self._options):
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                optimizer.register_step_pre_hook(TopKByHand(parameters, topk))
        else:
            self.session = lightck.attach(
                model, self._path, optimizer=optimizer, state=state, resume=True, **self._options
            )
        self._update = self.session.step
        self._tell("attached", self._update)
        return self.session

    def updated(self, loss: torch.Tensor) -> None:
        self._update += 1
        self._tell("finished", [self._update, float(loss.detach()).hex()])

    def ended(self, model: nn.Module, optimizer: torch.optim.Optimizer, **state: Any) -> None:
        drawn = [torch.get_rng_state(), str(np.random.get_state()), random.getstate()]
        self._tell("ended", digest([truth(model, optimizer, **state), drawn]).hex())
        self.session.close()
        self._tell("closed", self._update)


def compression_of(options: dict[str, Any]) -> TopK | None:
    """How a training that is attached with these options compresses its gradients."""
    compress: TopK | None = getattr(options.get("strategy"), "compress", None)
    return compress


def _fixed(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def convolution(follow: Follow) -> None:
    """SGD with momentum, BatchNorm, dropout, a scheduler per epoch, a shuffled loader that is killed in mid-pass."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8 * 36, 64),
        nn.ReLU(),
        nn.Linear(64, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    session = follow.attach(model, optimizer, scheduler=scheduler)
    labels = torch.randint(4, (32,), generator=torch.Generator().manual_seed(3))
    loader = session.loader(DataLoader(TensorDataset(_fixed(32, 1, 8, 8), labels), batch_size=8, shuffle=True))
    for _ in range(loader.epoch, UPDATES // 4):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            follow.updated(loss)
        scheduler.step()
    follow.ended(model, optimizer, scheduler=scheduler)


class Decoder(nn.Module):
    """A language model of two layers with tied weights."""

    def __init__(self, words: int = 50, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        logits: torch.Tensor = self.head(self.layers(self.embed(words), mask=mask, is_causal=True))
        return logits


def language_model(follow: Follow) -> None:
    """AdamW, clipped gradients, a schedule per update, batches drawn from torch's global generator."""
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, UPDATES)
    session = follow.attach(model, optimizer, scheduler=scheduler)
    for _ in range(session.step, UPDATES):
        words = torch.randint(50, (4, 13))
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        follow.updated(loss)
    follow.ended(model, optimizer, scheduler=scheduler)


class Adapted(nn.Module):
    """A frozen layer with a trained one of rank 4 beside it, of which only the second half begins at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.base(x) + self.up(self.down(x)))


def adapters(follow: Follow) -> None:
    """A frozen base with adapters, gradients of two micro-batches, draws from Python's and numpy's generators."""
    model = nn.Sequential(Adapted(160), nn.Dropout(0.1), Adapted(160))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    session = follow.attach(model, optimizer)
    data = _fixed(64, 160)
    for _ in range(session.step, UPDATES):
        total = torch.zeros(())
        for _ in range(2):
            rows = np.random.randint(64, size=8)
            loss = (model(data[rows]) - data[rows] * random.random()).square().mean()
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        follow.updated(total)
        session.end_step()
    follow.ended(model, optimizer)


def layer_by_layer(follow: Follow) -> None:
    """Each layer is updated, and begins to be copied, inside the backward pass; gradients of two micro-batches."""
    model = nn.Sequential(
        nn.Linear(40, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 40)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    eager_copies.EAGER_JOB_NBYTES_MIN = 1  # or all of so small a model would be one part
    layers = lightck.layerwise(model, optimizer)
    session = follow.attach(model, optimizer)
    data = _fixed(64, 40)
    for _ in range(session.step, UPDATES):
        optimizer.zero_grad()
        rows = torch.randint(64, (2, 8))
        with layers.accumulate():
            model(data[rows[0]]).square().mean().backward()
        loss = (model(data[rows[1]]) - data[rows[1]]).square().mean()
        loss.backward()
        optimizer.step()
        follow.updated(loss)
    follow.ended(model, optimizer)


KINDS: dict[str, Callable[[Follow], None]] = {
    "convolution": convolution,
    "language model": language_model,
    "adapters": adapters,
    "layer by layer": layer_by_layer,
}
