"""Which trainings and arguments ``strategy=Gradients(...)`` takes, checked at attach."""

from __future__ import annotations

from collections.abc import Collection

from lightck.errors import UnsupportedError
from lightck.hooks.layerwise import layerwise_of
from lightck.pipeline.gradient_pools import GradientPools
from lightck.pool.gradient_log import problem_of, records_default
from lightck.session.arguments import SaveOptions
from lightck.session.capture import Capture
from lightck.session.discover import Found
from lightck.state.replayable import refuse_unreplayable
from lightck.strategy.gradients import Gradients


def n_records(strategy: Gradients) -> int:
    """Return the number of record slots of a new pool."""
    return strategy.log_records or records_default(strategy.base_every)


def gradient_pools(strategy: Gradients, capture: Capture) -> GradientPools:
    """Return the kind of pools of this session."""

    def updated() -> Collection[str]:
        return {name for view in capture.optimizers for name, _ in view.params}

    return GradientPools(strategy.base_every, updated)


def refuse_unrecordable(options: SaveOptions, found: Found, *, is_rank_pool: bool) -> None:
    """Raise ``UnsupportedError``, ``ValueError`` or ``TypeError`` if this training, with these arguments, cannot be
    saved by ``Gradients``."""
    strategy = options.strategy
    assert isinstance(strategy, Gradients)
    numbers = {"base_every": strategy.base_every, "log_records": strategy.log_records or 1}
    for name, value in numbers.items():
        if type(value) is not int:
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}. Pass a whole number.")
    problem = problem_of(strategy.base_every, strategy.log_records)
    if problem is not None:
        raise ValueError(f"Gradients: {problem}")
    _refuse_other_arguments(options, is_rank_pool=is_rank_pool)
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


def _refuse_other_arguments(options: SaveOptions, *, is_rank_pool: bool) -> None:
    given = {
        "slots=": options.slots is not None,
        "keep=": options.keep is not None,
        "interval= other than 1": options.interval != 1,
    }
    for name, is_given in given.items():
        if is_given:
            raise UnsupportedError(
                f"strategy=Gradients(...) cannot be used with {name}. Leave that argument out, or use "
                "strategy=FullState()."
            )
    if is_rank_pool:
        raise UnsupportedError(
            "strategy=Gradients(...) cannot be used in a group of ranks. Use strategy=FullState(), or group=False to "
            "save this process alone."
        )
