"""How many tensors look, asked of all at once: loops that run in C, since these questions come at every step.

Nothing here reads a tensor's bytes. Values are compared one at a time: a list of as many shapes would set off the
garbage collector.

Naming every tensor anew costs microseconds for each, and for thousands of steps nothing comes or goes. So a
``TensorList`` keeps the tensors that one boundary found, and the next boundary asks whether they are all the same.
Invariant: where anything differs, ``holds`` returns False, and everything is named anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq, getitem, is_, ne
from typing import Any

import torch

from lightck.state.inventory import Live, OptimizerView, is_direct, storage_of

_shape, _dtype, _version = attrgetter("shape"), attrgetter("dtype"), attrgetter("_version")


def all_same(now: Iterable[object], before: Sequence[object]) -> bool:
    """Whether these are the same objects. As many of them: the caller has made sure of that."""
    return all(map(is_, now, before))


def all_equal(now: Iterable[object], before: Sequence[object]) -> bool:
    """The same for values."""
    return all(map(eq, now, before))


def version_counter_of(tensor: torch.Tensor) -> int:
    """Its version counter; 0 for one that was made under ``inference_mode``, to which torch counts no writes."""
    return 0 if tensor.is_inference() else tensor._version


Reading = tuple[int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]


def reading_of(tensor: torch.Tensor) -> Reading:
    """Where the bytes of a tensor begin, and how they are read: shape, stride, dtype, conjugated, negated. ``.data =``
    can change any of it alone, on the same object."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


class Signatures:
    """The readings of tensors. Raises what ``data_ptr`` raises where one has no memory.

    Only complex tensors are asked whether they are conjugated or negated: a real one that is negated is a part of a
    complex one, which never lies dense, and of such a tensor a copy is made at each version.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.addresses = list(map(torch.Tensor.data_ptr, tensors))
        self.shapes = list(map(_shape, tensors))
        self._strides = list(map(torch.Tensor.stride, tensors))
        self._dtypes = list(map(_dtype, tensors))
        has_complex = any(dtype.is_complex for dtype in set(self._dtypes))
        self._complex = [tensor for tensor in tensors if tensor.is_complex()] if has_complex else []
        self._readings = list(map(reading_of, self._complex))

    def hold(self) -> bool:
        return (
            all_equal(map(torch.Tensor.data_ptr, self.tensors), self.addresses)
            and all_equal(map(_shape, self.tensors), self.shapes)
            and all_equal(map(torch.Tensor.stride, self.tensors), self._strides)
            and all_same(map(_dtype, self.tensors), self._dtypes)
            and all_equal(map(reading_of, self._complex), self._readings)
        )

    def changed(self) -> set[int]:
        """Positions of those that do not hold."""
        was = zip(self.addresses, self.shapes, self._strides, self._dtypes, strict=True)
        now = map(reading_of, self.tensors)
        turned = map(reading_of, self._complex)
        other = {id(t) for t, a, b in zip(self._complex, turned, self._readings, strict=True) if a != b}
        return {
            i
            for i, (tensor, a, b) in enumerate(zip(self.tensors, now, was, strict=True))
            if a[:4] != b or id(tensor) in other
        }


class VersionCounters:
    """Version counters of tensors: what torch counts of the writes to them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._of: Callable[[torch.Tensor], int] = _version
        try:
            self.checkpoints = list(map(self._of, tensors))
        except RuntimeError:  # one of them has none: asking each before would cost at every step
            self._of = version_counter_of
            self.checkpoints = list(map(self._of, tensors))

    def hold(self) -> bool:
        return all_equal(map(self._of, self._tensors), self.checkpoints)

    def changed(self) -> set[int]:
        """Positions of those that do not hold."""
        return {i for i, moved in enumerate(map(ne, map(self._of, self._tensors), self.checkpoints)) if moved}


class Places:
    """Which tensor each module or optimizer holds under which key. KeyError from ``hold`` where a key is gone."""

    def __init__(self, lives: Sequence[Live]) -> None:
        housed = [live for live in lives if live.home is not None]
        self._homes: list[Any] = [live.home for live in housed]
        self._keys = [live.key for live in housed]
        self._tensors = [live.tensor for live in housed]

    def hold(self) -> bool:
        return all_same(map(getitem, self._homes, self._keys), self._tensors)


_grads = attrgetter("requires_grad")
_UNASKABLE = (KeyError, TypeError, RuntimeError, NotImplementedError, ValueError)
"""What a tensor without memory of its own answers, or a place that is gone."""


class TensorList:
    """``lives`` as one boundary found them: identity, address, shape, stride, dtype and ``requires_grad`` of every
    tensor, and what every place that was empty holds. Made by ``tensor_list_of``."""

    def __init__(
        self, lives: list[Live], vacant: Sequence[tuple[dict[str, object], str]], views: Sequence[OptimizerView]
    ) -> None:
        self.lives = lives
        self.token = object()
        """Tells this roster from every other, for who must not keep an optimizer alive."""
        self._vacant = list(vacant)
        self._places = Places(lives)
        self._signatures = Signatures([live.tensor for live in lives])
        self._params = [live.tensor for live in lives if live.role == "param"]
        self._grads = list(map(_grads, self._params))
        self._storages = (
            list(map(storage_of, self._signatures.tensors)) if any(live.is_frozen for live in lives) else None
        )
        self._states = [_StateSignature(view) for view in views]
        self.with_values = {signature.view.index: signature.with_values for signature in self._states}
        """By index of the view: the parameters whose state is not only tensors, to be read at every boundary."""

    def holds(self) -> bool:
        """Whether naming everything anew would find just this."""
        try:
            return (
                self._places.hold()
                and not any(home.get(key) is not None for home, key in self._vacant)
                and self._signatures.hold()
                and all_same(map(_grads, self._params), self._grads)
                and (self._storages is None or all_equal(map(storage_of, self._signatures.tensors), self._storages))
                and all(signature.holds() for signature in self._states)
            )
        except _UNASKABLE:
            return False


def tensor_list_of(
    lives: list[Live], vacant: Sequence[tuple[dict[str, object], str]], views: Sequence[OptimizerView]
) -> TensorList | None:
    """None where some tensor cannot be asked all of it: then everything is named anew each time."""
    try:
        return TensorList(lives, vacant, views)
    except _UNASKABLE:
        return None


class _StateSignature:
    """Which parameters an optimizer holds state for, and in which dicts."""

    def __init__(self, view: OptimizerView) -> None:
        self.view = view
        state = view.optimizer.state
        self._keys, self._homes = list(state.keys()), list(state.values())
        self._dicts = [home for home in self._homes if isinstance(home, dict)]
        self._sizes = list(map(len, self._dicts))
        self.with_values = [(name, p) for name, p in view.params if p in state and not _only_tensors(state[p])]
        self._mixed = [state[p] for _, p in self.with_values]
        self._directs = list(map(_n_direct, self._mixed))

    def holds(self) -> bool:
        state = self.view.optimizer.state
        return (
            len(state) == len(self._keys)
            and all_same(state.keys(), self._keys)
            and all_same(state.values(), self._homes)
            and list(map(len, self._dicts)) == self._sizes
            and list(map(_n_direct, self._mixed)) == self._directs
        )


def _only_tensors(home: object) -> bool:
    return isinstance(home, dict) and 0 < len(home) == _n_direct(home)


def _n_direct(home: object) -> int:
    return sum(is_direct(key, value) for key, value in home.items()) if isinstance(home, dict) else -1


@dataclass(slots=True)
class ClosedStep:
    """A version as capture hands it to the pipeline."""

    step: int
    iteration: int
    lives: list[Live]
    state: bytes
    copied_at_boundary: frozenset[str] = frozenset()
    """Names of tensors that must not be left to background copies."""
    tensor_list: TensorList | None = None
    """Its tensors are the first of ``lives``; where it is that of an earlier version, they look as they did then."""
