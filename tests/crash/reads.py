"""What a recovery reads, and what it makes of it: so that no two images are recovered that it cannot tell apart.

Recovery is deterministic: what it reads next follows from what it has read. ``Memory`` keeps the reads of all
recoveries as a tree. An image whose bytes lead to a leaf of that tree has the outcome of the leaf, whatever lies in
the places that were never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar
from unittest.mock import patch

from lightck.pool.gradient_reader import GradientCheckpoint, StoredTensor
from lightck.pool.reader import PoolReader, StoredCheckpoint
from lightck.restore.replay import replay

T = TypeVar("T")
Place = tuple[int, int]
"""Offset and length in bytes."""


@contextmanager
def watched() -> Iterator[list[Place]]:
    """Inside, every read from any pool is appended to the list, in order. Updates are made again for one unit after
    the other, or their reads would come in any order."""
    places: list[Place] = []
    read, read_into, read_many = PoolReader.read, StoredCheckpoint.read_into, StoredCheckpoint.read_many
    read_gradients = GradientCheckpoint.read

    def watched_read(reader: PoolReader, offset: int, nbytes: int) -> bytes:
        places.append((offset, nbytes))
        return read(reader, offset, nbytes)

    def note(checkpoint: StoredCheckpoint, name: str) -> None:
        entry = checkpoint.entries[name]
        if entry.nbytes:
            places.append((checkpoint.reader.superblock.slots[checkpoint.record.slot][0] + entry.offset, entry.nbytes))

    def watched_read_into(checkpoint: StoredCheckpoint, name: str, address: int) -> None:
        note(checkpoint, name)
        read_into(checkpoint, name, address)

    def watched_read_many(checkpoint: StoredCheckpoint, wanted: Sequence[tuple[str, int]]) -> None:
        for name, _ in wanted:
            note(checkpoint, name)
        read_many(checkpoint, wanted)

    def watched_read_gradients(checkpoint: GradientCheckpoint, tensors: Sequence[tuple[StoredTensor, int]]) -> None:
        places.extend((one.offset, one.entry.nbytes) for one, _ in tensors if one.entry.nbytes)
        read_gradients(checkpoint, tensors)

    with (
        patch.object(PoolReader, "read", watched_read),
        patch.object(StoredCheckpoint, "read_into", watched_read_into),
        patch.object(StoredCheckpoint, "read_many", watched_read_many),
        patch.object(GradientCheckpoint, "read", watched_read_gradients),
        patch("lightck.restore.gradient_state.replay", partial(replay, workers=1)),
    ):
        yield places


@dataclass(slots=True)
class _Node(Generic[T]):
    place: Place
    nexts: dict[bytes, _Node[T] | _Leaf[T]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Leaf(Generic[T]):
    outcome: T


class Memory(Generic[T]):
    """Outcomes by what was read on the way to them."""

    def __init__(self) -> None:
        self._root: _Node[T] | _Leaf[T] | None = None

    def recall(self, read: Callable[[int, int], bytes]) -> tuple[T, list[Place]] | None:
        """The outcome for an image whose bytes ``read`` gives, and what its recovery reads; None where nothing like it
        was seen."""
        node, places = self._root, []
        while isinstance(node, _Node):
            places.append(node.place)
            node = node.nexts.get(read(*node.place))
        return None if node is None else (node.outcome, places)

    def learn(self, places: list[Place], read: Callable[[int, int], bytes], outcome: T) -> None:
        """This image was read at these places, in this order, and gave this outcome."""
        assert places, "a recovery reads"
        if self._root is None:
            self._root = _Node(places[0])
        node = self._root
        for place, following in zip(places, [*places[1:], None], strict=True):
            assert isinstance(node, _Node), "a recovery read on where the same bytes ended another"
            assert node.place == place, "a recovery read elsewhere after the same bytes"
            fresh: _Node[T] | _Leaf[T] = _Leaf(outcome) if following is None else _Node(following)
            node = node.nexts.setdefault(read(*place), fresh)
