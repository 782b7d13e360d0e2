"""Predicts, before an optimizer's first step, which state it will have, so that the pool can be laid out at attach.

A scratch instance of the optimizer's class makes one step on tiny trial tensors. Each kind of parameter (group, number
of dimensions, dtype, device) has one trial tensor, whose sizes are different primes. So a prime among the sizes of a
state tensor shows from which dimension of the parameter that size comes. User hooks do not run, and random states are
preserved. If anything fails, ``predict`` returns None, and the pool is laid out at the first boundary instead.

Only torch's own optimizers are run in this way. The constructor or the step of another class may do more than create
state (change a counter of the class or a buffer that its groups share, write a file, make a collective call). Such a
side effect would change the training, and could not be undone. For another class ``predict`` returns None.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch

from lightck.pool.format.layout import Entry, contiguous_stride
from lightck.state import rng
from lightck.state.inventory import OptimizerView, state_name
from lightck.state.local_tensors import has_placements_of, local_of
from lightck.state.partial_optimizer import without_global_hooks
from lightck.state.parts import part_of
from lightck.state.storable import dtype_name
from lightck.state.torch_classes import foreign_code

log = logging.getLogger("lightck")
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
"""The sizes of a trial tensor of n dimensions are the first n of these."""

_SizeSource = tuple[str, int]
"""How one size of a state tensor follows from its parameter: ("dim", i) is the parameter's size in dimension i,
("numel", 0) its number of elements, ("size", n) the constant n."""
_StateKind = tuple[torch.dtype, torch.device, tuple[_SizeSource, ...]]
"""Dtype and device of one state tensor, and how each of its sizes follows."""


def predict(view: OptimizerView) -> list[Entry] | None:
    """Return entries for the state of every parameter of this optimizer, or None if they cannot be predicted."""
    try:
        with rng.preserved():
            return list(_predict(view))
    except Exception as err:
        log.info(
            "lightck: the size of the state of %s is not known before its first update (%s), so the pool is created "
            "when the first step closes",
            view.class_name,
            err,
        )
        return None


def _predict(view: OptimizerView) -> Iterator[Entry]:
    """Yield the entries. Raises ``ValueError`` with the reason if they cannot be predicted."""
    if view.wraps:
        raise ValueError("it wraps another optimizer")
    foreign = foreign_code(type(view.optimizer))
    if foreign is not None:
        raise ValueError(f"{foreign} is not torch's own code, so it is not tried out beforehand")
    groups, trial_tensors = _trial_tensors(view)
    make: Any = type(view.optimizer)
    scratch: torch.optim.Optimizer = make(groups)
    with without_global_hooks():
        scratch.step()
    state_kinds = {key: _state_kinds(p, scratch.state.get(p, {})) for key, p in trial_tensors.items()}
    for g, (group, names) in enumerate(zip(view.optimizer.param_groups, view.names, strict=True)):
        for name, p in zip(names, group["params"], strict=True):
            for state_key, (dtype, device, size_sources) in state_kinds[_kind(g, p)].items():
                yield _entry(name, p, state_key, dtype, device, size_sources)


def _kind(group: int, p: torch.Tensor) -> tuple[object, ...]:
    """Return the kind of a parameter: what it has in common with its trial tensor. ``group``: the index of its
    group."""
    return group, p.dim(), p.dtype, p.device


def _trial_tensors(view: OptimizerView) -> tuple[list[dict[str, object]], dict[tuple[object, ...], torch.Tensor]]:
    """Return groups of trial tensors with the options of the optimizer's groups, and kind -> trial tensor. Raises
    ``ValueError`` for a parameter with more dimensions than ``_PRIMES`` has items."""
    groups, by_kind = [], {}
    for g, group in enumerate(view.optimizer.param_groups):
        mine = {_kind(g, p): p for p in group["params"]}
        for kind, p in mine.items():
            sizes = _PRIMES[: p.dim()]
            if len(sizes) < p.dim():
                raise ValueError(
                    f"a parameter has {p.dim()} dimensions, and an optimizer is tried out on at most {len(_PRIMES)}"
                )
            by_kind[kind] = torch.ones(sizes, dtype=p.dtype, device=p.device, requires_grad=True)
            by_kind[kind].grad = torch.ones_like(by_kind[kind])
        options = deepcopy({key: group[key] for key in view.optimizer.defaults if key in group})
        groups.append({"params": [by_kind[kind] for kind in mine], **options})
    return groups, by_kind


def _state_kinds(p: torch.Tensor, state: dict[object, object]) -> dict[object, _StateKind]:
    """Return key -> kind of each tensor in the state of the trial tensor ``p``. Raises ``ValueError`` if the state
    contains a list, tuple or dict with items, or a tensor with a size that does not follow from the shape of ``p``."""
    kinds = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            kinds[key] = (value.dtype, value.device, tuple(_size_source(p, size) for size in value.shape))
        elif isinstance(value, (list, tuple, dict)) and value:
            raise ValueError(f"state {key!r} is a {type(value).__name__}")
    return kinds


def _size_source(p: torch.Tensor, size: int) -> _SizeSource:
    if size == 1:
        return "size", 1
    if size in p.shape:
        return "dim", list(p.shape).index(size)
    if size == p.numel():
        return "numel", 0
    raise ValueError(f"a size of {size} does not follow from the parameter's shape")


def _size(p: torch.Tensor, basis: str, n: int) -> int:
    """Return the size that follows from (``basis``, ``n``), a ``_SizeSource``, for the parameter ``p``."""
    if basis == "dim":
        return int(p.shape[n])
    return p.numel() if basis == "numel" else n


def _entry(
    name: str,
    p: torch.Tensor,
    key: object,
    dtype: torch.dtype,
    device: torch.device,
    size_sources: tuple[_SizeSource, ...],
) -> Entry:
    local = local_of(p)
    shape = tuple(_size(local, basis, n) for basis, n in size_sources)
    # State of the parameter's shape gets the parameter's strides too, because torch creates it with preserve_format.
    # If the state has other strides, it gets a new extent at its first checkpoint.
    stride = tuple(local.stride()) if shape == tuple(local.shape) and _is_dense(p) else contiguous_stride(shape)
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    full = state_name(name, key)
    logical_shape, pieces = part_of(full, p if has_placements_of(p, key, shape) else None)
    return Entry(
        full,
        "optimizer",
        dtype_name(dtype),
        shape,
        stride,
        nbytes,
        device.type,
        logical_shape=logical_shape,
        pieces=pieces,
    )


def _is_dense(p: torch.Tensor) -> bool:
    """Whether a parameter's memory is dense. Every parameter on a device is assumed to be dense."""
    from lightck.state.inventory import is_plain

    return p.device.type != "cpu" or is_plain(local_of(p))
