"""Restore an optimizer's state and options by parameter name. ``load_state_dict`` is not called, because it casts.

A live state tensor of the saved shape and dtype is written in place. So other objects that refer to this tensor see the
restored values.
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
from lightck.restore.tensor_devices import MovedTensors
from lightck.restore.tensor_writes import TensorWrites
from lightck.state.inventory import OptimizerView
from lightck.state.local_tensors import as_state_of, is_dtensor, local_of
from lightck.state.storable import dtype_from_name


def read_state(
    saved: OptimizerContents,
    live: OptimizerView,
    contents: Contents,
    unfit: set[str],
    restored: dict[str, torch.Tensor],
    writes: TensorWrites,
) -> dict[str, Any]:
    """Return parameter name -> restored state. Its tensors are the live ones if they fit, else new ones. The caller
    must call ``writes.run()``, which writes the saved values into these tensors.

    ``unfit``: names of parameters of another shape or dtype, whose state is not restored. ``restored``: entry name ->
    tensor; this function adds the tensors of the state.
    """
    keys = keys_by_param(contents, saved)
    non_tensors = unpack_dict(saved.packed_param_state, tensor=tensor_reader(writes.source, restored))
    params = dict(live.params)
    used: set[int] = set()
    state_tensors: dict[int, torch.Tensor] = {}
    """id of a local tensor -> what ``as_state_of`` returned for it, usually a DTensor. So keys that share a local
    tensor also share its DTensor."""
    counts_on_device = params_with_count_on_device(saved)
    nested = MovedTensors(restored)
    state: dict[str, object] = {}
    for name in saved.all_names:
        if name in unfit:
            continue
        p = params[name]
        live_state, is_of_dtensor = live.optimizer.state.get(p), is_dtensor(p)
        new: dict[object, object] = {}
        for key, entry in keys.get(name, {}).items():
            live_value = live_state.get(key) if isinstance(live_state, dict) else None
            is_cpu_count = key == "step" and name not in counts_on_device
            choose_device = partial(device_of, entry, contents, name, p, is_cpu_count)
            if not is_of_dtensor:
                new[key] = _state_tensor(live_value, entry, choose_device, restored, writes, used)
                continue
            live_local = local_of(live_value) if isinstance(live_value, torch.Tensor) else None
            local = _state_tensor(live_local, entry, choose_device, restored, writes, used)
            if local is live_local:
                new[key] = live_value
            else:
                new[key] = state_tensors.setdefault(id(local), as_state_of(p, key, local))
        if new or name in non_tensors:
            if name in non_tensors:
                non_tensors[name] = nested.moved(non_tensors[name], partial(_device_of_nested, contents, name, p))
            state[name] = joined(new, non_tensors, name)
    return state


def joined(tensors: dict[object, object], non_tensors: Mapping[str, object], name: str) -> object:
    """Return the state of the parameter ``name``: a dict of its tensors and other values. ``non_tensors``: unpacked
    ``OptimizerContents.packed_param_state``. If this holds a value other than a dict for the parameter, that value is
    the whole state."""
    other = non_tensors.get(name, {})
    return tensors | other if isinstance(other, dict) else other


def params_with_count_on_device(saved: OptimizerContents) -> set[str]:
    """Return the names of the parameters whose step count lies on the device of the parameter, because their group is
    ``fused`` or ``capturable``."""
    groups = zip(saved.names, saved.groups, strict=True)
    return {name for names, options in groups if options.get("fused") or options.get("capturable") for name in names}


def device_of(entry: Entry, contents: Contents, name: str, param: torch.Tensor, is_cpu_count: bool) -> torch.device:
    """Return the device for a new state tensor. ``entry``: the saved state tensor. ``param``: its live parameter.
    ``name``: the name of the parameter. ``is_cpu_count``: whether the tensor is a step count that the optimizer keeps
    on the CPU.

    Usually the device is that of the parameter. It is the CPU if the state tensor was saved on the CPU, and either its
    parameter was saved on another device, or the tensor is a step count that the optimizer keeps on the CPU. torch's
    ``load_state_dict`` treats such a step count in the same way."""
    saved_param = contents.entries.get(f"model/{name}") or contents.entries.get(name)  # the latter: ``outside/...``
    follows_param = saved_param is not None and saved_param.device == "cpu" and not is_cpu_count
    return torch.device("cpu") if entry.device == "cpu" and not follows_param else param.device


def _device_of_nested(contents: Contents, name: str, param: torch.Tensor, entry_name: str | None) -> torch.device:
    """Return the device for a tensor inside a list, a tuple or a dict of the state of the parameter ``name``. (LBFGS
    keeps its history so.) ``entry_name``: its entry; None for a small tensor, which is stored without its device.
    torch's ``load_state_dict`` moves all of them to the device of the parameter."""
    if entry_name is None:
        return param.device
    return device_of(contents.entries[entry_name], contents, name, param, is_cpu_count=False)


def _state_tensor(
    live_value: Any,
    entry: Entry,
    choose_device: Callable[[], torch.device],
    restored: dict[str, torch.Tensor],
    writes: TensorWrites,
    used: set[int],
) -> torch.Tensor:
    """Return the tensor into which ``writes.run()`` will write the saved values of ``entry``: the live tensor
    ``live_value`` if it fits and no other entry uses it, else a new one on ``choose_device()``.

    ``used``: ids of the tensors that other entries use. Parameters that shared a state tensor when it was saved share
    it again (``entry.alias``). If parameters share a live state tensor and were saved with separate ones, the first
    parameter keeps the live tensor, and the others get new tensors."""
    if entry.alias is not None:
        known = restored.get(entry.alias)
        if known is not None:
            return known
        entry = writes.source.entries[entry.alias]
    target = live_value if _fits(live_value, entry) and id(live_value) not in used else None
    if target is None:
        target = empty_for(entry, choose_device())
    used.add(id(target))
    restored[entry.name] = target
    writes.add(entry.name, target)
    return target


def _fits(value: object, entry: Entry) -> bool:
    """Whether a live value is a tensor with the dtype and shape of the entry, and no DTensor."""
    if not isinstance(value, torch.Tensor) or is_dtensor(value):
        return False
    return value.shape == entry.shape and value.dtype == dtype_from_name(entry.dtype)


def keys_by_param(contents: Contents, saved: OptimizerContents) -> dict[str, dict[str, Entry]]:
    """Return parameter name -> key -> entry, for the tensors that lay in ``optimizer.state[p]`` under this key. Empty
    for a wrapper."""
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
    """Set the state and the options of the live optimizer. ``state``: parameter name -> its state, as ``read_state``
    returns it. If a parameter has no state in ``state``, its live state is removed."""
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


def _option(live: Any, saved: object, taken: dict[int, torch.Tensor]) -> object:
    """Return the value of a group's option: a copy of the saved value, or the tensor ``live`` with the saved value
    written into it.

    A live tensor (a learning rate) is written in place, because other objects may refer to it. If several groups share
    one live tensor and were saved with different values, the second value gets a new tensor. ``taken``: id of a live
    tensor -> saved value that was written into it."""
    if not isinstance(saved, torch.Tensor):
        return deepcopy(saved)
    fits = isinstance(live, torch.Tensor) and (live.dtype, live.shape) == (saved.dtype, saved.shape)
    if not fits or not torch.equal(taken.setdefault(id(live), saved), saved):
        device = live.device if isinstance(live, torch.Tensor) else saved.device
        return saved.clone().to(device)
    with torch.no_grad():
        tensor_writes.write(live, saved)
    return live
