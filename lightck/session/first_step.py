"""Checks that are possible only at the first update after attach: objects that were made too late."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from lightck.errors import LateError
from lightck.session.capture import Capture
from lightck.session.discover import LiveObjects, Objects, schedulers_of
from lightck.session.late_schedulers import LateSchedulers, step_counts
from lightck.state.ranks import check_rank

log = logging.getLogger("lightck")
_SCALER = torch.amp.GradScaler


@dataclass(slots=True)
class FirstStep:
    """The checks of one session at its first update. Made at attach; ``check`` is called once, at that
    update."""

    optimizers: tuple[Optimizer, ...]
    objects: Objects
    is_scheduler_declined: bool = False
    """Whether ``state={"scheduler": None}`` was passed, so that no scheduler need be saved."""
    scheduled: frozenset[int] = frozenset()
    """Ids of the optimizers for which a scheduler was passed. Other schedulers of these optimizers are not checked."""
    is_scaler_declined: bool = False
    """Whether ``state={"scaler": None}`` was passed."""
    is_rank_known: bool = False
    """Whether attach knew that this process is a rank of a group, or that it is saved alone (``group=False``). If not,
    ``check`` looks whether it has become a rank since."""
    _lrs: list[tuple[dict[str, Any], float]] = field(default_factory=list)
    """Each parameter group that a scheduler has driven, in this run or before, and the group's restored learning
    rate."""
    _scheduler_counts_at_attach: list[object] = field(default_factory=list)
    """The step counts of the saved schedulers after the restore."""
    _options_are_compared: bool = False
    """Whether ``Comparison`` compares the options of optimizers at the first update."""
    _schedulers_at_attach: list[weakref.ref[LRScheduler]] = field(default_factory=list)
    """Schedulers that existed after the restore, saved or not. Empty if ``_lrs`` is empty."""

    def after_restore(self, options_are_compared: bool) -> None:
        """Record the restored learning rates. ``options_are_compared``: the checkpoint records the options of the
        update that followed it, and ``Comparison`` compares them at the first update."""
        self._options_are_compared = options_are_compared
        self._lrs = [(g, float(g["lr"])) for o in self.optimizers for g in o.param_groups if "initial_lr" in g]
        self._scheduler_counts_at_attach = step_counts(self.objects.values())
        if self._lrs:
            self._schedulers_at_attach.extend(
                weakref.ref(s) for s in schedulers_of(LiveObjects(collect=False), self.optimizers)
            )

    def check(self, capture: Capture) -> LateSchedulers | None:
        """Raise ``LateError`` for a scheduler that was made after attach. If the process has become one of several
        ranks since attach, warn on rank 0, and raise ``UnsupportedError`` on any other. Also run what other parts of
        the session do before the first update. Returns what finds schedulers that are built later; None if no
        scheduler need be saved."""
        if not self.is_rank_known:
            check_rank()
        capture.before_first_update()
        left_out = self._check_late_objects([view.optimizer for view in capture.optimizers])
        self._check_lr()
        capture.positions.before_first_update()
        capture.persistent.before_first_update()
        return None if self.is_scheduler_declined else LateSchedulers(capture, left_out)

    def _check_lr(self) -> None:
        """If a restored learning rate has changed and no saved scheduler has stepped, raise ``LateError`` or warn."""
        if not self._lrs or step_counts(self.objects.values()) != self._scheduler_counts_at_attach:
            return
        moved = [(was, float(g["lr"])) for g, was in self._lrs if "initial_lr" in g and float(g["lr"]) != was]
        if not moved:
            return
        was, now = moved[0]
        fact = f"The learning rate was restored as {was:g} and is {now:g} now, though no saved scheduler has stepped"
        early = [scheduler for known in self._schedulers_at_attach if (scheduler := known()) is not None]
        if any(s not in early for s in schedulers_of(LiveObjects(collect=False), self.optimizers)):
            raise LateError(
                f"{fact}: an LR scheduler was built after attach and reset it. Build the scheduler before attach, or "
                'pass it: attach(..., state={"scheduler": scheduler}).'
            )
        if self._options_are_compared:
            return
        log.warning(
            "lightck: %s. If the loop sets the learning rate itself, or by an object that is no torch LRScheduler, "
            "nothing is wrong. If a scheduler was built after attach, it has started over: build it before attach",
            fact,
        )

    def _check_late_objects(self, optimizers: list[Optimizer]) -> list[LRScheduler]:
        """Raise ``LateError`` for a live scheduler of these optimizers that is not saved. Warn about an enabled
        GradScaler, if none is saved. (It does not say which optimizer it serves, so it may be that of another
        training.) Returns the unsaved schedulers of the optimizers in ``scheduled``: the user has left them out."""
        known = {id(o) for o in self.objects.values()}
        watched = [] if self.is_scheduler_declined else [o for o in optimizers if id(o) not in self.scheduled]
        scheduled = [] if self.is_scheduler_declined else [o for o in optimizers if id(o) in self.scheduled]
        left_out: list[LRScheduler] = []
        needs_scaler = not (self.is_scaler_declined or any(isinstance(o, _SCALER) for o in self.objects.values()))
        # What the quick search finds may be garbage, and garbage must not stop a training. So collect garbage, and
        # search again.
        for collect in (False, True):
            if not watched and not scheduled and not needs_scaler:
                return left_out
            live = LiveObjects(collect=collect)
            left_out = [s for s in schedulers_of(live, scheduled) if id(s) not in known] if scheduled else []
            late = [s for s in schedulers_of(live, watched) if id(s) not in known] if watched else []
            has_late_scaler = needs_scaler and bool(live.matching(_SCALER, lambda one: one.is_enabled()))
            if not late and not has_late_scaler:
                return left_out
        if late:
            raise LateError(
                f"An LR scheduler ({type(late[0]).__name__}) was built after attach and is not saved. After a crash it "
                'would start over. Build it before attach, or pass it: attach(..., state={"scheduler": scheduler}); '
                'state={"scheduler": None} says that it need not be saved.'
            )
        log.warning(
            "lightck: a GradScaler was built after attach and is not saved. After a crash its scale would start over, "
            "and updates would be skipped at other steps. Build it before attach, or pass it: attach(..., "
            'state={"scaler": scaler}); state={"scaler": None} says that it need not be saved'
        )
        return left_out
