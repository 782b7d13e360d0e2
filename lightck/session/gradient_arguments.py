"""Which trainings and arguments ``strategy=Gradients(...)`` takes, checked at attach."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable

from lightck.errors import UnsupportedError
from lightck.hooks.layerwise import layerwise_of
from lightck.pipeline.gradient_pools import GradientPools
from lightck.pipeline.pool_kind import PoolKind
from lightck.pool.create import pool_nbytes
from lightck.pool.format.layout import GRADIENT_ROLE, HOME_PLACE, Entry
from lightck.pool.gradient_log import BASE_EVERY_MIN, problem_of, records_default
from lightck.restore.checkpoint import refuse_other_than_bool
from lightck.session.arguments import Arguments, SaveOptions
from lightck.session.capture import Capture
from lightck.session.compression import RESIDUALS_OF_STEPS, Compression, capacity_of, refuse_uncompressible
from lightck.session.discover import Found
from lightck.state.inventory import unit_of
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.replayable import refuse_low_ratio, refuse_unreplayable
from lightck.state.update_record import parameter_of
from lightck.strategy.gradients import Gradients


def n_records(strategy: Gradients) -> int:
    """Return the number of record slots of a new pool."""
    return strategy.log_records or records_default(strategy.base_every)


def gradient_pools(strategy: Gradients, capture: Capture, compression: Compression | None) -> GradientPools:
    """Return the kind of pools of this session."""

    def updated() -> Collection[str]:
        return {name for view in capture.optimizers for name, _ in view.params}

    return GradientPools(strategy.base_every, updated, capacity_of(compression))


def refuse_unrecordable(strategy: Gradients, arguments: Arguments, found: Found, *, is_rank_pool: bool) -> None:
    """Raise ``UnsupportedError``, ``ValueError`` or ``TypeError`` if this training, with these arguments, cannot be
    saved by ``strategy``."""
    numbers = {"base_every": strategy.base_every, "log_records": strategy.log_records or 1}
    for name, value in numbers.items():
        if type(value) is not int:
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}. Pass a whole number.")
    refuse_other_than_bool(own_optimizers=strategy.own_optimizers)
    problem = problem_of(strategy.base_every, strategy.log_records)
    if problem is not None:
        raise ValueError(f"Gradients: {problem}")
    _refuse_other_arguments(arguments.save_options, is_rank_pool=is_rank_pool)
    if not found.optimizers:
        raise UnsupportedError(
            "strategy=Gradients(...) records what an optimizer consumes, and no optimizer of this model exists at "
            "attach. Build the optimizer first, or use strategy=FullState()."
        )
    for optimizer in found.optimizers:
        if layerwise_of(optimizer) is not None:
            raise UnsupportedError(
                "strategy=Gradients(...) and lightck.layerwise() exclude each other: a layer's gradient is gone before "
                "it can be recorded. Use strategy=FullState(), or leave out layerwise()."
            )
        refuse_unreplayable(optimizer)
        if not (strategy.own_optimizers or PartialOptimizer.of(optimizer).is_torch):
            raise UnsupportedError(
                f"{type(optimizer).__name__} is not a class of torch.optim, so lightck does not know what its step() "
                "reads, and whether a recovery can make its updates again. Use strategy=FullState(). If its step reads "
                "nothing but the gradient, the options and the state of each parameter, pass "
                "Gradients(own_optimizers=True)."
            )
    refuse_uncompressible(strategy.compress, arguments.model, found, is_rank_pool=is_rank_pool)


def refuse_small_gain(kind: PoolKind, entries: Iterable[Entry]) -> None:
    """Raise ``UnsupportedError`` if gradients have nearly as many bytes as what the updates change. ``entries``: the
    tensors of a checkpoint, with optimizer state."""
    laid_out = kind.laid_out(entries)
    updated = {parameter_of(entry.name) for entry in laid_out if entry.role == GRADIENT_ROLE}
    residuals = [e.nbytes for e in laid_out if e.name.startswith(RESIDUALS_OF_STEPS)]
    gradient_nbytes = sum(entry.nbytes for entry in laid_out if entry.role == GRADIENT_ROLE) + sum(residuals)
    changed = [e for e in laid_out if e.place == HOME_PLACE and e.role != "state" and unit_of(e) in updated]
    refuse_low_ratio(sum(e.nbytes for e in changed), gradient_nbytes)


def space_advice(entries: Iterable[Entry], state_nbytes: int, kind: PoolKind, base_every: int, path: str) -> str:
    """Return a sentence for a pool that does not fit into its folder: with which ``base_every`` it would."""
    laid_out = kind.laid_out(entries)
    free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
    for smaller in range(base_every - 1, BASE_EVERY_MIN - 1, -1):
        if pool_nbytes(laid_out, slots=records_default(smaller), state_nbytes=state_nbytes) <= free:
            return f"With Gradients(base_every={smaller}) it fits."
    return "No base_every makes it fit. FullState() needs less space."


def _refuse_other_arguments(options: SaveOptions, *, is_rank_pool: bool) -> None:
    given = {
        "slots=": (options.slots is not None, "its pool has gradient records instead (log_records=)"),
        "keep=": (options.keep is not None, "a checkpoint that is kept would need the records of other steps too"),
        "interval=": (options.interval != 1, "the updates of all steps are needed to make a later one again"),
    }
    for name, (is_given, reason) in given.items():
        if is_given:
            raise UnsupportedError(
                f"strategy=Gradients(...) cannot be used with {name}: {reason}. Leave that argument out, or use "
                "strategy=FullState()."
            )
    if is_rank_pool:
        raise UnsupportedError(
            "strategy=Gradients(...) cannot be used in a group of ranks. Use strategy=FullState(), or group=False to "
            "save this process alone."
        )
