"""Write the tensors of one checkpoint into a slot, batch by batch: those of another pool, read and verified (a copy),
or any others that a caller hands over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from lightck.pool.create import create
from lightck.pool.engine import ENDED, Engine
from lightck.pool.format.layout import SLOT_PLACE
from lightck.pool.format.structures import DamagedError
from lightck.pool.planned_records import CopyPlan
from lightck.pool.reader import PoolReader
from lightck.pool.reservation import Reservation
from lightck.pool.slots import Slot
from lightck.pool.storage.backend import Backend, Container
from lightck.pool.storage.failures import undo_on_error
from lightck.pool.writer import Pending, PoolWriter
from lightck.ranks.rule import CheckpointId
from lightck.restore.contents import NOT_EXACT_KEY, Saved, Source, load_tensors, unpack_dict
from lightck.state import values
from lightck.state.update_record import BASE_EVERY_KEY, UPDATE_KEY

SLOTS = 2
"""Number of slots of a pool that holds one copy: the least that a pool has."""
BATCH_NBYTES = 32 << 20
"""Tensors are read into memory in batches of at most so many bytes. A larger tensor is a batch of its own."""


def commit_copy(
    writer: PoolWriter,
    checkpoint_id: CheckpointId,
    stored: Saved,
    state: bytes,
    advance: Callable[[int], None] = lambda _: None,
    source: Source | None = None,
) -> Pending:
    """Commit a copy of ``stored`` in an empty pool, and wait until it is durable. Returns where it lies.
    ``checkpoint_id``: of the copy. ``state``: its small state. ``advance`` is called with the number of bytes of each
    batch. ``source``: has the tensors; None: ``stored``. Raises ``DamagedError``."""
    writer.incarnation = checkpoint_id.incarnation
    record_numbers = {name: writer.numbers[name] for name in stored.entries}
    pending = copy_uncommitted(writer, stored, record_numbers, state, advance=advance, source=source)
    commit(pending)
    return pending


def commit(pending: Pending) -> None:
    """Commit a checkpoint whose copies have all been made, and wait until it is durable. Raises ``BackgroundError``."""
    try:
        pending.job.release()
        pending.job.wait(ENDED)
    finally:
        pending.job.abandon()


def copy_uncommitted(
    writer: PoolWriter,
    stored: Saved,
    record_numbers: dict[str, int],
    state: bytes,
    held: frozenset[int] = frozenset(),
    *,
    advance: Callable[[int], None] = lambda _: None,
    source: Source | None = None,
) -> Pending:
    """Copy the tensors of a checkpoint into a slot of a new pool file, and return the pending checkpoint, whose job
    must be released to commit it. The tensors are read and copied in batches, so that they need little memory. Raises
    ``DamagedError``.

    ``record_numbers``: name -> record number in that file, of each tensor of the checkpoint. ``state``: the small state
    of the copy. ``held``: indexes of slots that must not be overwritten. ``advance``, ``source``: as for
    ``commit_copy``."""
    slot = writer.slot_for_copy(stored.step, held)
    assert slot is not None, "a new pool has room for each checkpoint that is copied into it"

    def batches() -> Iterator[Mapping[str, torch.Tensor]]:
        for names in names_of_batches({name: entry.nbytes for name, entry in stored.entries.items()}):
            yield load_tensors(source or stored, names)
            advance(sum(stored.entries[name].nbytes for name in names))

    return copy_batches(
        writer, slot, copied_plan(stored.step, stored.iteration, record_numbers, state), record_numbers, batches()
    )


def copy_batches(
    writer: PoolWriter,
    slot: Slot,
    plan: CopyPlan,
    record_numbers: Mapping[str, int],
    batches: Iterable[Mapping[str, torch.Tensor]],
) -> Pending:
    """Copy tensors into a slot, batch by batch, and return the pending checkpoint, whose job must be released to
    commit it.

    ``plan``: what ``copied_plan`` returned. ``record_numbers``: name -> record number of each tensor. ``batches``: each
    is name -> tensor in host memory, with the strides of its entry; together they have every tensor with bytes. The
    next batch is asked for when the one before is in the slot. If a batch raises, the slot is freed."""
    reservation = writer.reserve(slot)
    try:
        for batch in batches:
            _copy_batch(reservation, record_numbers, batch)
            del batch  # only one batch is in memory at a time
        return writer.begin(plan, slot, None, reservation)
    except BaseException:
        if slot.in_flight:
            reservation.drop()
        raise


def state_for_copy(stored: Saved) -> dict[str, object]:
    """Return the small state for a copy of a checkpoint: the checkpoint's own, without the keys that belong to its
    gradient records, which are not copied. It has ``NOT_EXACT_KEY`` if the replay of the updates may have given other
    bits than the training."""
    state = {key: value for key, value in unpack_dict(stored.state).items() if key not in (UPDATE_KEY, BASE_EVERY_KEY)}
    not_exact = getattr(stored, "not_exact", "")  # of a ``ReplayedCheckpoint`` or a ``Relocated``
    if not_exact:
        state[NOT_EXACT_KEY] = not_exact
    return state


def small_state_of_new_pool(stored: Saved) -> bytes:
    """Return the small state for a copy in a pool of its own: that of ``state_for_copy``, without ``stale_after``,
    which is a generation of the old pool."""
    return values.pack(state_for_copy(stored) | {"stale_after": None}, path="state")


def pool_with_copy(
    kind: Backend,
    path: str,
    reader: PoolReader,
    stored: Saved,
    engine: Engine,
    *,
    generation: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
    source: Source | None = None,
) -> tuple[Container, PoolWriter]:
    """Make a pool that holds a copy of a checkpoint alone: each tensor whole, in a slot. It is durable, and not
    published yet. Returns its container, and its writer, which closes both.

    ``kind``, ``path``: backend and path of the new pool. ``reader``: reads the pool in which ``stored`` lies.
    ``generation``: that of the copy; None: the first one. ``advance``: as for ``commit_copy``. ``source``: has the
    tensors, all of which were read before; None: they are read from ``stored``. Raises ``DamagedError`` if a block of
    the checkpoint cannot be used, or was overwritten while it was read, and what ``Backend.create`` raises."""
    following = reader.next_batches(stored.record)
    _refuse_reused(stored)
    entries = [entry._replace(place=SLOT_PLACE) for entry in stored.entries.values()]
    state = small_state_of_new_pool(stored)
    container, _ = create(kind, path, entries, slots=SLOTS, state_nbytes=len(state))
    with undo_on_error(container.close):
        writer = PoolWriter(PoolReader(container, path), engine, kind.probe(path))
    with undo_on_error(writer.close):
        if generation is not None:
            writer.generation = generation - 1
        checkpoint_id = CheckpointId(stored.record.incarnation, stored.step)
        pending = commit_copy(writer, checkpoint_id, stored, state, advance, source)
        if source is None:  # a training may have begun in the old pool
            _refuse_reused(stored)
        if following is not None:
            writer.store_next_batch(pending.slot, pending.record.generation, following)
            writer.medium.sync()
    return container, writer


def _refuse_reused(stored: Saved) -> None:
    if not stored.owns_slot():
        raise DamagedError("its slot was reused while it was read")


def copied_plan(step: int, iteration: int, record_numbers: Mapping[str, int], state: bytes) -> CopyPlan:
    """Return a plan in which all tensors are copied already. ``record_numbers``: as for ``copy_batches``. ``state``:
    the small state."""
    return CopyPlan(
        step=step,
        iteration=iteration,
        records=np.array([], np.int64),
        sources=np.array([], np.uint64),
        at_boundary=np.array([], np.bool_),
        unchanged=np.array([], np.int64),
        recorded_only=_as_array(record_numbers, record_numbers),
        n_tensors=len(record_numbers),
        state=state,
    )


def _copy_batch(
    reservation: Reservation, record_numbers: Mapping[str, int], tensors: Mapping[str, torch.Tensor]
) -> None:
    addresses = np.array([tensor.data_ptr() for tensor in tensors.values()], np.uint64)
    is_begun = reservation.copy(_as_array(record_numbers, tensors), addresses, tensors)
    assert is_begun, "no other checkpoint is in flight"
    reservation.end_parts()


def names_of_batches(nbytes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the names of the tensors that are copied together. ``nbytes``: name -> bytes of each tensor; those without
    bytes are left out."""
    batch: list[str] = []
    n_in_batch = 0
    for name in filter(nbytes.__getitem__, nbytes):  # a tied tensor has none of its own
        if batch and n_in_batch + nbytes[name] > BATCH_NBYTES:
            yield batch
            batch, n_in_batch = [], 0
        batch.append(name)
        n_in_batch += nbytes[name]
    if batch:
        yield batch


def _as_array(record_numbers: Mapping[str, int], names: Collection[str]) -> npt.NDArray[np.int64]:
    return np.array([record_numbers[name] for name in names], np.int64)
