"""Marks of tensors and objects: compact values that differ if the content differs.

A mark is made by reading all bytes. So marks are made at a few moments of a training, and never at every step. The mark
of a tensor on a device is its version counter and address: a write that moves no version counter is not detected there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lightck.state import rng, values
from lightck.state.blocks import checksums
from lightck.state.device_transfers import transfer_of
from lightck.state.inventory import Live, OptimizerView, address_of, has_memory, in_plain_memory
from lightck.state.local_tensors import local_of
from lightck.state.signatures import version_counter_of

_BLOCK = 1 << 20
"""Bytes per checksum."""

Mark = tuple[object, ...]
Marks = dict[str, Mark]
"""Name -> mark. What cannot be read is left out."""


def tensor_marks(lives: Iterable[Live]) -> Marks:
    """Marks of parameters and buffers, each under the first of its names."""
    marks = {live.name.removeprefix("model/"): _mark(live.registered) for live in lives if live.alias is None}
    return {name: mark for name, mark in marks.items() if mark is not None}


def object_marks(name: str, obj: Any) -> Marks:
    """Name -> mark of an object in ``state=``: the mark of its ``state_dict()``, large tensors included. Empty if the
    ``state_dict()`` cannot be read or stored now. Random numbers that ``state_dict()`` draws do not change the global
    generators."""
    large: list[torch.Tensor] = []
    try:
        with rng.preserved():
            state = obj.state_dict()
            if isinstance(obj, LRScheduler):
                state = _epoch_of(state)
            packed = values.pack(state, path=name, large=lambda _, tensor: large.append(tensor))
        return {f"state[{name!r}]": (_digest(packed), *map(_mark, large))}
    except Exception:  # state_dict() is the user's code; the boundary calls it again, and raises its error
        return {}


def _epoch_of(state: object) -> object:
    """Return the part of a scheduler's state that is marked: ``last_epoch`` of the scheduler and of the schedulers in
    it. A second ``step(epoch)`` with the same epoch does no harm, but changes the other parts, so they are not marked.
    A state without ``last_epoch`` is returned unchanged."""
    if not isinstance(state, dict) or "last_epoch" not in state:
        return state
    return state["last_epoch"], [_epoch_of(each) for each in state.get("_schedulers") or ()]


def option_marks(view: OptimizerView) -> Marks:
    """Label -> mark of an optimizer's options (lr, betas, ...). Empty if they cannot be stored."""
    try:
        return {options_label(view): (_digest(values.pack(view.groups(), path="options")),)}
    except Exception:
        return {}


def optimizer_state_mark(view: OptimizerView) -> Mark:
    """The mark of an optimizer's state: its tensors' names and marks."""
    marks = {live.name: _mark(live.registered) for live in view.state_tensors() if live.alias is None}
    return "state", *sorted(marks.items(), key=lambda item: item[0])


def options_label(view: OptimizerView) -> str:
    return f"the options of {optimizer_label(view)}"


def optimizer_label(view: OptimizerView) -> str:
    """The class of an optimizer, and its number unless that is 0, because two optimizers may have the same class."""
    return view.class_name + (f" {view.index}" if view.index else "")


def changed_names(before: Mapping[str, Mark], now: Mapping[str, Mark]) -> list[str]:
    """Names in ``before`` and ``now`` whose marks differ. A tensor that moved to a device, or back, is left out,
    because the two marks are of different kinds."""
    both = [(name, before[name], mark) for name, mark in now.items() if name in before]
    return [name for name, was, mark in both if was != mark and type(was[0]) is type(mark[0])]


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=16).digest()


def _mark(held: torch.Tensor) -> Mark | None:
    """The mark of a tensor, of a DTensor that of its local tensor; None if it has no bytes in memory."""
    tensor = local_of(held)
    if transfer_of(tensor) is not None or not tensor.is_cpu:
        return version_counter_of(held), version_counter_of(tensor), address_of(tensor)
    if not has_memory(tensor):
        return None
    if not tensor.is_contiguous():  # in the order of its elements, so that channels_last changes no mark
        tensor = tensor.detach().contiguous()
    return checksums(in_plain_memory(tensor), _BLOCK).tobytes(), str(tensor.dtype), tuple(tensor.shape)
