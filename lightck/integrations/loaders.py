"""Loaders that an integration puts into the place of a framework's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class WrappedLoader:
    """A loader in the place of another one, whose length and attributes it has."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy, or a pickle, that has no attributes yet
            raise AttributeError(name)
        return getattr(self._loader, name)


class EvaluationLoader(WrappedLoader):
    """A loader of an evaluation whose workers persist. It draws a random number when its workers start, once in each
    process. The run before has drawn it, so a resumed run leaves the random state as it was."""

    def __init__(self, loader: Any, started_loaders: set[str], key: str) -> None:
        """``started_loaders``: keys of the loaders whose workers have started in this run or before."""
        super().__init__(loader)
        self._started_loaders, self._key = started_loaders, key

    def __iter__(self) -> Iterator[Any]:
        must_undo_draw = self._key in self._started_loaders and getattr(self._loader, "_iterator", None) is None
        self._started_loaders.add(self._key)
        if not must_undo_draw:
            yield from self._loader
            return
        random_state = torch.get_rng_state()
        batches = iter(self._loader)
        first = next(batches, None)
        torch.set_rng_state(random_state)
        if first is not None:
            yield first
            yield from batches
