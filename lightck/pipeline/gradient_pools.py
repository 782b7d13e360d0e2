"""Pools with gradient records, as the pipeline sees them (``pool/gradient_writer.py`` writes them).

All parameters and their optimizer state lie in homes, also those that are never updated: they are written once.
Everything else lies in the record of each step: gradients, buffers, the user's objects. If gradients are compressed, a
record has room for their indexed form. A gradient that does not fit into it once (a hook of the user has added noise)
needs a new pool, which has room for its dense form too.

A step without a good record of its update (nobody captured it, or the step before was not saved) gets a full
checkpoint: every unit is written to a home.
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
    ITEM_NBYTES,
    SLOT_PLACE,
    Entry,
    contiguous_stride,
    is_of_unit,
)
from lightck.pool.gradient_log import records_min
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

Capacity = Callable[[int, int], int | None]
"""From the number of elements of a gradient, and the bytes of one, to the capacity of its indexed form; None: it has no
indexed form."""


def no_capacity(_numel: int, _item_nbytes: int) -> int | None:
    """Gradients are not compressed: none has an indexed form."""
    return None


class GradientPools:
    """``base_every``: see ``GradientLog``. ``updated``: returns the names of the parameters that optimizers update, for
    which a pool has room for gradients. ``capacity``: see ``Capacity``."""

    def __init__(
        self, base_every: int, updated: Callable[[], Collection[str]], capacity: Capacity = no_capacity
    ) -> None:
        self._base_every, self._updated, self._capacity = base_every, updated, capacity
        self._seen_dense: set[str] = set()
        """Names of the entries of gradients that have an indexed form, and did not fit into it once."""
        self._pages: SentinelPages | None = None

    def laid_out(self, entries: Iterable[Entry]) -> list[Entry]:
        entries = list(entries)
        self._seen_dense |= {entry.name for entry in entries if entry.role == GRADIENT_ROLE}
        kept = in_module_order(entry for entry in entries if entry.role != GRADIENT_ROLE)
        in_homes = [entry._replace(place=HOME_PLACE) for entry in kept if _is_in_home(entry)]
        in_slots = [entry for entry in kept if not _is_in_home(entry)]
        updated = self._updated()
        params = [e for e in in_homes if e.role == "param" and unit_of(e) in updated]
        return [*in_homes, *in_slots, *(entry for param in params for entry in self._gradient_entries(param))]

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
            for name, dtype in zip(gradient_names(unit_of(param), is_sparse=True), dtypes, strict=True)
        ]

    def writer(
        self,
        reader: PoolReader,
        engine: Engine,
        durability: Durability,
        predecessor: PoolWriter | None,
        lock: PoolLock | None,
    ) -> PoolWriter:
        units = [unit_of(entry) for entry in reader.entries if entry.place == HOME_PLACE]
        n_slots, least = len(reader.superblock.slots), records_min(self._base_every)
        if n_slots < least:
            raise UnsupportedError(
                f"The pool {reader.path!r} has room for {n_slots} gradient records, and base_every={self._base_every} "
                f"needs {least}. Use a smaller base_every, or start a new pool."
            )
        return GradientWriter(
            reader, engine, durability, predecessor, lock, base_every=self._base_every, unit_names=units
        )

    def choose_slot(self, writer: PoolWriter, closed_step: ClosedStep, held: frozenset[int]) -> Slot | None:
        assert isinstance(writer, GradientWriter)
        assert not held, "pins and exports are refused"
        if any(slot.in_flight for slot in writer.slots.slots):
            return None
        step, update, names = closed_step.step, closed_step.update, writer.units.names
        if update is None or writer.log.step != step - 1:
            writer.skipped(step - 1, np.ones(len(names), np.bool_))
            updated = np.ones(len(names), np.bool_)
        else:
            updated = np.array([name in update.updated for name in names], np.bool_)
        plan = writer.plan_record(updated)
        if plan is None:
            raise RelayoutNeededError("each of the pool's gradient records is needed")
        token = None if closed_step.tensor_list is None else closed_step.tensor_list.token
        if token is None or self._pages is None or not self._pages.is_of(writer, token):
            self._pages = SentinelPages(writer, token, closed_step.lives)
        return writer.prepare(plan, self._pages.checksums(step))


def _is_in_home(entry: Entry) -> bool:
    return is_of_unit(entry.role, entry.name, entry.alias)


def _gradient_entry(param: Entry) -> Entry:
    """Return the entry of a dense gradient, whose elements are stored in row-major order."""
    (name,) = gradient_names(unit_of(param), is_sparse=False)
    return param._replace(name=name, role=GRADIENT_ROLE, stride=contiguous_stride(param.shape), place=SLOT_PLACE)


class SentinelPages:
    """The memory of the tensors in homes, of which each checkpoint records the checksum of one page."""

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
