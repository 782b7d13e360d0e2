"""The loaders of a ``Trainer`` of transformers, as ``transformers.py`` replaces them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from lightck.integrations.loaders import WrappedLoader


class LoaderOwner(Protocol):
    """What a loader needs of ``TrainerSession``."""

    found: Any
    """Not None if the training continues from the pool."""
    has_batch: bool
    """Set to True when the loader gives a batch."""

    def loader_of(self, loader: Any) -> Any:
        """Return the session's loader, which iterates over the Trainer's."""
        ...


class TrainLoader(WrappedLoader):
    """The Trainer's loader. It iterates over ``session.loader``, which goes on in the middle of a pass."""

    def __init__(self, loader: Any, owner: LoaderOwner, n_skipped: int = 0) -> None:
        """``n_skipped``: batches that are fetched and dropped, because the Trainer's own checkpoint lies after them."""
        super().__init__(loader)
        self._owner, self._n_skipped = owner, n_skipped

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self._owner.loader_of(self._loader))
        for _ in range(self._n_skipped):
            next(batches)
        return _Batches(batches, self._owner)

    def after(self, n_batches: int) -> TrainLoader:
        """Return the loader for an epoch of which the Trainer wants to skip the first batches. If the training goes on
        from the pool, this is the same loader: ``session.loader`` begins at the right batch by itself."""
        return self if self._owner.found is not None else TrainLoader(self._loader, self._owner, n_batches)


class _Batches:
    """The batches of one pass."""

    def __init__(self, batches: Iterator[Any], owner: LoaderOwner) -> None:
        self._batches, self._owner = batches, owner

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._owner.has_batch = True
        return batch


def skipping(skip: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``skip_first_batches`` that knows the loaders of this file, too."""

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        return dataloader.after(num_batches) if isinstance(dataloader, TrainLoader) else skip(dataloader, num_batches)

    return skip_first_batches
