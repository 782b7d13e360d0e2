"""Write one checkpoint of given tensors into a pool, and commit it.

    lock        the pool's lock is held from the first look to the commit: a second writer is refused
    open        an existing pool is used again; the checkpoint that must stay is held
    copy        tensor by tensor, in batches, into a free slot. If something no longer fits (another shape, a new name),
                the pool moves to a new file, and takes along the held checkpoint
    commit      the commit record is durable when ``save`` returns

Invariants: the held checkpoint is not overwritten, and a new file gets the pool's name only with the new checkpoint in
it. So a kill at any store leaves the checkpoint before, or the new one. An error leaves the checkpoint before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress

import torch

from lightck.errors import PoolError, PoolLockedError
from lightck.events import ClosingEvent
from lightck.pipeline.current_pool import CurrentPool
from lightck.pipeline.pool_kind import WholeCheckpoints
from lightck.pool.direct_writes import copy_threads
from lightck.pool.engine import Engine
from lightck.pool.format.boxes import Box
from lightck.pool.format.layout import Entry
from lightck.pool.listener import CommitEvents
from lightck.pool.reader import open_pool
from lightck.pool.storage.backends import backend_for, pool_path
from lightck.pool.storage.lock import PoolLock
from lightck.pool.writer import PoolWriter, RelayoutNeededError
from lightck.ranks.directory import pools_in
from lightck.restore.pool_copies import commit, copied_plan, copy_batches, names_of_batches
from lightck.restore.usable import usable_by_id
from lightck.saving.given import GivenTensor, batches_of
from lightck.saving.places import Order, path_of
from lightck.state import rng, values
from lightck.tiers.pin import Holds

log = logging.getLogger("lightck")
SLOTS = 2
"""Number of slots of a pool: the checkpoint that stays, and the one that is written."""
RANKS_NAME = "ranks"
"""Name of a tensor of which each rank holds one element. So a checkpoint is complete only with the pools of all ranks.
Without it, the pool of a rank that holds no part of any other tensor could be lost unnoticed."""


def save(
    path: str | os.PathLike[str],
    order: Order,
    tensors: Sequence[GivenTensor],
    state: Mapping[str, object],
) -> int:
    """Commit a checkpoint, and return the number of bytes of its tensors.

    ``path``: as for ``survey``. ``tensors``: those of this rank, with different names. ``state``: name -> plain value,
    which ``Checkpoint.state`` has under this name.

    Raises ``PoolError`` (``PoolLockedError``: another process, or thread, writes to the pool), ``StateValueError`` for
    what cannot be stored, and ``BackgroundError``. After an error the checkpoint before is intact."""
    given, group = list(tensors), order.group
    if group is not None:
        one = Box((group.rank,), (1,))
        own = torch.tensor([group.rank], dtype=torch.int64)
        given.append(GivenTensor(RANKS_NAME, own.dtype, (group.world_size,), (one,), lambda _: own))
    entries = [one.whole_entry() if group is None else one.part_entry() for one in given]
    with ExitStack() as stack:
        pool, holds = _opened(path_of(path, order), order, stack)
        small = _small_state(order, state)

        def commit_in(writer: PoolWriter) -> None:
            writer.incarnation = order.id.incarnation
            _commit(writer, order, holds, given, entries, small)

        try:
            commit_in(pool.ready_writer())
        except RelayoutNeededError as why:
            if pool.writer is not None:
                log.info("lightck: the pool %r moves to a new file: %s", pool.path, why)
                pool.writer.incarnation = order.id.incarnation
            pool.relayout(entries, len(small), commit_in)
    if order.goes_on and order.common is not None and group is not None:
        remove_other_worlds(path, order, only_own_share=True)
    return sum(entry.nbytes for entry in entries)


def _opened(path: str, order: Order, stack: ExitStack) -> tuple[CurrentPool, Holds]:
    """Return the pool, and the holds with the checkpoint that must stay. The end of ``stack`` closes all."""
    try:
        lock = PoolLock(path)
    except PoolLockedError as err:
        raise PoolLockedError(
            f"Nothing was saved into the pool {path!r}, because something else writes to it. If that is another save, "
            f"wait until it has ended (with dcp.async_save: for its future), and save again. {err}"
        ) from err
    stack.callback(lock.release)
    backend, events, holds = backend_for(path), CommitEvents(), Holds()
    backend.remove_stale(path)
    medium_durability = backend.probe(path)
    engine = stack.enter_context(closing(Engine(copy_threads(path, backend.name, medium_durability.medium_kind))))
    events.add(holds)
    pool = CurrentPool(path, backend, medium_durability, engine, SLOTS, lock, events, WholeCheckpoints())
    stack.callback(pool.close)
    pool.group = order.group
    if not order.goes_on:
        if os.path.lexists(path) and not order.discards:
            raise _written_meanwhile(path)
        return pool, holds
    writer = pool.open(open_pool(path, write=True))
    if writer.commit_log.incarnation >= order.id.incarnation:
        raise _written_meanwhile(path)
    if order.common is not None:
        stored = usable_by_id(writer.reader)[order.common][0]
        holds.take_slot(writer, stored.record.slot, is_for_save=True)
    return pool, holds


def _written_meanwhile(path: str) -> PoolLockedError:
    return PoolLockedError(
        f"Something else has written to the pool {path!r} since this save began. Nothing was written. Let one process "
        "(or one group of ranks) save into a pool at a time, and save again."
    )


def _commit(
    writer: PoolWriter,
    order: Order,
    holds: Holds,
    given: Sequence[GivenTensor],
    entries: Sequence[Entry],
    small: bytes,
) -> None:
    """Copy and commit the checkpoint. Raises ``RelayoutNeededError`` before anything is written."""
    unfit = [entry for entry in entries if not writer.has_extent_for(entry)]
    if unfit:
        writer.add(unfit, {entry.name for entry in entries})
    numbers = {entry.name: writer.numbers[entry.name] for entry in entries}
    slot = writer.choose_slot(lambda read: writer.slots.choose(holds.held(writer) | read)).slot
    assert slot is not None, "one slot is held, and no checkpoint is in flight"
    batches = batches_of(given, entries, names_of_batches({entry.name: entry.nbytes for entry in entries}))
    pending = copy_batches(writer, slot, copied_plan(order.id.step, 0, numbers, small), numbers, batches)
    commit(pending)
    writer.committed(pending)


def _small_state(order: Order, state: Mapping[str, object]) -> bytes:
    """Return the packed small state: that of a training without optimizers and loaders. The random states are those of
    the moment of the save, and nothing restores them."""
    return values.pack(
        {
            "version": values.STATE_VERSION,
            "event": ClosingEvent.SAVE.value,
            "explicit": False,
            "rng": rng.capture().to_value(),
            "rng_forward": None,
            "optimizers": [],
            "state": {name: values.pack(value, path=f"state[{name!r}]") for name, value in state.items()},
            "extra": {},
            "loaders": {},
            "at_once": [],
            "fingerprint": {},
            "first_of_world": order.is_first_of_world,
        },
        path="state",
    )


def remove_other_worlds(path: str | os.PathLike[str], order: Order, *, only_own_share: bool = False) -> None:
    """Remove the pools of all other worlds from the directory, because all ranks of this world have a checkpoint.
    ``only_own_share``: look only at those pools whose rank number, modulo the number of ranks, is this rank's, so that
    all ranks together look at each pool once."""
    group, directory = order.group, pool_path(path)
    assert group is not None, "only the pools of ranks lie in a directory"
    for file in pools_in(directory):
        rank = int(file.name.split("-")[1])
        if file.name == order.name or (only_own_share and rank % group.world_size != group.rank):
            continue
        with suppress(PoolError):  # of what cannot be read, nobody knows whose it is
            with closing(open_pool(str(file), gradients=True)) as reader:
                is_of_world = reader.group is not None and reader.group.world_id == group.world_id
            if not is_of_world:
                _remove(str(file))


def _remove(path: str) -> None:
    """Remove a pool that no process has open for writing. Raises ``PoolError``."""
    log.info("lightck: the pool %r, of an earlier world, is no longer needed. It is removed unless it is open", path)
    lock = PoolLock(path)
    try:
        backend_for(path).discard(path)
        with suppress(OSError):
            os.unlink(f"{path}.lock")
    finally:
        lock.release()
