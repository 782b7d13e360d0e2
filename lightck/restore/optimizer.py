"""Restore an optimizer's state and options, by parameter name and never through ``load_state_dict``, which casts.

Live state tensors are written in place if they fit, so that other holders of these tensors see the values too.
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
    restored: dict[str, torch.Tensor],
    writes: TensorWrites,
) -> dict[str, Any]:
    """Return the state of each parameter by name: live tensors that fit, else new ones. ``writes.run()`` gives them
    their values.

    ``unfit``: parameters of another shape or dtype, whose state is not restored. The tensors are added to ``restored``
    by entry name.
    """
    keys = keys_by_param(contents, saved)
    rest = unpack_dict(saved.values, tensor=tensor_reader(writes.source, restored))
    params = dict(live.params)
    used: set[int] = set()
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
            is_cpu_count = key == "step" and name not in counted
            where = partial(device_of, entry, contents, name, p, is_cpu_count)
            new[key] = _state_tensor(now, entry, where, restored, writes, used)
        if new or name in rest:
            state[name] = joined(new, rest, name)
    return state


def joined(tensors: dict[object, object], rest: Mapping[str, object], name: str) -> object:
    """Combine the tensors and the other values of one parameter's state; if the state is no dict, return it."""
    other = rest.get(name, {})
    return tensors | other if isinstance(other, dict) else other


def counted_on_device(saved: OptimizerContents) -> set[str]:
    """Return the parameters whose step count is on their device, as in ``fused`` and ``capturable`` optimizers."""
    groups = zip(saved.names, saved.groups, strict=True)
    return {name for names, options in groups if options.get("fused") or options.get("capturable") for name in names}


def device_of(entry: Entry, contents: Contents, name: str, live: torch.Tensor, is_cpu_count: bool) -> torch.device:
    """Return the device for a new state tensor: that of its parameter ``live``.

    A tensor that was saved on the CPU stays there if its parameter was on another device, or if it is a step count that
    the optimizer keeps on the CPU (``is_cpu_count``), as in torch's ``load_state_dict``."""
    param = contents.entries.get(f"model/{name}")
    follows_param = param is not None and param.device == "cpu" and not is_cpu_count
    return torch.device("cpu") if entry.device == "cpu" and not follows_param else live.device


def _state_tensor(
    present: Any,
    entry: Entry,
    device: Callable[[], torch.device],
    restored: dict[str, torch.Tensor],
    writes: TensorWrites,
    used: set[int],
) -> torch.Tensor:
    """Return the tensor that gets the values of an entry: ``present`` if it fits, else a new one.

    ``used``: ids of live tensors that have values already. A live tensor that several parameters share gets the values
    of one of them only, unless they shared it when it was saved."""
    if entry.alias is not None:
        known = restored.get(entry.alias)
        if known is not None:
            return known
        entry = writes.source.entries[entry.alias]
    target = present if _fits(present, entry) and id(present) not in used else None
    if target is None:
        target = empty_for(entry, device())
    used.add(id(target))
    restored[entry.name] = target
    writes.add(entry.name, target)
    return target


def _fits(present: object, entry: Entry) -> bool:
    if not isinstance(present, torch.Tensor) or present.dtype != dtype_from_name(entry.dtype):
        return False
    return present.shape == entry.shape


def keys_by_param(contents: Contents, saved: OptimizerContents) -> dict[str, dict[str, Entry]]:
    """Return parameter name -> key -> entry, for the tensors that are values of ``optimizer.state[p]``."""
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
    """Put the restored state and options into the live optimizer."""
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
    """Return a group's option as it was saved. The live tensor of an option (a learning rate) gets the saved value in
    place, because others may hold it. If groups share it now and had different values, the later one gets a new tensor.
    ``taken``: id of a live tensor -> the value that it was set to."""
    if not isinstance(saved, torch.Tensor):
        return deepcopy(saved)
    fits = isinstance(now, torch.Tensor) and (now.dtype, now.shape) == (saved.dtype, saved.shape)
    if not fits or not torch.equal(taken.setdefault(id(now), saved), saved):
        device = now.device if isinstance(now, torch.Tensor) else saved.device
        return saved.clone().to(device)
    with torch.no_grad():
        tensor_writes.write(now, saved)
    return now
