"""Signatures of tensors: whether a tensor is the same one, in the same memory, without reading its bytes.

These checks run at every step, so loops over many tensors run in C. Values are compared one at a time, and are not
collected in a list first: a list of as many new objects as there are tensors would trigger the garbage collector.

To find and name all tensors again takes microseconds for each tensor, and usually no tensor appears or disappears for
thousands of steps. So a ``TensorList`` keeps the tensors that one boundary found, and the next boundary checks whether
all tensors are still the same. Invariant: if anything about them differs, ``is_unchanged`` returns False, and all
tensors are named again. (New modules, parameters and groups are found before, by ``ModelView.refresh`` and
``OptimizerView.has_changed``.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, eq, getitem, is_, ne
from typing import Any

import torch

from lightck.state.inventory import Live, OptimizerView, is_named_tensor, storage_address_of

_shape, _dtype, _version = attrgetter("shape"), attrgetter("dtype"), attrgetter("_version")


def all_same(now: Iterable[object], before: Sequence[object]) -> bool:
    """Whether ``now`` and ``before`` hold the same objects in the same order. They must have the same length."""
    return all(map(is_, now, before))


def all_equal(now: Iterable[object], before: Sequence[object]) -> bool:
    """Whether ``now`` and ``before`` hold equal values in the same order. They must have the same length."""
    return all(map(eq, now, before))


def version_counter_of(tensor: torch.Tensor) -> int:
    """Return torch's count of in-place writes to a tensor; 0 for a tensor made under ``inference_mode``, because torch
    does not count writes to it."""
    return 0 if tensor.is_inference() else tensor._version


MemoryLayout = tuple[int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]
"""See ``memory_layout_of``."""


def memory_layout_of(tensor: torch.Tensor) -> MemoryLayout:
    """Return where the bytes of a tensor begin (address) and how they are interpreted (shape, strides, dtype, whether
    conjugated, whether negated). An assignment to ``.data`` can change any of these on the same object."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


class MemoryLayouts:
    """The memory layouts of tensors, to compare later. The constructor raises what ``data_ptr`` raises for a tensor
    without memory.

    Conjugation and negation are checked for complex tensors only. A real tensor is negated only as a view of a complex
    one (``x.conj().imag``). Such a view is never dense, so it is copied at each checkpoint anyway.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.addresses = list(map(torch.Tensor.data_ptr, tensors))
        self.shapes = list(map(_shape, tensors))
        self._strides = list(map(torch.Tensor.stride, tensors))
        self._dtypes = list(map(_dtype, tensors))
        has_complex = any(dtype.is_complex for dtype in set(self._dtypes))
        self._complex = [tensor for tensor in tensors if tensor.is_complex()] if has_complex else []
        self._layouts = list(map(memory_layout_of, self._complex))

    def are_unchanged(self) -> bool:
        return (
            all_equal(map(torch.Tensor.data_ptr, self.tensors), self.addresses)
            and all_equal(map(_shape, self.tensors), self.shapes)
            and all_equal(map(torch.Tensor.stride, self.tensors), self._strides)
            and all_same(map(_dtype, self.tensors), self._dtypes)
            and all_equal(map(memory_layout_of, self._complex), self._layouts)
        )

    def changed(self) -> set[int]:
        """Return the indices of the tensors whose memory layout changed."""
        was = zip(self.addresses, self.shapes, self._strides, self._dtypes, strict=True)
        now = map(memory_layout_of, self.tensors)
        now_complex = map(memory_layout_of, self._complex)
        changed_complex = {id(t) for t, a, b in zip(self._complex, now_complex, self._layouts, strict=True) if a != b}
        return {
            i
            for i, (tensor, a, b) in enumerate(zip(self.tensors, now, was, strict=True))
            if a[:4] != b or id(tensor) in changed_complex
        }


class VersionCounters:
    """The version counters of tensors, to compare later."""

    def __init__(self, tensors: Sequence[torch.Tensor], dtensors: Sequence[tuple[int, torch.Tensor]] = ()) -> None:
        """``dtensors``: the DTensors that hold some of the tensors, each with the index of its local tensor
        (``Registrations.dtensors``): a write to a DTensor moves its own counter, and not that of its local tensor."""
        self._n_plain, self._dtensors = len(tensors), dtensors
        self._tensors = [*tensors, *(dtensor for _, dtensor in dtensors)] if dtensors else tensors
        self._counter_of: Callable[[torch.Tensor], int] = _version
        try:
            self.counters = list(map(self._counter_of, self._tensors))
        except RuntimeError:
            # An inference tensor has no version counter. ``version_counter_of`` allows for that, but tests each tensor
            # at every step, so it is used only if there is an inference tensor.
            self._counter_of = version_counter_of
            self.counters = list(map(self._counter_of, self._tensors))

    def are_unchanged(self) -> bool:
        return all_equal(map(self._counter_of, self._tensors), self.counters)

    def changed(self) -> set[int]:
        """Return the indices of the tensors whose version counter changed."""
        now = map(self._counter_of, self._tensors)
        changed = [i for i, has_changed in enumerate(map(ne, now, self.counters)) if has_changed]
        return {i if i < self._n_plain else self._dtensors[i - self._n_plain][0] for i in changed}


class Registrations:
    """Which tensor each module or optimizer holds under which key. ``are_unchanged`` raises ``KeyError`` if a key has
    gone."""

    def __init__(self, lives: Sequence[Live]) -> None:
        owned = [live for live in lives if live.owner is not None and live.dtensor is None]
        self._owners: list[Any] = [live.owner for live in owned]
        self._keys = [live.key for live in owned]
        self._tensors = [live.tensor for live in owned]
        self._in_dtensors = [live for live in lives if live.dtensor is not None]
        self.dtensors = (
            [(i, live.dtensor) for i, live in enumerate(lives) if live.dtensor is not None] if self._in_dtensors else []
        )
        """The DTensors, each with the index of its local tensor in ``lives``."""

    def are_unchanged(self) -> bool:
        return all_same(map(getitem, self._owners, self._keys), self._tensors) and all(
            live.is_current() for live in self._in_dtensors
        )


_requires_grad = attrgetter("requires_grad")
_UNREADABLE = (KeyError, TypeError, RuntimeError, NotImplementedError, ValueError)
"""Errors of a tensor that has no memory of its own, or of a place that no longer exists."""


class TensorList:
    """The tensors as one boundary found them: identity, address, shape, strides, dtype and ``requires_grad`` of each,
    and which places of parameters and buffers held None. Made by ``tensor_list_of``."""

    def __init__(
        self, lives: list[Live], vacant: Sequence[tuple[dict[str, object], str]], views: Sequence[OptimizerView]
    ) -> None:
        self.lives = lives
        self.token = object()
        """Identifies this list for an object that must not keep the list's tensors alive."""
        self._vacant = list(vacant)
        self._registrations = Registrations(lives)
        self._layouts = MemoryLayouts([live.tensor for live in lives])
        self._params = [live.registered for live in lives if live.role == "param"]
        self._requires_grad_flags = list(map(_requires_grad, self._params))
        self._storages = (
            list(map(storage_address_of, self._layouts.tensors)) if any(live.is_frozen for live in lives) else None
        )
        """The address of each tensor's storage. None if no tensor is frozen, because the addresses only decide which
        tensors are frozen (``inventory._unfreeze_shared``)."""
        self._states = [_StateSignature(view) for view in views]
        self.with_values = {signature.view.index: signature.with_values for signature in self._states}
        """Index of the optimizer view -> name and tensor of each parameter whose state is not only tensors. Such state
        has to be read at every boundary."""

    def is_unchanged(self) -> bool:
        """Whether finding and naming all tensors again would give the same list. To be called after
        ``ModelView.refresh`` and ``OptimizerView.has_changed``, which find new modules, parameters and groups."""
        try:
            return (
                self._registrations.are_unchanged()
                and not any(owner.get(key) is not None for owner, key in self._vacant)
                and self._layouts.are_unchanged()
                and all_same(map(_requires_grad, self._params), self._requires_grad_flags)
                and (
                    self._storages is None or all_equal(map(storage_address_of, self._layouts.tensors), self._storages)
                )
                and all(signature.is_unchanged() for signature in self._states)
            )
        except _UNREADABLE:
            return False


def tensor_list_of(
    lives: list[Live], vacant: Sequence[tuple[dict[str, object], str]], views: Sequence[OptimizerView]
) -> TensorList | None:
    """Return the list. If some tensor has no complete signature, return None, and all tensors are named again at each
    boundary."""
    try:
        return TensorList(lives, vacant, views)
    except _UNREADABLE:
        return None


class _StateSignature:
    """Which parameters an optimizer holds state for, which dict holds the state of each, and how many items each dict
    has, to compare later. ``with_values``: name and tensor of each parameter whose state is not only named tensors."""

    def __init__(self, view: OptimizerView) -> None:
        self.view = view
        state = view.optimizer.state
        self._keys, self._values = list(state.keys()), list(state.values())
        self._dicts = [value for value in self._values if isinstance(value, dict)]
        self._sizes = list(map(len, self._dicts))
        self.with_values = [(name, p) for name, p in view.params if p in state and not _only_tensors(state[p])]
        self._states_with_values = [state[p] for _, p in self.with_values]
        self._n_named = list(map(_n_named_tensors, self._states_with_values))

    def is_unchanged(self) -> bool:
        state = self.view.optimizer.state
        return (
            len(state) == len(self._keys)
            and all_same(state.keys(), self._keys)
            and all_same(state.values(), self._values)
            and list(map(len, self._dicts)) == self._sizes
            and list(map(_n_named_tensors, self._states_with_values)) == self._n_named
        )


def _only_tensors(state: object) -> bool:
    """Whether the state of one parameter is a dict that is not empty and holds named tensors only
    (``is_named_tensor``)."""
    return isinstance(state, dict) and 0 < len(state) == _n_named_tensors(state)


def _n_named_tensors(state: object) -> int:
    """Return how many named tensors the state of one parameter holds; -1 if the state is no dict."""
    return sum(is_named_tensor(key, value) for key, value in state.items()) if isinstance(state, dict) else -1


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """What the pool stores of an update, apart from the state after it.

    gradients: the tensors that it consumed, with the names of their entries. value: everything else that it consumed,
    for the small state. updated: the names of the parameters that it changed, without those whose gradients are not
    recorded, because their units lie whole in each checkpoint.
    """

    gradients: list[Live]
    value: object
    updated: frozenset[str]


@dataclass(slots=True)
class ClosedStep:
    """A closed step as capture passes it to the pipeline."""

    step: int
    iteration: int
    """How many iterations of the loop have ended, those without an update included."""
    lives: list[Live]
    state: bytes
    """The small state, packed."""
    written_outside_step: frozenset[str] = frozenset()
    """Names of tensors that a wrapper writes outside its ``step``. From now on no background copy may read them."""
    tensor_list: TensorList | None = None
    """The list whose tensors are the first items of ``lives``. If an earlier checkpoint had the same list, these
    tensors are the same and lie in the same memory as at that checkpoint. Their bytes may differ."""
    update: UpdateRecord | None = None
    """What the update of this step consumed; None: this is not known, or the strategy does not store it."""
    is_checkpoint: bool = True
    """Whether the step is saved as a checkpoint. If not, the step only stores ``update`` for a later checkpoint:
    ``state`` holds the update alone, and of ``lives`` only the tensors that optimizers update are read."""

    def without_stand_ins(self) -> ClosedStep:
        """Return the step with no stand-ins: each tensor is read itself."""
        if all(live.stand_in is None for live in self.lives):
            return self
        return replace(self, lives=[replace(live, stand_in=None) for live in self.lives], tensor_list=None)
