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
from lightck.pool.format.gradients import part_nbytes
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.layout import GRADIENT_ROLE, HOME_PLACE, Entry, blocks_of
from lightck.pool.format.structures import (
    BLOCK_MAX,
    COMPAT_NEXT,
    INCOMPAT_GRADIENTS,
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

RESERVE_MIN, RESERVE_DIVISOR = 256 * KIB, 32
"""The reserve of a slot is the space for extra entries: tensors that appear or grow after the pool is created. It has
``RESERVE_MIN`` bytes, or 1/``RESERVE_DIVISOR`` of the payload if that is more."""
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

    If an entry lies in a home or is a gradient, the pool is one with gradient records, and its table lists the entries
    in homes first.

    ``slots``: number of slots. ``state_nbytes``: expected length of the small state. ``extras``: extra entries of an
    old pool, for which the reserve of each slot gets room. ``spare_nbytes``: further bytes of the reserve.
    ``may_discard``: whether to remove what is at this path if the new pool has no room beside it. True only if what is
    there is empty or no longer wanted. ``group``: the identity of a rank's pool, whose entries may have pieces; None
    if the pool is not that of a rank.
    """
    sb, table = _geometry(entries, slots, state_nbytes, spare_nbytes, extras, group)
    container = _allocate(backend, path, sb.nbytes, may_discard)
    with (
        undo_on_error(container.close),
        contextlib.closing(Medium(container.fd, container.extents, backend.probe(path).medium_kind)) as medium,
    ):
        for offset in sb.table_offsets:
            medium.store(offset, table)
        for copy in (0, 1):
            medium.store(copy * PAGE, sb.pack())
        medium.sync()
    return container, sb


def pool_nbytes(entries: Sequence[Entry], *, slots: int, state_nbytes: int) -> int:
    """Return the length of the pool that ``create`` would make for these entries."""
    return _geometry(entries, slots, state_nbytes, 0, (), None)[0].nbytes


def _allocate(backend: Backend, path: str, nbytes: int, may_discard: bool) -> Container:
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
    has_gradients = any(e.place == HOME_PLACE or e.role == GRADIENT_ROLE for e in entries)
    in_homes = [e for e in entries if e.place == HOME_PLACE]
    in_slots = [e for e in entries if e.place != HOME_PLACE]
    reserve = max(RESERVE_MIN, sum(e.nbytes for e in in_slots) // RESERVE_DIVISOR) + spare_nbytes
    # The factor 2: a tensor whose size changed gets an extent of double its size (PoolWriter._append).
    reserve += 2 * sum(align_up(e.nbytes, LARGE_EXTENT_ALIGN) + LARGE_EXTENT_ALIGN for e in extras)
    encoded = layout.encode_extras(
        extras, has_group=group is not None, has_shares=has_shares, has_gradients=has_gradients
    )
    part = part_nbytes(in_homes, BLOCK_MAX, slots) if has_gradients else 0
    manifest = _manifest_nbytes(entries, extras, len(encoded), state_nbytes, part)
    payload_offset = PAGE + 2 * manifest
    placed, reserve_offset = layout.assign_offsets(in_slots, payload_offset)
    slot_nbytes = align_up(reserve_offset + reserve, SLOT_ALIGN)
    placed_in_homes, home_nbytes = layout.assign_offsets(in_homes, 0)
    home_nbytes = align_up(home_nbytes, SLOT_ALIGN)
    table = layout.encode([*placed_in_homes, *placed], group, has_shares=has_shares, has_gradients=has_gradients)
    table_space = align_up(len(table), PAGE)
    first = align_up(TABLE_OFFSET + 2 * table_space, SLOT_ALIGN)
    homes = ((first, home_nbytes), (first + home_nbytes, home_nbytes)) if has_gradients else ()
    first_slot = first + len(homes) * home_nbytes
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
        homes=homes,
        compat=COMPAT_NEXT,
        incompat=_incompat(group, has_shares=has_shares, has_gradients=has_gradients),
    )
    return sb, table


def _incompat(group: GroupIdentity | None, *, has_shares: bool, has_gradients: bool) -> int:
    """Return the feature flags of ``Superblock.incompat``."""
    flags = INCOMPAT_GRADIENTS if has_gradients else 0
    if group is not None:
        flags |= INCOMPAT_GROUP | (INCOMPAT_SHARES if has_shares else 0)
    return flags


def _manifest_nbytes(
    entries: Sequence[Entry], extras: Sequence[Entry], extras_nbytes: int, state_nbytes: int, part_nbytes: int
) -> int:
    """Return the space for a manifest. ``extras_nbytes``: length of the encoded extra entries. ``part_nbytes``: length
    of the part with older bases, chain and sentinels."""
    blocks = sum(blocks_of(e.nbytes, BLOCK_MAX) for e in entries)
    fixed = MANIFEST_HEADER_NBYTES + len(entries) * TENSOR_RECORD_NBYTES + 4 * blocks + part_nbytes
    # Room in the manifest for the entries, records and checksums of tensors that are added later.
    variable = 64 * KIB + fixed // 4 + 2 * extras_nbytes
    variable += sum(TENSOR_RECORD_NBYTES + 8 * blocks_of(e.nbytes, BLOCK_MAX) for e in extras)
    return align_up(fixed + variable + max(STATE_MIN, STATE_FACTOR * state_nbytes), PAGE)
