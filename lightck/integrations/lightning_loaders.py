"""The loaders of a Trainer of Lightning, as ``lightning_fit.py`` replaces them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightck.errors import LightckError
from lightck.integrations.loaders import EvaluationLoader, WrappedLoader

_SAMPLERS = ("sampler", "batch_sampler")
"""Attributes of a loader that may have a generator of their own."""


class _Replacement(WrappedLoader):
    """A wrapped loader that has the ``_iterator`` of the loader inside. Lightning sets this attribute to None when it
    has ended the loader's workers."""

    @property
    def _iterator(self) -> Any:
        return getattr(self._loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._loader._iterator = value


class ValidationLoader(_Replacement, EvaluationLoader):
    """A loader of a validation whose workers persist."""


class TrainLoader(_Replacement):
    """A loader of the training. It iterates over ``session.loader``, which goes on in the middle of a pass."""

    def __init__(
        self, loader: Any, session_loader: Any, before_next: Callable[[], None], on_error: Callable[[], None]
    ) -> None:
        """``before_next``: called before each batch is fetched. ``on_error``: called if a pass cannot go on."""
        super().__init__(loader)
        self._session_loader, self._before_next, self._on_error = session_loader, before_next, on_error

    def __iter__(self) -> Iterator[Any]:
        try:
            return Batches(iter(self._session_loader), self._session_loader, self._before_next)
        except LightckError:
            self._on_error()
            raise


class Batches(Iterator[Any]):
    """The iterator of one pass over a `TrainLoader`."""

    def __init__(self, batches: Iterator[Any], session_loader: Any, before_next: Callable[[], None]) -> None:
        self._batches, self._session_loader, self._before_next = batches, session_loader, before_next

    @property
    def has_given_all(self) -> bool:
        """Whether the pass has given as many batches as the loader has. Its end is seen only by one more ``next()``."""
        present = self._session_loader.current_pass
        return present is not None and present.state.given == len(self._session_loader)

    def __next__(self) -> Any:
        self._before_next()
        return next(self._batches)


class Lookahead(WrappedLoader):
    """A loader without a length. It fetches one batch more than it gives, so it knows which batch is the last one.
    (Lightning's own loop can fetch ahead, too. But it would take the extra batch from ``session.loader``, which would
    count it as used before it is trained.)"""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.gave_last = False
        """Whether the last batch that was given is the last of its pass."""

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # that state is a batch ahead; the pass is fetched again instead
            raise AttributeError(name)
        return super().__getattr__(name)

    def __iter__(self) -> Iterator[Any]:
        self.gave_last = False
        batches, end = iter(self._loader), object()
        return self._give(batches, end, next(batches, end))  # the first one now, as Lightning does it

    def _give(self, batches: Iterator[Any], end: object, batch: Any) -> Iterator[Any]:
        while batch is not end:
            following = next(batches, end)
            self.gave_last = following is end
            yield batch
            batch = following


class RandomStates:
    """The states of torch's random generator, and of those that loaders have of their own."""

    def __init__(self, loaders: list[Any]) -> None:
        self._loaders = loaders
        self._states = [(one, one.get_state()) for one in (torch.default_generator, *generators_of(loaders))]

    def set(self) -> None:
        """Set the states as they were."""
        for one, state in self._states:
            one.set_state(state)

    @contextmanager
    def set_for_a_while(self) -> Iterator[None]:
        """Set the states, and end the loaders' passes, so that the passes can begin once more. Afterwards the states
        are as they were before the call."""
        now = [(one, one.get_state()) for one, _ in self._states]
        self.set()
        for loader in self._loaders:
            if getattr(loader, "_iterator", None) is not None:
                loader._iterator = None  # its workers have begun to fetch the pass
        try:
            yield
        finally:
            for one, state in now:
                one.set_state(state)


def generators_of(loaders: list[Any]) -> list[torch.Generator]:
    """Return the generators that loaders or their samplers have of their own, each once."""
    owners = [owner for one in loaders for owner in (one, *(getattr(one, name, None) for name in _SAMPLERS))]
    found = {id(g): g for one in owners if isinstance(g := getattr(one, "generator", None), torch.Generator)}
    return list(found.values())


def has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
