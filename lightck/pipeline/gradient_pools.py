"""Pools with gradient records, as the pipeline sees them (``pool/gradient_writer.py`` writes them).

All parameters and their optimizer state lie in homes, also those that are never updated: they are written once. (Units
whose updates cannot be made again are the exception. See ``whole``.) Everything else lies in the record of each step:
gradients, buffers, the user's objects. If gradients are compressed, a record has room for their indexed form. If a
gradient does not fit into it (a hook of the user has added noise), the pool is replaced by one that has room for the
dense form of this gradient too.

A step without a good record of its update (nobody captured it, or the step before left none) gets a full checkpoint:
every unit is written to a home. With an interval, each step between two checkpoints gets a record that is not
committed: gradients, options of the update, and the units whose turn it is. If one of these steps leaves no record, the
next checkpoint is full. The records up to it would be of no use, and are not written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from lightck.errors import UnsupportedError
from lightck.pipeline.pool_kind import in_module_order
from lightck.pool.engine import Engine
from lightck.pool.format.gradients import SENTINEL_PAGE, Crcs
from lightck.pool.format.layout import (
    GRADIENT_ROLE,
    HOME_PLACE,
    HOME_ROLES,
    ITEM_NBYTES,
    SLOT_PLACE,
    Entry,
    contiguous_stride,
    is_of_unit,
)
from lightck.pool.format.structures import RECORD_SLOTS_MAX
from lightck.pool.gradient_log import BASE_EVERY_MIN, records_min, steps_between_writes, tolerant_base_every
from lightck.pool.gradient_writer import GradientWriter
from lightck.pool.reader import PoolReader
from lightck.pool.slots import Slot
from lightck.pool.storage.durability import Durability
from lightck.pool.storage.lock import PoolLock
from lightck.pool.writer import PoolWriter, RelayoutNeededError
from lightck.state.blocks import Blocks
from lightck.state.indexed_gradient import INDEX_DTYPE
from lightck.state.inventory import Live, address_of, in_plain_memory, is_plain, unit_of
from lightck.state.selection import BITS
from lightck.state.signatures import ClosedStep
from lightck.state.storable import dtype_from_name, dtype_name
from lightck.state.update_record import gradient_names

BASE_EVERY_MAX = tolerant_base_every(RECORD_SLOTS_MAX)
Capacity = Callable[[int, int], int | None]
"""(number of elements of a gradient, bytes of one element) -> how many elements its indexed form has room for; None: it
has no indexed form."""


def no_capacity(_numel: int, _item_nbytes: int) -> int | None:
    """Gradients are not compressed: none has an indexed form."""
    return None


class GradientPools:
    """The kind of pools with gradient records, made for a session."""

    def __init__(
        self,
        base_every: int | None,
        updated: Callable[[], Collection[str]],
        interval: int = 1,
        n_records: Callable[[Sequence[Entry], int], int] | None = None,
        capacity: Capacity = no_capacity,
        whole: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        """``base_every``: see ``Gradients``; None: in each pool the largest number that is worth its cost there
        (``worthwhile_base_every``), if its records allow this. ``updated``: returns the names of the parameters that
        optimizers update, for which a pool has room for gradients. ``interval``: updates from one commit to the next.
        ``n_records``: returns the number of record slots of a new pool, from its entries and the bytes of its small
        state; None: the number that the session asks for. ``capacity``: see ``Capacity``. ``whole``: returns the names
        of the parameters whose units lie whole in each checkpoint, in the slots: their updates cannot be made again, so
        no gradient of them is recorded."""
        self._base_every, self._interval, self._updated = base_every, interval, updated
        self._n_records, self._capacity, self._whole = n_records, capacity, whole
        self._seen_dense: set[str] = set()
        """Names of all gradient entries that ``laid_out`` was given so far. If the dense entry of a gradient is among
        them although the gradient has an indexed form, the gradient did not fit into that form."""
        self._base_every_max = BASE_EVERY_MAX
        """The largest ``base_every`` from the next full checkpoint on."""
        self._pages: SentinelPages | None = None

    def limit_base_every(self, most: int) -> None:
        """Let ``base_every`` be at most this number from the next checkpoint on, which is full if ``base_every`` is
        larger now."""
        self._base_every_max = min(self._base_every_max, most)

    def base_every_of(self, writer: PoolWriter | None) -> int | None:
        """Return ``base_every`` in a pool, from the next checkpoint on; None if there is no pool yet."""
        return min(writer.log.base_every, self._base_every_max) if isinstance(writer, GradientWriter) else None

    def laid_out(self, entries: Iterable[Entry]) -> list[Entry]:
        entries = list(entries)
        self._seen_dense |= {entry.name for entry in entries if entry.role == GRADIENT_ROLE}
        kept = in_module_order(entry for entry in entries if entry.role != GRADIENT_ROLE)
        updated, whole = self._updated(), self._whole()
        are_in_homes = [_is_in_home(entry, whole) for entry in kept]
        in_homes = [entry._replace(place=HOME_PLACE) for entry, is_in in zip(kept, are_in_homes, strict=True) if is_in]
        in_slots = [
            entry._replace(place=SLOT_PLACE) for entry, is_in in zip(kept, are_in_homes, strict=True) if not is_in
        ]
        params = [e for e in in_homes if e.role == "param" and unit_of(e) in updated]
        return [*in_homes, *in_slots, *(entry for param in params for entry in self._gradient_entries(param))]

    def whole_nbytes(self, laid_out: Iterable[Entry]) -> int:
        """Return how many bytes of units each checkpoint holds whole. ``laid_out``: the entries of a pool."""
        whole = self._whole()
        of_units = (entry for entry in laid_out if entry.role in HOME_ROLES and entry.alias is None)
        return sum(entry.nbytes for entry in of_units if unit_of(entry) in whole)

    def _gradient_entries(self, param: Entry) -> list[Entry]:
        dense, indexed = _gradient_entry(param), self._indexed_entries(param)
        return indexed + ([dense] if not indexed or dense.name in self._seen_dense else [])

    def _indexed_entries(self, param: Entry) -> list[Entry]:
        """Return the entries of the indexed form of a parameter's gradient; none if it has no indexed form."""
        numel = math.prod(param.shape)
        room = self._capacity(numel, ITEM_NBYTES[param.dtype]) if dtype_from_name(param.dtype) in BITS else None
        if room is None:
            return []
        dtypes = dtype_name(INDEX_DTYPE), param.dtype
        return [
            Entry(name, GRADIENT_ROLE, dtype, (room,), (1,), room * ITEM_NBYTES[dtype], param.device, layer=param.layer)
            for name, dtype in zip(gradient_names(unit_of(param), has_indices=True), dtypes, strict=True)
        ]

    def n_slots(self, entries: Sequence[Entry], state_nbytes: int, wanted: int) -> int:
        return wanted if self._n_records is None else self._n_records(entries, state_nbytes)

    def writer(
        self,
        reader: PoolReader,
        engine: Engine,
        durability: Durability,
        predecessor: PoolWriter | None,
        lock: PoolLock | None,
    ) -> PoolWriter:
        units = [unit_of(entry) for entry in reader.entries if entry.place == HOME_PLACE]
        n_slots = len(reader.superblock.slots)
        base_every = self._base_every
        if base_every is None:
            base_every = min(worthwhile_base_every(reader.entries), tolerant_base_every(n_slots))
        base_every = min(base_every, self._base_every_max)
        least = records_min(base_every, self._interval, in_group=reader.group is not None)
        if n_slots < least:
            given = f"base_every={self._base_every}" + f" and interval={self._interval}" * (self._interval > 1)
            smaller = "base_every or interval" if self._interval > 1 else "base_every"
            raise UnsupportedError(
                f"The pool {reader.path!r} has room for {n_slots} gradient records, and {given} needs {least}. Use a "
                f"smaller {smaller}, or start a new pool."
            )
        length = steps_between_writes(base_every, self._interval)
        return GradientWriter(reader, engine, durability, predecessor, lock, base_every=length, unit_names=units)

    def whole_max(self, n_slots: int) -> int:
        return 2  # one in each home

    def choose_slot(self, writer: PoolWriter, closed_step: ClosedStep, held: frozenset[int]) -> Slot | None:
        assert isinstance(writer, GradientWriter)
        if any(slot.in_flight for slot in writer.slots.slots):
            return None
        writer.unprotect_all_but(held)
        step, update, names = closed_step.step, closed_step.update, writer.units.names
        moved = writer.units.numbers.keys() & self._whole()
        if moved:
            raise RelayoutNeededError(f"no gradient of {min(moved)!r} is recorded any more, so it needs another place")
        if update is None or writer.log.step != step - 1 or self._base_every_max < writer.log.base_every:
            writer.skipped(step - 1, np.ones(len(names), np.bool_))
            writer.limit_base_every(self._base_every_max)
            updated = np.ones(len(names), np.bool_)
        else:
            updated = np.array([name in update.updated for name in names], np.bool_)
        plan = writer.plan_record(updated, commits=closed_step.is_checkpoint)
        if plan is None and len(held) > 1:
            return None  # the caller waits: other ranks need a held one only until they have committed a newer one
        if plan is None:
            raise RelayoutNeededError("each of the pool's gradient records is needed")
        token = None if closed_step.tensor_list is None else closed_step.tensor_list.token
        if token is None or self._pages is None or not self._pages.is_of(writer, token):
            self._pages = SentinelPages(writer, token, closed_step.lives)
        return writer.prepare(plan, self._pages.checksums(step), commits=closed_step.is_checkpoint)

    def takes_record(self, writer: PoolWriter, closed_step: ClosedStep) -> bool:
        assert isinstance(writer, GradientWriter)
        return closed_step.update is not None and writer.takes_record(closed_step.step)


def updated_nbytes(laid_out: Iterable[Entry]) -> tuple[int, int]:
    """Return how many bytes an update changes, and how many bytes of gradients it consumes. ``laid_out``: the entries
    of a pool."""
    laid_out = list(laid_out)
    gradients = {entry.name: entry.nbytes for entry in laid_out if entry.role == GRADIENT_ROLE}
    in_homes = [e for e in laid_out if e.place == HOME_PLACE and e.role in HOME_ROLES]
    changed = sum(entry.nbytes for entry in in_homes if _has_gradient(unit_of(entry), gradients))
    return changed, sum(gradients.values())


def _has_gradient(parameter: str, entry_names: Collection[str]) -> bool:
    """Whether a pool has room for the gradient of a parameter. ``entry_names``: of the pool's entries of gradients."""
    forms = (gradient_names(parameter, has_indices=one) for one in (False, True))
    return any(all(name in entry_names for name in names) for names in forms)


def worthwhile_base_every(laid_out: Iterable[Entry]) -> int:
    """Return the largest ``base_every`` that is worth its cost: twice the number of bytes that an update changes for
    each byte of gradients. With it a checkpoint writes half as much of the state as of gradients; a larger number saves
    little more, and needs space and a longer recovery. ``laid_out``: the entries of a pool."""
    changed, consumed = updated_nbytes(laid_out)
    return min(max(2 * changed // consumed, BASE_EVERY_MIN), BASE_EVERY_MAX) if consumed else BASE_EVERY_MAX


def _is_in_home(entry: Entry, whole: Collection[str]) -> bool:
    return is_of_unit(entry.role, entry.name, entry.alias) and unit_of(entry) not in whole


def _gradient_entry(param: Entry) -> Entry:
    """Return the entry of a dense gradient, whose elements are stored in row-major order. (The gradient of a part of a
    parameter is stored as a whole tensor, because only the same rank makes updates with it.)"""
    (name,) = gradient_names(unit_of(param), has_indices=False)
    stride = contiguous_stride(param.shape)
    return param._replace(
        name=name, role=GRADIENT_ROLE, stride=stride, place=SLOT_PLACE, logical_shape=None, pieces=None
    )


class SentinelPages:
    """The memory of the tensors in homes. Each checkpoint records the checksum of one page of each tensor; the pages
    take turns."""

    def __init__(self, writer: GradientWriter, token: object, lives: Sequence[Live]) -> None:
        """``token``: ``TensorList.token`` of these tensors."""
        self._writer, self._token = writer, token
        present = {live.name: live.tensor for live in lives}
        entries = writer.entries[: writer.n_home_entries]
        tensors = [(number, present[e.name]) for number, e in enumerate(entries) if e.name in present and e.nbytes]
        self._copied = [(number, tensor) for number, tensor in tensors if not is_plain(tensor)]
        """Tensors that can be read only through a copy."""
        plain = [(number, tensor) for number, tensor in tensors if is_plain(tensor)]
        self._numbers = np.array([number for number, _ in plain], np.int64)
        self._addresses = np.array([address_of(tensor) for _, tensor in plain], np.int64)
        self._nbytes = np.array([entries[number].nbytes for number, _ in plain], np.int64)

    def is_of(self, writer: GradientWriter, token: object) -> bool:
        return self._writer is writer and self._token is token

    def checksums(self, step: int) -> Crcs:
        """Return for each entry in a home the CRC-32C of page (``step`` modulo the number of pages); 0 if the tensor is
        absent or empty."""
        found = np.zeros(self._writer.n_home_entries, np.uint32)
        copies = [(number, in_plain_memory(tensor)) for number, tensor in self._copied]
        numbers = np.concatenate((self._numbers, np.array([number for number, _ in copies], np.int64)))
        addresses = np.concatenate((self._addresses, np.array([address_of(copy) for _, copy in copies], np.int64)))
        nbytes = np.concatenate((self._nbytes, np.array([copy.nbytes for _, copy in copies], np.int64)))
        begin = step % -(-nbytes // SENTINEL_PAGE) * SENTINEL_PAGE
        sizes = np.minimum(nbytes - begin, SENTINEL_PAGE)
        pages = Blocks.of((addresses + begin).astype(np.uint64), sizes, np.zeros(len(sizes), np.int64), SENTINEL_PAGE)
        found[numbers] = pages.checksums()
        return found
