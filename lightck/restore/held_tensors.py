"""The tensors that a rank held, put together from its own rows and from those that other ranks of its host wrote.

``HeldTensors`` is a ``Source``, for a rank that continues from its own checkpoint. If the rank wrote a tensor whole,
only the rank's own bytes are read. If ranks divided a tensor, the rows that each of them wrote are read from its
checkpoint. Which ranks these are, and which rows each wrote, is in the share of the rank's own entry; the entry of the
other rank must say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightck.pool.format.boxes import Box, Ints
from lightck.pool.format.layout import Entry, held_entry
from lightck.pool.format.shares import Share
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.restore.read_boxes import BoxRead, Destination, read_boxes
from lightck.restore.usable import RankCheckpoint


@dataclass(slots=True)
class HeldTensors:
    """A rank's checkpoint with all rows of the tensors that it held. It is read as a ``StoredCheckpoint`` is."""

    own: RankCheckpoint
    of_others: Mapping[int, RankCheckpoint]
    """Another rank -> its checkpoint of the same step."""
    entries: dict[str, Entry] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ``DamagedError`` if rows of a tensor are missing."""
        for name, entry in self.own.entries.items():
            if entry.share is not None and not entry.share.is_whole:
                for _ in self._writers(name, entry.share):
                    pass
        self.entries = {name: held_entry(entry) for name, entry in self.own.entries.items()}

    def _writers(self, name: str, share: Share) -> Iterator[tuple[RankCheckpoint, Share, int]]:
        """Yield, for each rank that wrote rows of a tensor that is divided: the rank's checkpoint, its share, and its
        index among the ranks that divide the tensor. Raises ``DamagedError`` if the rows of a rank are missing."""
        for place, rank in enumerate(share.cut.ranks):
            first, n_rows = share.rows_of(place)
            if not n_rows:
                continue
            stored = self.own if place == share.place else self.of_others.get(rank)
            entry = None if stored is None else stored.entries.get(name)
            written = None if entry is None else entry.share
            if (
                stored is None
                or entry is None
                or written is None
                or (written.cut, written.place, written.pieces) != (share.cut, place, share.pieces)
                or (entry.dtype, entry.alias) != (self.own.entries[name].dtype, self.own.entries[name].alias)
            ):
                raise DamagedError(
                    f"its tensor {name!r} cannot be put together: the rows {first} to {first + n_rows - 1}, which rank "
                    f"{rank} writes, are in no pool of this directory at this step"
                )
            yield stored, written, place

    # -- as a checkpoint ---------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.own.step

    @property
    def iteration(self) -> int:
        return self.own.iteration

    @property
    def state(self) -> bytes:
        return self.own.state

    @property
    def record(self) -> CommitRecord:
        return self.own.record

    @property
    def path(self) -> str:
        return self.own.path

    @property
    def uuid(self) -> bytes:
        return self.own.uuid

    def owns_slot(self) -> bool:
        return all(stored.owns_slot() for stored in (self.own, *self.of_others.values()))

    def read_into(self, name: str, address: int) -> None:
        """``read_many`` for one tensor."""
        self.read_many([(name, address)])

    def read_many(self, places: Sequence[tuple[str, int]]) -> None:
        """Read many tensors; see ``Source``. Raises ``DamagedError`` and ``PoolIOError``."""
        wholes: list[tuple[str, int]] = []
        boxes: dict[int, tuple[RankCheckpoint, list[BoxRead]]] = {}
        for name, address in places:
            if not self.entries[name].nbytes:
                continue
            share = self.own.entries[name].share
            if share is None or share.is_whole:
                wholes.append((name, address))
                continue
            into = Destination(address, self.entries[name].shape, self.entries[name].stride)
            for stored, written, place in self._writers(name, share):
                source = _box(written, written.rows[0] if written.is_whole else 0)
                destination = _box(written, written.rows[0])
                _, reads = boxes.setdefault(share.cut.ranks[place], (stored, []))
                reads.append(BoxRead(name, source, destination, into))
        self.own.read_many(wholes)
        for stored, reads in boxes.values():
            read_boxes(stored, reads)


def _box(share: Share, first: int) -> Box:
    """Return the box of the share's rows, with ``first`` as the index of the first of these rows."""
    (shape, dim, *_), (_, n_rows) = share.cut, share.rows
    zeros: Ints = (0,) * len(shape)
    return Box((*zeros[:dim], first, *zeros[dim + 1 :]), (*shape[:dim], n_rows, *shape[dim + 1 :]))
