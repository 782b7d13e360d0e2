"""Recovery: find the newest version of a pool that verifies, and load or restore it. It writes nothing.

Versions are tried from the newest on. A block that does not match its checksum sends us to the next older one, over the
same tensors; where no version is left, nothing is returned and no floating-point parameter keeps a usable value: a mix
of two versions never leaves this module.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import TypeVar

import torch
from torch import nn

from lightck.errors import CorruptPoolError, NoCheckpointError, PoolLockedError
from lightck.pool.commit_log import CommitLog
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.reader import PoolReader, RejectedCheckpoint, StoredCheckpoint, open_pool
from lightck.pool.storage.backends import readable_path
from lightck.pool.storage.lock import holder_of
from lightck.restore import restore as _restore
from lightck.restore.checkpoint import Checkpoint, plan_restore, poison, refuse_other_than_mapping
from lightck.restore.contents import Contents, MemorySource, in_memory, refuse_unusable_device
from lightck.restore.tensor_writes import ordinary_tensors

T = TypeVar("T")
STALE_REASON = "it holds old bytes of a tensor that was written unannounced, as a newer version says"
_ATTEMPTS = 20
"""How often the ring is read again on a pool whose slots are being reused while we read."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cyclic garbage collector makes no collection by itself until the end of the block; ``gc.collect()``
    works. A collector that is off stays off.

    A recovery makes some ten objects per tensor in one go, and keeps them. To the collector that looks like garbage in
    the making: it passes over them again and again, and over all that was made before, and finds nothing. That took a
    fifth of a recovery of 100,000 tensors."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@collector_paused()
@ordinary_tensors()
def recover(
    pool_path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: object = None,
    state: Mapping[str, object] | None = None,
    *,
    step: int | None = None,
    device: torch.device | str = "cpu",
    strict: bool = True,
) -> Checkpoint:
    """The newest version of a pool that verifies.

    Args:
        pool_path: the pool; it may be in use (it is only read).
        model: restore into this module in place; without it everything is loaded into new tensors.
        optimizer: an optimizer, or a list of them, restored by parameter name.
        state: name -> object with ``load_state_dict``, restored from what was saved under that name.
        step: this step instead of the newest.
        device: where new tensors are made, without ``model``.
        strict: raise where checkpoint and model differ; else take what fits and list the rest in ``.drift``.

    Raises:
        PoolError: there is no pool, or not one that can be read (see :mod:`lightck.errors`).
        NoCheckpointError: nothing was committed yet, or not this step.
        CorruptPoolError: versions exist and none of them verifies.
        DriftError: the checkpoint does not fit ``model``, ``optimizer`` or ``state``; nothing was changed, but where an
            object in ``state`` refuses what it saved: then the model's parameters are NaN, as the message says.
        SessionError: the model's session is open.
        TypeError, ValueError: an argument that makes no sense, or a ``device`` that this machine or torch lacks.
    """
    _check_arguments(model, optimizer, state, step)
    if model is None:
        refuse_unusable_device(device)
    path = readable_path(pool_path)
    reader = open_pool(path)
    try:
        if model is None:
            return newest(reader, step, lambda v, c, r: _load(reader, v, c, r, device))
        in_use = holder_of(path) is not None
        return restore_newest(reader, step, model, optimizer, state, strict=strict, in_use=in_use)
    finally:
        reader.close()


def _check_arguments(model: object, optimizer: object, state: object, step: object) -> None:
    refuse_other_than_mapping(state)
    if step is not None and (isinstance(step, bool) or not isinstance(step, Integral)):
        raise TypeError(f"step={step!r} is a {type(step).__name__}. Pass the number of a step, an int: step=1000.")
    if model is None and (optimizer is not None or state):
        said = " and ".join(name for name, given in (("optimizer=", optimizer), ("state=", state)) if given is not None)
        raise TypeError(
            f"{said} without model=: they are restored together with the model, whose parameters name their state. "
            "Pass model= too; or leave them out, and read .optimizer and .state of the checkpoint."
        )


def newest(
    reader: PoolReader, step: int | None, take: Callable[[StoredCheckpoint, Contents, list[RejectedCheckpoint]], T]
) -> T:
    """``take`` of the newest version that it does not reject by ``DamagedError``.

    On a pool in use a slot may be re-used while we look at it: as long as new lines appear, we look again.
    """
    for _ in range(_ATTEMPTS):
        commit_log, rejected = reader.commit_log(), []
        stale_after: int | None = None
        for stored in reader.checkpoints(step):
            if isinstance(stored, RejectedCheckpoint):
                rejected.append(stored)
                continue
            generation = stored.record.payload_generation
            if stale_after is not None and generation > stale_after:
                rejected.append(RejectedCheckpoint(stored.step, stored.record.generation, STALE_REASON))
                continue
            try:
                contents = parse(stored)
                known = [each for each in (stale_after, contents.stale_after) if each is not None]
                stale_after = min(known, default=None)
                taken = take(stored, contents, rejected)
            except DamagedError as err:
                rejected.append(RejectedCheckpoint(stored.step, stored.record.generation, str(err)))
                continue
            if stored.is_intact():
                return taken
            rejected.append(
                RejectedCheckpoint(stored.step, stored.record.generation, "its slot was reused while it was read")
            )
        if reader.commit_log() == commit_log:
            raise _nothing_left(reader, commit_log, step, rejected)
    raise PoolLockedError(
        f"The pool {reader.path!r} is in use, and its versions were overwritten faster than they could be read, "
        f"{_ATTEMPTS} times. Nothing is wrong with it. Try again, end the training first, or give it more slots: "
        "attach(..., slots=3)."
    )


def parse(stored: StoredCheckpoint) -> Contents:
    """Raises ``DamagedError`` where the small state does not make sense."""
    try:
        return Contents.parse(stored.state, stored.step, stored.iteration, stored.entries)
    except CorruptPoolError as err:
        raise DamagedError(str(err)) from err


def _nothing_left(
    reader: PoolReader, commit_log: CommitLog, step: int | None, rejected: list[RejectedCheckpoint]
) -> Exception:
    reasons = tuple(map(str, rejected)) + tuple(f"commit line {p} is damaged" for p in commit_log.damaged)
    if commit_log.is_empty:
        return erased_log_error(reader) or NoCheckpointError(
            f"The pool {reader.path!r} holds no checkpoint yet. The training that made it committed no step so far. "
            "If it has ended, start it afresh; attach(..., resume=True) does that by itself."
        )
    held = {record.step for record in commit_log.records.values() if not reader.is_reused(record)}
    if step is not None and step not in held:
        return NoCheckpointError(
            f"The pool {reader.path!r} does not hold step {step}. It holds {', '.join(map(str, sorted(held)))}: older "
            "steps were overwritten, since a pool keeps the newest few. Ask for one of these, or leave step out."
        )
    return CorruptPoolError(
        f"No version in the pool {reader.path!r} verifies: {'; '.join(reasons)}. Nothing was restored. Use another "
        "copy of the pool; attach(..., overwrite=True) discards this one and starts afresh.",
        reasons,
    )


def erased_log_error(reader: PoolReader) -> CorruptPoolError | None:
    """Of a pool whose commit lines are gone (``PoolReader.unnamed_generations``)."""
    generations = ", ".join(map(str, reader.unnamed_generations()))
    if not generations:
        return None
    return CorruptPoolError(
        f"All commit lines of the pool {reader.path!r} are erased, and its slots hold versions (generations "
        f"{generations}). Which of them were committed whole cannot be told any more. Nothing was restored or changed. "
        "Use another copy of the pool; attach(..., overwrite=True) discards this one and starts afresh.",
        ("every commit line is erased",),
    )


def _load(
    reader: PoolReader,
    stored: StoredCheckpoint,
    contents: Contents,
    rejected: list[RejectedCheckpoint],
    device: torch.device | str,
) -> Checkpoint:
    source = in_memory(stored, device)
    return Checkpoint(contents, lambda: source, stored.record, reader.path, reader.superblock.uuid, rejected)


def _read_again(path: str, uuid: bytes, record: CommitRecord) -> MemorySource:
    """The tensors of a version that was restored in place, if the pool still holds it."""
    reader = open_pool(path)
    try:
        if reader.superblock.uuid != uuid:
            raise DamagedError("the pool was made anew since")
        return in_memory(reader.checkpoint(record))
    except DamagedError as err:
        raise NoCheckpointError(
            f"Step {record.step}, which was restored in place, is no longer in the pool {path!r} ({err}), and the live "
            "tensors may have trained on. Use lightck.recover(path) without a model to keep a version in memory."
        ) from err
    finally:
        reader.close()


@collector_paused()
def restore_newest(
    reader: PoolReader,
    step: int | None,
    model: nn.Module,
    optimizer: object,
    state: Mapping[str, object] | None,
    *,
    strict: bool,
    complete: bool = False,
    in_use: bool = False,
) -> Checkpoint:
    """Restore the newest version that verifies into live objects; the next older one where a block fails.

    ``in_use``: a training may write the version over while it is read, so it is read into memory of its own first.
    """
    touched: list[torch.Tensor] = []

    def take(stored: StoredCheckpoint, contents: Contents, rejected: list[RejectedCheckpoint]) -> Checkpoint:
        plan = plan_restore(contents, model, optimizer, state, strict=strict, complete=complete)
        source = in_memory(stored, "cpu") if in_use or touched else stored
        if source is not stored and not stored.is_intact():
            raise DamagedError("its slot was reused while it was read")
        try:
            _restore.apply(plan, source)
        finally:
            touched.extend(plan.held.values())
        path, uuid, record = reader.path, reader.superblock.uuid, stored.record
        checkpoint = Checkpoint(contents, lambda: _read_again(path, uuid, record), record, path, uuid, rejected)
        checkpoint.record_restored(model, plan)
        return checkpoint

    try:
        return newest(reader, step, take)
    except BaseException as err:
        if touched:
            poison(err, touched, model)
        raise
