"""An optimizer's state and options back into the live one: by parameter name, never through ``load_state_dict``, which
casts. Live tensors are filled in place where they fit, so that whoever else holds them sees the values too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch

from lightck.pool.format.layout import Entry
from lightck.restore import tensor_writes
from lightck.restore.contents import Contents, OptimizerContents, empty_for, tensor_reader, unpack_dict
from lightck.restore.tensor_writes import TensorWrites
from lightck.state.inventory import OptimizerView
from lightck.state.storable import dtype_from_name


def read_state(
    saved: OptimizerContents,
    live: OptimizerView,
    contents: Contents,
    unfit: set[str],
    held: dict[str, torch.Tensor],
    writes: TensorWrites,
) -> dict[str, Any]:
    """The state of each parameter, by name: live tensors where they fit, new ones elsewhere, added to ``writes``, which
    gives them their values.

    ``unfit``: parameters of another shape or dtype, whose state is not taken. ``held`` gets the tensors by entry name.
    """
    keys = keys_by_param(contents, saved)
    rest = unpack_dict(saved.values, tensor=tensor_reader(writes.source, held))
    params = dict(live.params)
    filled: set[int] = set()
    counted = counted_on_device(saved)
    state: dict[str, object] = {}
    for name in saved.all_names:
        if name in unfit:
            continue
        p = params[name]
        present = live.optimizer.state.get(p)
        new: dict[object, object] = {}
        for key, entry in keys.get(name, {}).items():
            now = present.get(key) if isinstance(present, dict) else None
            stays = key == "step" and name not in counted
            where = partial(device_of, entry, contents, name, p, stays)
            new[key] = _state_tensor(now, entry, where, held, writes, filled)
        if new or name in rest:
            state[name] = joined(new, rest, name)
    return state


def joined(tensors: dict[object, object], rest: Mapping[str, object], name: str) -> object:
    """One parameter's state: its tensors and the rest of it, or what it is where it is no dict."""
    other = rest.get(name, {})
    return tensors | other if isinstance(other, dict) else other


def counted_on_device(saved: OptimizerContents) -> set[str]:
    """Parameters whose steps are counted where they lie, as ``fused`` and ``capturable`` optimizers do."""
    groups = zip(saved.names, saved.groups, strict=True)
    return {name for names, options in groups if options.get("fused") or options.get("capturable") for name in names}


def device_of(entry: Entry, contents: Contents, name: str, live: torch.Tensor, stays: bool) -> torch.device:
    """Where a new state tensor belongs: with its parameter. What was kept on the CPU for one on a device stays there;
    so does a count of steps (``stays``) that was there, as in torch's own ``load_state_dict``."""
    param = contents.entries.get(f"model/{name}")
    is_of_cpu = param is not None and param.device == "cpu" and not stays
    return torch.device("cpu") if entry.device == "cpu" and not is_of_cpu else live.device


def _state_tensor(
    present: Any,
    entry: Entry,
    device: Callable[[], torch.device],
    held: dict[str, torch.Tensor],
    writes: TensorWrites,
    filled: set[int],
) -> torch.Tensor:
    """``filled``: ids of the live tensors that were filled already. One that several parameters share live holds the
    values of one of them only, unless they shared it when it was saved."""
    if entry.alias is not None:
        known = held.get(entry.alias)
        if known is not None:
            return known
        entry = writes.source.entries[entry.alias]
    target = present if _fits(present, entry) and id(present) not in filled else None
    if target is None:
        target = empty_for(entry, device())
    filled.add(id(target))
    held[entry.name] = target
    writes.add(entry.name, target)
    return target


def _fits(present: object, entry: Entry) -> bool:
    if not isinstance(present, torch.Tensor) or present.dtype != dtype_from_name(entry.dtype):
        return False
    return present.shape == entry.shape


def keys_by_param(contents: Contents, saved: OptimizerContents) -> dict[str, dict[str, Entry]]:
    """Parameter name -> key -> entry, for state tensors that lie directly in ``optimizer.state[p]``."""
    names = set(saved.all_names) if not saved.wraps else set()
    found: dict[str, dict[str, Entry]] = {}
    for full, entry in contents.entries.items():
        if not full.startswith("optimizer/"):
            continue
        param, _, key = full.removeprefix("optimizer/").rpartition("/")
        if param in names:
            found.setdefault(param, {})[key] = entry
    return found


def set_state(saved: OptimizerContents, live: OptimizerView, state: dict[str, dict[object, object]]) -> None:
    optimizer, params = live.optimizer, dict(live.params)
    taken: dict[int, torch.Tensor] = {}
    for name, p in params.items():
        if name in state:
            optimizer.state[p] = state[name]
        else:
            optimizer.state.pop(p, None)
    for group, options in zip(optimizer.param_groups, saved.groups, strict=True):
        for key, value in options.items():
            group[key] = _option(group.get(key), value, taken)


def _option(now: Any, saved: object, taken: dict[int, torch.Tensor]) -> object:
    """A group's option as it was saved. A tensor (a learning rate) stays the tensor that others may hold, unless
    another group shares it and had another value (``taken``: what live tensors were set to)."""
    if not isinstance(saved, torch.Tensor):
        return deepcopy(saved)
    fits = isinstance(now, torch.Tensor) and (now.dtype, now.shape) == (saved.dtype, saved.shape)
    if not fits or not torch.equal(taken.setdefault(id(now), saved), saved):
        device = now.device if isinstance(now, torch.Tensor) else saved.device
        return saved.clone().to(device)
    with torch.no_grad():
        tensor_writes.write(now, saved)
    return now
