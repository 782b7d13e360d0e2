"""Bugs that were planted into the code that reads: each must be found by some crash image, or by a flipped bit."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import toys
from crash.cuts import Limits
from crash.oracle import Outcome, Recovered, recovery
from crash.persistence import Adversary, BlockDevice, PersistentMemory
from crash.recording import Recording
from crash.simulator import Effort, Simulator

from lightck.errors import CorruptPoolError
from lightck.pool import commit_log, reader
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    KIND_CHECKPOINT,
    SUPERBLOCK_NBYTES,
    SUPERBLOCK_OFFSETS,
    CommitRecord,
    DamagedError,
    Superblock,
    manifest_hash,
)
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.pool.storage import extents
from lightck.restore.contents import MemorySource

pytestmark = pytest.mark.long

LIMITS = Limits(budget=512, metadata=8, payload=4, contents=4, prefixes=2, masks=4)
EFFORT = Effort(LIMITS, again_every=1 << 30, violations_max=10)
Planted = Callable[[], AbstractContextManager[Any]]
Recorded = Callable[[str], "tuple[Recording, Path]"]


# -- the bugs --------------------------------------------------------------------------------------------------------


class _Equal:
    """Equal to everything: a comparison that is left out."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def older_checkpoint_preferred() -> AbstractContextManager[Any]:
    newest_first = commit_log.candidates
    return patch.object(reader, "candidates", lambda *args: newest_first(*args)[::-1])


def ordered_by_step() -> AbstractContextManager[Any]:
    right = commit_log.candidates
    return patch.object(reader, "candidates", lambda *args: sorted(right(*args), key=lambda ln: -ln.step))


@contextmanager
def timelines_not_distinguished() -> Iterator[None]:
    """Neither incarnations nor adoptions count, only how far a training had come."""
    with ordered_by_step(), patch.object(commit_log, "is_dead", lambda *args: False):
        yield


def dead_records_used() -> AbstractContextManager[Any]:
    return patch.object(commit_log, "is_dead", lambda *args: False)


def record_not_checked() -> AbstractContextManager[Any]:
    return patch.object(commit_log, "CommitRecord", _Lines(_unchecked))


def cut_off_record_not_completed() -> AbstractContextManager[Any]:
    def unpack(data: bytes, uuid: bytes) -> CommitRecord | None:
        return None if data[:8] == bytes(8) else CommitRecord.unpack(data, uuid)

    return patch.object(commit_log, "CommitRecord", _Lines(unpack))


@dataclass
class _Lines:
    unpack: Callable[[bytes, bytes], CommitRecord | None]


def _unchecked(data: bytes, uuid: bytes) -> CommitRecord | None:
    check = manifest_hash(uuid, data[:56])  # the same function of uuid and bytes
    return CommitRecord.unpack(data[:56] + check.to_bytes(8, "little"), uuid)


def manifest_not_checked() -> AbstractContextManager[Any]:
    return patch.object(reader, "manifest_hash", lambda *args: _Equal())


def table_not_checked() -> AbstractContextManager[Any]:
    return patch.object(reader, "layout_hash", lambda *args: _Equal())


def superblock_not_checked() -> AbstractContextManager[Any]:
    def unpack(data: bytes) -> Superblock:
        return Superblock._from_checked(data[:-8])

    return patch.object(reader, "Superblock", _Superblocks(unpack))


@dataclass
class _Superblocks:
    unpack: Callable[[bytes], Superblock]


def second_superblock_not_tried() -> AbstractContextManager[Any]:
    return patch.object(reader, "SUPERBLOCK_OFFSETS", SUPERBLOCK_OFFSETS[:1] * 2)


def second_table_not_tried() -> AbstractContextManager[Any]:
    def only_first(self: PoolReader) -> Any:
        sb = self.superblock
        table = self.read(sb.table_offsets[0], sb.table_nbytes)
        if reader.layout_hash(table) != sb.table_hash:
            raise CorruptPoolError("the layout table is damaged")
        return right(self)

    right = PoolReader._read_table
    return patch.object(PoolReader, "_read_table", only_first)


def blocks_not_checked() -> AbstractContextManager[Any]:
    def read_into(checkpoint: StoredCheckpoint, name: str, address: int) -> None:
        entry = checkpoint.entries[name]
        slot, _ = checkpoint.reader.superblock.slots[checkpoint.record.slot]
        data = checkpoint.reader.read(slot + entry.offset, entry.nbytes)
        if address:
            reader.ffi.memmove(reader.ffi.cast("void *", address), data, len(data))

    return patch.multiple(StoredCheckpoint, read_into=read_into, read_many=MemorySource.read_many)  # one by one


def header_not_compared() -> AbstractContextManager[Any]:
    return patch.object(PoolReader, "slot_generation", lambda *args: None)


@contextmanager
def neither_header_nor_blocks() -> Iterator[None]:
    with header_not_compared(), blocks_not_checked():
        yield


# -- crash images ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bug", "workload"),
    [
        (older_checkpoint_preferred, "two slots"),
        (timelines_not_distinguished, "going back, three slots"),
        (blocks_not_checked, "media error"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_crash_image_finds_it(bug: Planted, workload: str, recorded: Recorded, folder: Path) -> None:
    recording, _ = recorded(workload)
    for model in (PersistentMemory(), Adversary(), BlockDevice()):
        with bug():
            report = Simulator(recording, str(folder), effort=EFFORT).check(model)
        print(report)
        assert report.violations, str(report)


def recovery_without_newest(path: str) -> Outcome:
    """The outcome of recovery if the newest checkpoint is lost with its medium."""
    right, calls = PoolReader.checkpoint, []

    def lost(self: PoolReader, line: CommitRecord) -> StoredCheckpoint:
        checkpoint = right(self, line)
        calls.append(line)
        if len(calls) == 1:
            raise DamagedError("lost")
        return checkpoint

    with patch.object(PoolReader, "checkpoint", lost):
        return recovery(path)


def older_ones_are_exact(recording: Recording, folder: Path) -> bool:
    """Whether every other checkpoint that is recovered is bit for bit one that was written."""
    expected = {g: (known.step, known.digest) for tape in recording for g, known in tape.expected.items()}
    wrong = []

    def recover(path: str) -> Outcome:
        outcome = recovery_without_newest(path)
        if isinstance(outcome, Recovered) and expected.get(outcome.generation) != (outcome.step, outcome.digest):
            wrong.append(outcome)
        return outcome

    Simulator(recording, str(folder), recover=recover, effort=Effort(LIMITS, violations_max=1 << 30)).check(
        PersistentMemory()
    )
    return not wrong


def test_slot_header_and_block_checksums_each_keep_a_reused_slot_from_being_read(
    recorded: Recorded, folder: Path
) -> None:
    """Either would do for crashes alone, so a bug in one of them cannot be seen; one in both can."""
    recording, _ = recorded("two slots")
    for bug in (header_not_compared, blocks_not_checked):
        with bug():
            assert older_ones_are_exact(recording, folder), bug.__name__
    with neither_header_nor_blocks():
        assert not older_ones_are_exact(recording, folder)


# -- flipped bits ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    name: str
    offset: int
    nbytes: int
    is_newest: bool
    """The places where a flip may lose the newest checkpoint, and recovery must give the one before."""


def regions(path: Path) -> list[Region]:
    """All structures of a pool, and the payload of its newest checkpoint."""
    with closing(open_pool(str(path))) as pool:
        sb = pool.superblock
        newest = next(v for v in pool.checkpoints() if isinstance(v, StoredCheckpoint))
        found = [Region("superblock", at, 176, False) for at in SUPERBLOCK_OFFSETS]
        found += [Region("superblock", at + SUPERBLOCK_NBYTES - 8, 8, False) for at in SUPERBLOCK_OFFSETS]
        found += [Region("table", at, sb.table_nbytes, False) for at in sb.table_offsets]
        for position, line in pool.commit_log().records.items():
            if line.kind == KIND_CHECKPOINT:  # without its adoption record dead checkpoints are live again: no bug here
                names_newest = line.payload_generation == newest.record.payload_generation
                found.append(Region("line", sb.commit_record_offset(position), COMMIT_RECORD_NBYTES, names_newest))
        found += [
            Region("header", at, COMMIT_RECORD_NBYTES, i == newest.record.slot) for i, (at, _) in enumerate(sb.slots)
        ]
        slot = sb.slots[newest.record.slot][0]
        manifest = slot + sb.manifest_offset + newest.record.manifest_index * sb.manifest_nbytes
        found.append(Region("manifest", manifest, newest.record.manifest_nbytes, True))
        rate = pool.read(manifest, newest.record.manifest_nbytes).index(struct.pack(">d", 0.1))
        found.append(Region("learning rate in the manifest", manifest + rate, 8, True))
        found += [Region("payload", slot + e.offset, e.nbytes, True) for e in newest.entries.values() if e.nbytes]
        return found


def peek(path: Path, offset: int) -> bytes:
    with open(path, "rb") as f:
        return extents.read(f.fileno(), toys.places(path), offset, 1)


def harm_of_flips(path: Path, allowed: list[Outcome], seed: int = 0) -> list[str]:
    """The violations by single flipped bits: ``allowed`` are the newest checkpoint and the one before it."""
    rng, found = random.Random(seed), []
    for region in regions(path):
        for number in rng.sample(range(8 * region.nbytes), 24):
            at, bit = region.offset + number // 8, 1 << number % 8
            byte = peek(path, at)
            toys.poke(path, at, bytes([byte[0] ^ bit]))
            outcome = recovery(str(path))
            toys.poke(path, at, byte)
            if outcome not in (allowed if region.is_newest else allowed[:1]):
                found.append(f"{region.name}: bit {bit} at {at:#x}, seed {seed}: {outcome}")
    return found


def two_newest(recording: Recording) -> list[Outcome]:
    """From the training's own reports: the checkpoint of the last commit record, and the one before."""
    tape = recording[-1]
    last = tape.content[max(tape.content)]
    before = [g for g in (last - 1,) if g in tape.expected]
    return [Recovered(g, tape.expected[g].step, tape.expected[g].digest) for g in (last, *before)]


@pytest.mark.parametrize("workload", ["two slots", "going back, no step"])
def test_no_flipped_bit_does_harm(workload: str, recorded: Recorded) -> None:
    recording, path = recorded(workload)
    assert not harm_of_flips(path, two_newest(recording))


@pytest.mark.parametrize(
    ("bug", "workload"),
    [
        (record_not_checked, "two slots"),
        (manifest_not_checked, "two slots"),
        (table_not_checked, "two slots"),
        (superblock_not_checked, "two slots"),
        (second_superblock_not_tried, "two slots"),
        (second_table_not_tried, "two slots"),
        (blocks_not_checked, "two slots"),
        (dead_records_used, "going back, no step"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_flipped_bit_finds_it(bug: Planted, workload: str, recorded: Recorded) -> None:
    recording, path = recorded(workload)
    with bug():
        found = harm_of_flips(path, two_newest(recording))
    print(len(found), found[:3])
    assert found


def test_a_lost_generation_is_found_in_the_line_itself(recorded: Recorded) -> None:
    """The last store of a commit record may be lost if it changes no byte."""
    recording, path = recorded("one checkpoint")
    with closing(open_pool(str(path))) as pool:
        ((position, _),) = pool.commit_log().records.items()
        at = pool.superblock.commit_record_offset(position)
    word = b"".join(peek(path, at + i) for i in range(8))
    toys.poke(path, at, bytes(8))
    try:
        assert recovery(str(path)) == two_newest(recording)[0]
        with cut_off_record_not_completed():
            assert recovery(str(path)) != two_newest(recording)[0]
    finally:
        toys.poke(path, at, word)
