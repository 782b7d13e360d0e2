"""Partial copies of a pool: what is not there is never taken for data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import lightck
from lightck.pool import create
from lightck.pool.format.structures import DamagedError
from lightck.pool.partial_copy import BlocksMissingError, ByteRanges, PartialCopy, metadata_of
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.restore.contents import load_tensor


@pytest.mark.parametrize("seed", range(20))
def test_ranges_are_sets_of_bytes(seed):
    rng = random.Random(seed)
    ranges, expected = ByteRanges(), set()
    for _ in range(40):
        begin = rng.randrange(200)
        end = begin + rng.randrange(12)
        gaps = {at for low, high in ranges.gaps(begin, end) for at in range(low, high)}
        assert gaps == set(range(begin, end)) - expected
        assert ranges.touches(begin, end) == bool(set(range(begin, end)) & expected)
        ranges.add(begin, end)
        expected |= set(range(begin, end))
        found = list(ranges)
        assert [at for low, high in found for at in range(low, high)] == sorted(expected)
        assert all(high < low for (_, high), (low, _) in pairwise(found)), "they do not touch"
        assert ranges.nbytes == len(expected)


@pytest.fixture
def source(pool: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolReader]:
    """A pool with one tensor of many blocks."""
    monkeypatch.setattr(create, "BLOCK_MAX", 1 << 16)
    model = torch.nn.Linear(512, 700)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer):
        model(torch.rand(2, 512)).sum().backward()
        optimizer.step()
    with closing(open_pool(str(pool))) as reader:
        yield reader


@pytest.fixture
def copied(source: PoolReader, folder: Path) -> Iterator[StoredCheckpoint]:
    """The newest checkpoint, in a copy with nothing but metadata."""
    path = folder / "copy.pool"
    with path.open("wb") as file:
        file.truncate(source.superblock.nbytes)
    for begin, end in metadata_of(source):
        put(path, begin, source.read(begin, end - begin))
    with closing(open_pool(str(path))) as reader:
        reader.partial = PartialCopy()
        yield next(iter(reader.checkpoints()))


def put(path: str | Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def partial_of(stored: StoredCheckpoint) -> PartialCopy:
    assert stored.reader.partial is not None
    return stored.reader.partial


def fetch(source: PoolReader, stored: StoredCheckpoint, attempts_max: int = 1, spoiled: int = -1) -> list[int]:
    """Write all blocks that are wanted, the one with number ``spoiled`` with other bytes. Returns their numbers."""
    found = []
    for blocks, _ in partial_of(stored).take_wanted():
        begin, end = stored.range_of(*blocks[1:])
        data = bytearray(source.read(begin, end - begin))
        numbers = range(blocks.first, blocks.first + -(-(end - begin) // stored.block_nbytes))
        if spoiled in numbers:
            data[(spoiled - blocks.first) * stored.block_nbytes] ^= 1
        put(stored.path, begin, data)
        partial_of(stored).received(blocks, attempts_max)
        found += numbers
    return found


def test_a_block_that_was_not_fetched_is_an_error_of_its_own(source, copied):
    block, name = copied.block_nbytes, "model/weight"
    memory = torch.empty(copied.entries[name].nbytes, dtype=torch.uint8)
    partial_of(copied).want(copied, [(name, 2, 3 * block)])
    assert fetch(source, copied) == [2, 3, 4]
    copied.read_blocks([(name, 3, 2 * block, memory.data_ptr())])
    for read in (
        lambda: copied.read_blocks([(name, 4, 2 * block, memory.data_ptr())]),
        lambda: copied.read_into(name, memory.data_ptr()),
        lambda: copied.read_many([(name, memory.data_ptr())]),
        copied.verify,
    ):
        with pytest.raises(BlocksMissingError, match="is not in the partial copy"):
            read()
    fetch(source, copied)
    assert torch.equal(load_tensor(copied, name), load_tensor(next(iter(source.checkpoints())), name))


def test_a_hole_does_not_match_its_checksum(copied):
    with closing(open_pool(copied.path)) as reader, pytest.raises(DamagedError, match="does not match its checksum"):
        next(iter(reader.checkpoints())).verify()


def test_nothing_is_fetched_twice(source, copied):
    name, block = "model/weight", copied.block_nbytes
    assert partial_of(copied).want(copied, [(name, 3, 2 * block)])
    fetch(source, copied)
    assert not partial_of(copied).want(copied, [(name, 3, block)])
    assert partial_of(copied).want(copied, [(name, 1, 6 * block)])
    assert fetch(source, copied) == [1, 2, 5, 6]


def test_a_damaged_block_is_wanted_again_until_all_sources_have_sent_it(source, copied):
    name, block = "model/weight", copied.block_nbytes
    places = [(name, 0, 5 * block)]
    for attempt in range(3):
        assert partial_of(copied).want(copied, places)
        assert partial_of(copied).damage_in(copied, places) is None
        assert fetch(source, copied, attempts_max=3, spoiled=3) == ([0, 1, 2, 3, 4] if attempt == 0 else [3])
    assert not partial_of(copied).want(copied, places)
    assert partial_of(copied).damage_in(copied, [(name, 0, 3 * block)]) is None
    assert "does not match its checksum" in str(partial_of(copied).damage_in(copied, places))
    with pytest.raises(DamagedError, match="block 3 of 'model/weight' does not match"):
        copied.read_blocks([(name, 0, 5 * block, 0)])
