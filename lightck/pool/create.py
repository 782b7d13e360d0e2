"""Create a pool: compute its geometry and write its static part. The new pool is not visible at its path yet."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from lightck.errors import NoSpaceError, NotAPoolError
from lightck.pool.engine import Medium
from lightck.pool.format import layout
from lightck.pool.format.layout import Entry, blocks_of
from lightck.pool.format.structures import (
    BLOCK_MAX,
    COMPAT_NEXT,
    KIB,
    LARGE_EXTENT_ALIGN,
    MANIFEST_HEADER_NBYTES,
    PAGE,
    SLOT_ALIGN,
    TABLE_OFFSET,
    TENSOR_RECORD_NBYTES,
    Superblock,
    align_up,
    layout_hash,
)
from lightck.pool.storage.backend import Backend, Container
from lightck.pool.storage.failures import undo_on_error

RESERVE_MIN, RESERVE_SHARE = 256 * KIB, 32
"""The reserve of a slot has at least this many bytes, and at least this fraction (1/32) of the payload."""
STATE_MIN, STATE_FACTOR = 256 * KIB, 4
"""The manifest has room for small state of at least this many bytes, and of this many times the expected length."""


def create(
    backend: Backend,
    path: str,
    entries: Sequence[Entry],
    *,
    slots: int,
    state_nbytes: int,
    spare_nbytes: int = 0,
    extras: Sequence[Entry] = (),
    may_discard: bool = False,
) -> tuple[Container, Superblock]:
    """Allocate a pool for these entries and write its static part; ``container.publish()`` makes it visible.

    ``state_nbytes`` is the expected length of the small state. The reserve of each slot has room for ``extras`` and
    for ``spare_nbytes`` more. ``may_discard``: a pool at this path is empty or no longer wanted, and is removed if
    the new one has no room beside it.
    """
    sb, table = _geometry(entries, slots, state_nbytes, spare_nbytes, extras)
    container = _allocated(backend, path, sb.nbytes, may_discard)
    with (
        undo_on_error(container.close),
        contextlib.closing(Medium(container.fd, container.extents, backend.probe(path).tier)) as medium,
    ):
        for offset in sb.table_offsets:
            medium.store(offset, table)
        for copy in (0, 1):
            medium.store(copy * PAGE, sb.pack())
        medium.sync()
    return container, sb


def _allocated(backend: Backend, path: str, nbytes: int, may_discard: bool) -> Container:
    try:
        return backend.create(path, nbytes)
    except (NoSpaceError, NotAPoolError) as err:
        if not may_discard or not err.discard_helps:
            raise
    backend.discard(path)
    return backend.create(path, nbytes)


def _geometry(
    entries: Sequence[Entry], slots: int, state_nbytes: int, spare_nbytes: int, extras: Sequence[Entry]
) -> tuple[Superblock, bytes]:
    blocks = sum(blocks_of(e.nbytes, BLOCK_MAX) for e in entries)
    payload = sum(e.nbytes for e in entries)
    reserve = max(RESERVE_MIN, payload // RESERVE_SHARE) + spare_nbytes
    # The factor 2: a tensor whose size changed gets an extent of double its size (PoolWriter._append).
    reserve += 2 * sum(align_up(e.nbytes, LARGE_EXTENT_ALIGN) + LARGE_EXTENT_ALIGN for e in extras)
    fixed = MANIFEST_HEADER_NBYTES + len(entries) * TENSOR_RECORD_NBYTES + 4 * blocks
    # Room for the table entries, records and checksums of tensors that are added later.
    variable = 64 * KIB + fixed // 4 + 2 * len(layout.encode_extras(extras))
    variable += sum(TENSOR_RECORD_NBYTES + 8 * blocks_of(e.nbytes, BLOCK_MAX) for e in extras)
    manifest = align_up(fixed + variable + max(STATE_MIN, STATE_FACTOR * state_nbytes), PAGE)
    payload_offset = PAGE + 2 * manifest
    placed, reserve_offset = layout.place(entries, payload_offset)
    slot_nbytes = align_up(reserve_offset + reserve, SLOT_ALIGN)
    table = layout.encode(placed)
    table_space = align_up(len(table), PAGE)
    first = align_up(TABLE_OFFSET + 2 * table_space, SLOT_ALIGN)
    sb = Superblock(
        uuid=os.urandom(16),
        nbytes=first + slots * slot_nbytes,
        table_offsets=(TABLE_OFFSET, TABLE_OFFSET + table_space),
        table_nbytes=len(table),
        table_hash=layout_hash(table),
        block=BLOCK_MAX,
        manifest_offset=PAGE,
        manifest_nbytes=manifest,
        payload_offset=payload_offset,
        reserve_offset=reserve_offset,
        slots=tuple((first + i * slot_nbytes, slot_nbytes) for i in range(slots)),
        compat=COMPAT_NEXT,
    )
    return sb, table
