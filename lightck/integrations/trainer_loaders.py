"""The loaders of a ``Trainer`` of transformers, as ``transformers.py`` replaces them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class LoaderOwner(Protocol):
    """What a loader needs of ``TrainerSession``."""

    found: Any
    """Not None if the training goes on from the pool."""

    def loader_of(self, loader: Any) -> Any:
        """Return the session's loader, which iterates over the Trainer's."""
        ...


class _Wrapped:
    """A loader in the place of another one, whose length and attributes it has."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class TrainLoader(_Wrapped):
    """The Trainer's loader. It iterates over ``session.loader``, which goes on in the middle of a pass."""

    def __init__(self, loader: Any, owner: LoaderOwner, n_skipped: int = 0) -> None:
        """``n_skipped``: batches that are fetched and dropped, because the Trainer's own checkpoint lies after them."""
        super().__init__(loader)
        self._owner, self._n_skipped = owner, n_skipped

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self._owner.loader_of(self._loader))
        for _ in range(self._n_skipped):
            next(batches)
        return batches

    def after(self, n_batches: int) -> TrainLoader:
        """Return the loader for an epoch of which the Trainer wants to skip the first batches. If the training goes on
        from the pool, ``session.loader`` finds its place itself."""
        return self if self._owner.found is not None else TrainLoader(self._loader, self._owner, n_batches)


class EvaluationLoader(_Wrapped):
    """A loader of an evaluation whose workers persist. It draws a random number when its workers start, once in each
    process. The run before has drawn it, so a resumed run leaves the random state as it was."""

    def __init__(self, loader: Any, evaluated: set[str], key: str) -> None:
        """``evaluated``: keys of the loaders whose workers have started in this run or before."""
        super().__init__(loader)
        self._evaluated, self._key = evaluated, key

    def __iter__(self) -> Iterator[Any]:
        draws_again = self._key in self._evaluated and getattr(self._loader, "_iterator", None) is None
        self._evaluated.add(self._key)
        if not draws_again:
            yield from self._loader
            return
        random_state = torch.get_rng_state()
        batches = iter(self._loader)
        first = next(batches, None)
        torch.set_rng_state(random_state)
        if first is not None:
            yield first
            yield from batches


def skipping(skip: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``skip_first_batches`` that knows the loaders of this file, too."""

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        return dataloader.after(num_batches) if isinstance(dataloader, TrainLoader) else skip(dataloader, num_batches)

    return skip_first_batches
