"""Where a restored training goes on: counters, RNG at the right moments, loader positions. And who was restored.

A model that was restored from a pool is remembered (weakly), so that ``attach`` on the same pool goes on from there;
a model whose restore failed half-way is remembered too, so that ``attach`` refuses it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightck.dataloader.loader import SessionLoader
from lightck.dataloader.passes import Pass
from lightck.dataloader.preview import RestoredRng
from lightck.events import Event
from lightck.following.update_parts import OPTIONS
from lightck.pool.format.structures import CommitRecord, NextBatch
from lightck.restore.contents import Contents
from lightck.state.fingerprint import fingerprint
from lightck.state.numbers import ModuleNumbers
from lightck.state.rng import RngState

log = logging.getLogger("lightck")


@dataclass(slots=True)
class Resumed:
    """What a session needs of the version that it goes on from."""

    step: int
    iteration: int
    explicit: bool
    loaders: dict[str, dict[str, object]]
    closed_by_next: bool
    persistent_started: bool
    done: bool
    recorded: Sequence[NextBatch] | None
    """What is known of the batch that followed this version."""
    same_conditions: bool
    """Whether machine, threads and torch are those that saved: then the same operations give the same bits."""
    _rng: RngState
    _rng_once: RestoredRng
    _rng_forward: RngState | None
    event: str = ""
    """What closed the version."""
    numbers: Mapping[str, int] | None = None
    """Of modules, where they are to be compared before the first forward."""

    @classmethod
    def from_contents(cls, contents: Contents, recorded: Sequence[NextBatch] | None) -> Resumed:
        closed_by_forward = contents.event == Event.FORWARD.value
        once = RestoredRng(None if closed_by_forward else contents.rng)
        closed_by_next = contents.event == Event.NEXT.value
        return cls(
            contents.step,
            contents.iteration,
            contents.explicit,
            contents.loaders,
            closed_by_next,
            contents.persistent_started,
            contents.done,
            recorded,
            not _other_conditions(contents),
            contents.rng,
            once,
            contents.rng_forward,
            contents.event,
            None if contents.event == Event.PRE_STEP.value else contents.numbers,
        )

    @property
    def knows_options(self) -> bool:
        """Whether the optimizer's options of the update that followed are recorded."""
        return any(each.kind == OPTIONS for each in self.recorded or ())

    def set_rng(self) -> None:
        """At attach: the loop's own draws come next."""
        self._rng.restore()

    def take_rng(self, loader: SessionLoader, pass_: Pass) -> RngState | None:
        """At the first ``next()`` of a loader that is no preview: what was drawn since attach does not count."""
        return self._rng_once.take(loader, pass_)

    def forward_begins(self, numbers: ModuleNumbers) -> None:
        """Before the first training forward: its random state, where a forward closed the version, and what the model's
        modules keep as numbers."""
        if self._rng_forward is not None:
            self._rng_forward.restore()
            self._rng_forward = None
        if self.numbers is not None:
            numbers.compare(self.numbers, self.step)
            self.numbers = None


@dataclass(frozen=True, slots=True)
class RestoredFrom:
    """A model holds this version."""

    path: str
    uuid: bytes
    record: CommitRecord
    contents: Contents
    missing: tuple[str, ...]
    """What the version holds and nobody took."""


_restored: weakref.WeakKeyDictionary[nn.Module, RestoredFrom] = weakref.WeakKeyDictionary()
_poisoned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember(model: nn.Module, restored: RestoredFrom) -> None:
    _poisoned.discard(model)
    _restored[model] = restored


def restored_from(model: nn.Module, path: str, uuid: bytes) -> RestoredFrom | None:
    known = _restored.get(model)
    return known if known is not None and (known.path, known.uuid) == (path, uuid) else None


def forget(model: nn.Module) -> None:
    _restored.pop(model, None)


def mark_poisoned(model: nn.Module) -> None:
    _restored.pop(model, None)
    _poisoned.add(model)


def is_poisoned(model: nn.Module) -> bool:
    return model in _poisoned


def tell_differences(contents: Contents) -> None:
    """One line where the machine or torch is not the one that saved: continuation may differ in bits."""
    differ = _other_conditions(contents)
    if differ:
        log.warning(
            "lightck: going on under other conditions than were saved (%s): results may differ in their last bits",
            ", ".join(differ),
        )
    if contents.event == Event.FORWARD.value:
        log.info(
            "lightck: this checkpoint was closed when the model's next forward began, so no session loader says "
            "where the data stood. Whether the loop goes on with the right batch is compared at the first update; "
            "a DataLoader outside session.loader() does not resume in mid-epoch"
        )


def _other_conditions(contents: Contents) -> list[str]:
    """What an older lightck did not save is not compared."""
    was, now = contents.fingerprint, fingerprint()
    return [f"{name} {was[name]} -> {now[name]}" for name in now if name in was and was[name] != now[name]]
