"""The last part of a manifest in a pool with gradient records: older bases, the chain, sentinels.

The *chain* names the gradient records of consecutive steps before the checkpoint's own. A *sentinel* is the checksum of
one page of a tensor as the checkpoint has it. A replay can be compared with it.

The bytes of the part are drawn in docs/format.md, "Pools with gradient records". They are untrusted: every count is
compared with the length before anything is made of it. ``checked_homes`` checks the part together with the tensor
records.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightck.pool.format.layout import HOME_PLACE, Entry, blocks_of
from lightck.pool.format.structures import (
    NUMBER_MAX,
    TENSOR_RECORD_NBYTES,
    DamagedError,
    ManifestHeader,
    Superblock,
    align_up,
)

GRADIENT_MAGIC = b"LCKGRAD1"
HOME_ROW_DTYPE = np.dtype([("generation", "<u8"), ("step", "<u8"), ("offset", "<u8"), ("crc", "<u4"), ("home", "<u4")])
"""A tensor record, with the number of the home in the place of its last field (docs/format.md)."""
IN_RECORD = 2
"""In the place of the number of a home: the tensor lies whole in the gradient record whose generation the row has. The
``step`` of the row is the step before that record's. So the record is needed, like each record after a base."""
N_HOMES = 2
"""Number of homes of a unit: homes 0 and 1."""
CHAIN_COMMITTED = 1
"""Flag of a chain entry: the record was committed as a checkpoint."""
SENTINEL_PAGE = 4096
"""Bytes of a tensor that a sentinel covers."""

_HEAD = struct.Struct("<8sIIIIQ")
_CHAIN = struct.Struct("<QQQIBBH")
assert _CHAIN.size == TENSOR_RECORD_NBYTES == HOME_ROW_DTYPE.itemsize

Rows = npt.NDArray[np.void]
Crcs = npt.NDArray[np.uint32]


class ChainEntry(NamedTuple):
    """One gradient record, as the manifest of a later checkpoint names it. Fields are in the order of the bytes."""

    step: int
    generation: int
    manifest_hash: int
    manifest_nbytes: int
    slot: int
    manifest_index: int
    flags: int = 0


class GradientPart(NamedTuple):
    """The part that only the manifests of pools with gradient records have."""

    older: Rows
    """For each entry in a home, in the order of the layout table, its older base (``HOME_ROW_DTYPE``). ``crc`` is an
    index into ``older_crcs``; ``generation`` 0: there is none."""
    older_crcs: Crcs
    """The seeded block checksums of the older bases."""
    chain: tuple[ChainEntry, ...]
    """The records of consecutive steps before the checkpoint's own, oldest first."""
    sentinels: Crcs
    """For each entry in a home the CRC-32C of one page of its state: the page with the number (step of the checkpoint
    mod number of pages). Empty if the checkpoint has no sentinels."""

    def pack(self) -> bytes:
        """Return the bytes of the part. Its offset in the manifest is ``part_offset``."""
        head = _HEAD.pack(
            GRADIENT_MAGIC, len(self.older), len(self.older_crcs), len(self.chain), len(self.sentinels), 0
        )
        chain = b"".join(_CHAIN.pack(*entry) for entry in self.chain)
        crcs = self.older_crcs.astype("<u4").tobytes(), self.sentinels.astype("<u4").tobytes()
        return b"".join((head, self.older.astype(HOME_ROW_DTYPE).tobytes(), crcs[0], chain, crcs[1]))

    @classmethod
    def unpack(
        cls, manifest: bytes, header: ManifestHeader, superblock: Superblock, n_home_entries: int
    ) -> GradientPart:
        """Parse the part. ``header``: of the same manifest, already checked. ``n_home_entries``: number of entries of
        the layout table that lie in homes. Raises ``DamagedError``, also if the chain has a hole."""
        at = part_offset(header)
        if len(manifest) < at + _HEAD.size:
            raise DamagedError("its manifest ends before the chain of its gradient records")
        magic, n_older, n_crcs, n_chain, n_sentinels, zero = _HEAD.unpack_from(manifest, at)
        if magic != GRADIENT_MAGIC or zero or n_older != n_home_entries or n_sentinels not in (0, n_home_entries):
            raise DamagedError("the list of its bases does not belong to the layout table")
        if n_chain >= len(superblock.slots):
            raise DamagedError("the chain of its gradient records is longer than the log")
        at += _HEAD.size
        parts = ((n_older, HOME_ROW_DTYPE.itemsize), (n_crcs, 4), (n_chain, _CHAIN.size), (n_sentinels, 4))
        if at + sum(count * size for count, size in parts) != len(manifest):
            raise DamagedError("the list of its bases does not end where its manifest ends")
        older = np.frombuffer(manifest, HOME_ROW_DTYPE, n_older, at)
        at += older.nbytes
        crcs = np.frombuffer(manifest, "<u4", n_crcs, at)
        at += crcs.nbytes
        chain = tuple(
            ChainEntry._make(_CHAIN.unpack_from(manifest, at + number * _CHAIN.size)) for number in range(n_chain)
        )
        sentinels = np.frombuffer(manifest, "<u4", n_sentinels, at + n_chain * _CHAIN.size)
        _check_chain(chain, header, superblock)
        return cls(older, crcs, chain, sentinels)


def part_nbytes(in_homes: Sequence[Entry], block: int, n_slots: int) -> int:
    """Return the largest length of the part in a pool with these entries in homes and ``n_slots`` slots, with the
    padding before it. ``block``: bytes of a block."""
    crcs = sum(blocks_of(entry.nbytes, block) for entry in in_homes) + len(in_homes)
    return 8 + _HEAD.size + HOME_ROW_DTYPE.itemsize * len(in_homes) + 4 * crcs + _CHAIN.size * n_slots


def part_offset(header: ManifestHeader) -> int:
    """Return where in its manifest the part begins: after the small state, at a multiple of 8."""
    return align_up(header.state_offset + header.state_nbytes, 8)


def _check_chain(chain: Sequence[ChainEntry], header: ManifestHeader, superblock: Superblock) -> None:
    """Raise ``DamagedError`` unless the chain names records of consecutive steps, up to the one before the checkpoint,
    that can lie in the log."""
    for entry in chain:
        if entry.slot >= len(superblock.slots) or entry.manifest_index > 1 or entry.flags & ~CHAIN_COMMITTED:
            raise DamagedError("the chain names an impossible gradient record")
        if not 0 < entry.manifest_nbytes <= superblock.manifest_nbytes:
            raise DamagedError("the chain names a manifest that is larger than the space for it")
    slots = [entry.slot for entry in chain]
    if len({*slots, header.slot}) != len(slots) + 1:
        raise DamagedError("the chain names one slot twice")
    order = [(entry.step, entry.generation) for entry in chain] + [(header.step, header.generation)]
    if not all(two[0] == one[0] + 1 and one[1] < two[1] for one, two in pairwise(order)):
        raise DamagedError("the chain of its gradient records has a hole")


def first_step(chain: Sequence[ChainEntry], header: ManifestHeader) -> int:
    """Return the step of the oldest record that is named: the chain's first, or the checkpoint's own."""
    return chain[0].step if chain else header.step


def checked_homes(
    records: Rows, entries: Sequence[Entry], crcs_count: int, part: GradientPart, header: ManifestHeader, block: int
) -> Rows:
    """Return the tensor records of the entries in homes, as rows of ``HOME_ROW_DTYPE`` in the order of the table.
    ``records``, ``entries``: all records of the manifest and the entries of the layout table. ``crcs_count``: number of
    block checksums of the manifest. ``block``: bytes of a block.

    Raises ``DamagedError`` unless each row has the offset of its entry, no base is newer than the checkpoint, and
    the chain reaches back to the oldest base."""
    numbers = [number for number, entry in enumerate(entries) if entry.place == HOME_PLACE]
    rows = records.view(HOME_ROW_DTYPE)[numbers]
    offsets = np.array([entries[number].offset for number in numbers], np.uint64)
    blocks = np.array([blocks_of(entries[number].nbytes, block) for number in numbers], np.uint64)
    present, has_older = rows["generation"] > 0, part.older["generation"] > 0
    in_home = present & (rows["home"] < N_HOMES)
    for one, is_there, count in ((rows, in_home, crcs_count), (part.older, has_older, len(part.older_crcs))):
        if (one["offset"] != offsets)[is_there].any() or (one["crc"] + blocks > count)[is_there].any():
            raise DamagedError("its manifest gives a base a wrong offset or checksum index")
        if (one["step"] > header.step)[is_there].any() or header.step >= NUMBER_MAX:
            raise DamagedError("its manifest names a base that is newer than the checkpoint")
    if (rows["home"] > IN_RECORD).any() or (rows["generation"] > header.generation).any():
        raise DamagedError("its manifest names a base that lies in no home, or is newer than the checkpoint")
    if (has_older & ~in_home).any() or (part.older["generation"] >= rows["generation"])[has_older].any():
        raise DamagedError("its manifest names an older base that is newer than the base")
    if (part.older["home"] != 1 - rows["home"].astype(np.int64))[has_older].any():
        raise DamagedError("its manifest names an older base that lies in the same home as the base")
    _check_whole(rows[present & (rows["home"] == IN_RECORD)], part, header)
    if rows["step"][present].min(initial=header.step) + 1 < first_step(part.chain, header):
        raise DamagedError("the chain of its gradient records does not reach back to its oldest base")
    return rows


def _check_whole(rows: Rows, part: GradientPart, header: ManifestHeader) -> None:
    """Raise ``DamagedError`` unless the records in which these tensors lie whole are in the chain, or are the
    checkpoint's own. Each such record is that of the step after the ``step`` of the row (``IN_RECORD``)."""
    named = {(entry.generation, entry.step) for entry in part.chain} | {(header.generation, header.step)}
    for generation, step in zip(rows["generation"].tolist(), rows["step"].tolist(), strict=True):
        if (generation, step + 1) not in named:
            raise DamagedError("the chain does not name the gradient record in which a tensor lies whole")
