"""What a session loader owns: random generators, and objects of ``state=`` that are part of it (a dataset or a sampler
with a state of its own). The generators are captured, restored and preserved together with the global generators.

Fetching changes these objects, and a replay fetches again. So the state that they had before the pass is saved with the
pass. A resume loads that state, replays, and then restores the state that the checkpoint holds of each object. Workers
have copies of the objects, which are made when the pass begins and therefore have the state before the pass.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MemberDescriptorType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightck.dataloader.position import GENERATORS_MAX, RngSnapshot
from lightck.dataloader.wrapped_loader import is_loader_of_torch, wrapper_chain
from lightck.errors import DriftError, UnsupportedError
from lightck.state import rng, values
from lightck.state.generator_states import OwnGenerator, check_state, is_own_generator, set_state, state_of

States = tuple[torch.Tensor, ...]
"""States of a loader's own generators, in the order in which they were found."""


class OwnGenerators:
    """The random generators of a loader, of its samplers, and of loaders inside a wrapper, each once: torch's, numpy's
    and Python's. The global generators are not among them, because they are saved apart."""

    def __init__(self, loader: object) -> None:
        self._loader = loader
        self._own = _generators_of(loader)
        if len(self._own) > GENERATORS_MAX:
            raise UnsupportedError(
                f"The loader and its samplers have {len(self._own)} random generators of their own, and a position can "
                f"hold {GENERATORS_MAX}. Let several samplers share a generator."
            )

    def __len__(self) -> int:
        return len(self._own)

    def may_be_drawn_late(self) -> bool:
        """Whether a sampler may choose samples with draws after the beginning of a pass. torch's samplers make
        all draws at the beginning, except a ``RandomSampler`` with replacement, or with more samples than the dataset
        has. (Without replacement it draws once more at the end, and uses nothing of that draw.)"""
        if not len(self):
            return False
        samplers = _parts(self._loader, _SAMPLERS)[len(wrapper_chain(self._loader)) :]
        return not all(is_loader_of_torch(each) or _draws_at_the_beginning(each) for each in samplers)

    def found_again(self) -> OwnGenerators:
        """Search for the generators again, because the loop may have replaced some, and return this object. (If another
        number is found, a sampler makes generators when it is iterated, from its epoch for example. Then nothing is
        changed.)"""
        found = _generators_of(self._loader)
        if len(found) == len(self._own):
            self._own = found
        return self

    def states(self) -> States:
        """Return the current states of these generators."""
        return tuple(map(state_of, self._own))

    def snapshot(self) -> RngSnapshot:
        """Return the current states of the global generators and of these generators."""
        return RngSnapshot(rng.capture(), self.states())

    def try_states(self, states: States) -> None:
        """Raise ``RuntimeError``, ``TypeError`` or ``CorruptPoolError`` for states that these generators refuse.
        Nothing is changed."""
        for generator, state in zip(self._own, states, strict=True):
            check_state(generator, state)

    def set_states(self, states: States) -> None:
        for generator, state in zip(self._own, states, strict=True):
            set_state(generator, state)

    def restore(self, snapshot: RngSnapshot) -> None:
        """Set the global generators and these generators to a snapshot."""
        snapshot.rng.restore()
        self.set_states(snapshot.generators)

    @contextmanager
    def preserved(self) -> Generator[None, None, None]:
        """At the end of the block, give the global generators and these generators the states that they had at its
        beginning."""
        before = self.snapshot()
        try:
            yield
        finally:
            self.restore(before)


def _draws_at_the_beginning(sampler: object) -> bool:
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in (BatchSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def _generators_of(loader: object) -> tuple[OwnGenerator, ...]:
    parts = _parts(loader, _SAMPLERS)
    held: list[Any] = [getattr(part, "generator", None) for part in parts]
    for sampler in parts[len(wrapper_chain(loader)) :]:
        if not is_loader_of_torch(sampler):  # a DataLoader's other attributes are torch's own
            for value in _attributes(sampler).values():
                held += _wanted_items(value, is_own_generator)
    generators = {id(one): one for one in held if is_own_generator(one)}
    return tuple(generators.values())


log = logging.getLogger("lightck")
_SAMPLERS = ("sampler", "samplers", "batch_sampler")
"""Attributes in which loaders and samplers keep what chooses the samples."""
_PARTS = ("dataset", "datasets", *_SAMPLERS, "collate_fn", "transform", "transforms", "target_transform")
"""Attributes in which loaders, datasets and samplers keep the objects that they fetch with."""
_PARTS_MAX = 256
"""The largest number of objects that are examined."""
_NBYTES_MAX = 1 << 20
"""The largest size of one object's state before the pass, in bytes. This state is part of the small state of each
checkpoint."""

PackedStates = dict[str, "bytes | None"]
"""Key in ``state=`` -> packed state of the object; None if the state is too large."""


class OwnedObjects:
    """The objects of ``state=`` that are part of one loader."""

    def __init__(self, loader: object, name: str, objects: Mapping[str, Any], is_restored: bool) -> None:
        """Find the objects. ``name``: of the loader, for messages. ``objects``: all objects of ``state=``.
        ``is_restored``: the objects hold the state of the restored checkpoint now."""
        parts = _parts(loader)
        self._name = name
        self._objects = {key: obj for key, obj in objects.items() if any(obj is part for part in parts)}
        self._at_checkpoint = {key: self._packed(key) for key in self._objects} if is_restored else {}
        """Key -> the packed state that the restored checkpoint holds."""
        self._has_warned = False

    def packed_states(self) -> PackedStates:
        """Return the states of the objects, before a pass begins. Warn once of a state that is too large to be
        saved."""
        states: PackedStates = {key: self._packed(key) for key in self._objects}
        for key, state in states.items():
            if state is not None and len(state) > _NBYTES_MAX:
                states[key] = None
                self._warn_large(key, len(state))
        return states

    def load(self, states: PackedStates) -> None:
        """Load, before a replay, the states that the objects had when the pass began."""
        for key, state in states.items():
            if state is not None and key in self._objects and state != self._packed(key):
                self._load(key, state)

    def put_back(self) -> None:
        """Load the states that the restored checkpoint holds. An object that has its state already is not loaded,
        because loading may reset the object."""
        for key, state in self._at_checkpoint.items():
            if state != self._packed(key):
                self._load(key, state)

    def _packed(self, key: str) -> bytes:
        with rng.preserved():
            return values.pack(self._objects[key].state_dict(), path=f"state/{key}")

    def _load(self, key: str, state: bytes) -> None:
        value = values.unpack(state)
        try:
            self._objects[key].load_state_dict(value)
        except Exception as error:
            raise DriftError(
                f"loader {self._name!r} iterates over the object that was passed as state[{key!r}], and its "
                "load_state_dict() refused a state that its state_dict() had returned: "
                f"{type(error).__name__}: {error}. Build that object as it was, or begin the pass anew: "
                "session.loader(..., anew=True)."
            ) from error

    def _warn_large(self, key: str, nbytes: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "lightck: loader %r: after a kill in mid-pass the resume may not be exact. It needs the state that the "
                "object in state[%r] had before the pass. This state was not saved, because it has %d bytes and the "
                "limit is %d. Let the object's state_dict() return only what determines the order of the batches, such "
                "as a seed and the epoch",
                self._name,
                key,
                nbytes,
                _NBYTES_MAX,
            )


def _parts(loader: object, names: Sequence[str] = _PARTS) -> list[object]:
    """Return the objects that a loader fetches with: the loader itself and what it wraps, then what these hold in
    attributes of these names, and samplers and loaders in attributes of any name (Accelerate's ``BatchSamplerShard``
    holds a batch sampler, which holds the sampler). No code of these objects runs."""
    found = wrapper_chain(loader)
    for owner in found:
        for name, value in _attributes(owner).items():
            for one in _wanted_items(value, _is_any if name in names else _chooses_samples):
                if one is not None and len(found) < _PARTS_MAX and not any(one is known for known in found):
                    found.append(one)
    return found


def _is_any(_: object) -> bool:
    return True


def _chooses_samples(value: object) -> bool:
    return isinstance(value, Sampler) or is_loader_of_torch(value)


def _wanted_items(value: object, is_wanted: Callable[[object], bool]) -> list[Any]:
    """Return the wanted objects among the items of a container (the values of a dict), or the object itself if it is
    wanted. A container is left out if its first item is not wanted: it may be a long list of indices."""
    if type(value) not in (list, tuple, deque, dict):
        return [value] if is_wanted(value) else []
    items: Iterable[Any] = value.values() if type(value) is dict else value  # type: ignore[assignment]
    return [one for one in items if is_wanted(one)] if is_wanted(next(iter(items), None)) else []


def _attributes(obj: object) -> dict[str, Any]:
    """Return the object's own attributes, those in ``__slots__`` too."""
    attributes = getattr(obj, "__dict__", None)
    found = dict(attributes) if type(attributes) is dict else {}
    for base in type(obj).__mro__:
        for name, slot in vars(base).items():
            if type(slot) is MemberDescriptorType:
                with suppress(AttributeError):  # not set
                    found[name] = slot.__get__(obj)
    return found
