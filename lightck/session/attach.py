"""``attach``: from a model and a path to a session.

In order: what is to be saved is found and checked; the pool's lock is taken; an existing pool is restored, adopted or
refused, a new one is laid out; the hooks go in. Nothing of the user's is changed before everything that can be refused
was refused, and no pool that holds a checkpoint is overwritten or loaded unless the caller said so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lightck import sessions
from lightck.errors import (
    CheckpointExistsError,
    LateError,
    NotAPoolError,
    PoolError,
    PoolNotFoundError,
    SessionError,
    UnsupportedError,
)
from lightck.hooks.layerwise import layerwise_of
from lightck.pipeline.finite import Finite
from lightck.pipeline.pipeline import Pipeline
from lightck.pipeline.staging.kinds import Kind, check_kind
from lightck.pipeline.table import in_order_of_need
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import SLOTS_MAX, CommitLine, DamagedError
from lightck.pool.reader import PoolReader, Version, open_pool
from lightck.pool.ring import candidates
from lightck.pool.storage import durability
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.backends import backend_for
from lightck.pool.storage.backends import pool_path as _pool_path
from lightck.pool.storage.lock import PoolLock
from lightck.restore.checkpoint import (
    Checkpoint,
    refuse_other_than_bool,
    refuse_other_than_mapping,
    refuse_other_than_module,
)
from lightck.restore.edited import set_flags
from lightck.restore.memory import ordinary_tensors
from lightck.restore.recover import erased_error, parse, restore_newest
from lightck.restore.resume import Resumed, forget, is_poisoned, restored_from, tell_differences
from lightck.session.discover import Found, discover, unwrap
from lightck.session.first_step import FirstStep
from lightck.session.interval import Auto, cadence
from lightck.session.session import Session
from lightck.session.snapshot import Capture
from lightck.state.inventory import entry_of
from lightck.state.objects import check_objects
from lightck.state.predict import predict
from lightck.state.ranks import is_one_of_several, of_several
from lightck.state.scaler import enabled
from lightck.stats import Meter
from lightck.strategy.full import FullState
from lightck.tiers.keep import Keep, Keeper, refuse_unkept

log = logging.getLogger("lightck")
CHECK_VARIABLE = "LIGHTCK_CHECK"


@ordinary_tensors()
def attach(
    model: nn.Module,
    pool_path: str | os.PathLike[str],
    *,
    optimizer: Any = None,
    state: Mapping[str, Any] | None = None,
    interval: int | str | Auto = 1,
    resume: bool = False,
    overwrite: bool = False,
    strategy: FullState | None = None,
    backend: str = "auto",
    require: str | None = None,
    slots: int | None = None,
    keep: Keep | None = None,
    pause_on_nonfinite: bool = False,
    staging: Kind | None = None,
    strict_data: bool = False,
) -> Session:
    """Make every finished training step of ``model`` survive a crash.

    Args:
        model: the root module. Attach after its optimizer and LR scheduler were built.
        pool_path: the pool's file, made if it is not there (its folder must exist); or a device-dax device.
        optimizer: an optimizer or a list of them. Not passed: looked for among live objects.
        state: name -> object with ``state_dict``. Schedulers and a GradScaler are found; ``{"scheduler": None}``: no.
        interval: every how many updates a version is saved; ``"auto"`` or ``lightck.Auto(...)``: by what it costs.
        resume: restore the newest version, if the pool holds one, and go on from it.
        overwrite: discard what the pool holds.
        strategy: what a version holds; ``FullState()``.
        backend: ``"file"``, ``"pmdk"``, ``"devdax"``; ``"auto"``: by the path; a new one on persistent memory PMDK's.
        require: ``"process"``, ``"os"`` or ``"power"``: refuse a medium that does not survive that.
        slots: versions that the pool has room for, 2 to 8; by default 2, or what an existing pool has.
        keep: export a version every so often: ``lightck.Keep(every=1000, last=3, to=folder)``. It takes one more slot.
        pause_on_nonfinite: commit no state whose loss scale or sampled values are not finite.
        staging: the way out of a device: ``lightck.Host()``, ``Direct()`` or ``Device()``; by default the best of them.
        strict_data: refuse the first update of a resume that is not made of what followed; else that is a warning.

    Raises:
        CheckpointExistsError: the pool holds a checkpoint, and neither ``resume`` nor ``overwrite`` was said.
        PoolError: the pool cannot be made, opened, locked or read (see :mod:`lightck.errors`).
        DriftError, CorruptPoolError: ``resume=True`` and the checkpoint does not fit, or none verifies.
        AmbiguousError, StateValueError, LateError, SessionError, UnsupportedError, MediumError, KeepError: see each.
    """
    refuse_other_than_bool(strict_data=strict_data)
    _check_arguments(model, state, resume, overwrite, strategy, slots, keep, staging, pause_on_nonfinite)
    pace = cadence(interval)
    path = _pool_path(pool_path)
    kind = backend_for(path, backend)
    durable = kind.probe(path)
    durability.require(durable, require)
    found = _discover(model, optimizer, state)
    capture = Capture(model, found.optimizers, found.state)
    attachment = _Attachment(model, path, kind, found, _declined(state), capture, resume, overwrite, keep)
    lock = attachment.lock()
    meter = Meter()
    finite = Finite(found.state) if pause_on_nonfinite else None
    is_checked = os.environ.get(CHECK_VARIABLE) == "1"
    with _undone(lock.release):
        pipeline = Pipeline(path, kind, durable, slots or 2, meter, finite, staging, check=is_checked, lock=lock)
        with _undone(pipeline.close):
            pipeline.keep(Keeper(keep, path, meter) if keep is not None else None)
            kind.remove_stale(path)
            first = _first_step(found, state)
            resumed = attachment.open(pipeline, slots)
            if resumed is not None:
                first.restored_now(resumed.knows_options)
            session = Session(model, found, capture, pipeline, lock, meter, cadence=pace, resumed=resumed,
                              first_step=first, strict_data=strict_data)  # fmt: skip
    _begin(model, session, path, resumed)
    return session


@contextmanager
def _undone(undo: Callable[[], None]) -> Iterator[None]:
    """Give up what was taken, where this block fails."""
    try:
        yield
    except BaseException:
        undo()
        raise


def _check_arguments(model: Any, state: Any, resume: bool, overwrite: bool, strategy: Any, slots: Any,
                     keep: Any, staging: Any, pause_on_nonfinite: bool) -> None:  # fmt: skip
    refuse_other_than_bool(resume=resume, overwrite=overwrite, pause_on_nonfinite=pause_on_nonfinite)
    refuse_other_than_module(model)
    refuse_other_than_mapping(state)
    if resume and overwrite:
        raise ValueError("resume=True and overwrite=True exclude each other: go on from the checkpoint, or discard it.")
    if strategy is not None and not isinstance(strategy, FullState):
        raise TypeError(f"strategy is a {type(strategy).__name__}. Pass lightck.FullState().")
    sessions.refuse_open(model)
    if is_poisoned(model):
        raise SessionError(
            "A restore into this model failed half-way, and its parameters are NaN so that nobody trains on a mix. "
            "Build the model anew, or restore another checkpoint into it."
        )
    _check_slots(slots, keep)
    check_kind(staging)
    is_one_of_several()


def _check_slots(slots: Any, keep: Any) -> None:
    if slots is not None and (type(slots) is not int or not 2 <= slots <= SLOTS_MAX):
        raise ValueError(f"slots={slots!r}: a pool has 2 to {SLOTS_MAX} slots.")
    if keep is not None and not isinstance(keep, Keep):
        raise TypeError(f"keep is a {type(keep).__name__}. Pass lightck.Keep(every=1000, last=3, to=folder).")
    if keep is not None and slots == SLOTS_MAX:
        raise ValueError(f"slots={slots} and keep=: a pool has {SLOTS_MAX} slots, and keep= needs one of them.")


def _discover(model: nn.Module, optimizer: Any, state: Mapping[str, Any] | None) -> Found:
    found = discover({id(p): i for i, p in enumerate(model.parameters())}, optimizer, state)
    check_objects(found.state)
    if not found.optimizers and next(model.parameters(), None) is None:
        log.warning("lightck: the model (%s) has no parameters, and no optimizer is followed, so nothing of a training "
                    "is in its checkpoints. Layers in a plain list, dict or tuple are not part of a module: keep them "
                    "in an nn.ModuleList or nn.ModuleDict", type(model).__name__)  # fmt: skip
    if enabled(found.state) and any(layerwise_of(o) is not None for o in found.optimizers):
        raise UnsupportedError(
            "A GradScaler is enabled, and layers are updated inside backward(). Whether a step is skipped is known "
            "when all gradients are there. Leave out lightck.layerwise(), or the scaler (bfloat16 needs none); where "
            'the scaler is none of this training, say state={"scaler": None}.'
        )
    return found


def _first_step(found: Found, state: Mapping[str, Any] | None) -> FirstStep:
    given = state or {}
    chosen = frozenset(id(unwrap(o.optimizer)) for o in given.values() if isinstance(o, LRScheduler))
    return FirstStep(found.optimizers, found.state, "scheduler" in _declined(state), chosen, of_several() is not None)


def _declined(state: Mapping[str, Any] | None) -> frozenset[str]:
    """Names that the user said no to."""
    return frozenset(name for name, obj in (state or {}).items() if obj is None)


@dataclass(slots=True)
class _Attachment:
    """What to do about the pool's file."""

    model: nn.Module
    path: str
    backend: Backend
    found: Found
    declined: frozenset[str]
    capture: Capture
    resume: bool
    overwrite: bool
    keep: Keep | None
    entries: dict[str, Entry] = field(init=False)
    """What a version would hold now: everything in it can be stored."""

    def __post_init__(self) -> None:
        self.entries = {live.name: entry_of(live) for live in self.capture.expected_tensors()}
        if self.keep is not None:
            refuse_unkept(self.keep, self.entries.values())
        self.capture.model.refuse_hidden_state()
        self.capture.note_built()
        self.capture.persistent.follow(self.found.persistent)

    def lock(self) -> PoolLock:
        """Its lock. What lies there and is no pool is refused first: nothing is made beside somebody else's file."""
        if os.path.lexists(self.path) and not self.backend.recognises(self.path):
            reader = self._existing(write=False)
            if reader is not None:
                reader.close()
        return PoolLock(self.path)

    def open(self, pipeline: Pipeline, slots: int | None) -> Resumed | None:
        """Restore, adopt, or make the pool. None for a fresh start."""
        reader = self._existing()
        if reader is None:
            self._create(pipeline)
            return None
        try:
            checkpoint = self._checkpoint(reader)
        except BaseException:
            reader.close()
            raise
        if checkpoint is None:
            reader.close()
            self._create(pipeline)
            return None
        contents, line = checkpoint
        recorded = reader.next_batches(line)
        pipeline.open(reader).adopt(line)
        pipeline.adopted(contents.step, contents.at_once, slots, line.payload_generation, contents.stale_after)
        self.capture.elastic.update(contents.elastic)
        set_flags(contents, self.capture.model)
        tell_differences(contents)
        forget(self.model)
        return Resumed.from_contents(contents, recorded)

    def _existing(self, *, write: bool = True) -> PoolReader | None:
        """The pool that lies there, if it may matter: None where there is none or it is to be discarded."""
        try:
            reader = open_pool(self.path, self.backend.name, write=write)
        except PoolNotFoundError:
            return None
        except NotAPoolError as err:
            if self.overwrite and err.in_the_way:
                return None
            raise
        except PoolError:
            if self.overwrite and self.backend.recognises(self.path):
                return None
            raise
        if self.overwrite:
            reader.close()
            return None
        return reader

    def _checkpoint(self, reader: PoolReader) -> tuple[Any, CommitLine] | None:
        """The version to go on from; None where the pool never held one."""
        if reader.ring().is_empty:
            lost = erased_error(reader)
            if lost is not None:
                raise lost
            return None
        known = restored_from(self.model, self.path, reader.superblock.uuid)
        if known is not None:
            return self._go_on_from(reader, known)
        if not self.resume:
            raise self._exists(reader)
        self._check_optimizer_in_time(reader)
        state = {**self.found.state, **dict.fromkeys(self.declined)}
        checkpoint = restore_newest(reader, None, self.model, list(self.found.optimizers), state, strict=True,
                                    complete=True)  # fmt: skip
        _tell_rejected(checkpoint)
        return checkpoint.contents, checkpoint.line

    def _go_on_from(self, reader: PoolReader, known: Any) -> tuple[Any, CommitLine]:
        missing = [what for what in known.missing if what not in {f"state {name!r}" for name in self.declined}]
        if missing:
            raise SessionError(
                f"This model was restored from step {known.contents.step} of {self.path!r}, but "
                f"{', '.join(missing)} of that version was restored nowhere. Going on would lose it. Pass "
                "it to recover() or restore() too, use attach(..., resume=True), or train into another pool; "
                "overwrite=True discards what this one holds."
            )
        try:
            reader.version(known.line)
        except DamagedError as err:
            raise CheckpointExistsError(
                f"Step {known.contents.step}, which this model was restored from, is no longer in {self.path!r}: "
                f"{err}. The pool was trained on since. Use attach(..., resume=True) to go on from its newest step, or "
                "overwrite=True to discard it."
            ) from err
        self.capture.built.is_from(known.contents.built)
        return known.contents, known.line

    def _exists(self, reader: PoolReader) -> CheckpointExistsError:
        lines = candidates(reader.ring())
        held = f"step {lines[0].step}" if lines else "versions that cannot be read"
        return CheckpointExistsError(
            f"The pool {self.path!r} holds {held}. It is neither loaded nor overwritten unasked. Say "
            "attach(..., resume=True) to go on from it, restore it yourself with lightck.recover(path, model, ...), or "
            "say overwrite=True to discard it."
        )

    def _check_optimizer_in_time(self, reader: PoolReader) -> None:
        if self.found.optimizers:
            return
        for version in reader.versions():
            if isinstance(version, Version):
                try:
                    names = [o.class_name for o in parse(version).optimizers]
                except DamagedError:
                    continue
                if names:
                    raise LateError(
                        f"The pool {self.path!r} holds the state of {', '.join(names)}, and no live optimizer updates "
                        "this model. State is restored at attach. Build the optimizer first, or pass it: "
                        "attach(..., optimizer=opt)."
                    )
                return

    def _create(self, pipeline: Pipeline) -> None:
        """Lay the pool out now, so that a full medium is an error here; later where the state cannot be foreseen."""
        forget(self.model)  # what it was restored from elsewhere: it trains on now
        entries = self._foreseen()
        if entries is not None:
            pipeline.create(in_order_of_need(entries.values()), self.capture.expected_state_nbytes)
        elif self.overwrite:
            self.backend.discard(self.path)  # or a crash before the first version would bring it back

    def _foreseen(self) -> dict[str, Entry] | None:
        entries = dict(self.entries)
        if not self.capture.optimizers:
            log.info("lightck: no optimizer is alive yet: the pool is laid out at the first boundary")
            return None
        for view in self.capture.optimizers:
            foreseen = predict(view)
            if foreseen is None:
                return None
            for entry in foreseen:
                entries.setdefault(entry.name, entry)
        return entries


def _tell_rejected(checkpoint: Checkpoint) -> None:
    for rejected in checkpoint.rejected:
        log.warning("lightck: passed over %s", rejected)


def _begin(model: nn.Module, session: Session, path: str, resumed: Resumed | None) -> None:
    """The loop comes next. One line: what was found, and where the training stands."""
    if resumed is not None:
        resumed.set_rng()
    sessions.opened(model, session)
    found = ", ".join(f"{name}: {kind}" for name, kind in session.found.items()) or "nothing"
    start = f"resumed at step {resumed.step}" if resumed is not None else "fresh start"
    log.info("lightck: %s, %s (%s); found %s", path, start, session.durability, found)
