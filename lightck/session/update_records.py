"""What each update consumed, for the checkpoints of ``Gradients``: captured at the update, stored with the boundary.

    last pre-step hook   ``ConsumedGradients`` holds the gradients; those that the update or the loop will overwrite are
                         copied to memory at once
    boundary             ``record_of``: gradients and options become a part of the checkpoint, if they are all that the
                         update consumed, and nothing else has written to parameters or optimizer state
    after the copies     ``validate``: the copies have the checksums from before the update
    next update          gradients that no checkpoint took are released

An update without a good record leaves a hole: its checkpoint is full.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

import torch
from torch.optim.optimizer import Optimizer

from lightck.events import StepListener
from lightck.hooks.captured_update import CapturedStep, CapturedUpdate, CopyResult, GradientClass, HeldGradient
from lightck.hooks.consumed import ConsumedGradients, Indexing, never_indexed
from lightck.hooks.gradient_checksums import plain_tensor
from lightck.pipeline.guard import Rejection
from lightck.pipeline.in_flight import InFlightCheckpoint
from lightck.pool.format.layout import HOME_ROLES
from lightck.pool.format.structures import BLOCK_MAX
from lightck.pool.writer import PoolWriter
from lightck.session.base_check import BaseCheck
from lightck.session.capture import Capture
from lightck.session.outside_writes import OutsideWrites, WritesInStep
from lightck.session.update_audit import UpdateAudit
from lightck.state.blocks import checksums
from lightck.state.inventory import Live, unit_of
from lightck.state.neutral_settings import settings_reason
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.signatures import UpdateRecord
from lightck.state.update_record import UpdatePacker, gradient_tensors, names_of, unrecordable_reason

log = logging.getLogger("lightck")
_CRASH_NOW = "If the process crashes before the next checkpoint is committed, a recovery takes an older one."
_STRUCK = "When the next checkpoint is committed, older ones that may be wrong are struck (made unreadable)."
FULL_MAX = 20
"""After this many full checkpoints in a row a warning says that the strategy does not fit the loop."""


class UpdateRecords(StepListener):
    """The records of one session's updates. Its ``consumed_gradients`` is a listener of its own."""

    def __init__(
        self,
        capture: Capture,
        copied_at_boundary: Set[str],
        *,
        reads_all: bool = False,
        index: Indexing = never_indexed,
    ) -> None:
        """``copied_at_boundary``: names of tensors that no background copy may read. ``reads_all``: read all bytes at
        each update to find writes outside of updates. ``index``: see ``Indexing``."""
        self._capture, self._copied_at_boundary = capture, copied_at_boundary
        self.consumed_gradients = ConsumedGradients(
            self,
            self._names_of,
            block=BLOCK_MAX,
            index=index,
            left_out=capture.whole_units,
            distrust_earlier=self._distrust_earlier,
        )
        self._packer, self._outside, self._audit = UpdatePacker(), OutsideWrites(reads_all=reads_all), UpdateAudit()
        self._in_step = WritesInStep(reads_all=reads_all)
        self._copies: dict[HeldGradient, tuple[torch.Tensor, ...]] = {}
        """Gradients that were copied to memory, because something would have overwritten them."""
        self._update: CapturedUpdate | None = None
        """The last update, until a checkpoint takes it."""
        self._last: set[HeldGradient] = set()
        """The gradients of the last update."""
        self._begun: list[tuple[HeldGradient, tuple[str, ...]]] = []
        """Gradients that the checkpoint in flight copies, with the names of their entries."""
        self.base_check: BaseCheck | None = None
        """Set under ``LIGHTCK_CHECK=1``."""
        self.distrusted: Callable[[int | None], bool] = lambda after: False
        """Called when updates are not trusted any more, with the generation after which checkpoints may be wrong (None:
        it is not known). Returns whether they are struck when a newer one is committed."""
        self._reason = ""
        """Why the next record that ``record_of`` makes is of no use; "" if no reason is known."""
        self._distrust = ""
        """The first difference that the audit or the check of bases has found; "" if they found none."""
        self.update_seconds = 0.0
        """How long the ``step`` of all optimizers took so far."""
        self._step_began: float | None = None
        """When the ``step`` that runs now began."""
        self._n_full = 0
        """How many checkpoints in a row were full for a reason."""
        self._hole = ""
        """Why the next checkpoint is full, if an update since the last one has left no record; else ""."""
        self._optimizer_of: dict[str, int] = {}
        """Name of a parameter -> index of the optimizer that last had it."""
        self._token_of_optimizers: object = None
        """``Capture.token`` at the last update of ``_optimizer_of``."""
        self._last_step: int | None = None
        """The step of the last call of ``record_of``, whether the step was saved or not."""
        self._watched: list[Live] = []
        """Parameters and optimizer state at the last ``step``, without the units that lie whole in each checkpoint."""
        self._token: object = None
        """``Capture.token`` for which ``_watched`` was made."""
        self._has_warned_of_late_writes = False
        self._logged: set[str] = set()
        self._custom_classes: dict[type, bool] = {}
        """Class of an optimizer -> whether it is none of ``torch.optim``."""

    def _names_of(self, optimizer: Optimizer) -> list[list[str]]:
        self._capture.refresh()
        self._capture.tensors()  # finds parameters that modules have exchanged
        return next((view.names for view in self._capture.optimizers if view.optimizer is optimizer), [])

    def forget(self) -> None:
        """Release everything, after the hooks were removed."""
        self.consumed_gradients.forget()
        self._copies.clear()
        self._last.clear()
        self._begun.clear()
        self._update = self._token = self._token_of_optimizers = None
        self._watched = []
        self._outside.forget()
        self._in_step.forget()
        self._audit.forget()

    # -- step events -------------------------------------------------------------------------------------

    def gradients_final(self, index: int, optimizer: Optimizer) -> None:
        self._find_outside_writes()
        self._reason = self._reason or settings_reason(type(optimizer))
        step = self.consumed_gradients.running_step(index)
        if step is not None:
            self._audit.begin(index, optimizer, step, self._tensors_of)
        if self._is_custom(optimizer):
            self._in_step.step_begins(index, self._names_of(optimizer), self._watched, self._token)
        self._step_began = time.perf_counter()

    def after_step(self, index: int) -> None:
        if self._step_began is not None:
            self.update_seconds += time.perf_counter() - self._step_began
            self._step_began = None
        difference = self._audit.difference(index)
        if difference:
            self._trust_no_more(difference, _CRASH_NOW, None)
        written = self._in_step.written_names(index)
        if written:
            self._reason = f"{written[0]!r} was written inside the step() of an optimizer that does not have it"
        lives, token = self._capture.tensors(), self._capture.token
        if token is None or token is not self._token:
            self._token = token
            own = (one for one in lives if one.role in HOME_ROLES and one.alias is None and _is_dense(one))
            whole = self._capture.whole_units()
            self._watched = [one for one in own if unit_of(one) not in whole] if whole else list(own)
        self._outside.step_ended(self._watched, token)

    def _trust_no_more(self, difference: str, consequence: str, after: int | None) -> None:
        """``after``: as for ``distrusted``."""
        if not self._distrust:
            self._distrust = difference
            are_struck = self.distrusted(after)
            log.warning(
                "lightck: %s, so updates are not trusted any more: from now on each checkpoint stores the whole state. "
                "%s%s Use strategy=FullState() for this training",
                difference,
                f"{_STRUCK} " if are_struck else "",
                consequence,
            )

    def _tensors_of(self, gradient: HeldGradient) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a gradient, or their copies; none if it was overwritten."""
        return gradient.tensors or self._copies.get(gradient, ())

    def _find_outside_writes(self) -> None:
        names = self._outside.written_names() or self._exchanged()
        if names:
            self._reason = f"{names[0]!r} was written between two updates"

    def _exchanged(self) -> list[str]:
        """Return the names of tensors that were exchanged for others since the last ``step``, or that have gone."""
        lives, token = self._capture.tensors(), self._capture.token
        if token is not None and token is self._token:
            return []
        now = {live.name: live.tensor for live in lives}
        return [live.name for live in self._watched if now.get(live.name) is not live.tensor]

    # -- copies: a ``GradientCopier`` --------------------------------------------------------------------

    def copies_due_now(self, gradients: Sequence[HeldGradient]) -> None:
        for gradient in gradients:
            if gradient not in self._last:  # else no checkpoint took it, and it is not needed any more
                self._copy(gradient)

    def _copy(self, gradient: HeldGradient) -> None:
        copies = tuple(plain_tensor(tensor).clone() for tensor in gradient.tensors)
        if self.consumed_gradients.copied(gradient, [checksums(one, BLOCK_MAX) for one in copies]):
            self._copies[gradient] = copies

    def consumed(self, update: CapturedUpdate) -> None:
        gradients = list(update.gradients())
        for gradient in gradients:
            if gradient.result is CopyResult.HELD and self._is_overwritten_early(gradient):
                self._copy(gradient)
        self._last = set(gradients)
        self._copies = {gradient: copies for gradient, copies in self._copies.items() if gradient in self._last}
        self._update = update

    def _is_overwritten_early(self, gradient: HeldGradient) -> bool:
        """Whether the loop writes into the memory of this gradient before the next update. (The pool
        remembers the names of gradients that were once overwritten during a copy, also in an earlier process.)"""
        return gradient.kind is GradientClass.VIEW or not self._copied_at_boundary.isdisjoint(names_of(gradient))

    def overwritten(self, gradient: HeldGradient, reason: str) -> None:
        log.info("lightck: the gradient of %r cannot be recorded: %s", gradient.name, reason)

    def _distrust_earlier(self, gradient: HeldGradient) -> None:
        are_struck = self.distrusted(None)
        self._reason = self._reason or f"earlier gradients of {gradient.name!r} may have been overwritten"
        if self._has_warned_of_late_writes:
            return
        self._has_warned_of_late_writes = True
        log.warning(
            "lightck: the loop writes into the gradient of %r after optimizer.step(), in a way that torch does not "
            "count (.data, numpy). So earlier checkpoints may be wrong. The next one stores the whole state. %s Write "
            "into gradients before step() only, or without .data",
            gradient.name,
            _STRUCK if are_struck else _CRASH_NOW,
        )

    def discarded(self, step: CapturedStep) -> None:
        for gradient in step.present_gradients():
            self._copies.pop(gradient, None)

    # -- the checkpoint ----------------------------------------------------------------------------------

    def record_of(self, step: int, is_checkpoint: bool = True) -> UpdateRecord | None:
        """Return what the update of this step consumed, for the checkpoint that closes now. Returns None if that is not
        known; then the checkpoint must be full. ``is_checkpoint``: whether the step is saved. If it is not saved, the
        next checkpoint needs this record; and if None is returned, the next checkpoint must be full."""
        self._find_outside_writes()
        self.consumed_gradients.find_overwritten()
        update, self._update, self._begun = self._update, None, []
        moved = self._moved()
        reason, self._reason = self._reason or self._distrust, ""
        is_again, self._last_step = step == self._last_step, step
        if update is None or update.step != step:
            reason = reason or ("it is saved once more" if is_again else "its update was not seen")
        else:
            reason = reason or _reason_of(update) or moved
        if not self._capture.state_is_only_tensors():
            reason = reason or "an optimizer has state that is no tensor, which has no older copy in the pool"
        if not reason and update is not None:
            reason = self._checked_bases(update)
        if not is_again:
            self._note(step, reason, is_checkpoint)
        elif is_checkpoint:
            self._hole = ""
        if reason or update is None:
            self._outside.rebaseline()
            return None
        lives = [self._live_of(*one) for one in gradient_tensors(update)]
        return UpdateRecord(lives, self._packer.value(_recorded(update)), self._updated(update))

    def _moved(self) -> str:
        """Return why an update leaves no record if a parameter belonged to another optimizer before, which a replay
        does not follow; else ""."""
        token = self._capture.token
        if token is not None and token is self._token_of_optimizers:
            return ""
        self._token_of_optimizers = token
        now = {name: view.root for view in self._capture.optimizers for name, _ in view.params}
        moved = [name for name, one in now.items() if self._optimizer_of.get(name, one) != one]
        self._optimizer_of |= now
        return f"the parameter {moved[0]!r} has moved to another optimizer" if moved else ""

    def _checked_bases(self, update: CapturedUpdate) -> str:
        """Compare the units that this checkpoint writes to a home with what their old bases and the updates since then
        lead to. Return what differs, or why they cannot be compared; "" if nothing differs, or nothing is compared."""
        if self.base_check is None:
            return ""
        tensors = {name: self._tensors_of(gradient)[number] for name, gradient, number in gradient_tensors(update)}
        found = self.base_check.run(
            update.step,
            self._packer.value(_recorded(update)),
            lambda name: plain_tensor(tensors[name].detach()).to(tensors[name].device),
            self._updated(update),
        )
        if found.unreadable:
            log.warning(
                "lightck: LIGHTCK_CHECK=1 cannot check that the older copies in the pool and the updates since then "
                "give this step's tensors, so the checkpoint stores the whole state: %s. lightck verify names what is "
                "damaged",
                found.unreadable,
            )
        if found.difference:
            first, last = found.since + 1, update.step - 1
            wrong = (
                f"If the process crashes before the next checkpoint is committed, one of the steps {first} to {last} "
                "may be recovered without a change that was made by something other than an update."
            )
            self._trust_no_more(found.difference, wrong if first <= last else _CRASH_NOW, found.generation)
        return found.difference or found.unreadable

    def _updated(self, update: CapturedUpdate) -> frozenset[str]:
        """Return the names of the parameters that an update may have changed. ``torch.optim`` skips parameters
        without a gradient."""
        found = {gradient.name for gradient in update.gradients()}
        custom = {view.root for view in self._capture.optimizers if self._is_custom(view.optimizer)}
        for step in update.optimizer_steps if custom else ():
            if step.optimizer in custom:
                found |= step.gradients.keys() - step.left_out
        return frozenset(found)

    def _is_custom(self, optimizer: Optimizer) -> bool:
        """Whether the class of this optimizer is none of ``torch.optim``."""
        kind = type(optimizer)
        if kind not in self._custom_classes:
            self._custom_classes[kind] = not PartialOptimizer.of(optimizer).is_torch
        return self._custom_classes[kind]

    def _live_of(self, name: str, gradient: HeldGradient, number: int) -> Live:
        copies = self._copies.get(gradient)
        if copies is not None:
            return Live(name, "gradient", copies[number], None, None)
        if not self._begun or self._begun[-1][0] is not gradient:
            self._begun.append((gradient, ()))
        self._begun[-1] = gradient, (*self._begun[-1][1], name)
        return Live(name, "gradient", plain_tensor(gradient.tensors[number]), None, None)

    def validate(self, checkpoint: InFlightCheckpoint, writer: PoolWriter) -> Rejection | None:
        """Compare the copies of a checkpoint with the gradients before the update, and release these. Returns why the
        checkpoint must not commit, or None."""
        begun, self._begun = self._begun, []
        slot, overwritten = checkpoint.pending.slot, list[str]()
        for gradient, names in begun:
            crcs = [writer.raw_crcs(slot, writer.numbers[name]) for name in names]
            if not self.consumed_gradients.copied(gradient, crcs):
                overwritten += names
        if overwritten:
            return Rejection("something wrote to a gradient before its copy had ended", overwritten)
        return None

    def _note(self, step: int, reason: str, is_checkpoint: bool) -> None:
        """Log a reason why an update leaves no record, and count the full checkpoints. ``reason``: "" if it leaves
        one."""
        why_full, self._hole = self._hole or reason, self._hole or reason
        if is_checkpoint:
            self._hole = ""
            self._n_full = self._n_full + 1 if why_full else 0
        if is_checkpoint and self._n_full == FULL_MAX:
            log.warning(
                "lightck: the last %d checkpoints stored the whole state, and not gradients alone; this one because "
                "%s. So Gradients saves nothing here, and its pool and its memory are larger: use strategy=FullState() "
                "for this training, or change the loop",
                FULL_MAX,
                why_full.rstrip("."),
            )
        if reason and reason not in self._logged:
            self._logged.add(reason)
            which = "the checkpoint of" if is_checkpoint else "the next checkpoint after"
            log.info("lightck: %s step %d stores the whole state, and not gradients alone: %s", which, step, reason)


def _is_dense(live: Live) -> bool:
    """Whether a tensor is not sparse. (No checkpoint holds a sparse one: the boundary refuses it by name.)"""
    return live.tensor.layout is torch.strided


def _recorded(update: CapturedUpdate) -> CapturedUpdate:
    """Return an update without the optimizer steps that a recovery never replays."""
    kept = tuple(one for one in update.optimizer_steps if not one.left_out or one.gradients.keys() - one.left_out)
    return update if len(kept) == len(update.optimizer_steps) else replace(update, optimizer_steps=kept)


def _reason_of(update: CapturedUpdate) -> str:
    """Return why the record of an update would be of no use; "" if it is good."""
    lost = [one.name for one in update.gradients() if one.result in (CopyResult.OVERWRITTEN, CopyResult.NOT_COPIED)]
    if lost:
        return f"the gradient of {lost[0]!r} was overwritten before it was copied"
    return unrecordable_reason(update)
