"""The positions of all session loaders of a checkpoint: each is restored, kept, or reported as unused. Also detects
loops that use batches again after a pass.

A position belongs to the loader that has its name. The first update after a resume decides about a position that no
loader took. A position between two passes is kept in later checkpoints, for a loader that is wrapped later. A position
in mid-pass is dropped. But if the loop continues no restored pass, and trains on another loader from the first batch
of that loader, the resume is refused, because batches would be given twice. If no batch was left in the saved pass
(each pass may have a loader with a name of its own), a warning says so instead.

Batches that are used again after their pass has ended (``itertools.cycle``, a list) are part of no position.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from lightck.dataloader.identity import is_numbered_name
from lightck.dataloader.position import Position
from lightck.errors import DriftError

if TYPE_CHECKING:
    from lightck.dataloader.loader import SessionLoader

log = logging.getLogger("lightck")


class Positions:
    """The positions of one session's loaders."""

    def __init__(
        self, loaders: Sequence[SessionLoader], restored: Mapping[str, dict[str, object]] | None = None
    ) -> None:
        self._loaders = loaders
        self._untaken = dict(restored or {})
        """Restored positions that no loader has taken so far."""
        self._without_position: list[SessionLoader] = []
        """Loaders for whose names no position was restored."""
        self.any_in_pass = any(bool(position.get("live")) for position in self._untaken.values())
        self.drops_pass = False
        """Whether ``anew=True`` was passed for a loader whose restored position was in mid-pass."""
        self._ended_loader: SessionLoader | None = None
        """The loader whose pass ended last, until a batch is fetched to train on."""
        self._no_update_since_pass = True
        """Whether no update was made since ``_ended_loader``'s pass ended."""

    def restored_for(self, name: str, anew: bool) -> dict[str, object] | None:
        """Return the restored position for this name (None: there is none). ``anew``: whether to return the position
        that the loader had at the beginning of the saved pass instead."""
        value = self._untaken.get(name)
        if value is None or not anew:
            return value
        position = Position.from_value(value)
        if position.in_pass:
            self.drops_pass = True
            log.warning(
                "lightck: loader %r begins its pass anew because of anew=True: %d batches of epoch %d are given again. "
                "So this training differs from the interrupted one, and lightck omits its check that the first update "
                "after a resume is the one that followed the checkpoint",
                name,
                position.state.given,
                position.epoch,
            )
        return position.before_its_pass().to_value()

    def loader_wrapped(self, loader: SessionLoader) -> None:
        """Record that a session loader was made: it takes the restored position of its name, if there is one."""
        if self._untaken.pop(loader.name, None) is None:
            self._without_position.append(loader)

    def values(self) -> dict[str, Any]:
        """Return all positions that a checkpoint saves: name of a loader -> position."""
        kept = {name: value for name, value in self._untaken.items() if not value.get("live")}
        return kept | {loader.name: loader.position() for loader in self._loaders}

    def before_first_update(self) -> None:
        """Warn about positions that were not taken. Raises ``DriftError`` if the training would go on with batches that
        were given before."""
        if not self._untaken:
            return
        left = {name: Position.from_value(value) for name, value in self._untaken.items()}
        in_pass = {name: p for name, p in left.items() if p.in_pass and p.trained}
        ended = {name: p for name, p in in_pass.items() if p.has_given_all}
        unfinished = {name: p for name, p in in_pass.items() if name not in ended}
        instead = [loader for loader in self._loaders if loader.trains_from_the_beginning]
        continues_restored_pass = any(loader.continues_restored_pass for loader in self._loaders)
        if unfinished and instead and not continues_restored_pass and not all(loader.is_anew for loader in instead):
            raise _not_taken(unfinished, [loader.name for loader in instead])
        self._report_untaken(left, ended, unfinished)
        self._untaken = {name: value for name, value in self._untaken.items() if name not in in_pass}

    def _report_untaken(
        self, left: Mapping[str, Position], ended: Mapping[str, Position], unfinished: Mapping[str, Position]
    ) -> None:
        """Log which positions were not taken, ``left``. ``ended``, ``unfinished``: those of passes with updates that
        have no batch left, and that have some."""
        without = [loader.name for loader in self._without_position]
        if ended:
            log.warning(
                "lightck: the checkpoint was saved after the last batch of a pass over %s, but no session.loader() "
                "call of this run has that name. So code that follows this pass (for example scheduler.step()) was "
                "not run again%s. If the loop needs that code, give the loader the name= that it had and iterate over "
                "it: it gives no batch, and the code follows",
                _described(ended),
                f", and the training begins a new pass over {_loader_names(without)}, for which no position is saved"
                if without
                else "",
            )
            left = {name: position for name, position in left.items() if name not in ended}
            without = []  # it is reported
        if unfinished or (left and without) or any(is_numbered_name(name) for name in left):
            log.warning(
                "lightck: the checkpoint holds the position of %s, but no session.loader() call of this run has that "
                "name, so %s. Give each loader the name= that it had; one without a name= is numbered by the order of "
                "the calls",
                _described(left),
                f"the training begins a new pass over {_loader_names(without)}, for which no position is saved"
                if without
                else "the training does not continue from that position",
            )
        elif left:
            log.info(
                "lightck: the checkpoint holds the position of %s, which no session.loader() call of this run has "
                "taken so far. New checkpoints keep it, and you need not do anything",
                _described(left),
            )

    # -- batches that are used again

    def next_begins(self, loader: SessionLoader) -> None:
        """Record that the loop requests a batch of this loader."""
        if not loader.in_eval:
            self._ended_loader = None

    def pass_ended(self, loader: SessionLoader) -> None:
        """Record that a pass over this loader has ended."""
        if loader.is_training:
            self._ended_loader, self._no_update_since_pass = loader, True

    def updated(self) -> None:
        """Check, after an update, whether batches are used again. The first update after a pass counts only if the loop
        certainly holds old batches, because that update perhaps only applies gradients of the pass's last batches."""
        loader = self._ended_loader
        if loader is None:
            return
        if loader.reused.is_held(certain=self._no_update_since_pass):
            loader.reused.warn()
        if not self._no_update_since_pass:
            self._ended_loader = None
        self._no_update_since_pass = False


_BATCHES_DIFFER = (
    "lightck counts the batches that the loader gives, and does not count batches that the loop keeps and uses again, "
    "so a resume trains on other batches. Iterate over the loader again for each pass: while True: "
    "for batch in loader: ..."
)


class ReusedBatches:
    """Whether the loop still holds the first batch of a loader's last pass, and makes updates after the pass has
    ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: weakref.ref[object] | None = None
        self._fetched = 0
        """Number of batches of the last pass."""
        self.were_used_again = False
        """Whether batches of the last pass were used again after it ended."""
        self._has_warned = False

    def begins(self) -> None:
        """Record that a pass begins in this process."""
        self._first, self._fetched, self.were_used_again = None, 0, False

    def fetched(self, batch: object) -> None:
        self._fetched += 1
        if self._fetched == 1:
            tensor = _first_tensor(batch)
            self._first = None if tensor is None else weakref.ref(tensor)

    def is_held(self, *, certain: bool) -> bool:
        """Whether the loop still holds the first batch of the last pass. ``certain``: return True only if this is
        certain. There are two uncertain cases: the batch cannot be tracked; or it is the only batch of the pass, so
        that the loop's variable perhaps holds it without using it again."""
        if not self._fetched:
            return False
        if self._first is None:
            return not certain
        return self._first() is not None and not (certain and self._fetched == 1)

    def warn(self) -> None:
        """Warn once that an update was made after a pass ended and before another began."""
        self.were_used_again = True
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "lightck: loader %r: an update was made after the pass over it ended and before another began: "
                "the loop uses batches again (itertools.cycle, a list), or batches from elsewhere. %s",
                self._name,
                _BATCHES_DIFFER,
            )

    def warn_restored(self) -> None:
        log.warning(
            "lightck: loader %r: when the checkpoint was saved, the interrupted run was using batches of a pass again "
            "after the pass had ended. %s",
            self._name,
            _BATCHES_DIFFER,
        )


def _first_tensor(batch: object) -> torch.Tensor | npt.NDArray[np.generic] | None:
    """Return a tensor or an array of the batch, to be tracked by a weak reference; None if none is found."""
    todo = [batch]
    for _ in range(16):
        if not todo:
            break
        item = todo.pop()
        if isinstance(item, (torch.Tensor, np.ndarray)):
            return item
        if isinstance(item, (list, tuple)):
            todo.extend(item[:16])
        elif isinstance(item, Mapping):
            todo.extend(list(item.values())[:16])
    return None


def _not_taken(in_pass: Mapping[str, Position], instead: Sequence[str]) -> DriftError:
    name = "this name" if len(in_pass) == 1 else "one of these names"
    return DriftError(
        f"The checkpoint lies in the middle of a pass over {_described(in_pass)}, but no session.loader() call has "
        f"{name}, and {_loader_names(instead)} began a new pass instead, so batches would be given twice. "
        "Give the loader the name= that it had (without one it is numbered by the order of the calls), or let its pass "
        "begin anew: session.loader(..., anew=True).",
        dict.fromkeys(in_pass, ("in mid-pass", "not taken")),
    )


def _described(left: Mapping[str, Position]) -> str:
    return ", ".join(f"loader {name!r} (epoch {p.epoch}, {p.state.given} batches given)" for name, p in left.items())


def _loader_names(names: Sequence[str]) -> str:
    return ("loader " if len(names) == 1 else "loaders ") + ", ".join(map(repr, names))
