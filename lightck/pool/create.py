"""Create a pool: compute its geometry and write its static part (superblocks and layout tables).

The caller makes the new pool visible at its path (``Container.publish``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from lightck.errors import NoSpaceError, NotAPoolError
from lightck.pool.engine import Medium
from lightck.pool.format import layout
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.layout import Entry, blocks_of
from lightck.pool.format.structures import (
    BLOCK_MAX,
    COMPAT_NEXT,
    INCOMPAT_GROUP,
    INCOMPAT_SHARES,
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
"""The reserve of a slot is the space for extra entries: tensors that appear or grow after the pool is created. It has
``RESERVE_MIN`` bytes, or 1/``RESERVE_SHARE`` of the payload if that is more."""
STATE_MIN, STATE_FACTOR = 256 * KIB, 4
"""A manifest has room for ``STATE_MIN`` bytes of small state, or for ``STATE_FACTOR`` times its expected length if that
is more."""


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
    group: GroupIdentity | None = None,
) -> tuple[Container, Superblock]:
    """Allocate a pool for these entries and write its static part. Returns the pool's container, which ``publish()``
    makes visible, and its superblock. Raises the errors of ``Backend.create``, and ``ValueError`` if entries have
    pieces without a ``group``, or invalid pieces.

    ``slots``: number of slots. ``state_nbytes``: expected length of the small state. ``extras``: extra entries of an
    old pool, for which the reserve of each slot gets room. ``spare_nbytes``: further bytes of the reserve.
    ``may_discard``: whether to remove what is at this path if the new pool has no room beside it. True only if what is
    there is empty or no longer wanted. ``group``: the identity of a rank's pool, whose entries may have pieces; None
    if the pool is not that of a rank.
    """
    sb, table = _geometry(entries, slots, state_nbytes, spare_nbytes, extras, group)
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
    """Create the container. If there is no room for it beside what is at the path, and ``may_discard`` is true, discard
    what is at the path first."""
    try:
        return backend.create(path, nbytes)
    except (NoSpaceError, NotAPoolError) as err:
        if not may_discard or not err.discard_helps:
            raise
    backend.discard(path)
    return backend.create(path, nbytes)


def _geometry(
    entries: Sequence[Entry],
    slots: int,
    state_nbytes: int,
    spare_nbytes: int,
    extras: Sequence[Entry],
    group: GroupIdentity | None,
) -> tuple[Superblock, bytes]:
    has_shares = any(e.share is not None for e in (*entries, *extras))
    blocks = sum(blocks_of(e.nbytes, BLOCK_MAX) for e in entries)
    payload = sum(e.nbytes for e in entries)
    reserve = max(RESERVE_MIN, payload // RESERVE_SHARE) + spare_nbytes
    # The factor 2: a tensor whose size changed gets an extent of double its size (PoolWriter._append).
    reserve += 2 * sum(align_up(e.nbytes, LARGE_EXTENT_ALIGN) + LARGE_EXTENT_ALIGN for e in extras)
    fixed = MANIFEST_HEADER_NBYTES + len(entries) * TENSOR_RECORD_NBYTES + 4 * blocks
    encoded = layout.encode_extras(extras, has_group=group is not None, has_shares=has_shares)
    # Room in the manifest for the entries, records and checksums of tensors that are added later.
    variable = 64 * KIB + fixed // 4 + 2 * len(encoded)
    variable += sum(TENSOR_RECORD_NBYTES + 8 * blocks_of(e.nbytes, BLOCK_MAX) for e in extras)
    manifest = align_up(fixed + variable + max(STATE_MIN, STATE_FACTOR * state_nbytes), PAGE)
    payload_offset = PAGE + 2 * manifest
    placed, reserve_offset = layout.place(entries, payload_offset)
    slot_nbytes = align_up(reserve_offset + reserve, SLOT_ALIGN)
    table = layout.encode(placed, group, has_shares=has_shares)
    table_space = align_up(len(table), PAGE)
    first_slot = align_up(TABLE_OFFSET + 2 * table_space, SLOT_ALIGN)
    sb = Superblock(
        uuid=os.urandom(16),
        nbytes=first_slot + slots * slot_nbytes,
        table_offsets=(TABLE_OFFSET, TABLE_OFFSET + table_space),
        table_nbytes=len(table),
        table_hash=layout_hash(table),
        block=BLOCK_MAX,
        manifest_offset=PAGE,
        manifest_nbytes=manifest,
        payload_offset=payload_offset,
        reserve_offset=reserve_offset,
        slots=tuple((first_slot + i * slot_nbytes, slot_nbytes) for i in range(slots)),
        compat=COMPAT_NEXT,
        incompat=0 if group is None else INCOMPAT_GROUP | (INCOMPAT_SHARES if has_shares else 0),
    )
    return sb, table
