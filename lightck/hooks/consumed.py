"""Takes what each update is about to consume: gradients by reference, options by value.

The gradients are taken in the last of all pre-step hooks, or when a closure has returned for the first time: after
accumulation, all-reduce, unscaling, clipping, and any other edit. Of nested ``step`` calls the outermost counts.

A gradient is held until its copy has ended and was validated, or until it is given up. So at most one more set of
gradients than the training's own is in memory, and it is released part by part. The ``GradientCopier`` has time until
the deadline of the gradient's class. No copy is trusted unchecked: ``copied`` compares the version counter, and the
checksums of some blocks (they take turns, ``gradient_checksums.py``), with those of the gradient before the update.

If gradients are compressed, the indexed form of a gradient is made at once, in memory of its own, and is held instead
of the gradient.

All methods are called on the thread that trains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch
from torch.optim.optimizer import Optimizer

from lightck.errors import UnsupportedError
from lightck.events import StepListener
from lightck.hooks.captured_update import (
    CapturedStep,
    CapturedUpdate,
    CopyResult,
    Deadline,
    GradientClass,
    HeldGradient,
)
from lightck.hooks.gradient_checksums import WHOLE_COPIES, Checksums, ExpectedBlocks, GradientChecksums
from lightck.hooks.gradient_classes import GradientHistories, GradientHistory
from lightck.state.consumed_update import ConsumedGroup, Implementation, options_by_value
from lightck.state.implementation_choice import chosen_implementations, writes_gradients
from lightck.state.indexed_gradient import IndexedGradient
from lightck.state.local_tensors import local_of
from lightck.state.partial_optimizer import recorded_name
from lightck.state.signatures import version_counter_of
from lightck.state.torch_classes import irreproducible_reason

log = logging.getLogger("lightck")
_CLOSURE_AGAIN = (
    "step() called its closure more than once, so it consumed other gradients than those of the first call."
)
_CLOSURE_NEVER = "step() did not call its closure, so it is not known which gradients it consumed."
_IN_BACKWARD = "Layers were updated inside the backward pass, and their gradients were not seen."
_NO_STEP = "No step of an optimizer was seen."
_OTHER_THREADS = "The number of intra-op threads changed between the steps of the optimizers."


Indexing = Callable[[torch.Tensor], IndexedGradient | None]
"""Returns the indexed form of a dense gradient; None if there is no such form, or it has no room for the gradient."""


def never_indexed(_gradient: torch.Tensor) -> IndexedGradient | None:
    """Gradients are not compressed."""
    return None


_NO_NAMES: frozenset[str] = frozenset()


class GradientCopier(Protocol):
    """Copies gradients. Each copy is reported to ``ConsumedGradients.copied``."""

    def copies_due_now(self, gradients: Sequence[HeldGradient]) -> None:
        """The copies of these gradients must have ended, and be reported, when this method returns. A gradient that is
        not reported is released without a copy."""

    def consumed(self, update: CapturedUpdate) -> None:
        """An update was made. Those of its gradients that are held may be copied in the background."""

    def overwritten(self, gradient: HeldGradient, reason: str) -> None:
        """The gradient was written before its copy ended: its copy must not be used."""

    def discarded(self, step: CapturedStep) -> None:
        """This step changed nothing, or raised: it belongs to no update, and copies of its gradients are not needed."""


@dataclass(slots=True, eq=False)
class _PendingCopy:
    """A gradient whose copy is not validated yet. dtensor: the DTensor that holds its local tensor; None: there is
    none. index: of the optimizer that consumes the gradient. update: the number of the update
    (``ConsumedGradients._update``). signatures: version counter and address of each tensor before the update.
    expected: the checksums that the copy must have."""

    gradient: HeldGradient
    dtensor: torch.Tensor | None
    history: GradientHistory
    index: int
    update: int
    signatures: list[tuple[int, int]]
    expected: list[ExpectedBlocks]

    @property
    def was_written(self) -> bool:
        """Whether a version counter or an address has changed since the gradient was taken."""
        return _signatures_of(self.gradient.tensors, self.dtensor) != self.signatures


@dataclass(slots=True, eq=False)
class _Names:
    """The names of an optimizer's parameters. given, all_left_out: what ``names_of`` and ``left_out`` returned. names:
    of the parameters of each group. left_out: those of them that are left out."""

    given: Sequence[Sequence[str]]
    all_left_out: frozenset[str]
    names: list[tuple[str, ...]]
    left_out: frozenset[str]


@dataclass(slots=True, eq=False)
class _RunningStep:
    """A ``step`` between its last pre-step hook and its end. unobserved: its gradients of an unobserved class, with
    their tensors, because a gradient that is copied no longer has them."""

    step: CapturedStep
    threads: int
    unobserved: list[tuple[_PendingCopy, tuple[torch.Tensor, ...]]]
    reasons: list[str] = field(default_factory=list)


class ConsumedGradients(StepListener):
    """What the updates of one session consumed. The hooks must report gradients (``Hooks.report_gradients``)."""

    def __init__(
        self,
        copier: GradientCopier,
        names_of: Callable[[Optimizer], Sequence[Sequence[str]]],
        *,
        block: int,
        index: Indexing = never_indexed,
        left_out: Callable[[], frozenset[str]] = lambda: _NO_NAMES,
        distrust_earlier: Callable[[HeldGradient], None] = lambda gradient: None,
    ) -> None:
        """``names_of``: returns, for each group of an optimizer, the names of its parameters; the same object as before
        if no name has changed, else another one. ``block``: bytes that one
        checksum covers. ``index``: see ``Indexing``. ``left_out``: returns the names of the parameters whose gradients
        are not taken: the same object as before, if nothing has changed. ``distrust_earlier``: called if this gradient
        was written before its copy ended, and neither an address nor a version counter shows it. So earlier copies that
        were compared in part only may be wrong."""
        self._distrust_earlier = distrust_earlier
        self._copier, self._names_of, self._index, self._left_out = copier, names_of, index, left_out
        self._histories, self._block = GradientHistories(), block
        self._checksums = GradientChecksums(block)
        self._names: dict[int, _Names] = {}
        """Index of an optimizer -> the names that ``_names_in`` found last."""
        self._class_names: dict[type[Optimizer], str] = {}
        """Class of an optimizer -> ``recorded_name``."""
        self._held: dict[HeldGradient, _PendingCopy] = {}
        self._running: dict[int, _RunningStep] = {}
        """Index of an optimizer -> its running step."""
        self._steps: list[CapturedStep] = []
        """The steps since the last update was complete."""
        self._reasons: list[str] = []
        self._threads: set[int] = set()
        """The numbers of intra-op threads with which these steps ran."""
        self._update = 0
        """Counts complete updates."""
        self._has_forward = False
        """Whether a forward pass has ended since the last update was complete."""
        self._may_log_recycled = True

    @property
    def held_nbytes(self) -> int:
        """Bytes of the gradients that are held."""
        return sum(tensor.nbytes for gradient in self._held for tensor in gradient.tensors)

    def running_step(self, index: int) -> CapturedStep | None:
        """Return what the running ``step`` of optimizer ``index`` consumes; None if it is not known."""
        running = self._running.get(index)
        return None if running is None else running.step

    # -- step events -------------------------------------------------------------------------------------

    def before_step(self, index: int, bypasses_wrapper: bool, has_gradients: bool) -> None:
        self._discard(index)  # a step that raised is not ended by an event

    def gradients_final(self, index: int, optimizer: Optimizer) -> None:
        running = self._running.get(index)
        if running is not None:
            running.reasons.append(_CLOSURE_AGAIN)
            return
        self._end_earlier(index)
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, torch.Tensor) and bool(found_inf.item()):
            return  # the step will change nothing, and is reported as skipped
        running = self._running[index] = self._take(index, optimizer)
        self._log_recycled()
        self._end_copies(
            pending
            for gradient in running.step.present_gradients()
            if (pending := self._held[gradient]).gradient.kind.deadline is Deadline.NOW
        )

    def after_step(self, index: int) -> None:
        running = self._running.pop(index, None)
        if running is None:
            self._reasons.append(_CLOSURE_NEVER)
            return
        self._find_writes_of_step(running)
        self._steps.append(running.step)
        self._threads.add(running.threads)
        self._reasons += running.reasons

    def skipped_step(self, index: int) -> None:
        self._discard(index)

    def layers_begin(self, index: int) -> None:
        self._reasons.append(_IN_BACKWARD)

    def step_ended(self, step: int) -> None:
        reasons = self._reasons if self._steps or self._reasons else [_NO_STEP]
        if len(self._threads) > 1:
            reasons.append(_OTHER_THREADS)
        threads = max(self._threads, default=torch.get_num_threads())
        update = CapturedUpdate(step, tuple(self._steps), threads, tuple(dict.fromkeys(reasons)))
        self._steps, self._reasons, self._has_forward = [], [], False
        self._threads.clear()
        self._update += 1
        self._copier.consumed(update)

    def forward_ended(self) -> None:
        self._histories.forward_ended()
        self._has_forward = True
        self._end_copies(one for one in self._held.values() if one.gradient.kind.deadline is Deadline.BACKWARD)

    # -- copies ------------------------------------------------------------------------------------------

    def copied(self, gradient: HeldGradient, checksums: Sequence[Checksums]) -> bool:
        """Report that the copy of a gradient has ended. ``checksums``: of the copy, for each tensor of the gradient:
        the CRC-32C of every ``block`` bytes of its elements in row-major order. Returns whether the copy is right.
        If not, ``GradientCopier.overwritten`` was called. In both cases the gradient is released."""
        return self._ended(gradient, lambda copy: all(one.matches(checksums) for one in copy.expected))

    def was_read(self, gradient: HeldGradient) -> bool:
        """Report that the gradient itself was read, and that no copy is needed. Returns whether it still is what the
        update consumed. If it was overwritten, this acts as ``copied`` does."""
        return self._ended(
            gradient,
            lambda copy: all(one.are_still_in(gradient.tensors[one.tensor], self._block) for one in copy.expected),
        )

    def _ended(self, gradient: HeldGradient, checksums_match: Callable[[_PendingCopy], bool]) -> bool:
        pending = self._held.get(gradient)
        if pending is None:
            return gradient.result is CopyResult.VALIDATED
        if pending.was_written:
            self._overwritten(pending, "Its version counter or its address has changed.")
        elif not checksums_match(pending):
            self._overwritten(pending, "Its checksum differs from that of the gradient before the update.")
            if self._checksums.is_partial and gradient.kind is not GradientClass.UNOBSERVED:
                self._distrust_earlier(gradient)
        else:
            pending.history.n_validated += gradient.kind is not GradientClass.UNOBSERVED
            self._let_go(pending, CopyResult.VALIDATED)
        return gradient.result is CopyResult.VALIDATED

    def find_overwritten(self) -> None:
        """Find gradients that were written since their update, by version counters and addresses, before their copies
        begin."""
        for pending in [one for one in self._held.values() if one.was_written]:
            self._overwritten(pending, "Its version counter or its address has changed.")

    def give_up(self, gradients: Iterable[HeldGradient]) -> None:
        """Release gradients that are not copied, and will not be."""
        for gradient in gradients:
            pending = self._held.get(gradient)
            if pending is not None:
                self._let_go(pending, CopyResult.NOT_COPIED)

    def forget(self) -> None:
        """Release everything, after the hooks were removed. What is not copied is given up."""
        self.give_up(list(self._held))
        self._running.clear()
        self._steps, self._reasons, self._names = [], [], {}
        self._histories = GradientHistories()

    def _end_copies(self, pending_copies: Iterable[_PendingCopy]) -> None:
        """Let the copier complete the copies of these gradients now, and release the gradients that it did not copy."""
        due = [pending.gradient for pending in pending_copies]
        if due:
            self._copier.copies_due_now(due)
            self.give_up(due)

    def _end_earlier(self, index: int) -> None:
        """Let the copier complete the copies of earlier updates, and those of an earlier step of the same optimizer.
        Otherwise more than one set of gradients would be held."""
        self._end_copies([one for one in self._held.values() if one.update != self._update or one.index == index])

    def _overwritten(self, pending: _PendingCopy, reason: str) -> None:
        if pending.gradient.kind.deadline is not Deadline.NOW:
            pending.history.fix(GradientClass.RECYCLED)
        self._let_go(pending, CopyResult.OVERWRITTEN)
        self._copier.overwritten(pending.gradient, reason)

    def _let_go(self, pending: _PendingCopy, result: CopyResult) -> None:
        del self._held[pending.gradient]
        pending.gradient.result, pending.gradient.tensors = result, ()

    def _discard(self, index: int) -> None:
        running = self._running.pop(index, None)
        if running is not None:
            self.give_up(running.step.present_gradients())
            self._copier.discarded(running.step)

    # -- taking ------------------------------------------------------------------------------------------

    def _take(self, index: int, optimizer: Optimizer) -> _RunningStep:
        if not self._steps and not self._running:
            self._histories.begin_update()
        self._histories.parameters_are(index, chain.from_iterable(group["params"] for group in optimizer.param_groups))
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        groups, pending_copies, reasons = [], [], set[str]()
        gradients: dict[str, HeldGradient | None] = {}
        names_of_groups, left_out = self._names_in(index, optimizer)
        for group, names in zip(optimizer.param_groups, names_of_groups, strict=True):
            found = [
                (p, name, p.grad)
                for p, name in zip(group["params"], names, strict=True)
                if p.grad is not None and name not in left_out
            ]
            implementation, exceptions = chosen_implementations(type(optimizer), group, names, optimizer.state)
            is_written = writes_gradients(type(optimizer), group, implementation, scale is not None)
            for dtype, one in {(p.dtype, exceptions.get(name, implementation)) for p, name, _ in found}:
                why = irreproducible_reason(type(optimizer), group, one is Implementation.FUSED, dtype)
                if why is not None:
                    reasons.add(why)
            groups.append(ConsumedGroup(names, options_by_value(group), implementation, exceptions))
            gradients |= dict.fromkeys(names)
            for p, name, grad in found:
                local = grad if type(grad) is torch.Tensor else local_of(grad)
                form = self._index(local) if local.layout is torch.strided else None
                if form is None:
                    history = self._histories.observe(
                        p, grad, local, is_written=is_written, has_forward=self._has_forward
                    )
                    gradient = gradients[name] = _gradient_of(name, local, history.kind)
                else:
                    history = self._histories.of_indexed(p)
                    gradient = gradients[name] = _indexed_gradient_of(name, local, form)
                dtensor = None if grad is local or form is not None else grad
                signatures = _signatures_of(gradient.tensors, dtensor)
                pending_copies.append(_PendingCopy(gradient, dtensor, history, index, self._update, signatures, []))
        are_whole = [pending.history.n_validated < WHOLE_COPIES for pending in pending_copies]
        expected = self._checksums.read(index, [pending.gradient for pending in pending_copies], are_whole)
        for pending, blocks in zip(pending_copies, expected, strict=True):
            pending.expected = blocks
            self._held[pending.gradient] = pending
        kind = self._class_names.get(type(optimizer))
        if kind is None:
            kind = self._class_names[type(optimizer)] = recorded_name(type(optimizer))
        step = CapturedStep(index, kind, tuple(groups), gradients, _copy_of(scale), _copy_of(found_inf), left_out)
        unobserved = [
            (one, one.gradient.tensors) for one in pending_copies if one.gradient.kind is GradientClass.UNOBSERVED
        ]
        return _RunningStep(step, torch.get_num_threads(), unobserved, sorted(reasons))

    def _names_in(self, index: int, optimizer: Optimizer) -> tuple[list[tuple[str, ...]], frozenset[str]]:
        """Return the names of the parameters of each group, and which of them are left out. They are the same objects
        as before, if nothing has changed. (The names can change while the parameters stay the same.)"""
        given, left_out, known = self._names_of(optimizer), self._left_out(), self._names.get(index)
        if known is None or known.given is not given or known.all_left_out is not left_out:
            names = list(map(tuple, given))
            if known is not None and known.names == names:
                names = known.names
            of_optimizer = left_out.intersection(name for group in names for name in group)
            known = self._names[index] = _Names(given, left_out, names, of_optimizer)
        return known.names, known.left_out

    def _find_writes_of_step(self, running: _RunningStep) -> None:
        """Find gradients of the unobserved class that the step has changed. (For the other classes, ``copied`` detects
        every write that came before the copy ended, and it does not matter whether the step made this write.)"""
        if not running.unobserved:
            return
        now = self._checksums.read_whole([tensors for _, tensors in running.unobserved])
        for (pending, tensors), blocks in zip(running.unobserved, now, strict=True):
            is_equal = all(one.equals(other) for one, other in zip(pending.expected, blocks, strict=True))
            if not is_equal or _signatures_of(tensors, pending.dtensor) != pending.signatures:
                pending.history.fix(GradientClass.WRITTEN_BY_STEP)
                if pending.gradient in self._held:
                    self._overwritten(pending, "The step itself has changed it.")

    def _log_recycled(self) -> None:
        if self._may_log_recycled and self._histories.has_recycled:
            self._may_log_recycled = False
            log.warning(
                "lightck: two updates used one gradient tensor (the loop zeroes gradients in place, or steps twice "
                "with them), so each gradient is copied inside optimizer.step(), before the update begins. Call "
                "zero_grad() after each step, without set_to_none=False, and they are copied in the background"
            )


def _gradient_of(name: str, local: torch.Tensor, kind: GradientClass) -> HeldGradient:
    if local.requires_grad:
        local = local.detach()  # the graph of a gradient need not be held
    if local.layout is torch.strided:
        return HeldGradient(name, kind, (local,), local.stride(), shape=tuple(local.shape))
    if local.layout is torch.sparse_coo:
        # The indices of an embedding's gradient are a view of the batch, which the loop may fill again at any moment.
        tensors = local._indices().clone(), local._values()
        shape = tuple(local.shape)
        return HeldGradient(name, kind, tensors, (), shape, local.is_coalesced(), shape=shape)
    raise UnsupportedError(
        f"The gradient of {name!r} has the layout {local.layout}. lightck can record dense gradients, and sparse ones "
        "of the layout torch.sparse_coo. Use one of these, or strategy=FullState()."
    )


def _indexed_gradient_of(name: str, local: torch.Tensor, form: IndexedGradient) -> HeldGradient:
    tensors, kind = (form.indices, form.values), GradientClass.INDEXED
    return HeldGradient(name, kind, tensors, local.stride(), shape=tuple(local.shape), n_used=form.n_used)


def _signatures_of(tensors: tuple[torch.Tensor, ...], dtensor: torch.Tensor | None) -> list[tuple[int, int]]:
    """``dtensor``: a write to a DTensor moves its own version counter, and not that of its local tensor."""
    found = [(version_counter_of(tensor), tensor.data_ptr()) for tensor in tensors]
    return found if dtensor is None else [*found, (version_counter_of(dtensor), 0)]


def _copy_of(value: object) -> torch.Tensor | None:
    return value.detach().clone() if isinstance(value, torch.Tensor) else None
