"""What tensors and objects hold at one moment, as marks that can be compared with those of another moment.

This reads bytes, so it is for a few moments of a training and never for every step. Tensors on a device are not read:
their version counters are compared, and a write that moves none stays unseen there.
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
from lightck.state.inventory import Live, OptimizerView, address_of, has_memory, staged
from lightck.state.signatures import version_counter_of

_BLOCK = 1 << 20

Mark = tuple[object, ...]
Marks = dict[str, Mark]
"""Name -> mark. What could not be read has none."""


def tensor_marks(lives: Iterable[Live]) -> Marks:
    """Of parameters and buffers, each under the first of its names."""
    marks = {live.name.removeprefix("model/"): _mark(live.tensor) for live in lives if live.alias is None}
    return {name: mark for name, mark in marks.items() if mark is not None}


def object_marks(name: str, obj: Any) -> Marks:
    """Of an object in ``state``: what its ``state_dict()`` gives, large tensors included. The global generators are
    as before, whatever it draws. Empty where it cannot be read or stored now."""
    large: list[torch.Tensor] = []
    try:
        with rng.shielded():
            state = obj.state_dict()
            if isinstance(obj, LRScheduler):
                state = _epoch_of(state)
            packed = values.pack(state, path=name, large=lambda _, tensor: large.append(tensor))
        return {f"state[{name!r}]": (_digest(packed), *map(_mark, large))}
    except Exception:  # it is the user's code, which may refuse to answer now: the boundary asks again, and raises
        return {}


def _epoch_of(state: object) -> object:
    """Of a scheduler and those in it, where they stand. ``step(epoch)`` sets the rest anew at each iteration, and
    counts that it was called."""
    if not isinstance(state, dict) or "last_epoch" not in state:
        return state
    return state["last_epoch"], [_epoch_of(each) for each in state.get("_schedulers") or ()]


def option_marks(view: OptimizerView) -> Marks:
    """Of an optimizer's options (lr, betas, ...)."""
    try:
        return {options_label(view): (_digest(values.pack(view.groups(), path="options")),)}
    except Exception:
        return {}


def optimizer_state_mark(view: OptimizerView) -> Mark:
    """Of the tensors of an optimizer's state, by their names."""
    marks = {live.name: _mark(live.tensor) for live in view.state_tensors() if live.alias is None}
    return "state", *sorted(marks.items(), key=lambda item: item[0])


def options_label(view: OptimizerView) -> str:
    return f"the options of {optimizer_label(view)}"


def optimizer_label(view: OptimizerView) -> str:
    """Its class, and its number where it is not the first: two may be of one class."""
    return view.class_name + (f" {view.index}" if view.index else "")


def changed_names(before: Mapping[str, Mark], now: Mapping[str, Mark]) -> list[str]:
    """Names of what held something else before. What was read in another way (moved to a device) is passed over."""
    both = [(name, before[name], mark) for name, mark in now.items() if name in before]
    return [name for name, was, mark in both if was != mark and type(was[0]) is type(mark[0])]


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=16).digest()


def _mark(tensor: torch.Tensor) -> Mark | None:
    if transfer_of(tensor) is not None or not tensor.is_cpu:
        return version_counter_of(tensor), address_of(tensor)
    if not has_memory(tensor):
        return None
    if not tensor.is_contiguous():  # in the order of its elements: channels_last changes no value
        tensor = tensor.detach().contiguous()
    return checksums(staged(tensor), _BLOCK).tobytes(), str(tensor.dtype), tuple(tensor.shape)
