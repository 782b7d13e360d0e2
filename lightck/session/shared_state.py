"""Tensors that share memory, in an object of ``state=`` or in optimizer state: a checkpoint saves each by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from lightck.restore.readback import state_dict_of
from lightck.session.discover import Found
from lightck.state.inventory import Live, has_memory, storage_address_of
from lightck.state.storable import is_loader

log = logging.getLogger("lightck")
_DEPTH_MAX = 32


def warn_of_shared_memory_in_objects(found: Found) -> None:
    """Warn once for each object that was passed in ``state=`` and is neither a module nor of torch's classes, if two
    tensors in its ``state_dict()`` share memory. Restored, they have memory of their own, so a write to one no longer
    changes the other. (A module writes into its tensors in place, so they stay shared.)"""
    for name in found.state.keys() - found.classes.keys():
        obj = found.state[name]
        if isinstance(obj, nn.Module) or type(obj).__module__.startswith("torch.") or is_loader(obj):
            continue
        pair = _sharing(state_dict_of(obj))  # None if it raises: the first checkpoint raises it too
        if pair is not None:
            log.warning(
                "lightck: state[%r] holds tensors that share memory (%s and %s). A checkpoint saves each by itself, so "
                "after a resume a write to one no longer changes the other, and the training goes on differently. Let "
                "state_dict() return one of them, and make the other from it in load_state_dict(); or let "
                "load_state_dict() write into the object's own tensors with copy_()",
                name,
                *pair,
            )


def _sharing(state: object) -> tuple[str, str] | None:
    """Return the paths of two tensors that share memory, or None."""
    seen: dict[int, str] = {}
    for path, tensor in _tensors(state, "", 0):
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        try:
            address = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
            continue
        if address in seen:
            return seen[address], path
        seen[address] = path
    return None


def _tensors(value: object, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path or "the value itself", value
    elif depth < _DEPTH_MAX and isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, f"{path}/{key}" if path else str(key), depth + 1)
    elif depth < _DEPTH_MAX and isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for i, part in enumerate(value):
            yield from _tensors(part, f"{path}/{i}" if path else str(i), depth + 1)


def warn_of_shared_memory_in_optimizers(lives: Iterable[Live], optimizers: Iterable[object]) -> bool:
    """Warn if two tensors of optimizer state share memory, because a restore makes separate tensors of them. Return
    False if there is no optimizer state yet to check. ``optimizers``: those that are followed. If one has a true
    attribute ``joins_restored_state`` (DeepSpeed: it joins restored tensors by itself), return True without a check."""
    if any(getattr(optimizer, "joins_restored_state", False) for optimizer in optimizers):
        return True
    state_tensors = [
        live for live in lives if live.role == "optimizer" and live.alias is None and has_memory(live.tensor)
    ]
    first: dict[int, str] = {}
    for live in state_tensors:
        address = storage_address_of(live.tensor)
        other = first.setdefault(address, live.name) if address else live.name
        if other != live.name:
            log.warning(
                "lightck: %s lies in the memory of %s. Each is saved whole, and they are restored as separate "
                "tensors: an optimizer that writes one through the other does not continue bit-identically. "
                "Keep each state in memory of its own (.clone())",
                live.name,
                other,
            )
            break
    return bool(state_tensors)
