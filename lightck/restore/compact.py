"""Write one checkpoint of a pool into a new pool, in which each slot holds a whole checkpoint.

The new pool holds that checkpoint alone. Gradient records are replayed, so the new pool is smaller than one that has
them. Training can continue in it bit for bit with any strategy except ``Gradients``.

    take       the newest checkpoint that verifies; its updates are replayed
    copy       its tensors, in batches, into a temporary file; the commit is durable. (If a training has the old pool
               open, and may overwrite the checkpoint, it is read into memory first)
    verify     each block of the copy against its checksum
    publish    the file is renamed to its final path, at which nothing must lie

Invariants: the old pool is only read; nothing that exists is replaced; a file under the new name is complete. A kill
leaves at most a temporary file, which the next attempt removes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial

from lightck.errors import ExportError, ExportExistsError, UnsupportedError
from lightck.pool.engine import Engine
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import PoolReader, RejectedCheckpoint, open_pool
from lightck.pool.storage.backends import backend_for, pool_path, readable_path
from lightck.pool.storage.lock import PoolLock, holder_of
from lightck.restore.contents import Contents, Saved, in_memory
from lightck.restore.pool_copies import pool_with_copy
from lightck.restore.recover import collector_paused, take_newest
from lightck.restore.replayed import ReplayedCheckpoint
from lightck.restore.tensor_writes import ordinary_tensors

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""``progress(label, total_bytes)`` is a context manager. It yields a function; call it with numbers of bytes done."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """What was written. nbytes, old_nbytes: sizes of the new and of the old pool. updates: how many updates were
    replayed from the oldest base. rejected: newer checkpoints that were skipped."""

    step: int
    path: str
    tensors: int
    nbytes: int
    old_nbytes: int
    updates: int
    rejected: tuple[RejectedCheckpoint, ...]


@collector_paused()
@ordinary_tensors()
def compact(path: str, new: str, *, step: int | None, progress: Progress) -> Compacted:
    """Write the newest checkpoint of a pool (of ``step``, if given) into a new pool.

    Raises ``ExportExistsError`` if something lies at ``new``, what ``recover`` raises, ``UnsupportedError`` for the
    pools of ranks, or if an optimizer of another class than those of ``torch.optim`` is needed, and ``NoSpaceError``.
    After any error but ``ExportExistsError`` there is no file at ``new``."""
    target = pool_path(new)
    if os.path.isdir(path):
        raise UnsupportedError(
            f"{path!r} is a directory, and compact takes the pool of a single process. Name that pool. For the pools "
            "of a group of ranks: lightck reshard DIR OUT --world N."
        )
    _refuse_existing(target)
    with closing(open_pool(readable_path(path), gradients=True)) as reader:
        return take_newest(reader, step, partial(_write, reader=reader, target=target, progress=progress))


def _refuse_existing(path: str) -> None:
    if os.path.lexists(path):
        raise ExportExistsError(
            f"{path!r} exists, and compact replaces nothing. Name a file that does not exist, or remove this one if "
            "nobody needs it."
        )


def _write(
    stored: Saved,
    contents: Contents,
    rejected: list[RejectedCheckpoint],
    *,
    reader: PoolReader,
    target: str,
    progress: Progress,
) -> Compacted:
    """Write a checkpoint into a new pool at ``target``. Raises ``DamagedError`` if a block of the checkpoint cannot be
    used, or was overwritten while it was read."""
    source = in_memory(stored, "cpu") if holder_of(stored.path) is not None else None
    nbytes, kind = sum(entry.nbytes for entry in stored.entries.values()), backend_for(target)
    with ExitStack() as stack:
        stack.callback(PoolLock(target).release)
        engine = stack.enter_context(closing(Engine(1)))
        with progress("compacting", nbytes) as advance:
            container, writer = pool_with_copy(kind, target, reader, stored, engine, advance=advance, source=source)
        stack.enter_context(closing(writer))
        with progress("verifying", nbytes) as advance:
            _verify(writer.reader, stored, advance)
        _refuse_existing(target)
        container.publish()
    return Compacted(
        stored.step,
        target,
        len(stored.entries),
        os.path.getsize(target),
        reader.superblock.nbytes,
        _n_updates(stored),
        tuple(rejected),
    )


def _verify(reader: PoolReader, stored: Saved, advance: Callable[[int], None]) -> None:
    """Read each block of the copy. Raises ``ExportError`` if one is not what was written."""
    copy = next(reader.checkpoints())
    try:
        if isinstance(copy, RejectedCheckpoint):
            raise DamagedError(copy.reason)
        assert copy.entries.keys() == stored.entries.keys()
        for name, entry in copy.entries.items():
            copy.read_into(name, 0)  # address 0: the bytes are verified, and not copied
            advance(entry.nbytes)
    except DamagedError as err:
        raise ExportError(
            f"The new pool {reader.path!r} does not hold what was written to it: {err}. It was removed. Check the "
            "medium, or name a file on another one."
        ) from err


def _n_updates(stored: Saved) -> int:
    if not isinstance(stored, ReplayedCheckpoint):
        return 0
    return stored.step - stored.gradient_checkpoint.oldest_base_step
