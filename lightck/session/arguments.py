"""The arguments of ``attach``, checked before anything is searched for, opened or changed."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from lightck import sessions
from lightck.errors import SessionError, UnsupportedError
from lightck.layout import Layout, check_layout_argument
from lightck.pipeline.plan import Strategy
from lightck.pipeline.staging.kinds import StagingOption, check_staging
from lightck.pool.format.structures import SLOTS_MAX
from lightck.restore.checkpoint import refuse_other_than_bool, refuse_other_than_mapping, refuse_other_than_module
from lightck.restore.resume import is_poisoned
from lightck.session.interval import Auto, Cadence, cadence_of
from lightck.session.replicas import Replicas
from lightck.strategy.full import FullState
from lightck.strategy.gradients import Gradients
from lightck.strategy.replica import Replica
from lightck.tiers.keep import Keep, warn_deprecated
from lightck.tiers.open_store import is_url, open_store
from lightck.tiers.tier import Tier, checked_tiers, n_spare_slots

log = logging.getLogger("lightck")
AUTO_STRATEGY = "auto"
"""``attach(..., strategy="auto")``: see ``strategy_choice.py``."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How often, in what form and under which conditions checkpoints are saved."""

    interval: int | str | Auto
    strategy: Strategy | str | None
    """``AUTO_STRATEGY`` until ``with_present_strategy`` has looked at the pool."""
    slots: int | None
    keep: Keep | None
    pause_on_nonfinite: bool
    staging: StagingOption | None
    strict_data: bool
    split: bool = True
    replicas_given: object = 1
    """The ``replicas`` argument."""
    tiers_given: object = None
    """The ``tiers`` argument."""

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that get whole checkpoints. Raises ``TypeError`` or ``ValueError`` for a wrong argument."""
        tiers = (each for each in checked_tiers(self.tiers_given) if not each.is_export)
        if self.gradients is not None:
            # A pool with gradient records has no slot for a whole checkpoint. (Tiers that need specific steps stay as
            # they are: ``refuse_unrecordable`` refuses them.)
            tiers = (each if each.needs_specific_steps else replace(each, spare_slot=False) for each in tiers)
        return tuple(tiers)

    @property
    def exports(self) -> Keep | None:
        """Which checkpoints are exported for other programs: ``keep=``, or a tier with ``format="safetensors"``."""
        exported = [each.as_keep() for each in checked_tiers(self.tiers_given) if each.is_export]
        return exported[0] if exported else self.keep

    @property
    def exports_argument(self) -> str:
        """What asks for ``exports``, as the user has written it."""
        return "keep=" if self.keep is not None else 'Tier(format="safetensors")'

    @property
    def gradients(self) -> Gradients | None:
        """The strategy, if it stores gradients."""
        return self.strategy if isinstance(self.strategy, Gradients) else None

    @property
    def replica_strategy(self) -> Replica | None:
        """The strategy, if it keeps a copy of the state on which lightck repeats each update."""
        return self.strategy if isinstance(self.strategy, Replica) else None

    @property
    def fixed_interval(self) -> int:
        """Updates from one saved checkpoint to the next, if this is a fixed number; else 1."""
        return self.interval if isinstance(self.interval, int) else 1

    @property
    def replicas(self) -> Replicas:
        """How many hosts hold each rank's state. Raises ``TypeError`` or ``ValueError`` for a wrong argument."""
        return Replicas.of(self.replicas_given)

    @property
    def chosen_strategy(self) -> Strategy:
        """The strategy object."""
        assert not isinstance(self.strategy, str), "with_present_strategy has replaced it"
        return self.strategy or FullState()

    def _refuse_other_than_strategy(self) -> None:
        strategy = self.strategy
        if strategy is None or strategy == AUTO_STRATEGY:
            return
        if isinstance(strategy, (type, str)) or not isinstance(strategy, Strategy):
            name = strategy if isinstance(strategy, str) else getattr(strategy, "__name__", type(strategy).__name__)
            raise TypeError(
                f"strategy is {name!r}, which is no strategy object. Pass lightck.FullState(), lightck.Gradients(), "
                'lightck.Replica(), or "auto".'
            )

    def check(self) -> Cadence:
        """Check the options. Returns the ``Cadence``, which decides from ``interval`` when a checkpoint is due. Raises
        ``TypeError`` or ``ValueError``."""
        refuse_other_than_bool(
            strict_data=self.strict_data, pause_on_nonfinite=self.pause_on_nonfinite, split=self.split
        )
        self._refuse_other_than_strategy()
        slots, keep = self.slots, self.keep
        if slots is not None and (type(slots) is not int or not 2 <= slots <= SLOTS_MAX):
            raise ValueError(f"slots={slots!r}: a pool has 2 to {SLOTS_MAX} slots.")
        if keep is not None and not isinstance(keep, Keep):
            raise TypeError(
                f"keep is a {type(keep).__name__}. Leave keep= out, and pass "
                'tiers=[lightck.Tier(folder, every=1000, keep_last=3, format="safetensors")].'
            )
        tiers = checked_tiers(self.tiers_given)
        for each in self.tiers:
            open_store(each.root, each.options)  # raises before a file is made, if a library is missing
        if keep is not None and any(each.is_export for each in tiers):
            raise ValueError('keep= and a tier with format="safetensors" do the same. Pass only the tier.')
        if keep is not None:
            warn_deprecated(keep)
        spare = (self.exports is not None) + n_spare_slots(self.tiers)
        if slots is not None and slots + spare > SLOTS_MAX:
            raise ValueError(
                f"slots={slots}: a pool has at most {SLOTS_MAX} slots, and keep= or tiers= needs {spare} in addition "
                f"to slots=. Pass slots={SLOTS_MAX - spare} or fewer."
            )
        check_staging(self.staging)
        cadence = cadence_of(self.interval)
        _warn_of_unsaved_steps(self.tiers, self.interval)
        return cadence


def _warn_of_unsaved_steps(tiers: Iterable[Tier], interval: int | str | Auto) -> None:
    """Warn of each tier whose ``keep_every`` asks for steps that the interval may leave out."""
    for each in tiers:
        if each.keep_every is None:
            continue
        asks = f"the tier {each.path!r} has keep_every={each.keep_every}"
        if not isinstance(interval, int):
            if not isinstance(interval, Auto) or interval.most > 1:
                log.warning(
                    'lightck: %s, and interval="auto" chooses which steps are saved, so some of the steps for which it '
                    "asks may not be sent. Pass a number that divides keep_every as interval=",
                    asks,
                )
        elif each.keep_every % interval:
            log.warning(
                "lightck: %s, and interval=%d saves only multiples of %d, so only multiples of %d are sent. Pass a "
                "keep_every= that %d divides",
                asks,
                interval,
                interval,
                math.lcm(each.keep_every, interval),
                interval,
            )


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of :func:`lightck.attach`, which documents them."""

    model: nn.Module
    pool_path: str | os.PathLike[str]
    optimizer: object
    state: Mapping[str, object] | None
    resume: bool
    overwrite: bool
    backend: str
    require: str | None
    save_options: SaveOptions
    layout: Layout | None = None

    @property
    def declined(self) -> frozenset[str]:
        """Names that the caller passed as None in ``state``: these objects must not be saved."""
        return frozenset(name for name, obj in (self.state or {}).items() if obj is None)

    def check(self, *, is_rank_pool: bool) -> Cadence:
        """Check all arguments, and return the ``Cadence`` of the save options. ``is_rank_pool``: whether the pool will
        be that of a rank of a group. Raises ``TypeError``, ``ValueError``, or a ``LightckError``."""
        refuse_other_than_bool(resume=self.resume, overwrite=self.overwrite)
        if is_url(self.pool_path):
            raise ValueError(
                f"pool_path={self.pool_path!r} is a URL, and a pool lies in memory or on a disk of this machine. Pass "
                "the path of a file, /dev/shm/run.pool for example, and the URL as a tier: "
                f'tiers=[lightck.Tier({self.pool_path!r}, every="1h")].'
            )
        refuse_other_than_module(self.model)
        refuse_other_than_mapping(self.state)
        check_layout_argument(self.layout, is_used=is_rank_pool)
        if self.save_options.replicas.count > 1 and not is_rank_pool:
            raise UnsupportedError(
                "replicas=2 keeps a copy of each rank's pool on another host, and this process is saved alone. Leave "
                "replicas= out; or start the ranks with torchrun, and initialize their process group before attach."
            )
        if self.resume and self.overwrite:
            raise ValueError(
                "resume=True and overwrite=True exclude each other. Pass resume=True to continue from the checkpoint, "
                "or overwrite=True to discard it."
            )
        sessions.refuse_open(self.model)
        if is_poisoned(self.model):
            raise SessionError(
                "A restore into this model failed half-way. The parameters of the model were set to NaN, so that "
                "nobody trains on a mix of two states. Build the model anew, or restore another checkpoint into it."
            )
        return self.save_options.check()
