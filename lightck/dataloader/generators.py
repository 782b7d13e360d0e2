"""The random generators that a loader owns, and the global ones beside them: taken, put back, and held still."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from lightck.dataloader.position import Mark
from lightck.dataloader.under import chain
from lightck.state import rng

States = tuple[torch.Tensor, ...]
"""Of a loader's own generators, in the order in which they were found."""


class OwnGenerators:
    """Those of a loader, its sampler and its batch sampler, and of the loaders inside a wrapper, each once. Torch's
    global one is none of them: it is saved with the other global ones."""

    def __init__(self, loader: object) -> None:
        self._own = _found(loader)

    def __len__(self) -> int:
        return len(self._own)

    def states(self) -> States:
        return tuple(generator.get_state() for generator in self._own)

    def now(self) -> Mark:
        """The global generators and these, as they are."""
        return Mark(rng.capture(), self.states())

    def try_states(self, states: States) -> None:
        """Raises ``RuntimeError`` or ``TypeError`` for states that these do not take. Nothing is changed."""
        for generator, state in zip(self._own, states, strict=True):
            torch.Generator(generator.device).set_state(state)

    def set_states(self, states: States) -> None:
        for generator, state in zip(self._own, states, strict=True):
            generator.set_state(state)

    def restore(self, mark: Mark) -> None:
        """The global generators and these, as they were then."""
        mark.rng.restore()
        self.set_states(mark.generators)

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """The global generators and these are afterwards as they were before."""
        before = self.now()
        try:
            yield
        finally:
            self.restore(before)


def _found(loader: object) -> tuple[torch.Generator, ...]:
    owners: list[Any] = []
    for one in chain(loader):
        sampler, batches = getattr(one, "sampler", None), getattr(one, "batch_sampler", None)
        owners += (one, sampler, batches, getattr(batches, "sampler", None))
    found: dict[int, torch.Generator] = {}
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and generator is not torch.default_generator:
            found[id(generator)] = generator
    return tuple(found.values())
