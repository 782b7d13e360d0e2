"""State with which a restored training continues: counters, random states, loader positions; and which models were
restored.

Two tables hold weak references to models. A model that was restored from a pool is in ``_restored``, so that ``attach``
on the same pool continues from the restored checkpoint. A model whose restore failed after tensors were changed is in
``_poisoned``, so that ``attach`` refuses it.
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
from lightck.events import ClosingEvent
from lightck.following.update_parts import OPTIONS
from lightck.pool.format.structures import CommitRecord, NextBatch
from lightck.restore.contents import Contents
from lightck.state.fingerprint import fingerprint
from lightck.state.numbers import ModuleNumbers
from lightck.state.rng import RngState

log = logging.getLogger("lightck")


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a session continues from: ``session.recovered``."""

    step: int
    """The step of the restored checkpoint."""
    exact: bool
    """Whether the continuation can be bit-identical. False if a rank had lost its pool and took the checkpoint of
    another rank, if a rank gets rows of a tensor that it did not hold, or if the checkpoint was loaded from the pools
    of another world. Also False if it holds older residuals (``TopK(error_feedback=True, residual="base")``), if
    ``Replica`` saved a training on a device, or if updates were replayed for it by another torch or processor. The same
    on all ranks."""
    reason: str
    """Why ``exact`` is False; else empty."""


@dataclass(slots=True)
class Resumed:
    """The parts of a checkpoint that a session needs to continue from it. Fields without a docstring are those of
    ``Contents``."""

    step: int
    iteration: int
    explicit: bool
    loaders: dict[str, dict[str, object]]
    closed_by_next: bool
    """Whether ``next()`` on a session loader closed the checkpoint."""
    persistent_started: bool
    done: bool
    recorded: Sequence[NextBatch] | None
    """What followed this checkpoint: each ``NextBatch`` is the record of the next batch, or of a part of the next
    update (its ``kind`` says which). None if none are stored."""
    same_conditions: bool
    """Whether the fingerprint (machine, threads, torch) is unchanged, so that the same operations give the same
    bits."""
    _rng: RngState
    """Random states to restore at attach."""
    _rng_for_pass: RestoredRng
    """Random states to restore a second time, when the pass of a loader continues or begins."""
    _rng_forward: RngState | None
    """Random states to restore before the first training forward. None after that forward, and if no forward closed the
    checkpoint."""
    event: str = ""
    """The step event that closed the checkpoint."""
    numbers: Mapping[str, int] | None = None
    """Name of a number that a module keeps -> its value at the checkpoint, to compare before the first training
    forward. None after that forward, and if there is nothing to compare."""
    not_exact: str = ""
    """Why the continuation is not bit-identical, for one of the reasons that ``Recovered.exact`` lists. Empty if it is
    bit-identical."""

    @property
    def recovered(self) -> Recovered:
        return Recovered(self.step, not self.not_exact, self.not_exact)

    @classmethod
    def from_contents(cls, contents: Contents, recorded: Sequence[NextBatch] | None) -> Resumed:
        """Take the parts from a checkpoint. ``recorded``: the field of this name."""
        closed_by_forward = contents.event == ClosingEvent.FORWARD.value
        rng_for_pass = RestoredRng(None if closed_by_forward else contents.rng)
        closed_by_next = contents.event == ClosingEvent.NEXT.value
        return cls(
            contents.step,
            contents.iteration,
            contents.explicit,
            contents.loaders,
            closed_by_next,
            contents.persistent_started,
            contents.done,
            recorded,
            not _changed_conditions(contents),
            contents.rng,
            rng_for_pass,
            contents.rng_forward,
            contents.event,
            # PRE_STEP: the next forward had run before the checkpoint was closed, and may have changed the numbers. So
            # they are not compared.
            None if contents.event == ClosingEvent.PRE_STEP.value else contents.numbers,
            contents.not_exact,
        )

    @property
    def has_recorded_options(self) -> bool:
        """Whether ``recorded`` contains the optimizer options of the update that followed the checkpoint."""
        return any(each.kind == OPTIONS for each in self.recorded or ())

    def set_rng(self) -> None:
        """Set the random states to those of the checkpoint: at attach, before the loop draws random numbers."""
        self._rng.restore()

    def take_rng(self, loader: SessionLoader, pass_: Pass) -> RngState | None:
        """Return the random states to restore when a pass continues or begins, so that random numbers that the script
        drew since attach have no effect. Returns None if an earlier pass took the states. (After a preview, a pass that
        only looks at some batches, the next pass gets them again.)"""
        return self._rng_for_pass.take(loader, pass_)

    def forward_begins(self, numbers: ModuleNumbers) -> None:
        """Called before each training forward; only the first call does something. It compares ``numbers``, the current
        numbers of the modules, with those of the checkpoint. If a forward closed the checkpoint, it also restores the
        random states with which that forward began in the earlier run."""
        if self._rng_forward is not None:
            self._rng_forward.restore()
            self._rng_forward = None
        if self.numbers is not None:
            numbers.compare(self.numbers, self.step)
            self.numbers = None


@dataclass(frozen=True, slots=True)
class RestoredFrom:
    """The checkpoint that a model was restored from."""

    path: str
    uuid: bytes
    record: CommitRecord
    contents: Contents
    unused_parts: tuple[str, ...]
    """Descriptions of the parts of the checkpoint that the restore did not use."""


_restored: weakref.WeakKeyDictionary[nn.Module, RestoredFrom] = weakref.WeakKeyDictionary()
_poisoned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember(model: nn.Module, restored: RestoredFrom) -> None:
    """Record from which checkpoint a model was restored. The model is no longer poisoned."""
    _poisoned.discard(model)
    _restored[model] = restored


def restored_from(model: nn.Module, path: str, uuid: bytes) -> RestoredFrom | None:
    """Return the checkpoint from which a model was restored; None if the model was not restored from this pool."""
    known = _restored.get(model)
    return known if known is not None and (known.path, known.uuid) == (path, uuid) else None


def forget_restored_from(model: nn.Module) -> None:
    """Forget from which checkpoint a model was restored."""
    _restored.pop(model, None)


def mark_poisoned(model: nn.Module) -> None:
    """Record that a restore of a model failed after tensors were changed."""
    _restored.pop(model, None)
    _poisoned.add(model)


def is_poisoned(model: nn.Module) -> bool:
    return model in _poisoned


def warn_differences(contents: Contents) -> None:
    """Warn if the checkpoint is not exact, or if the fingerprint (machine, threads, torch) changed. If a forward closed
    the checkpoint, log how the data are checked without a session loader."""
    if contents.not_exact:
        log.warning("lightck: the training does not go on bit for bit: %s", contents.not_exact)
    differ = _changed_conditions(contents)
    if differ:
        log.warning(
            "lightck: the training continues under other conditions than those of the checkpoint (%s): the results of "
            "operations may differ in their last bits",
            ", ".join(differ),
        )
    if contents.event == ClosingEvent.FORWARD.value:
        log.info(
            "lightck: this checkpoint was saved when the next forward began, not when a session loader gave a batch, "
            "so it holds no position in the data. Your loop must find the right batch itself; lightck checks that at "
            "the first update. To resume in mid-epoch, iterate over session.loader(loader)"
        )


def _changed_conditions(contents: Contents) -> list[str]:
    """Return a text for each part of the fingerprint that changed. Parts that an older lightck did not save are not
    compared."""
    was, now = contents.fingerprint, fingerprint()
    return [f"{name} {was[name]} -> {now[name]}" for name in now if name in was and was[name] != now[name]]
