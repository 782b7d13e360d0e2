"""A fake session for tests of loaders: it keeps its checkpoints by number, logs what the run sees, and kills it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightck.dataloader.loader import SessionLoader
from lightck.dataloader.passes import Pass
from lightck.dataloader.preview import RestoredRng
from lightck.state import rng, values


class Killed(Exception):
    """A simulated kill -9."""


@dataclass
class Host:
    """A session that keeps its checkpoints by number. ``kill``: the number of the checkpoint that ends the run."""

    kill: int | None = None
    resumed: bytes | None = None
    number: int = 0
    updates: int = 0
    saved: int = 0
    log: list[Any] = field(default_factory=list)
    checkpoints: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    loaders: dict[str, SessionLoader] = field(default_factory=dict)
    ended: int = 0
    proxy: Any = None

    def __post_init__(self) -> None:
        self.checkpoint = None if self.resumed is None else values.unpack(self.resumed)
        self.once = None
        if self.checkpoint is not None:
            self.once = RestoredRng(rng.RngState.from_value(self.checkpoint["rng"]))
            self.updates = self.saved = self.checkpoint["updates"]
            self.number = self.checkpoint["number"]

    def loader(self, dl: Any, name: str = "train", **options: Any) -> SessionLoader:
        positions = self.checkpoint["loaders"] if self.checkpoint else {}
        at_iter = self.once is not None and not any(position["live"] for position in positions.values())
        self.loaders[name] = SessionLoader(dl, self.proxy or self, name, positions.get(name), at_iter, **options)
        return self.loaders[name]

    def loader_next(self, loader: SessionLoader) -> None:
        if self.updates > self.saved:
            self.save()

    def loader_gave(
        self, loader: SessionLoader, pass_: Pass, batch: object, checksum: int | None, cache: Any
    ) -> None: ...

    def loader_pass_ended(self, loader: SessionLoader) -> None:
        self.ended += 1

    def take_restored_rng(self, loader: SessionLoader, pass_: Any) -> rng.RngState | None:
        if self.once is None or self.updates > self.checkpoint["updates"]:
            return None
        state = self.once.take(loader, pass_)
        for other in self.loaders.values() if state is not None else ():
            other.put_back()
        return state

    def save(self) -> None:
        self.saved = self.updates
        self.number += 1
        checkpoint = {
            "number": self.number,
            "updates": self.updates,
            "rng": rng.capture().to_value(),
            "loaders": {name: loader.position() for name, loader in self.loaders.items()},
        }
        self.checkpoints[self.number] = len(self.log), values.pack(checkpoint, path="v")
        if self.number == self.kill:
            raise Killed

    def see(self, *what: Any) -> None:
        draws = random.random(), np.random.rand(), torch.rand(1).item()
        self.log.append((*map(plain, what), draws))

    def step(self, *what: Any) -> None:
        self.see(*what)
        self.updates += 1


def plain(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, dict):
        return plain(list(value.items()))
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
