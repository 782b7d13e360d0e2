"""Warns if ``flush()``, ``pin()`` or ``close()`` saves a step in the middle of an iteration.

A checkpoint is the state from which the next step starts. A step whose checkpoint was not saved when it closed (with
``interval``, or before the first update) can only be saved with the present state. In the middle of an iteration the
present state is another one: a forward has changed buffers, or random numbers were drawn for the next batch. The call
may stand there on purpose, so the state is saved, and a warning names what changed. Inside ``optimizer.step()``, where
only some of the parameters may be updated, nothing is saved.
"""

from __future__ import annotations

import logging
import threading

from lightck.interrupts import is_in_handler
from lightck.session.capture import Capture
from lightck.state import rng

log = logging.getLogger("lightck")


class FlushMoment:
    """Judges the moment of each ``flush()``, ``pin()`` and ``close()`` of one session."""

    def __init__(self, capture: Capture, is_fresh_start: bool) -> None:
        self._capture = capture
        self._rng_at_attach = rng.capture() if is_fresh_start else None
        """The random states that a checkpoint of step 0 should hold. None after the first update."""
        self._change: str | None = None
        """A clause for the warning: what the present iteration has done since the last update (None: nothing that
        matters)."""
        self._is_reported = False

    def batch_given(self) -> None:
        self._change = "a batch was fetched"

    def forward(self) -> None:
        self._change = "the model's forward ran"

    def updated(self) -> None:
        self._change = self._rng_at_attach = None

    def pass_ended(self) -> None:
        """A pass of a session loader ended: the loop is between two iterations."""
        self._change = None

    def change_since_update(self, step_thread: int | None) -> str | None:
        """Return what has changed since the last update (since attach, if there was no update), or None.

        step_thread: id of the thread that steps the optimizer, None if unknown. Random states are compared only if
        ``flush()`` is called from a signal handler or from another thread, because a loop that calls ``flush()`` itself
        may have drawn random numbers on purpose.
        """
        if self._change is not None:
            return self._change
        if not is_in_handler() and threading.get_ident() == (step_thread or threading.main_thread().ident):
            return None
        read = self._capture.provisional
        before = self._rng_at_attach if read is None else read.rng
        if before is None:
            return "random numbers may have been drawn (lightck has not read the random states after this update)"
        return "random numbers were drawn" if before.packed() != rng.capture().packed() else None

    def saved(self, step: int, change: str | None) -> None:
        """The present state was saved as the checkpoint of ``step``. Warn once if ``change_since_update`` returned a
        change."""
        if change is None or self._is_reported:
            return
        self._is_reported = True
        log.warning(
            "lightck: flush(), pin() or close() saved step %d in the middle of an iteration: %s since %s. The "
            "checkpoint holds the state of this moment, so a resume from it may go on with other random numbers or "
            "buffers than an uninterrupted run. Call flush() or close() between two iterations. A signal handler can "
            "set a flag that the loop reads there",
            step,
            change,
            f"update {step}" if step else "attach",
        )

    def refused(self, step: int, committed: int | None) -> None:
        """A call inside ``optimizer.step()`` saved nothing. Warn if ``step`` is not committed."""
        if committed == step:
            return
        log.warning(
            "lightck: flush(), pin() or close() was called inside optimizer.step(), or after step() had raised an "
            "exception. Only some of the parameters may be updated, so nothing is saved, and %s. Call it between two "
            "iterations. A signal handler can set a flag that the loop reads there",
            "no checkpoint is committed" if committed is None else f"step {committed} stays the newest checkpoint",
        )
