"""Whether the loop of a resumed training reads its position. A loop that counts from 0 instead makes too many updates.

A loop ``for epoch in range(epochs)`` over a session loader continues with the right batch, but makes too many passes at
the end. No comparison of batches finds this. A correct loop reads the loader's epoch, or the session's step or
iteration. But a script may also read the step only to print it. So a loop over a session loader is checked twice:
before the first update after the resume, and before the first update of the next pass.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType

from lightck.dataloader.loader import SessionLoader
from lightck.errors import listed

log = logging.getLogger("lightck")
_FRAMES_MAX = 60
"""The largest number of frames of the call stack that are searched for the loop's variables."""
_PASSES_MAX = 4
"""As long as every pass has exactly one update, a counter of passes has the same values as a counter of updates. So the
second check is put off until a pass has another number of updates, but for at most ``_PASSES_MAX`` passes."""
_OWN_REFERENCES = 3
"""The reference count of a function's ``frame.f_locals`` (a dict with copies of the function's variables) while no
other code holds the dict: one reference from the frame, one from a variable of this file, one from the argument of
``getrefcount``."""
_Variables = dict[tuple[CodeType, str], int]
"""(function or module, name) -> value."""


class LoopCounterCheck:
    """Warns if the loop of a resumed training does not read its position."""

    def __init__(
        self, step: int, updates: Callable[[], int], loaders: Sequence[SessionLoader], *, may_keep_count: bool
    ) -> None:
        """``step``: the restored step; 0 for a fresh start. ``updates``: returns the number of updates so far.
        ``may_keep_count``: an object in ``state=`` may hold the loop's own counter."""
        self._step, self._updates, self._loaders = step, updates, loaders
        self._is_over = may_keep_count or not step
        self._was_step_read = self._has_updated = False
        self._is_second_check_due = False
        """Whether a training pass has ended since the first update, and the second check was not tried since."""
        self._n_ended_passes = 0
        """Number of training passes that have ended since the resume."""
        self._n_ended_at_first_update = 0
        """The value of ``_n_ended_passes`` at the first update: 0, unless the restored pass had no batch left."""
        self._pass_counters: set[tuple[CodeType, str]] = set()
        """Variables of the loop that were equal to ``_n_ended_passes`` at the first update."""
        self._update_counters: set[tuple[CodeType, str]] = set()
        """Variables of the loop that were equal to the number of updates at the first update."""

    def step_read(self) -> None:
        """The script has read the session's step or iteration."""
        self._was_step_read = True

    def pass_ended(self) -> None:
        """A training pass over a session loader has ended."""
        self._is_second_check_due = self._has_updated
        self._n_ended_passes += 1

    def before_update(self) -> None:
        """Make the first check before the first update after the resume, and the second check before the first update
        of the next pass. If every loader was restored in its first pass, there is nothing to check, because a loop over
        ``range(epochs)`` is correct then."""
        if self._is_over or (self._has_updated and not self._is_second_check_due):
            return
        later = [loader for loader in self._loaders if loader.restored_epoch]
        if any(loader.position_was_read for loader in self._loaders) or (self._loaders and not later):
            self._is_over = True
        elif not self._has_updated:
            self._before_first_update(later)
        else:
            self._is_second_check_due = False
            # If each pass had one update, a counter of updates has the same values as a counter of passes.
            passes = self._n_ended_passes - self._n_ended_at_first_update
            self._is_over = self._updates() - self._step != passes or passes == _PASSES_MAX
            if self._is_over:
                self._before_next_pass(later[0])

    def _before_first_update(self, later: Sequence[SessionLoader]) -> None:
        """Make the first check. ``later``: the loaders that were restored in a later pass than their first one."""
        self._has_updated = True
        if self._was_step_read:
            self._is_over = not later
            self._was_step_read = False
            if later:
                variables, updates = _variables_of_the_loop(sys._getframe(1)), self._updates()
                n_ended = self._n_ended_at_first_update = self._n_ended_passes
                self._pass_counters = {key for key, value in variables.items() if value == n_ended}
                self._update_counters = {key for key, value in variables.items() if value == updates}
            return
        self._is_over = True
        where = f" in pass {later[0].restored_epoch + 1} over loader {later[0].name!r}" if later else ""
        log.warning(
            "lightck: The training continues from step %d%s, and the loop has read neither session.step nor "
            "loader.epoch. A loop that counts from 0, such as range(steps) or range(epochs), makes too many updates. "
            "Count from session.step; over a session loader, write `for epoch in range(loader.epoch, epochs)`",
            self._step,
            where,
        )

    def _before_next_pass(self, loader: SessionLoader) -> None:
        """Make the second check. A loop over ``range(epochs)`` has a variable that equals the number of passes that
        have ended since the resume, at the first update and now: warn. A loop that counts updates has a variable that
        is equal to the number of updates, or reads the step again: do not warn. Warn about any other loop."""
        variables, updates = _variables_of_the_loop(sys._getframe(1)), self._updates()
        counting = [name for code, name in self._pass_counters if variables.get((code, name)) == self._n_ended_passes]
        counts_updates = any(variables.get(key) == updates for key in self._update_counters)
        if counting:
            fact = f"and {listed(sorted(set(counting)))} was 0 in the restored pass and is {self._n_ended_passes} now"
        elif self._was_step_read or counts_updates:
            return
        else:
            fact = "and has not read session.step since its first update"
        log.warning(
            "lightck: The training continues from step %d in pass %d over loader %r, but the loop seems to count "
            "passes from 0: it has never read loader.epoch, %s. Such a loop, for example range(epochs), makes too many "
            "updates. Write `for epoch in range(loader.epoch, epochs)`. If your loop does not count passes from 0, "
            "ignore this warning; reading loader.epoch once silences it",
            self._step,
            loader.restored_epoch + 1,
            loader.name,
            fact,
        )


def _variables_of_the_loop(frame: FrameType | None) -> _Variables:
    """Return the variables that hold whole numbers, of the script and of all functions that are running."""
    found: _Variables = {}
    for _ in range(_FRAMES_MAX):
        if frame is None:
            break
        if not str(frame.f_globals.get("__name__")).startswith(("lightck.", "torch.")):
            variables = frame.f_locals
            found.update({(frame.f_code, name): value for name, value in variables.items() if type(value) is int})
            is_copy = type(variables) is dict and frame.f_code.co_flags & CO_OPTIMIZED
            if is_copy and sys.getrefcount(variables) <= _OWN_REFERENCES:
                _forget_copies(variables)
        frame = frame.f_back
    return found


def _forget_copies(variables: dict[str, object]) -> None:
    """Remove all values except whole numbers from the copies of a function's variables. Before Python 3.13 the
    function's frame keeps these copies alive, and they keep a batch alive. Do not call this for the variables of a
    module or a class, which are no copies, or for copies that a script got from ``locals()``."""
    for name in [name for name, value in variables.items() if type(value) is not int]:
        del variables[name]
