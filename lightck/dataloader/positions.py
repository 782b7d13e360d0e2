"""The positions of all session loaders: each one of a checkpoint is restored, carried on, or named; and what shows that
a loop does not go by its loader.

A position belongs to the loader that has its name. One that no loader took by the first update after a resume is lost
where it lies in mid-pass: another loader that began at its beginning instead is refused, since it would give batches
that were given before. One that lies between two passes is kept in the checkpoints to come, for a loader that is
wrapped later. Batches that are used again after their pass has ended (``itertools.cycle``, a list) are part of no
position.
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
    """Of one session."""

    def __init__(
        self, loaders: Sequence[SessionLoader], restored: Mapping[str, dict[str, object]] | None = None
    ) -> None:
        self._loaders = loaders
        self._left = dict(restored or {})
        """What was restored and nobody took so far."""
        self._without: list[SessionLoader] = []
        """Loaders that found no position of theirs."""
        self.any_live = any(bool(position.get("live")) for position in self._left.values())
        self._over: SessionLoader | None = None
        """The loader whose pass ended last, until a batch is fetched to train on."""
        self._is_first_after = True

    def restored_for(self, name: str, anew: bool) -> dict[str, object] | None:
        """The restored position for this name. ``anew``: at the beginning of its pass."""
        value = self._left.get(name)
        if value is None or not anew:
            return value
        position = Position.from_value(value)
        if position.live:
            log.warning(
                "loader %r begins its pass anew, as anew=True says: %d batches of epoch %d are given again",
                name,
                position.state.given,
                position.epoch,
            )
        return position.before_its_pass().to_value()

    def loader_wrapped(self, loader: SessionLoader) -> None:
        """The loader has its position, or there is none of its name."""
        if self._left.pop(loader.name, None) is None:
            self._without.append(loader)

    def values(self) -> dict[str, Any]:
        """Name -> what a checkpoint says of it."""
        kept = {name: value for name, value in self._left.items() if not value.get("live")}
        return kept | {loader.name: loader.position() for loader in self._loaders}

    def before_first_update(self) -> None:
        """Name the positions that were not taken. Raises ``DriftError`` where the training would go on with batches
        that were given before."""
        if not self._left:
            return
        left = {name: Position.from_value(value) for name, value in self._left.items()}
        in_pass = {name: p for name, p in left.items() if p.live and p.trained}
        instead = [loader for loader in self._loaders if loader.trains_from_the_beginning]
        continues_restored_pass = any(loader.continues_restored_pass for loader in self._loaders)
        if in_pass and instead and not continues_restored_pass and not all(loader.is_anew for loader in instead):
            raise _not_taken(in_pass, [loader.name for loader in instead])
        without = [loader.name for loader in self._without]
        if in_pass or without or any(is_numbered_name(name) for name in left):
            log.warning(
                "lightck: the checkpoint holds the position of %s, and session.loader() was called with no such name: "
                "%s. Give each loader the name= that it had; one without a name= is numbered by the order of the calls",
                _places(left),
                f"{_names(without)} found no position and begins anew" if without else "it is not gone on from",
            )
        else:
            log.info("lightck: no loader has taken the position of %s so far; checkpoints keep it", _places(left))
        self._left = {name: value for name, value in self._left.items() if name not in in_pass}

    # -- batches that are used again

    def fetches(self, loader: SessionLoader) -> None:
        """A batch is asked for."""
        if not loader.in_eval:
            self._over = None

    def pass_ended(self, loader: SessionLoader) -> None:
        if loader.is_training:
            self._over, self._is_first_after = loader, True

    def updated(self) -> None:
        """After an update. One more update than batches comes at the end of a pass, where gradients are left over."""
        over = self._over
        if over is None:
            return
        if over.reused.is_held(certain=self._is_first_after):
            over.reused.warn()
        if not self._is_first_after:
            self._over = None
        self._is_first_after = False


_BATCHES_DIFFER = (
    "A position counts the batches that a loader gives: after a resume the loop has others. Begin each pass anew: "
    "while True: for batch in loader: ..."
)


class ReusedBatches:
    """Whether the loop still holds the first batch of a loader's last pass, and makes updates when that has ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: weakref.ref[object] | None = None
        self._fetched = 0
        self.is_reported = False
        """For the last pass."""
        self._was_reported = False

    def begins(self) -> None:
        """A pass, in this process."""
        self._first, self._fetched, self.is_reported = None, 0, False

    def fetched(self, batch: object) -> None:
        self._fetched += 1
        if self._fetched == 1:
            tensor = _first_tensor(batch)
            self._first = None if tensor is None else weakref.ref(tensor)

    def is_held(self, *, certain: bool) -> bool:
        """``certain``: not where it may be the one that the loop's variable holds, nor where it cannot be seen."""
        if not self._fetched:
            return False
        if self._first is None:
            return not certain
        return self._first() is not None and not (certain and self._fetched == 1)

    def warn(self) -> None:
        """An update was made after a pass ended, and none began. Said once."""
        self.is_reported = True
        if not self._was_reported:
            self._was_reported = True
            log.warning(
                "loader %r: an update was made after the pass over it ended and before another began, so "
                "batches are used again that the loop holds (itertools.cycle, a list), or others. %s",
                self._name,
                _BATCHES_DIFFER,
            )

    def warn_restored(self) -> None:
        log.warning(
            "loader %r: the checkpoint was saved after updates on batches of a pass that had ended. %s",
            self._name,
            _BATCHES_DIFFER,
        )


def _first_tensor(batch: object) -> torch.Tensor | npt.NDArray[np.generic] | None:
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
    return DriftError(
        f"The checkpoint lies in the middle of a pass over {_places(in_pass)}, which no session.loader() has taken, "
        f"and {_names(instead)} began at its beginning instead: it would give batches that were given before. Give the "
        "loader the name= that it had (without one it is numbered by the order of the calls), or say that its pass "
        "begins anew: session.loader(..., anew=True).",
        dict.fromkeys(in_pass, ("in mid-pass", "not taken")),
    )


def _places(left: Mapping[str, Position]) -> str:
    return ", ".join(f"loader {name!r} (epoch {p.epoch}, {p.state.given} batches given)" for name, p in left.items())


def _names(names: Sequence[str]) -> str:
    return ("loader " if len(names) == 1 else "loaders ") + ", ".join(map(repr, names))
