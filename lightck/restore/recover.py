"""Recovery: find the newest checkpoint of a pool that verifies, and load or restore it. Recovery never writes to the
pool.

Checkpoints are tried from newest to oldest. If a block does not match its checksum, the next older checkpoint is
restored over the same tensors. If no checkpoint verifies, recovery raises. If it has written to tensors of the model by
then, it also writes NaN into the floating-point and complex tensors among the model's parameters and among what it has
written to, so that nobody trains on a mix of two checkpoints.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import TypeVar

import torch
from torch import nn

from lightck.errors import CorruptPoolError, NoCheckpointError, PoolLockedError, UnsupportedError
from lightck.layout import Layout
from lightck.pool.commit_log import CommitLog
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.reader import PoolReader, RejectedCheckpoint, StoredCheckpoint, open_pool
from lightck.pool.storage.lock import holder_of
from lightck.restore import restore as _restore
from lightck.restore.checkpoint import Checkpoint, as_list, plan_restore, poison
from lightck.restore.contents import Contents, MemorySource, Saved, in_memory
from lightck.restore.logical import LogicalCheckpoint
from lightck.restore.optimizers_at_hand import OptimizersAtHand
from lightck.restore.ranges import RangeReader, pieces_of_pool
from lightck.restore.replayed import ReplayedCheckpoint
from lightck.restore.usable import STALE_REASON, StaleCheckpoints, checkpoints_of, parse, stored_checkpoint

T = TypeVar("T")
_ATTEMPTS = 20
"""The largest number of attempts. All checkpoints are tried again if a training reused slots of the pool meanwhile."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable Python's automatic cyclic garbage collection in this block; ``gc.collect()`` still works. After the
    block the collector is enabled if it was enabled before.

    A recovery makes about ten lasting objects per tensor, so that Python would run many collections. They free nothing,
    and took a fifth of the time of a recovery of 100,000 tensors."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def recover_pool(
    path: str,
    model: nn.Module | None,
    optimizer: object,
    state: Mapping[str, object] | None,
    step: int | None,
    device: torch.device | str,
    *,
    strict: bool,
    lazy: bool,
) -> Checkpoint:
    """``lightck.recover`` for the pool of a single process. ``path``: an absolute path."""
    if lazy:
        return recover_lazily(lambda: open_pool(path), step)
    with closing(open_pool(path, gradients=True)) as reader:
        in_use = model is not None and holder_of(path) is not None
        return recover_from(reader, model, optimizer, state, step, device, strict=strict, in_use=in_use)


def recover_from(
    reader: PoolReader,
    model: nn.Module | None,
    optimizer: object,
    state: Mapping[str, object] | None,
    step: int | None,
    device: torch.device | str,
    *,
    strict: bool,
    in_use: bool = False,
) -> Checkpoint:
    """Load or restore the newest checkpoint of an open pool. ``in_use``: as in ``restore_newest``."""
    if model is None:
        return take_newest(
            reader, step, lambda stored, contents, rejected: _load(reader, stored, contents, rejected, device)
        )
    return restore_newest(reader, step, model, optimizer, state, strict=strict, in_use=in_use)


def recover_lazily(opening: Callable[[], PoolReader], step: int | None) -> Checkpoint:
    """``lightck.recover`` with ``lazy=True`` for one pool. ``opening``: opens it."""
    open_pools = ExitStack()
    with ExitStack() as stack:
        reader = opening()
        stack.callback(reader.close)

        def take(stored: Saved, contents: Contents, rejected: list[RejectedCheckpoint]) -> Checkpoint:
            assert isinstance(stored, StoredCheckpoint), "open_pool has refused a pool with gradient records"
            ranges = RangeReader(open_pools, LogicalCheckpoint([stored]))
            return Checkpoint(
                contents,
                ranges.all,
                stored.record,
                reader.path,
                reader.superblock.uuid,
                rejected,
                pieces_of_pool(reader.path, contents.entries),
                ranges,
            )

        checkpoint = take_newest(reader, step, take, keep_open=stack)
        open_pools.push(stack.pop_all())
        return checkpoint


def take_newest(
    reader: PoolReader,
    step: int | None,
    take: Callable[[Saved, Contents, list[RejectedCheckpoint]], T],
    optimizers: OptimizersAtHand | None = None,
    keep_open: ExitStack | None = None,
) -> T:
    """Call ``take`` for one checkpoint after the other, from newest to oldest, until a call raises no ``DamagedError``,
    and return the result of that call. ``step``: try the checkpoints of this step only. ``take`` gets the checkpoint,
    its contents and the checkpoints that were rejected before. ``optimizers``: as in ``checkpoints_of``. ``keep_open``:
    gets the hold of the checkpoint's slot; None: the slot is held only while ``take`` runs.

    A training may reuse a slot while the slot is read. So, if no checkpoint could be used and new commit records have
    appeared, all checkpoints are tried again. Raises ``PoolLockedError`` after ``_ATTEMPTS`` attempts, and
    ``NoCheckpointError`` or ``CorruptPoolError`` if no new commit records have appeared. Raises
    ``UnsupportedError`` as ``refuse_part`` does.
    """
    refuse_part(reader)
    for _ in range(_ATTEMPTS):
        commit_log, rejected = reader.commit_log(), []
        # Without ``step`` each newer checkpoint is visited below, and adds what it says about older ones.
        stale = StaleCheckpoints() if step is None else StaleCheckpoints.of_pool(reader, checkpoints_of(reader))
        for stored in checkpoints_of(reader, step, optimizers):
            if isinstance(stored, RejectedCheckpoint):
                rejected.append(stored)
                continue
            # The generation with which the checkpoint was written. If the checkpoint was adopted, ``stored.record`` is
            # the record of the adoption, and ``stored.record.generation`` is larger.
            generation = stored.record.payload_generation
            if stale.includes(generation):
                rejected.append(RejectedCheckpoint(stored.step, stored.record.generation, STALE_REASON))
                continue
            with ExitStack() as holds:
                holds.enter_context(stored.hold())
                try:
                    contents = parse(stored)
                    stale.add(contents, generation)
                    taken = take(stored, contents, rejected)
                except DamagedError as err:
                    rejected.append(RejectedCheckpoint(stored.step, stored.record.generation, str(err)))
                    continue
                if stored.owns_slot():
                    if keep_open is not None:
                        keep_open.push(holds.pop_all())
                    return taken
            rejected.append(
                RejectedCheckpoint(stored.step, stored.record.generation, "its slot was reused while it was read")
            )
        if reader.commit_log() == commit_log:
            raise _no_checkpoint_error(reader, commit_log, step, rejected)
    raise PoolLockedError(
        f"The pool {reader.path!r} is in use, and in each of {_ATTEMPTS} attempts its checkpoints were overwritten "
        "while they were read. The pool is not damaged. Try again, or end the training first. A pool without gradient "
        "records can also be given more slots: attach(..., slots=3)."
    )


def refuse_part(reader: PoolReader) -> None:
    """Raise ``UnsupportedError`` if the pool is that of a rank: its tensors may be parts, and a part must not be taken
    for the whole. Call this function before anything is read from a checkpoint."""
    group = reader.group
    if group is not None:
        raise UnsupportedError(
            f"The pool {reader.path!r} holds the state of rank {group.rank} of {group.world_size}, which may be only a "
            "part of the training. Nothing was restored or changed. Pass the directory that holds the pools of all "
            f"ranks: lightck.recover({os.path.dirname(reader.path)!r})."
        )


def _no_checkpoint_error(
    reader: PoolReader, commit_log: CommitLog, step: int | None, rejected: list[RejectedCheckpoint]
) -> Exception:
    """Return the error for a pool in which no checkpoint (of ``step``, if given) can be used."""
    reasons = tuple(map(str, rejected)) + tuple(f"commit record {p} is damaged" for p in commit_log.damaged)
    if commit_log.is_empty:
        return erased_log_error(reader) or NoCheckpointError(
            f"The pool {reader.path!r} holds no checkpoint yet. The training that made the pool has committed no step. "
            "If that training has ended, start it afresh: attach(..., resume=True) does so on a pool without "
            "checkpoints."
        )
    steps = {record.step for record in commit_log.records.values() if not reader.has_lost_slot(record)}
    if step is not None and step not in steps:
        return NoCheckpointError(
            f"The pool {reader.path!r} does not hold step {step}. It holds {', '.join(map(str, sorted(steps)))}: older "
            "steps were overwritten, because a pool keeps only the newest ones. Ask for a step that the pool holds, or "
            "leave step= out."
        )
    return CorruptPoolError(
        f"No checkpoint in the pool {reader.path!r} can be used: {'; '.join(reasons)}. Nothing was restored. Use "
        "another copy of the pool; attach(..., overwrite=True) discards this pool and starts afresh.",
        reasons,
    )


def erased_log_error(reader: PoolReader) -> CorruptPoolError | None:
    """Return the error for a pool whose commit records were erased (``PoolReader.generations_of_erased_records``), or
    None for any other pool."""
    generations = ", ".join(map(str, reader.generations_of_erased_records()))
    if not generations:
        return None
    return CorruptPoolError(
        f"All commit records of the pool {reader.path!r} are erased, and its slots hold checkpoints (generations "
        f"{generations}). Without a record it is unknown which of these checkpoints are complete. Nothing was restored "
        "or changed. Use another copy of the pool; attach(..., overwrite=True) discards this pool and starts afresh.",
        ("every commit record is erased",),
    )


def _load(
    reader: PoolReader,
    stored: Saved,
    contents: Contents,
    rejected: list[RejectedCheckpoint],
    device: torch.device | str,
) -> Checkpoint:
    source, pieces = in_memory(stored, device), pieces_of_pool(reader.path, contents.entries)
    return Checkpoint(contents, lambda: source, stored.record, reader.path, reader.superblock.uuid, rejected, pieces)


def _read_again(path: str, uuid: bytes, record: CommitRecord, optimizers: OptimizersAtHand | None) -> MemorySource:
    """Read the tensors of a checkpoint that was restored in place, from the pool into memory. ``optimizers``: given if
    updates must be replayed. Raises ``NoCheckpointError`` if the pool no longer holds the checkpoint."""
    if os.path.isdir(path):
        raise NoCheckpointError(
            f"The tensors of step {record.step} cannot be read: they were restored into the live model, without a "
            f"copy in memory, and a tier is not read again ({path!r}). To keep a checkpoint in memory, call "
            "lightck.recover(path) without a model."
        )
    reader = open_pool(path, gradients=optimizers is not None)
    try:
        if reader.superblock.uuid != uuid:
            raise DamagedError("another pool lies at this path now")
        return in_memory(stored_checkpoint(reader, record, optimizers))
    except DamagedError as err:
        raise NoCheckpointError(
            f"The tensors of step {record.step} cannot be read: they were restored into the live model, without a "
            f"copy in memory, and the pool {path!r} no longer holds this step ({err}). To keep a checkpoint in memory, "
            "call lightck.recover(path) without a model."
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
    unused_is_drift: bool = False,
    in_use: bool = False,
) -> Checkpoint:
    """Restore the newest checkpoint that verifies into live objects, and return it. If a block does not match its
    checksum, restore the next older checkpoint. Raises as ``recover`` does.

    ``step``, ``strict``: as in ``recover``. ``unused_is_drift``: whether it counts as drift if there is no live object
    for a saved optimizer or for a saved name in ``state``. ``in_use``: whether a training has the pool open, and may
    overwrite the checkpoint while it is read. If so, the whole checkpoint is read into separate memory before live
    tensors change.
    """
    live = LiveRestore(model, optimizer, state, strict=strict, unused_is_drift=unused_is_drift, in_use=in_use)
    at_hand = OptimizersAtHand(model, as_list(optimizer)) if reader.superblock.has_gradients else None
    with live.poisons_on_error():
        return take_newest(reader, step, live.take, at_hand)


class LiveRestore:
    """Restores one checkpoint after the other into live objects, until one of them verifies. The arguments are those of
    ``restore_newest``. ``of_rank``: whether the checkpoints are those of a rank, so that tensors may be parts.
    ``layout``: says of each plain tensor (no DTensor) which part of its logical tensor it is."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: object,
        state: Mapping[str, object] | None,
        *,
        strict: bool,
        unused_is_drift: bool,
        in_use: bool = False,
        of_rank: bool = False,
        layout: Layout | None = None,
    ) -> None:
        self._model, self._optimizer, self._state, self._of_rank = model, optimizer, state, of_rank
        self.layout = layout
        self._strict, self._unused_is_drift, self._in_use = strict, unused_is_drift, in_use
        self._touched: list[torch.Tensor] = []
        """Live tensors that may have been written."""

    def take(self, stored: Saved, contents: Contents, rejected: list[RejectedCheckpoint]) -> Checkpoint:
        """Restore a checkpoint. Raises ``DamagedError`` at a block that does not match its checksum; live tensors may
        have been written before the error."""
        model = self._model
        plan = plan_restore(
            contents,
            model,
            self._optimizer,
            self._state,
            strict=self._strict,
            unused_is_drift=self._unused_is_drift,
            of_rank=self._of_rank,
            layout=self.layout,
        )
        # If ``_touched`` is not empty, the restore of a newer checkpoint failed halfway. So this checkpoint is read and
        # verified as a whole before live tensors are written again.
        source = in_memory(stored, "cpu") if self._in_use or self._touched else stored
        if source is not stored and not stored.owns_slot():
            raise DamagedError("its slot was reused while it was read")
        try:
            _restore.apply(plan, source)
        finally:
            self._touched.extend(plan.restored.values())
        path, uuid, record = stored.path, stored.uuid, stored.record
        pieces = pieces_of_pool(path, contents.entries)
        at_hand = stored.optimizers if isinstance(stored, ReplayedCheckpoint) else None
        checkpoint = Checkpoint(
            contents, lambda: _read_again(path, uuid, record, at_hand), record, path, uuid, rejected, pieces
        )
        checkpoint.record_restored(model, plan)
        return checkpoint

    @contextmanager
    def poisons_on_error(self) -> Iterator[None]:
        """If the block raises after live tensors were written, make the model unusable (``poison``)."""
        try:
            yield
        except BaseException as err:
            if self._touched:
                poison(err, self._touched, self._model)
            raise
