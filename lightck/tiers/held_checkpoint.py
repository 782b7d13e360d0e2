"""A checkpoint of a pool that is in use, readable whole until it is sent.

A slot is held (``pool/slot_locks.py``). A pool with gradient records has no slot that holds a checkpoint whole: its
updates are made again, with torch, and nothing of the pool is needed afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightck.pool.commit_log import candidates
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.reader import PoolReader, StoredCheckpoint


class OverwrittenError(DamagedError):
    """The training has overwritten the checkpoint, which is no damage: there is a newer one."""


def record_of(reader: PoolReader, generation: int | None = None) -> CommitRecord | None:
    """Return the commit record of the newest checkpoint of a pool, or of the one with this generation; None if there is
    none."""
    records = candidates(reader.commit_log())
    return next((each for each in records if generation in (None, each.payload_generation)), None)


@contextmanager
def held(reader: PoolReader, generation: int | None = None) -> Iterator[StoredCheckpoint | None]:
    """Hold the newest checkpoint of a pool, or the one with this generation, during a ``with`` block. Yields None if
    there is none. ``reader``: may have a pool with gradient records open. Raises ``OverwrittenError`` if the training
    was faster, ``DamagedError``, ``PoolError``, and ``UnsupportedError`` if an optimizer of another class than those of
    ``torch.optim`` is needed to make updates again."""
    record = record_of(reader, generation)
    if record is None:
        yield None
        return
    with ExitStack() as stack:
        try:
            stored = _whole(reader, record, stack)
        except DamagedError as err:
            if _is_overtaken(reader, record):
                raise OverwrittenError(str(err)) from err
            raise
        if not stored.owns_slot():
            raise OverwrittenError("its slot was reused by a newer checkpoint")
        yield stored


def _whole(reader: PoolReader, record: CommitRecord, stack: ExitStack) -> StoredCheckpoint:
    if reader.superblock.has_gradients:
        from lightck.restore.whole_copy import whole_copy_of  # loads torch, which other pools do not need

        return stack.enter_context(whole_copy_of(reader, record))
    stored = reader.checkpoint(record)
    stack.enter_context(stored.hold())
    return stored


def _is_overtaken(reader: PoolReader, record: CommitRecord) -> bool:
    """Whether the training may have overwritten what the checkpoint needs."""
    if not reader.superblock.has_gradients:
        return reader.has_lost_slot(record)
    newest = record_of(reader)
    return newest is None or newest.generation > record.generation
