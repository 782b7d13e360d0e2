"""The live tensors of a training: where each one lies now, its name, and how it may be copied.

``ModelView`` follows a module tree. ``OptimizerView`` follows one optimizer. The two find their tensors again at every
boundary, because a parameter or its ``.data`` may be replaced. They use the names that a user knows, and read no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from lightck.errors import LayoutError, StateValueError, UnsupportedError
from lightck.layout import Layout
from lightck.pool.format.layout import RESIDUAL_PREFIX, Entry, contiguous_stride, entry_of_share
from lightck.pool.format.shares import Share
from lightck.state.device_transfers import is_dense_tensor
from lightck.state.local_tensors import (
    fully_sharded_class,
    is_dtensor,
    is_unsharded_form,
    local_of,
    refuse_unrestorable_state,
)
from lightck.state.module_tree import TreeStructure, modules_of
from lightck.state.optimizer_wrappers import WrapperRole, has_own_state, inner_of, wrapper_roles
from lightck.state.parts import Part, part_of_live
from lightck.state.removed_parameters import warn_of_removed
from lightck.state.stand_ins import StandIn
from lightck.state.storable import dtype_name, refuse_torchscript, refuse_undeclared_state, refuse_unstorable

_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""Wrapper class -> its attribute that holds the wrapped module. This attribute is no part of a parameter's name, so a
run with the wrapper and one without it use the same names."""


@dataclass(slots=True)
class Live:
    """One tensor as it is now.

    ``role``: "param", "buffer", "optimizer" (a tensor of optimizer state), "state" (a large tensor of the other state,
    for example of an object in ``state=``) or "gradient". ``owner``: the dict of a module or of optimizer state that
    holds the tensor, under ``key``; None if no such dict holds it (a copy, or a parameter that only an optimizer has).
    ``layer``: number of the tensor's module in the order of the module tree, from 0; -1 if it has none. ``alias``: the
    name under which the tensor's bytes are saved; None if they are saved under ``name``.
    """

    name: str
    role: str
    tensor: torch.Tensor
    owner: dict[Any, Any] | None
    key: object
    layer: int = -1
    alias: str | None = None
    dtensor: torch.Tensor | None = None
    """The DTensor that ``owner`` holds, if ``tensor`` is its local tensor; else None."""
    is_fully_sharded: bool = False
    """Whether the module may hold another tensor in place of ``dtensor`` at times (``fully_shard``)."""
    is_frozen: bool = False
    """Whether this is a parameter that no optimizer step changes. If a slot already holds the tensor's bytes, a
    strategy need not write them again."""
    share: Share | None = None
    """The rows that this rank writes, if the ranks of a host divide the tensor; None: all."""
    part: Part | None = None
    """The part that ``tensor`` is, if it is a plain tensor for which a layout has a rule; None: no rule, or it is
    whole."""
    stand_in: StandIn | None = None
    """What is copied in place of ``tensor``; None: ``tensor`` itself."""

    @property
    def registered(self) -> torch.Tensor:
        """What is registered in the module or the optimizer: the DTensor, if there is one, else ``tensor``."""
        return self.tensor if self.dtensor is None else self.dtensor

    @property
    def written(self) -> torch.Tensor:
        """What is written of ``tensor``: itself, or the rows of its share, as a view."""
        if self.share is None or self.share.is_whole:
            return self.tensor
        return self.tensor.detach().narrow(self.share.cut.dim, *self.share.rows)

    def is_current(self) -> bool:
        """Whether the tensor's module or optimizer still holds it (not checked if ``owner`` is None), and, for a
        DTensor, whether ``tensor`` is still its local tensor."""
        held = self.tensor if self.owner is None else self.owner.get(self.key)
        if self.dtensor is None:
            return held is self.tensor
        is_unsharded = self.is_fully_sharded and held is not None and is_unsharded_form(held, self.dtensor)
        return local_of(self.dtensor) is self.tensor and (held is self.dtensor or self.owner is None or is_unsharded)


def clean_prefixes(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (prefix, module) for each name of every module. A module that is registered twice has two names. The
    prefix, "" or "name.", stands before the names of the module's tensors, and leaves out wrappers (DDP, torch.compile,
    ...). Raises ``StateValueError`` if a module contains itself."""
    found: list[tuple[str, nn.Module]] = []
    todo: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = [("", model, ())]
    wraps: dict[type, str | None] = {}
    while todo:
        prefix, module, above = todo.pop()
        found.append((prefix, module))
        if not module._modules:
            continue
        kind = type(module)
        if kind not in wraps:
            wraps[kind] = next((_WRAPPERS[c.__name__] for c in kind.__mro__ if c.__name__ in _WRAPPERS), None)
        path = (*above, module)
        for key, child in reversed(module._modules.items()):
            if child is None:
                continue
            if any(child is one for one in path):
                raise _contains_itself(f"{prefix}{key}", child)
            is_wrapped = key == wraps[kind] and not _has_name_clash(module, key, child, path)
            todo.append((prefix if is_wrapped else f"{prefix}{key}.", child, path))
    return found


def _contains_itself(name: str, module: nn.Module) -> StateValueError:
    return StateValueError(
        f"The module {name!r} ({type(module).__name__}) contains itself: it is a child of one of its own children, "
        "so its parameters would have infinitely long names. Keep a reference to a parent where torch does not "
        "register it: in a list or tuple, or by object.__setattr__."
    )


def _has_name_clash(wrapper: nn.Module, key: str, child: nn.Module, path: tuple[nn.Module, ...]) -> bool:
    """Whether a tensor of the wrapped module ``child`` would get the name of another tensor of the wrapper, if ``key``
    were left out of the names of ``child``. ``path``: the modules from the root to the wrapper."""
    if len(wrapper._modules) == 1 and not wrapper._parameters and not wrapper._buffers:
        return False  # the common case
    own = set(_own_names(wrapper))
    for other, sibling in wrapper._modules.items():
        if other != key and sibling is not None and not any(sibling is one for one in path):
            own.update(f"{other}.{prefix}{name}" for prefix, m in clean_prefixes(sibling) for name in _own_names(m))
    return any(f"{prefix}{name}" in own for prefix, module in clean_prefixes(child) for name in _own_names(module))


def _own_names(module: nn.Module) -> Iterator[str]:
    """Yield the names, without prefix, of what is saved of a module, without its children."""
    yield from module._parameters
    yield from (key for key in module._buffers if key not in module._non_persistent_buffers_set)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield "_extra_state"


class ModelView:
    """Parameters, persistent buffers and extra state of a module tree."""

    def __init__(self, model: nn.Module, layout: Layout | None = None) -> None:
        """``layout``: says which names tensors have in the whole model, if the model is a stage of it. Raises
        ``LayoutError`` if it gives two tensors one name."""
        self.model = model
        self._layout = layout
        self._dtensors: dict[tuple[int, str], tuple[dict[str, Any], torch.Tensor]] = {}
        """(id of a dict in ``_sharded``, key) -> the dict, and the DTensor that was last found there."""
        self._is_sharded_late = False
        self._build()

    def _build(self) -> None:
        self._structure: TreeStructure | None = None
        """The structure for which the places were found. None if the last search for them raised an error."""
        self._registered: list[tuple[dict[str, Any], str, str, str, int]] = []
        """For each parameter or persistent buffer of each module: the dict and the key of the tensor, its name, its
        role, and the number of its module."""
        self._registered_buffers: list[tuple[dict[str, Any], str, str, str, int]] = []
        """The items of ``_registered`` for buffers."""
        self.extra: list[tuple[str, nn.Module]] = []
        """Name and module of each extra state."""
        self._sharded: set[int] = set()
        """Ids of the parameter dicts of the modules for which ``fully_shard`` was called, and of those below them."""
        layers, has_extra, sharded_class = dict[int, int](), dict[type, bool](), fully_sharded_class()
        self.local_names: dict[str, str] = {}
        """Name in the pool -> name in this model, of each tensor and extra state; both without the prefix ``model/``.
        (A layout may rename.)"""
        modules: list[nn.Module] = []
        for prefix, module in clean_prefixes(self.model):
            kind = type(module)
            if kind not in has_extra:
                refuse_torchscript(prefix, module)
                has_extra[kind] = kind.get_extra_state is not nn.Module.get_extra_state
            if sharded_class and issubclass(kind, sharded_class):
                self._sharded.update(id(below._parameters) for below in modules_of(module))
            layer = layers.setdefault(id(module), len(layers))
            modules.append(module)
            for key in module._parameters:
                self._registered.append((module._parameters, key, self._name_of(f"{prefix}{key}"), "param", layer))
            for key in module._buffers:
                if key not in module._non_persistent_buffers_set:
                    self._registered.append((module._buffers, key, self._name_of(f"{prefix}{key}"), "buffer", layer))
                    self._registered_buffers.append(self._registered[-1])
            if has_extra[kind]:
                self.extra.append((self._name_of(f"{prefix}_extra_state").removeprefix("model/"), module))
        self._structure = TreeStructure(modules)
        self._dtensors = {place: found for place, found in self._dtensors.items() if place[0] in self._sharded}

    def _name_of(self, local_name: str) -> str:
        """Return the name of a tensor in the pool."""
        name = local_name if self._layout is None else self._layout.name_of(local_name)
        other = self.local_names.setdefault(name, local_name)
        if other != local_name:
            raise LayoutError(
                f"rename of layout= gives the tensors {other!r} and {local_name!r} of this rank one name, {name!r}. "
                "Correct the patterns: each tensor has a name of its own in the whole model."
            )
        return f"model/{name}"

    def refresh(self) -> bool:
        """If a module, parameter name or buffer name was added, removed or replaced since the last search, find all
        places again and return True. Otherwise return False. Raises ``UnsupportedError`` if ``fully_shard`` was called
        on the model since this view was made."""
        has_changed = self._structure is None or self._structure.has_changed()
        if has_changed:
            was_sharded = self.is_sharded
            self._build()
            self._is_sharded_late |= self.is_sharded and not was_sharded
        if self._is_sharded_late:
            raise UnsupportedError(
                "fully_shard was called on the model after lightck.attach. It replaces parameters by DTensors, and "
                "lightck does not know which DTensor replaced which parameter. Shard the model, make its optimizer, "
                "and then attach."
            )
        return has_changed

    def tensors(self, trained: frozenset[int] | set[int] | None) -> list[Live]:
        """Return every tensor under each of its names. An item is an alias if an earlier item has the same tensor under
        another name, or another tensor in exactly the same memory. ``trained``: ids of the parameters that an optimizer
        updates (None: unknown; then no parameter is marked as frozen)."""
        by_id: dict[int, Live] = {}
        by_address: dict[int, Live] = {}
        lives: list[Live] = []
        sharded = self._sharded
        for owner, key, name, role, layer in self._registered:
            held = self._held(owner, key) if sharded else owner.get(key)
            if held is None:
                continue
            live = live_of(name, role, held, owner, key, layer)
            if sharded:
                live.is_fully_sharded = id(owner) in sharded
            tensor = live.tensor
            if role == "param" and trained is not None:
                live.is_frozen = id(held) not in trained or not held.requires_grad
            first = by_id.setdefault(id(tensor), live)
            if first is live and (address := address_of(tensor)):
                first = by_address.setdefault(address, live)
            if first is not live and (first.tensor is tensor or _is_same_memory(first.tensor, tensor)):
                live.alias = first.alias or first.name
            lives.append(live)
        _unfreeze_shared(lives)
        return lives

    def _held(self, owner: dict[str, Any], key: str) -> torch.Tensor | None:
        """Return the tensor under ``key``. While a module of ``fully_shard`` holds its unsharded form there
        (``is_unsharded_form``), return the DTensor that was there before."""
        tensor: torch.Tensor | None = owner.get(key)
        if tensor is None or id(owner) not in self._sharded:
            return tensor
        known = self._dtensors.get((id(owner), key))
        if known is not None and is_unsharded_form(tensor, known[1]):
            return known[1]
        if is_dtensor(tensor):
            self._dtensors[id(owner), key] = owner, tensor
        return tensor

    @property
    def is_sharded(self) -> bool:
        """Whether ``fully_shard`` was called on a module of the tree."""
        return bool(self._sharded)

    @property
    def buffer_places(self) -> Sequence[tuple[dict[str, Any], str, str, str, int]]:
        """Owner, key, name, role and layer of each place of a persistent buffer. Each search for places makes a new
        list, so the same list object means that nothing was searched again."""
        return self._registered_buffers

    @property
    def has_buffers(self) -> bool:
        """Whether there are places of persistent buffers, even if each holds None."""
        return bool(self._registered_buffers)

    def buffers(self) -> Iterator[Live]:
        """Yield persistent buffers, each tensor once."""
        seen: set[int] = set()
        for owner, key, name, role, layer in self._registered_buffers:
            tensor = owner.get(key)
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield live_of(name, role, tensor, owner, key, layer)

    def buffers_or_none(self) -> list[torch.Tensor | None]:
        """Return what each place of a persistent buffer holds: a tensor or None."""
        return [owner.get(key) for owner, key, _, _, _ in self._registered_buffers]

    def refuse_undeclared_state(self) -> None:
        """Raise ``StateValueError`` for a module with state that is no parameter, buffer or extra state."""
        refuse_undeclared_state(clean_prefixes(self.model), set(self.local_names.values()))

    def vacant_buffers(self) -> Iterator[tuple[str, dict[str, object], str]]:
        """Yield (name, dict, key) of each persistent buffer that is None now."""
        for owner, key, name, _, _ in self._registered_buffers:
            if owner.get(key) is None:
                yield name, owner, key

    def vacant(self) -> list[tuple[dict[str, object], str]]:
        """Return (dict, key) of each parameter and persistent buffer that is None now."""
        return [(owner, key) for owner, key, _, _, _ in self._registered if owner.get(key) is None]

    def unsharded_parameter(self) -> str | None:
        """Return the key of a parameter for which a module of ``fully_shard`` holds its unsharded form now. Return None
        if there is no such parameter."""
        return next(
            (key for (_, key), (owner, dtensor) in self._dtensors.items() if owner.get(key) is not dtensor), None
        )

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield each parameter under each of its names. A parameter of a sharded module is its DTensor."""
        return (tensor for _, tensor in self._named_parameters())

    def names_by_id(self) -> dict[int, str]:
        """Return id -> first name of each parameter, without the prefix ``model/``."""
        names: dict[int, str] = {}
        for name, tensor in self._named_parameters():
            names.setdefault(id(tensor), name.removeprefix("model/"))
        return names

    def _named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        held: Callable[[dict[str, Any], str], Any] = self._held if self._sharded else dict.get
        for owner, key, name, role, _ in self._registered:
            if role == "param" and (tensor := held(owner, key)) is not None:
                yield name, tensor


def live_of(
    name: str, role: str, held: torch.Tensor, owner: dict[Any, Any] | None, key: object, layer: int = -1
) -> Live:
    """Return the ``Live`` of a tensor that a module or an optimizer holds."""
    local = local_of(held)
    return Live(name, role, local, owner, key, layer, dtensor=None if local is held else held)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's memory, or 0 if it has none of its own (empty, sparse, meta, a wrapper)."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors at the same address are the same bytes, interpreted in the same way."""
    return (one.dtype, one.shape, one.stride(), one.is_conj(), one.is_neg()) == (
        other.dtype,
        other.shape,
        other.stride(),
        other.is_conj(),
        other.is_neg(),
    )


def _unfreeze_shared(lives: list[Live]) -> None:
    """Clear ``is_frozen`` of each parameter in the same storage as a tensor that is not frozen, because an update may
    write to that storage."""
    if any(live.is_frozen for live in lives):
        written = {storage_address_of(live.tensor) for live in lives if not live.is_frozen} - {0}
        for live in lives:
            if live.is_frozen and storage_address_of(live.tensor) in written:
                live.is_frozen = False


def storage_address_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage, or 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def storage_of(tensor: torch.Tensor) -> object:
    """Return the tensor's storage, to keep the tensor's present memory alive. A reference to the tensor would not do
    that, because ``p.data = ...`` gives the tensor another storage."""
    return tensor.untyped_storage()


class OptimizerView:
    """One optimizer: its parameters by name, the options of its groups, its state."""

    def __init__(
        self, index: int, optimizer: torch.optim.Optimizer, names: dict[int, str], role: WrapperRole, root: int
    ) -> None:
        """Create the view of ``optimizer``.

        index: number of the view, from 0. names: id -> name of the model's parameters. role: whether the optimizer
        wraps another one, or another one wraps it. root: index, among the followed optimizers, of the optimizer whose
        step counts as an update of this one.
        """
        self.index = index
        self.root = root
        self.wraps = role.wraps
        self.is_wrapped = role.is_wrapped
        self.optimizer = optimizer
        self._ids_of_all_params: set[int] = set()
        """Ids of the parameters that the optimizer has now or had earlier."""
        self._has_warned_removed = False
        self.refresh(names)

    @property
    def class_name(self) -> str:
        return type(self.optimizer).__name__

    def refresh(self, names: dict[int, str]) -> None:
        """Read the parameters of all groups, and name them again. ``names``: as in the constructor; a parameter that
        has no name in it is named ``outside/...``."""
        self.names: list[list[str]] = []
        """For each group, the names of its parameters."""
        self.params: list[tuple[str, torch.Tensor]] = []
        """Name and tensor of each parameter, group by group."""
        self._ids_seen = self._ids_of_groups()
        for g, group in enumerate(self.optimizer.param_groups):
            params, outside = group["params"], f"outside/{self.index}/{g}/"
            in_group = [names.get(id(p)) or f"{outside}{i}" for i, p in enumerate(params)]
            self.params.extend(zip(in_group, params, strict=True))
            self.names.append(in_group)
        present = set(chain.from_iterable(self._ids_seen))
        self._ids_of_all_params |= present
        if not self._has_warned_removed:
            self._has_warned_removed = warn_of_removed(self.optimizer, self._ids_of_all_params - present)

    def rename(self, names: dict[int, str]) -> None:
        """Do ``refresh`` if a parameter has another name in ``names``, because modules have exchanged parameters, or
        has none any more, because a module has replaced it."""
        if any(names.get(id(p), name if name.startswith("outside/") else None) != name for name, p in self.params):
            self.refresh(names)

    def has_changed(self) -> bool:
        """Whether the groups hold other parameters than at the last ``refresh``."""
        return self._ids_seen != self._ids_of_groups()

    def _ids_of_groups(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.optimizer.param_groups]

    def outside(self) -> Iterator[Live]:
        """Yield parameters that belong to the optimizer and not to the model."""
        for name, p in self.params:
            if name.startswith("outside/"):
                live = live_of(name, "param", p, None, None)
                live.is_frozen = not p.requires_grad
                yield live

    def state_tensors(self) -> Iterator[Live]:
        """Yield the tensors that lie directly in ``optimizer.state[p]``. A tensor that several parameters share is
        yielded once for each of them; all items but the first are aliases. Yield nothing for a wrapper, whose
        state, its tensors included, is part of the small state."""
        if self.wraps:
            return
        state = self.optimizer.state
        first: dict[int, str] = {}
        for name, p in self.params:
            owner = state.get(p)
            if not isinstance(owner, dict):
                continue
            for key, value in owner.items():
                if is_named_tensor(key, value):
                    full = state_name(name, key)
                    one = first.setdefault(id(value), full)
                    live = live_of(full, "optimizer", value, owner, key)
                    if is_dtensor(p) or live.dtensor is not None:
                        refuse_unrestorable_state(full, p, key, value)
                    live.alias = None if one == full else one
                    yield live

    def state_values(self, params: Sequence[tuple[str, torch.Tensor]] | None = None) -> dict[str, object]:
        """Return the values in each ``optimizer.state[p]`` that ``state_tensors`` does not yield (numbers, None, lists
        of tensors): name -> key -> value. A wrapper's state is returned whole, tensors included. A state that is no
        dict is returned unchanged. ``params``: name and tensor of the parameters whose state is read (None: of all
        parameters). The caller may leave out parameters whose state has no such values."""
        state = self.optimizer.state
        values: dict[str, object] = {}
        for name, p in self.params if params is None or self.wraps else params:
            if p not in state:
                continue
            owner = state[p]
            if not isinstance(owner, dict):
                values[name] = owner
                continue
            rest = {k: v for k, v in owner.items() if self.wraps or not is_named_tensor(k, v)}
            if rest or not owner:
                values[name] = rest
        return values

    def other_state(self) -> dict[Any, object]:
        """Return what ``optimizer.state`` holds under keys that are no tensors."""
        return {k: v for k, v in self.optimizer.state.items() if not isinstance(k, torch.Tensor)}

    def refuse_nameless(self) -> None:
        """Raise ``StateValueError`` for state under a tensor that never was a parameter, because such a tensor has no
        name under which its state could be saved."""
        for key in self.optimizer.state:
            if isinstance(key, torch.Tensor) and id(key) not in self._ids_of_all_params:
                raise StateValueError(
                    f"{self.class_name} keeps state under a tensor of shape {list(key.shape)} that is in none of its "
                    "param_groups. State is saved under the name of its parameter, and this tensor has no name. Use a "
                    "parameter or a string as the key, or delete the state (del optimizer.state[tensor])."
                )

    def groups(self) -> list[dict[str, object]]:
        """Return the options of each group (lr, betas, ...), without its parameters."""
        return [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]


def optimizer_views(
    optimizers: Sequence[Any], names: dict[int, str], *, n_views: int = 0, n_followed: int = 0
) -> list[OptimizerView]:
    """Return a view of each optimizer that has state of its own. ``n_views``, ``n_followed``: how many views and
    followed optimizers exist already. The new views and optimizers are numbered after them."""
    found: list[OptimizerView] = []
    for optimizer, role in zip(optimizers, wrapper_roles(optimizers), strict=True):
        if not inner_of(optimizer) or has_own_state(optimizer):
            found.append(OptimizerView(n_views + len(found), optimizer, names, role, n_followed + role.root))
    return found


def is_named_tensor(key: object, value: object) -> bool:
    """Whether the value is a tensor under a key that can be part of an entry's name."""
    return isinstance(value, torch.Tensor) and type(key) is str and "/" not in key


def state_name(param: str, key: object) -> str:
    return f"optimizer/{param}/{key}"


def param_of(name: str) -> str:
    """Return the name of the parameter to which a tensor of optimizer state belongs. ``name``: that of the tensor in
    the pool, as ``state_name`` makes it."""
    return name.removeprefix("optimizer/").rpartition("/")[0]


def unit_of(entry: Entry | Live) -> str:
    """Return the name of the parameter to whose unit (the parameter with its optimizer state) an entry belongs.
    ``entry``: of a parameter, of optimizer state, or of what ``TopK`` has left out of a parameter's gradients
    (``RESIDUAL_PREFIX``)."""
    if entry.role == "state":
        return entry.name.removeprefix(RESIDUAL_PREFIX)
    return param_of(entry.name) if entry.role == "optimizer" else entry.name.removeprefix("model/")


def entry_of(live: Live) -> Entry:
    """Return the entry that describes a tensor in a pool's layout table (``pool/format/layout.py``: which tensors have
    extents, and where). Raises ``StateValueError`` for a tensor that cannot be stored."""
    tensor = live.tensor
    refuse_unstorable(live.name, tensor)
    shape = tuple(tensor.shape)
    stride = tuple(tensor.stride())
    if not is_dense_tensor(tensor):
        stride = contiguous_stride(shape)
    nbytes = 0 if live.alias else tensor.numel() * tensor.element_size()
    logical_shape, pieces = part_of_live(live)
    entry = Entry(
        live.name,
        live.role,
        dtype_name(tensor.dtype),
        shape,
        stride,
        nbytes,
        tensor.device.type,
        layer=live.layer,
        alias=live.alias,
        logical_shape=logical_shape,
        pieces=pieces,
    )
    return entry if live.share is None else entry_of_share(entry, live.share)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has bytes in memory, which another tensor may share."""
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() > 0


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is one dense run of its bytes on the CPU, which can be copied directly."""
    return tensor.is_cpu and is_dense_tensor(tensor)


def in_plain_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, detached, if its memory can be copied directly (``is_plain``). Otherwise return a copy on the
    CPU: for a dense tensor, with the same order of dimensions in memory; for any other tensor, a contiguous one."""
    tensor = tensor.detach()
    if is_plain(tensor):
        return tensor
    if is_dense_tensor(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").copy_(tensor)
    return tensor.resolve_conj().resolve_neg().to("cpu").contiguous()
