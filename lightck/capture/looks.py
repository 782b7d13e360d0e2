"""How many tensors look, asked of all at once: loops that run in C, since these questions come at every step.

Nothing here reads a tensor's bytes. Values are compared one at a time: a list of as many shapes would set off the
garbage collector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, eq, getitem, is_
from typing import Any

import torch

from lightck.capture.inventory import Live

_shape, _dtype, _version = attrgetter("shape"), attrgetter("dtype"), attrgetter("_version")


def all_same(now: Iterable[Any], before: Sequence[Any]) -> bool:
    """Whether these are the same objects. As many of them: the caller has made sure of that."""
    return all(map(is_, now, before))


def all_equal(now: Iterable[Any], before: Sequence[Any]) -> bool:
    """The same for values."""
    return all(map(eq, now, before))


def version_of(tensor: torch.Tensor) -> int:
    """Its version counter; 0 for one that was made under ``inference_mode``, to which torch counts no writes."""
    return 0 if tensor.is_inference() else tensor._version


class Looks:
    """Address, shape, stride and dtype of tensors. Raises what ``data_ptr`` raises where one has no memory."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.addresses = list(map(torch.Tensor.data_ptr, tensors))
        self.shapes = list(map(_shape, tensors))
        self._strides = list(map(torch.Tensor.stride, tensors))
        self._dtypes = list(map(_dtype, tensors))

    def hold(self) -> bool:
        return (
            all_equal(map(torch.Tensor.data_ptr, self.tensors), self.addresses)
            and all_equal(map(_shape, self.tensors), self.shapes)
            and all_equal(map(torch.Tensor.stride, self.tensors), self._strides)
            and all_same(map(_dtype, self.tensors), self._dtypes)
        )


class Versions:
    """Version counters of tensors: what torch counts of the writes to them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._of: Callable[[torch.Tensor], int] = _version
        try:
            self.versions = list(map(self._of, tensors))
        except RuntimeError:  # one of them has none: asking each before would cost at every step
            self._of = version_of
            self.versions = list(map(self._of, tensors))

    def hold(self) -> bool:
        return all_equal(map(self._of, self._tensors), self.versions)


class Places:
    """Which tensor each module or optimizer holds under which key. KeyError from ``hold`` where a key is gone."""

    def __init__(self, lives: Sequence[Live]) -> None:
        housed = [live for live in lives if live.home is not None]
        self._homes: list[Any] = [live.home for live in housed]
        self._keys = [live.key for live in housed]
        self._tensors = [live.tensor for live in housed]

    def hold(self) -> bool:
        return all_same(map(getitem, self._homes, self._keys), self._tensors)
