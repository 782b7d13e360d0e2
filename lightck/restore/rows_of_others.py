"""Compare the rows that a rank held, by the checksums in its checkpoint, with those that other ranks wrote for it.

Ranks of a host divide tensors that all of them hold. With each checkpoint a rank records checksums of some blocks of
its copy of the rows that other ranks write. (A small model records all of them.) If these differ from what the other
ranks wrote, the ranks did not hold the same, and nobody can give the rank the rows back that it held.

*The order of blocks.* For each of the other ranks, the blocks of the rows that it wrote for this rank are numbered from
0: sorted by the tensor's name, then in the order of the rows. A ``RowsOfOther`` has the checksums of a run of blocks of
one rank in this order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from lightck.pool.format.layout import ITEM_NBYTES, Entry, blocks_of
from lightck.restore.contents import RowsOfOther, load_tensor
from lightck.restore.usable import RankCheckpoint
from lightck.state.blocks import checksums


def differing_rows(
    own: RankCheckpoint, records: Iterable[RowsOfOther], of_others: Mapping[int, RankCheckpoint]
) -> list[str]:
    """Return the names of tensors of which the rank held other rows than the ranks that wrote them. Also returned:
    tensors that another rank wrote whole, because it saw a difference, and whose rows ``records`` do not cover.

    ``own``: the rank's checkpoint. ``records``: those in its small state. ``of_others``: another rank -> its checkpoint
    of the same step. Raises ``DamagedError``."""
    divided = {name: one for name, one in sorted(own.entries.items()) if _is_share(one)}
    found: set[str] = set()
    for rank, stored in of_others.items():
        written = _Written(stored, rank, divided)
        for record in records:
            if record.rank == rank:
                found.update(written.differing(record))
        found.update(written.unknown())
    return sorted(found)


def _is_share(entry: Entry) -> bool:
    return entry.share is not None and not entry.share.is_whole and entry.alias is None


class _Written:
    """The rows that another rank (``rank``) wrote, of the tensors that it divides with this rank. "This rank" is the
    rank of ``own`` (see ``differing_rows``)."""

    def __init__(self, stored: RankCheckpoint, rank: int, divided: Mapping[str, Entry]) -> None:
        """``stored``: the checkpoint of ``rank``. ``divided``: name -> entry, in this rank's checkpoint, of each tensor
        that it divides with others."""
        self._stored = stored
        entries = [stored.entries[name] for name in divided if name in stored.entries]
        rows = [(one, _nbytes_of_share(one)) for one in entries if _is_written_by(one, rank, divided[one.name])]
        self._tensors = [(entry, blocks_of(nbytes, stored.block_nbytes)) for entry, nbytes in rows if nbytes]
        self._n_compared: Counter[str] = Counter()
        """Name -> how many of its blocks were compared."""

    def differing(self, record: RowsOfOther) -> list[str]:
        """Return the names of the tensors of which the record has other checksums."""
        held, at, found = np.frombuffer(record.checksums, "<u4").tolist(), 0, []
        for entry, first, count in self._tensors_with(record.first, len(held)):
            if self._checksums(entry)[first : first + count] != held[at : at + count]:
                found.append(entry.name)
            self._n_compared[entry.name] += count
            at += count
        return found

    def unknown(self) -> list[str]:
        """Return the names of the tensors that the other rank wrote whole, because its tensor differs from that of some
        rank, and that were not compared completely."""
        return [
            entry.name
            for entry, n_blocks in self._tensors
            if entry.share is not None and entry.share.is_whole and self._n_compared[entry.name] < n_blocks
        ]

    def _tensors_with(self, start: int, count: int) -> Iterable[tuple[Entry, int, int]]:
        """Yield (entry, first, n) of each tensor that has some of the ``count`` blocks from block ``start`` on: its
        blocks ``first`` to ``first + n`` (excluded) are among them."""
        begin = 0
        for entry, n_blocks in self._tensors:
            low, high = max(start, begin), min(start + count, begin + n_blocks)
            if low < high:
                yield entry, low - begin, high - low
            begin += n_blocks

    def _checksums(self, entry: Entry) -> list[int]:
        """Return the checksums of the blocks of the rows. Raises ``DamagedError``."""
        assert entry.share is not None, "the rank wrote rows"
        if not entry.share.is_whole:
            return self._stored.raw_checksums(entry.name)
        rows = load_tensor(self._stored, entry.name).narrow(entry.share.cut.dim, *entry.share.rows)
        numbers: list[int] = checksums(rows, self._stored.block_nbytes).tolist()
        return numbers


def _is_written_by(entry: Entry, rank: int, own: Entry) -> bool:
    """Whether ``entry`` is what ``rank`` wrote of the tensor of which ``own`` is another rank's share."""
    one, other = entry.share, own.share
    if one is None or other is None or entry.alias is not None:
        return False
    return (one.cut, one.pieces) == (other.cut, other.pieces) and one.cut.ranks[one.place] == rank


def _nbytes_of_share(entry: Entry) -> int:
    """Return the bytes of the rows that are the share of the rank; 0 if it has none."""
    if entry.share is None:
        return 0
    (shape, dim, *_), (_, n_rows) = entry.share.cut, entry.share.rows
    return math.prod(shape[:dim]) * n_rows * math.prod(shape[dim + 1 :]) * ITEM_NBYTES[entry.dtype]
