"""Copy one checkpoint into another pool file: read and verify its tensors, and commit them there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
import numpy.typing as npt

from lightck.pool.engine import ENDED
from lightck.pool.reservation import Reservation
from lightck.pool.writer import CopyPlan, Pending, PoolWriter
from lightck.ranks.rule import CheckpointId
from lightck.restore.contents import Saved, Source, load_tensors, unpack_dict
from lightck.state.update_record import BASE_EVERY_KEY, UPDATE_KEY

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
    numbers = {name: writer.numbers[name] for name in stored.entries}
    pending = begin_copy(writer, stored, numbers, state, advance=advance, source=source)
    try:
        pending.job.release()
        pending.job.wait(ENDED)
    finally:
        pending.job.abandon()
    return pending


def begin_copy(
    writer: PoolWriter,
    stored: Saved,
    numbers: dict[str, int],
    state: bytes,
    held: frozenset[int] = frozenset(),
    *,
    advance: Callable[[int], None] = lambda _: None,
    source: Source | None = None,
) -> Pending:
    """Copy the tensors of a checkpoint into a slot of a new pool file, and return what has to be released to commit
    the copy. The tensors are read and copied in batches, so that they need little memory. Raises ``DamagedError``.

    ``numbers``: name -> record number in that file, of each tensor of the checkpoint. ``state``: the small state of the
    copy. ``held``: indexes of slots that must not be overwritten. ``advance``, ``source``: as for ``commit_copy``."""
    slot = writer.slot_for_copy(stored.step, held)
    assert slot is not None, "a new pool has room for each checkpoint that is copied into it"
    reservation = writer.reservation(slot)
    try:
        for batch in _batches(stored):
            _copy_batch(reservation, source or stored, numbers, batch)
            advance(sum(stored.entries[name].nbytes for name in batch))
        return writer.begin(_plan(stored, numbers, state), slot, None, reservation)
    except BaseException:
        if slot.in_flight:
            reservation.drop()
        raise


def state_for_copy(stored: Saved) -> dict[str, object]:
    """Return the small state for a copy of a checkpoint: that of the checkpoint, without what is of use only beside its
    gradients, which are not copied."""
    return {key: value for key, value in unpack_dict(stored.state).items() if key not in (UPDATE_KEY, BASE_EVERY_KEY)}


def _plan(stored: Saved, numbers: dict[str, int], state: bytes) -> CopyPlan:
    """Return a plan in which all tensors are copied already."""
    return CopyPlan(
        step=stored.step,
        iteration=stored.iteration,
        records=np.array([], np.int64),
        sources=np.array([], np.uint64),
        at_boundary=np.array([], np.bool_),
        unchanged=np.array([], np.int64),
        recorded_only=_numbers(numbers, numbers),
        n_tensors=len(numbers),
        state=state,
    )


def _copy_batch(reservation: Reservation, source: Source, numbers: dict[str, int], batch: list[str]) -> None:
    tensors = load_tensors(source, batch)
    addresses = np.array([tensor.data_ptr() for tensor in tensors.values()], np.uint64)
    is_begun = reservation.copy(_numbers(numbers, tensors), addresses, tensors)
    assert is_begun, "no other checkpoint is in flight"
    reservation.end_parts()


def _batches(stored: Saved) -> Iterator[list[str]]:
    """Yield the names of the tensors that are copied together."""
    batch: list[str] = []
    nbytes = 0
    for name in [name for name, entry in stored.entries.items() if entry.nbytes]:  # a tied tensor has none of its own
        if batch and nbytes + stored.entries[name].nbytes > BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(name)
        nbytes += stored.entries[name].nbytes
    if batch:
        yield batch


def _numbers(numbers: dict[str, int], names: Collection[str]) -> npt.NDArray[np.int64]:
    return np.array([numbers[name] for name in names], np.int64)
