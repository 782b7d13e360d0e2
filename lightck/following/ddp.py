"""DistributedDataParallel: which parameters it keeps equal on all ranks, and its state that no checkpoint holds.

There are two kinds of such state. Both are looked for in the first training forward of a session.

*The order of sums.* DistributedDataParallel begins with one bucket for all gradients, and forms new buckets in the
order in which the gradients arrived in its first iteration (``Reducer::rebuild_buckets`` in torch; not with
``find_unused_parameters=True``, unless the graph is static). The place of a gradient in its bucket decides in which
order the values of the ranks are summed. With two ranks the order has no effect. With more ranks it changes the last
bits, so the first iteration after a resume is not that of a run that was never killed.

*Communication hooks.* Some have a state of their own. PowerSGD, for example, keeps the error of its compression and a
counter.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightck.state.ranks import rank_and_world_size

log = logging.getLogger("lightck")


def warn_unsaved_by_ddp(model: nn.Module | None, *, is_resumed: bool) -> None:
    """Warn if a live DistributedDataParallel has a communication hook whose state is in no checkpoint. With
    ``is_resumed`` (this is the first iteration after a resume), also warn if one sums gradients in another order in
    this iteration than in later ones. ``model``: the model of the session."""
    rank_and_size = rank_and_world_size()
    if rank_and_size is None:
        return
    found = live_ddp(model)
    if is_resumed and any(_changes_order(ddp) for ddp in found):
        log.warning(
            "lightck: rank %d of %d: this resume may differ in the last bits from a run that was never killed. "
            "DistributedDataParallel sums the gradients of more than two ranks in another order in the first iteration "
            "of a process than in later ones. DistributedDataParallel(..., find_unused_parameters=True), without "
            "static_graph=True, keeps the order, and makes a resume bit-identical (see `lightck docs ranks`)",
            *rank_and_size,
        )
    hooks = [name for ddp in found for name in _hooks_with_state(ddp)]
    if hooks:
        log.warning(
            "lightck: rank %d of %d: the communication hook %s of DistributedDataParallel has a state that is in no "
            "checkpoint, so a resume is not bit-identical. Use a hook without a state, or save its state yourself: an "
            "object with state_dict() and load_state_dict() in state=",
            *rank_and_size,
            hooks[0],
        )


def live_ddp(model: nn.Module | None) -> list[Any]:
    """Return every live DistributedDataParallel. The search through all objects takes some milliseconds, so it is made
    only a few times in a session."""
    found = {id(m): m for m in (model.modules() if model is not None else ()) if isinstance(m, DistributedDataParallel)}
    running = getattr(DistributedDataParallel, "_active_ddp_module", None)  # set by torch while its forward runs
    if running is not None:
        found[id(running)] = running
    # ``type`` and not ``isinstance``, which would evaluate a lazy proxy.
    found |= {id(one): one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)}
    return [ddp for ddp in found.values() if _ranks_of(ddp)]


def _ranks_of(ddp: Any) -> list[int]:
    """Return the ranks of the wrapper's process group; none if it has no group, or the group was destroyed."""
    try:
        return torch.distributed.get_process_group_ranks(ddp.process_group)
    except (AttributeError, KeyError, ValueError, RuntimeError):
        return []


def replicated_parameters(model: nn.Module, ranks: Sequence[int]) -> set[int]:
    """Return the ids of the parameters that a live DistributedDataParallel keeps equal on these ranks, given as numbers
    in the default process group. A parameter in its list of ignored ones is left out."""
    found: set[int] = set()
    for ddp in live_ddp(model):
        if sorted(_ranks_of(ddp)) == sorted(ranks):
            ignored = set(getattr(ddp, "parameters_to_ignore", ()))
            found |= {id(p) for name, p in ddp.module.named_parameters() if name not in ignored}
    return found


def _changes_order(ddp: Any) -> bool:
    rebuilds = ddp.static_graph or not ddp.find_unused_parameters
    return rebuilds and torch.distributed.get_world_size(ddp.process_group) > 2


def _hooks_with_state(ddp: Any) -> list[str]:
    """Return the names of the communication hooks that were registered with a state other than a process group."""
    hooks = getattr(ddp, "_comm_hooks", ())
    group_class = torch.distributed.ProcessGroup
    return [
        getattr(hook, "__name__", "?") for hook, state in hooks if not (state is None or isinstance(state, group_class))
    ]
