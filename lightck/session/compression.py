"""``TopK`` in one session: which trainings it takes, and what it needs at attach.

    attach      refuse_uncompressible   one process, or ranks with DistributedDataParallel; no other communication hook
                Compression             residuals that are saved; room in the pool for the indexed form of gradients
                                        (positions and values)
    backward    TopKAllReduce           several ranks: what each sends
    pre-hook    GradientCompression     one process: what is left out; then ConsumedGradients holds the indexed form

Invariant: the record of an update holds what the update consumed. A gradient whose elements do not all fit into its
indexed form is stored dense.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightck.errors import UnsupportedError
from lightck.events import StepListener
from lightck.following.ddp import live_ddp
from lightck.hooks.compression import (
    RESIDUALS_EACH_STEP,
    RESIDUALS_WITH_BASES,
    GradientCompression,
    NamesOf,
    PendingResiduals,
    Residuals,
)
from lightck.hooks.topk_all_reduce import TopKAllReduce, refuse_other_hook
from lightck.pipeline.gradient_pools import Capacity, no_capacity
from lightck.session.capture import Capture
from lightck.session.discover import Found
from lightck.state.indexed_gradient import IndexedGradient, capacity, indexed
from lightck.state.local_tensors import is_dtensor, is_fully_sharded
from lightck.state.optimizer_wrappers import enabled_scalers
from lightck.strategy.gradients import Gradients
from lightck.strategy.topk import TopK

STATE_NAME = "TopK"
"""Name in ``state`` under which residuals are saved (``pool.format.layout.RESIDUAL_PREFIX`` begins with it)."""
RESIDUALS_OF_STEPS = f"state/{STATE_NAME}/{RESIDUALS_EACH_STEP}/"
"""Beginning of the names of residuals that are saved at each step."""


class Compression:
    """The compression of one session's gradients."""

    def __init__(self, topk: TopK, ranks: int = 1) -> None:
        """``ranks``: number of ranks whose entries are added up. The sum has up to ``ranks`` times as many entries as
        one rank sends."""
        self._topk, self._ranks = topk, ranks
        self.residuals: Residuals | None = None
        if topk.error_feedback:
            self.residuals = Residuals(RESIDUALS_EACH_STEP if topk.residual == "step" else RESIDUALS_WITH_BASES)

    def added_to(self, found: Found) -> Found:
        """Return what the session saves, with the residuals."""
        if self.residuals is None:
            return found
        if STATE_NAME in found.state:
            raise ValueError(
                f"state= has an object named {STATE_NAME!r}, and lightck saves the residuals of TopK under this name. "
                "Give the object another name."
            )
        return replace(
            found,
            state={**found.state, STATE_NAME: self.residuals},
            classes={**found.classes, STATE_NAME: type(self.residuals).__name__},
        )

    def allocate(self, capture: Capture) -> None:
        """Make the residuals, before the pool is created."""
        if self.residuals is not None:
            self.residuals.allocate({name: p for view in capture.optimizers for name, p in view.params})

    def forget(self) -> None:
        """Drop all references to tensors, after the hooks were removed."""
        if self.residuals is not None:
            self.residuals.forget()

    def capacity(self, numel: int, item_nbytes: int) -> int | None:
        """Return for how many elements the indexed form of a gradient has room; None: it has no indexed form."""
        return capacity(numel, item_nbytes, self._ranks * self._topk.kept(numel))

    def index(self, gradient: torch.Tensor) -> IndexedGradient | None:
        """Return the indexed form of a dense gradient; None: it has none, or does not fit into it."""
        room = self.capacity(gradient.numel(), gradient.element_size())
        return None if room is None else indexed(gradient, room)

    def in_one_process(self, capture: Capture) -> list[StepListener]:
        """Return the listeners that compress the gradients of a process that is alone."""
        return [GradientCompression(self._topk.kept, _names_in(capture), self.residuals)]

    def in_group(self, capture: Capture) -> list[StepListener]:
        """Return the listeners of a rank whose communication hook compresses gradients."""
        return [] if self.residuals is None else [PendingResiduals(_names_in(capture), self.residuals)]

    def register_hook(self, model: nn.Module | None, capture: Capture) -> TopKAllReduce:
        """Register the communication hook of a rank, on the one DistributedDataParallel that ``refuse_uncompressible``
        has found."""
        residuals = self.residuals
        parameters = [p for view in capture.optimizers for _, p in view.params]
        (ddp,) = ddp_of(nn.Module() if model is None else model, parameters)
        if residuals is None:
            return TopKAllReduce.register(ddp, self._topk.kept)

        def residual_of(p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
            found = next((name for view in capture.optimizers for name, one in view.params if one is p), None)
            if found is None:
                raise UnsupportedError(
                    "DistributedDataParallel reduces the gradient of a parameter that no followed optimizer updates, "
                    "so TopK(error_feedback=True) cannot save its residual. Give the parameter to an optimizer, or set "
                    "requires_grad to False before DistributedDataParallel is made."
                )
            return residuals.pending(found, gradient)

        return TopKAllReduce.register(ddp, self._topk.kept, residual_of)


def _names_in(capture: Capture) -> NamesOf:
    def names_of(optimizer: torch.optim.Optimizer) -> list[list[str]]:
        view = next(view for view in capture.optimizers if view.optimizer is optimizer)
        if view.has_changed():
            capture.refresh()
        return view.names

    return names_of


def compression_of(strategy: Gradients | None, ranks: int) -> Compression | None:
    """Return the compression of a session; None: gradients are not compressed."""
    return None if strategy is None or strategy.compress is None else Compression(strategy.compress, ranks)


def capacity_of(compression: Compression | None) -> Capacity:
    return no_capacity if compression is None else compression.capacity


def refuse_uncompressible(topk: object, model: nn.Module, found: Found, *, is_rank_pool: bool) -> None:
    """Raise ``TypeError``, ``ValueError`` or ``UnsupportedError`` if the gradients of this training cannot be
    compressed."""
    if topk is None:
        return
    if not isinstance(topk, TopK):
        name = topk.__name__ if isinstance(topk, type) else type(topk).__name__
        raise TypeError(f"Gradients: compress is {name!r}. Pass lightck.TopK(0.01), or None.")
    topk.check()
    parameters = [p for optimizer in found.optimizers for group in optimizer.param_groups for p in group["params"]]
    fsdp = next((name for name, one in model.named_modules() if is_fully_sharded(one) or _is_flat(one)), None)
    if fsdp is not None or any(map(is_dtensor, parameters)):
        raise UnsupportedError(
            "Gradients(compress=TopK(...)) cannot be used under FSDP, or with other DTensors: a rank has only a part "
            "of each gradient, and its largest entries are not those of the whole. Leave out compress=, or use "
            "DistributedDataParallel."
        )
    wrappers = ddp_of(model, parameters)
    if not is_rank_pool:
        if any(torch.distributed.get_world_size(ddp.process_group) > 1 for ddp in wrappers):
            raise UnsupportedError(
                "Gradients(compress=TopK(...)) compresses the gradients of this process alone (group=False), and "
                "DistributedDataParallel keeps the model equal on several ranks: they would differ from now on. Leave "
                "out group=False, or compress=."
            )
        return
    if len(wrappers) != 1:
        raise UnsupportedError(
            "Gradients(compress=TopK(...)) in a group of ranks needs exactly one DistributedDataParallel that holds "
            f"parameters of this model, and {len(wrappers)} were found. Wrap the model in one "
            "DistributedDataParallel before attach, or leave out compress=."
        )
    refuse_other_hook(wrappers[0])
    if topk.error_feedback and enabled_scalers(found.state):
        raise UnsupportedError(
            "TopK(error_feedback=True) in a group of ranks cannot be used with a GradScaler: gradients are sent while "
            "they have the scaler's scale, so a residual would have the scale of an earlier step, or hold an infinity. "
            "Use bfloat16, which needs no scaler, or error_feedback=False."
        )


def ddp_of(model: nn.Module, parameters: Iterable[torch.Tensor]) -> list[DistributedDataParallel]:
    """Return the live DistributedDataParallel modules that hold some of these parameters, or of the model's."""
    ids = {id(p) for p in (*parameters, *model.parameters())}
    return [one for one in live_ddp(model) if any(id(p) in ids for p in one.parameters())]


def _is_flat(module: nn.Module) -> bool:
    """Whether a module is a ``FullyShardedDataParallel``."""
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)
