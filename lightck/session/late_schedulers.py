"""Finds an LR scheduler that is built after the first update, and is not saved: a resumed run would start it over.

Such a scheduler shows in the groups of its optimizer: it adds an option, or it changes the learning rate while no saved
scheduler steps. All live objects are searched only then, which is slow. A loop may change the learning rate itself, so
the search is made at the first, second, fourth, ... such update.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from operator import is_

from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from lightck.session.capture import Capture
from lightck.session.discover import LiveObjects, schedulers_of

log = logging.getLogger("lightck")
_COUNTS = ("last_epoch", "_step_count", "T_cur")
"""T_cur: schedulers with warm restarts count in fractions of an epoch."""


def step_counts(objects: Iterable[object]) -> list[object]:
    """Return the step counts of the schedulers in ``objects`` and of their parts. A scheduler that has stepped has
    other counts."""
    schedulers = [one for one in objects if isinstance(one, LRScheduler)]
    # A chained scheduler does not count its steps. Its parts count theirs.
    parts = [part for one in schedulers for part in getattr(one, "_schedulers", ())]
    return [getattr(one, name, None) for one in (*schedulers, *parts) for name in _COUNTS]


class LateSchedulers:
    """Made at the first update; ``check`` is called before each later one."""

    def __init__(self, capture: Capture, left_out: Iterable[LRScheduler]) -> None:
        """``left_out``: the unsaved schedulers that exist already. The user has left them out."""
        self._capture = capture
        self._left_out = [weakref.ref(one) for one in left_out]
        self._saved = [one for one in capture.objects.values() if isinstance(one, LRScheduler)]
        self._options, self._counts = self._options_now(), step_counts(self._saved)
        self._n_unexplained = 0
        """How many updates had options that no saved scheduler explains."""

    def check(self) -> bool:
        """Warn of a late scheduler. Returns True if there is one: then nothing is left to find."""
        before, counts = self._options, self._counts
        self._options = now = self._options_now()
        if self._saved:
            self._counts = step_counts(self._saved)
        if len(now) == len(before) and all(map(is_, now, before)):
            return False  # the usual case
        is_driven = _numbers(now[1::2]) != _numbers(before[1::2]) and self._counts == counts
        if now[::2] == before[::2] and not is_driven:
            return False
        self._n_unexplained += 1
        if self._n_unexplained & (self._n_unexplained - 1):
            return False
        late = self._late()
        if late is None:
            return False
        log.warning(
            "lightck: an LR scheduler (%s) was built after the first update and is not saved. After a crash it starts "
            "over, and the learning rates differ. Build it before attach, and pass all schedulers: attach(..., "
            'state={"scheduler": scheduler, "second": second_scheduler}); state={"scheduler": None} says that none '
            "need be saved",
            type(late).__name__,
        )
        return True

    def _options_now(self) -> list[object]:
        """Return the number of options and the learning rate of each group, in turn."""
        found: list[object] = []
        for view in self._capture.optimizers:
            for group in view.optimizer.param_groups:
                found += len(group), group.get("lr")
        return found

    def _late(self) -> LRScheduler | None:
        """Return a live scheduler that is neither saved nor left out; None if there is none."""
        known = {id(one) for one in self._capture.objects.values()}
        known |= {id(one) for ref in self._left_out if (one := ref()) is not None}
        optimizers: list[Optimizer] = [view.optimizer for view in self._capture.optimizers]
        found: list[LRScheduler] = []
        for collect in (False, True):  # what the quick search finds may be garbage
            live = schedulers_of(LiveObjects(collect=collect), optimizers)
            found = [one for one in live if id(one) not in known]
            if not found:
                return None
        return found[0]


def _numbers(rates: list[object]) -> list[float | None]:
    """Return the learning rates, with None in place of each that is no float: the value of a tensor is not read."""
    return [rate if type(rate) is float else None for rate in rates]
