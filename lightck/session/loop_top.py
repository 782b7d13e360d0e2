"""Finds changes that the top of a loop makes before a checkpoint closes, and that a resumed loop therefore makes twice.

Without a session loader or ``end_step()``, a checkpoint closes in the middle of the loop's body, at a *closing point*:
the model's next forward; or, if the forward hook never fires or several optimizers are followed, the next step of an
optimizer. If the loop changes something between its top and the closing point, such as an object in ``state=`` or
weights that it shrinks, the checkpoint contains the change, and the resumed loop makes the change again. One boundary
alone cannot distinguish such a change from work at the end of an iteration, such as ``scheduler.step()``. So the check
compares state on three occasions only, and reads nothing afterwards:

*After a restore* of a checkpoint that closed at a closing point: whatever changes until the loop reaches that closing
point again was changed twice. (A checkpoint that ``end_step()`` or ``flush()`` closed does not hold what the loop does
afterwards.)

*In a fresh run*, or after the restore of a checkpoint that ``flush()`` closed: a change counts if the loop makes it
before the first closing point, and again between the first update and the next closing point.

*In a resume in the middle of a pass over a session loader*: whatever changes until the loop continues the pass was
changed twice, because the interrupted run had executed the top of the same epoch already.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightck.errors import listed
from lightck.events import ClosingEvent
from lightck.hooks.boundary import Boundary
from lightck.session.capture import Capture
from lightck.session.state_marks import (
    Marks,
    changed_names,
    object_marks,
    optimizer_label,
    optimizer_state_mark,
    option_marks,
    options_label,
    tensor_marks,
)
from lightck.state.storable import is_loader

if TYPE_CHECKING:
    from lightck.dataloader.loader import SessionLoader
    from lightck.dataloader.passes import Pass

log = logging.getLogger("lightck")
_CURE = "Call session.end_step() as the last statement of the loop, or make the change right after the update"
_POINTS = (ClosingEvent.FORWARD, ClosingEvent.PRE_STEP)
"""The closing points."""
_WHERE = {ClosingEvent.FORWARD: "the model's training forward", ClosingEvent.PRE_STEP: "the step of the optimizer"}


class LoopTopCheck:
    """The check of one session. ``check_before`` returns False when nothing is left to check."""

    def __init__(self, capture: Capture, restored: tuple[str, int] | None) -> None:
        """``restored``: the event that closed the restored checkpoint, and that checkpoint's step (None: a fresh
        run)."""
        self._capture = capture
        self._step = 0 if restored is None else restored[1]
        self._closed_by = next((event for event in _POINTS if restored and event.value == restored[0]), None)
        """The closing point at which the restored checkpoint closed. None in a fresh run, and if another event closed
        that checkpoint."""
        self._before = self._marks()
        """Marks at attach, after the restore."""
        self._point: ClosingEvent | None = None
        """The first closing point that the loop reached. None before it is reached, and if ``_closed_by`` is set."""
        self._candidates: set[str] = set()
        """Names of what changed before the first closing point."""
        self._buffer_candidates: set[str] = set()
        """With several optimizers: names of the buffers that changed before the first forward. A checkpoint then closes
        at the step of an optimizer, and holds the buffers as they were when the forward before it began."""
        self._is_forward_checked = False
        """Whether a forward was checked since the last update."""
        self._after_update: Marks | None = None
        """Marks of ``_candidates``, made after the last update."""
        self._is_pass_check_on = restored is not None  # whether ``next_begins`` still checks
        self._states_before = (
            self._optimizer_states() if self._is_pass_check_on and capture.positions.any_in_pass else {}
        )
        """Marks of the optimizers' state at attach. Empty if no restored position is in mid-pass."""
        self._checked_pass: Pass | None = None
        """The pass that ``next_begins`` checked last."""

    def check_before(self, event: ClosingEvent, boundary: Boundary) -> bool:
        """Check before ``event``, a training forward or a step of the optimizer, because it may close a checkpoint.
        Returns whether anything is left to check at later closing points."""
        if event is ClosingEvent.FORWARD and boundary.n_optimizers > 1:
            if not self._is_forward_checked and not boundary.explicit and not self._capture.loaders:
                self._check_buffers(boundary)
            return True  # with several optimizers a forward closes nothing
        if self._closed_by is not None:
            return self._after_restore(event)
        if boundary.explicit or self._capture.loaders:
            return False
        if self._point is None:
            self._point = event
            # Options are left out. Many loops compute them from the step number before each update. A resumed loop does
            # so again, and gets the same values.
            options = {options_label(view) for view in self._capture.optimizers}
            self._candidates = set(self._changed(self._before, with_buffers=event is ClosingEvent.FORWARD)) - options
            self._candidates |= self._buffer_candidates
            return bool(self._candidates)
        if self._after_update is None or not boundary.closes_at(event):
            return True
        if event is self._point:
            self._warn_fresh_run(self._changed(self._after_update, with_buffers=event is ClosingEvent.FORWARD), event)
        return False

    def _check_buffers(self, boundary: Boundary) -> None:
        """Check the buffers before the first forward after an update, or after attach. Several optimizers are
        followed."""
        self._is_forward_checked = True
        if self._closed_by is ClosingEvent.PRE_STEP:
            changed = set(self._changed(self._before, with_buffers=True)) & self._buffers()
            self._warn_restored(sorted(changed), ClosingEvent.FORWARD)
        elif self._closed_by is None and self._point is None:
            self._buffer_candidates = set(self._changed(self._before, with_buffers=True)) & self._buffers()
        elif self._after_update is not None and boundary.closes_at(ClosingEvent.PRE_STEP):
            changed = set(self._changed(self._after_update, with_buffers=True)) & self._buffer_candidates
            self._warn_fresh_run(sorted(changed), ClosingEvent.FORWARD)

    def next_begins(self, loader: SessionLoader) -> None:
        """Check at the first ``next()`` of each restored pass, until an update is made. There may be several restored
        passes, because a script may begin a pass before its loop, to inspect a batch. Options of optimizers are not
        compared, because a loop may set them again after ``next()``."""
        pass_ = loader.current_pass
        if (
            not self._is_pass_check_on
            or pass_ is None
            or not (pass_.restored and pass_.trained_before)
            or pass_ is self._checked_pass
        ):
            return
        self._checked_pass = pass_
        options = {options_label(view) for view in self._capture.optimizers}
        changed = self._changed(self._before, with_buffers=True)
        names = self._repeatable([name for name in changed if name not in options])
        names += changed_names(self._states_before, self._optimizer_states())
        if names:
            self._is_pass_check_on = False
            log.warning(
                "lightck: %s changed between the restore and the first next() of loader %r, which goes on in "
                "the middle of a pass. The interrupted run made the same change where that epoch began, so it "
                "is made twice now, and the training does not go on as the interrupted one would have. Make the "
                "change where the epoch ends, or only if the pass is a new one (if loader.start == 0)",
                listed(names),
                loader.name,
            )

    def updated(self, boundary: Boundary) -> None:
        """Keep the marks after an update, if the checkpoint of the update may close at the next closing point."""
        self._is_pass_check_on = self._is_forward_checked = False
        if self._point is not None and boundary.closes_at(ClosingEvent.PRE_STEP):
            self._after_update = self._marks(self._candidates)

    def _after_restore(self, event: ClosingEvent) -> bool:
        """Warn about what changed between the restore and the closing point at which the restored checkpoint closed.
        Returns what ``check_before`` returns."""
        if event is not self._closed_by:
            return event is ClosingEvent.FORWARD  # the closing point is the step of the optimizer after this forward
        self._warn_restored(self._changed(self._before, with_buffers=event is ClosingEvent.FORWARD), event)
        return False

    def _warn_restored(self, changed: list[str], event: ClosingEvent) -> None:
        """``event``: the point of the loop before which this was found."""
        names = self._repeatable(changed)
        if names:
            log.warning(
                "lightck: %s changed between the restore and %s. Step %d was closed at that point of the loop, so its "
                "checkpoint holds the change already. This run has made the change once more, and does not go on as "
                "the interrupted one would have. %s",
                listed(names),
                _WHERE[event],
                self._step,
                _CURE,
            )

    def _warn_fresh_run(self, names: list[str], event: ClosingEvent) -> None:
        """``event``: the point of the loop before which this was found."""
        changed = self._repeatable(names)
        if changed:
            log.warning(
                "lightck: the loop changed %s before %s, in each of its first two iterations. A step of this loop "
                "closes only after that change. Its checkpoint holds the change already, and a resume makes the change "
                "a second time. (That does no harm if the new value depends on the step alone.) %s",
                listed(changed),
                _WHERE[event],
                _CURE,
            )

    def _changed(self, before: Marks, *, with_buffers: bool) -> list[str]:
        """Names whose marks changed. ``with_buffers``: whether the names of buffers are returned too. If the closing
        point is a step of the optimizer, they must not be: the forward has changed the buffers, but the checkpoint
        holds them as they were right after the last update."""
        names = changed_names(before, self._marks(set(before)))
        return names if with_buffers else [name for name in names if name not in self._buffers()]

    def _repeatable(self, names: list[str]) -> list[str]:
        """Return ``names`` without those of objects whose ``state_dict()`` differs at every call, for example because
        it holds the time."""
        changes = changed_names(self._marks(set(names)), self._marks(set(names)))
        return [name for name in names if name not in changes]

    def _optimizer_states(self) -> Marks:
        return {
            f"the state of {optimizer_label(view)}": optimizer_state_mark(view) for view in self._capture.optimizers
        }

    def _buffers(self) -> set[str]:
        return {live.name.removeprefix("model/") for live in self._capture.model.buffers()}

    def _marks(self, names: set[str] | None = None) -> Marks:
        """Marks of the model's tensors, the objects in ``state=`` and the optimizers' options. ``names``: make only the
        marks that have these names (None: all marks). Loaders are left out: a checkpoint holds their state as it was
        right after the update, and therefore no change that the loop makes to them later."""
        marks: Marks = {}
        for name, obj in self._capture.objects.items():
            if not is_loader(obj) and (names is None or f"state[{name!r}]" in names):
                marks |= object_marks(name, obj)
        for view in self._capture.optimizers:
            if names is None or options_label(view) in names:
                marks |= option_marks(view)
        return marks | tensor_marks(
            live
            for live in self._capture.model.tensors(None)
            if names is None or live.name.removeprefix("model/") in names
        )
