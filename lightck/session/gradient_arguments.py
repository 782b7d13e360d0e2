"""Which trainings and arguments ``strategy=Gradients(...)`` takes, checked at attach."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence

from lightck.errors import UnsupportedError, listed
from lightck.hooks.layerwise import layerwise_of
from lightck.pipeline.gradient_pools import GradientPools, updated_nbytes
from lightck.pipeline.pool_kind import PoolKind
from lightck.pool.create import pool_nbytes
from lightck.pool.format.layout import Entry
from lightck.pool.gradient_log import BASE_EVERY_MIN, problem_of, records_default
from lightck.pool.storage.backend import Backend
from lightck.restore.checkpoint import refuse_other_than_bool
from lightck.restore.optimizers_at_hand import OptimizersAtHand
from lightck.session.arguments import Arguments, SaveOptions
from lightck.session.base_every import (
    base_every_given,
    free_beside,
    free_nbytes,
    records_of_new_pool,
    refuse_wrong_mtbf,
)
from lightck.session.capture import Capture
from lightck.session.compression import RESIDUALS_OF_STEPS, Compression, capacity_of, refuse_uncompressible
from lightck.session.discover import Found
from lightck.session.whole_units import coupled_units
from lightck.state.inventory import OptimizerView
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.replayable import refuse_low_ratio, refuse_unreplayable
from lightck.strategy.gradients import Gradients


def optimizers_at_hand(capture: Capture) -> OptimizersAtHand:
    """Return the object that replays updates of this training, with the live optimizers."""
    return OptimizersAtHand(capture.model.model, [one.optimizer for one in capture.optimizers])


def n_records(strategy: Gradients, interval: int, *, is_rank_pool: bool) -> int:
    """Return the number of record slots of a new pool. (With ``base_every="auto"`` it is chosen when the tensors are
    known.) ``interval``: updates from one commit to the next."""
    if strategy.log_records is not None:
        return strategy.log_records
    return records_default(base_every_given(strategy) or BASE_EVERY_MIN, interval, in_group=is_rank_pool)


def gradient_pools(
    strategy: Gradients, capture: Capture, path: str, backend: Backend, interval: int, compression: Compression | None
) -> GradientPools:
    """Return the kind of pools of this session. path, backend: of the pool. interval: updates from one commit to the
    next. compression: of gradients."""

    reference = weakref.ref(capture)  # the pipeline outlives a session that is collected

    def optimizers() -> Sequence[OptimizerView]:
        live_capture = reference()
        return () if live_capture is None else live_capture.optimizers

    def updated() -> Collection[str]:
        return {name for view in optimizers() for name, _ in view.params}

    def whole() -> Collection[str]:
        live_capture = reference()
        return () if live_capture is None else live_capture.whole_units()

    def records_that_fit(entries: Sequence[Entry], state_nbytes: int) -> int:
        return records_of_new_pool(entries, state_nbytes, free_nbytes(path, backend))

    _refuse_all_whole(capture)
    base_every = base_every_given(strategy)
    is_chosen = base_every is not None or strategy.log_records is not None
    choose_n_records = None if is_chosen else records_that_fit
    capacity = capacity_of(compression)
    return GradientPools(base_every, updated, interval, choose_n_records, capacity, whole)


def refuse_unrecordable(strategy: Gradients, arguments: Arguments, found: Found, *, is_rank_pool: bool) -> None:
    """Raise ``UnsupportedError``, ``ValueError`` or ``TypeError`` if this training, with these arguments, cannot be
    saved by ``strategy``."""
    base_every, records = base_every_given(strategy), strategy.log_records
    if records is not None and type(records) is not int:
        raise TypeError(f"log_records={records!r} is a {type(records).__name__}. Pass a whole number.")
    refuse_other_than_bool(own_optimizers=strategy.own_optimizers)
    refuse_wrong_mtbf(strategy)
    options = arguments.save_options
    _refuse_other_arguments(options, is_rank_pool=is_rank_pool)
    if base_every is None and options.interval != 1:
        raise UnsupportedError(
            'Gradients(base_every="auto") cannot be used with interval= other than 1. Pass a number for base_every.'
        )
    least = BASE_EVERY_MIN if base_every is None else base_every
    problem = problem_of(least, records, options.fixed_interval, in_group=is_rank_pool)
    if problem is not None:
        raise ValueError(f"Gradients: {problem}")
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
        if arguments.layout is not None and not PartialOptimizer.of(optimizer).is_torch:
            raise UnsupportedError(
                f"{type(optimizer).__name__} is not a class of torch.optim, and layout= says that this rank may hold "
                "parts of parameters. Its update of a part may need the parts of other ranks, so a rank cannot make "
                "it again by itself. Use strategy=FullState()."
            )
    refuse_uncompressible(strategy.compress, arguments.model, found, is_rank_pool=is_rank_pool)


def _refuse_all_whole(capture: Capture) -> None:
    """Raise ``UnsupportedError`` if no gradient would be recorded, because the units of all parameters lie whole in
    each checkpoint."""
    whole, coupled = capture.whole_units(), coupled_units(capture.optimizers)
    if not whole or any(name not in whole for view in capture.optimizers for name, _ in view.params):
        return
    if whole != coupled:
        raise UnsupportedError(
            f"The parameters of the optimizer share their memory with each other or with other parameters (for example "
            f"{min(whole - coupled)!r}), so their updates cannot be made again one by one, and each checkpoint would "
            "hold all of them whole. Use strategy=FullState(). If one parameter is meant, assign it under both names, "
            "without .data and without a second nn.Parameter."
        )
    names = listed([view.class_name for view in capture.optimizers])
    raise UnsupportedError(
        f"{names} updates parameters of which each rank holds a part, and its update of a part may need the parts of "
        "other ranks. So a rank cannot make its updates again from its own gradients, and each checkpoint would hold "
        "all of them whole. Use strategy=FullState()."
    )


def refuse_small_gain(kind: PoolKind, entries: Iterable[Entry]) -> None:
    """Raise ``UnsupportedError`` if gradients have nearly as many bytes as what the updates change. ``entries``: the
    tensors of a checkpoint, with optimizer state."""
    laid_out = kind.laid_out(entries)
    changed_nbytes, gradient_nbytes = updated_nbytes(laid_out)
    whole = kind.whole_nbytes(laid_out) if isinstance(kind, GradientPools) else 0
    residuals = [entry.nbytes for entry in laid_out if entry.name.startswith(RESIDUALS_OF_STEPS)]
    refuse_low_ratio(changed_nbytes, gradient_nbytes + sum(residuals), whole)


def space_advice(
    entries: Iterable[Entry],
    state_nbytes: int,
    kind: PoolKind,
    tried: tuple[int, int | None],
    interval: int,
    path: str,
    *,
    in_group: bool,
) -> str:
    """Return a sentence for a pool that does not fit into its folder: with which ``base_every`` it would. ``tried``:
    the ``base_every`` and ``log_records`` with which it does not fit."""
    laid_out = kind.laid_out(entries)
    free, (base_every, log_records) = free_beside(path), tried
    without = "" if log_records is None else ", without log_records=,"
    for other in range(base_every - (log_records is None), BASE_EVERY_MIN - 1, -1):
        if problem_of(other, None, interval, in_group=in_group) is not None:
            continue
        records = records_default(other, interval, in_group=in_group)
        if pool_nbytes(laid_out, slots=records, state_nbytes=state_nbytes) <= free:
            return f"With Gradients(base_every={other}){without} it fits."
    return "No base_every makes it fit. FullState() needs less space."


def _refuse_other_arguments(options: SaveOptions, *, is_rank_pool: bool) -> None:
    given = {
        "slots=": (options.slots is not None, "its pool has gradient records instead (log_records=)"),
        "tiers= in a group of ranks": (
            bool(options.tiers) and is_rank_pool,
            "all ranks send the checkpoint of one agreed step, and a pool with gradient records cannot keep it so long",
        ),
        "tiers= together with own_optimizers=True": (
            bool(options.tiers) and options.gradients is not None and options.gradients.own_optimizers,
            "the process that sends checkpoints makes updates again, and has only the optimizers of torch",
        ),
        "keep_every= or keep_best= of a tier": (
            any(each.needs_specific_steps for each in options.tiers),
            "a pool with gradient records cannot keep one particular checkpoint until it is sent",
        ),
        options.exports_argument: (
            options.exports is not None,
            "a checkpoint that is kept would need the records of other steps too",
        ),
        "replicas=": (options.replicas.count > 1, "a peer copy holds whole checkpoints"),
    }
    for name, (is_given, reason) in given.items():
        if is_given:
            raise UnsupportedError(
                f"strategy=Gradients(...) cannot be used with {name}: {reason}. Leave that argument out, or use "
                "strategy=FullState()."
            )
    if not isinstance(options.interval, int):
        raise UnsupportedError(
            'strategy=Gradients(...) cannot be used with interval="auto" or lightck.Auto(...): the interval would '
            "change, and for how many updates a pool has room depends on it. Pass a number, interval=4 for example, or "
            "use strategy=FullState()."
        )
