"""One flipped bit anywhere: recovery gives the newest checkpoint, an older one, or a typed error; never other values.

Bits are flipped in place, and the pool is recovered: every bit of commit records, slot headers, manifest headers,
payload and of the superblock's fields; one seeded bit of every byte, or of every few, of layout tables, small state and
padding (that the checksums over these notice every single bit is in test_format.py). Both for a pool that is not in use
and while the oldest slot is being written anew, there with fewer bits. What a recovery does not read is flipped too,
and costs no recovery.
"""

from __future__ import annotations

import mmap
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
import toys
from crash.oracle import Outcome, Recovered, Refused, recovery, truth
from crash.reads import Memory, watched
from torch import nn

import lightck
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    MANIFEST_HEADER_NBYTES,
    SUPERBLOCK_NBYTES,
    pack_slot_header,
)
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.pool.storage import extents
from lightck.pool.storage.extents import Extents

pytestmark = pytest.mark.long

SEED = 20231106
STEPS = 5


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@dataclass
class Mapped:
    """A pool in its mapped file, by its own offsets."""

    file: mmap.mmap
    places: Extents

    def __len__(self) -> int:
        return extents.total(self.places)

    def read(self, offset: int, nbytes: int) -> bytes:
        return b"".join(self.file[at : at + n] for at, n in extents.runs(self.places, offset, nbytes))

    def flip(self, offset: int, mask: int) -> None:
        ((at, _),) = extents.runs(self.places, offset, 1)
        self.file[at] ^= mask


@dataclass
class Pool:
    """A pool's file, mapped, with the true state of each of its checkpoints."""

    path: Path
    map: Mapped
    truths: dict[int, bytes]
    newest: int
    """The step that an undisturbed recovery gives."""
    memory: Memory[Outcome]
    stride: int
    """Of many bits only every so many are flipped."""

    def recover(self) -> Outcome:
        """``lightck.recover``, unless it read the same bytes before."""
        known = self.memory.recall(self.map.read)
        if known is not None:
            return known[0]
        with watched() as places:
            outcome = recovery(str(self.path))
        self.memory.learn(places, self.map.read, outcome)
        return outcome

    def flipped(self, bit: int) -> Outcome:
        """What a recovery gives with this bit of the file flipped."""
        at, mask = bit // 8, 1 << bit % 8
        self.map.flip(at, mask)
        try:
            return self.recover()
        finally:
            self.map.flip(at, mask)

    def check(self, bits: Iterator[int], oldest: int) -> Counter[str]:
        """Flip each; the outcome must be exact and no older than ``oldest``."""
        seen: Counter[str] = Counter()
        for bit in islice(bits, None, None, self.stride):
            outcome = self.flipped(bit)
            where = f"bit {bit % 8} of byte {bit // 8:#x}"
            assert isinstance(outcome, Recovered) or outcome.typed, f"{where}: {outcome}"
            if isinstance(outcome, Refused):
                raise AssertionError(f"{where}: {outcome.error}: {outcome.message}")
            assert self.truths.get(outcome.step) == outcome.digest, f"{where}: step {outcome.step} has other values"
            assert oldest <= outcome.step <= self.newest, f"{where}: step {outcome.step}"
            seen[f"step {outcome.step}"] += 1
        return seen


@pytest.fixture(params=["not in use", "in mid-write"])
def pool(request: pytest.FixtureRequest, folder: Path) -> Iterator[Pool]:
    path = folder / "run.pool"
    model, optimizer = build()
    truths: dict[int, bytes] = {}
    with lightck.attach(model, path, optimizer=optimizer, slots=3):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            truths[step] = truth(model, optimizer)
    if request.param == "in mid-write":
        half_written(path)
    with open(path, "r+b") as f, mmap.mmap(f.fileno(), 0) as mapped:
        stride = 1 if request.param == "not in use" else 5
        pool = Pool(path, Mapped(mapped, toys.places(path)), truths, STEPS, Memory(), stride)
        assert pool.recover() == Recovered(STEPS, STEPS, truths[STEPS])
        yield pool


def half_written(path: Path) -> None:
    """The oldest slot as a kill in mid-write leaves it: invalidated, half of its payload new."""
    reader = open_pool(str(path))
    oldest = [v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint)][-1]
    sb, slot = reader.superblock, oldest.record.slot
    base = sb.slots[slot][0]
    tensors = sorted(e.offset for e in oldest.entries.values())
    reader.close()
    toys.poke(path, base, pack_slot_header(STEPS + 1, slot, sb.uuid))
    for offset in tensors[: len(tensors) // 2]:
        toys.poke(path, base + offset, b"new payload!")


@pytest.fixture
def reader(pool: Pool) -> Iterator[PoolReader]:
    reader = open_pool(str(pool.path))
    yield reader
    reader.close()


def all_bits(start: int, nbytes: int) -> Iterator[int]:
    return iter(range(8 * start, 8 * (start + nbytes)))


def one_bit_per_byte(start: int, nbytes: int, every: int = 1) -> Iterator[int]:
    rng = random.Random(SEED)
    return (8 * at + rng.randrange(8) for at in range(start, start + nbytes, every))


def checkpoints(reader: PoolReader) -> list[StoredCheckpoint]:
    return [v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint)]


def manifest_of(reader: PoolReader, checkpoint: StoredCheckpoint) -> tuple[int, int]:
    sb, line = reader.superblock, checkpoint.record
    start = sb.slots[line.slot][0] + sb.manifest_offset + line.manifest_index * sb.manifest_nbytes
    return start, line.manifest_nbytes


def test_superblocks(pool: Pool, reader: PoolReader) -> None:
    fields = 168 + 32 * len(reader.superblock.slots)
    for start in (0, SUPERBLOCK_NBYTES):
        padding = one_bit_per_byte(start + fields, SUPERBLOCK_NBYTES - 8 - fields, every=8)
        check = all_bits(start + SUPERBLOCK_NBYTES - 8, 8)
        seen = pool.check(chain(all_bits(start, fields), padding, check), oldest=STEPS)
        assert set(seen) == {f"step {STEPS}"}


def test_layout_tables(pool: Pool, reader: PoolReader) -> None:
    sb = reader.superblock
    for start in sb.table_offsets:
        assert set(pool.check(one_bit_per_byte(start, sb.table_nbytes), oldest=STEPS)) == {f"step {STEPS}"}


def test_commit_records(pool: Pool, reader: PoolReader) -> None:
    sb, lines = reader.superblock, reader.commit_log().records
    for position, line in lines.items():
        is_newest = line.step == STEPS
        seen = pool.check(all_bits(sb.commit_record_offset(position), COMMIT_RECORD_NBYTES), oldest=STEPS - is_newest)
        assert set(seen) == {f"step {STEPS - is_newest}"}


def test_places_of_lines_that_were_never_used(pool: Pool, reader: PoolReader) -> None:
    sb, lines = reader.superblock, reader.commit_log().records
    for position in range(sb.ring_lines):
        if position not in lines:
            pool.check(one_bit_per_byte(sb.commit_record_offset(position), COMMIT_RECORD_NBYTES), oldest=STEPS)


def test_slot_headers(pool: Pool, reader: PoolReader) -> None:
    for start, _ in reader.superblock.slots:
        seen = pool.check(all_bits(start, COMMIT_RECORD_NBYTES), oldest=STEPS)
        assert set(seen) == {f"step {STEPS}"}, "a damaged header proves nothing about the payload"


def test_the_newest_manifest(pool: Pool, reader: PoolReader) -> None:
    start, nbytes = manifest_of(reader, checkpoints(reader)[0])
    state = start + checkpoints(reader)[0].header.state_offset
    header_end = start + MANIFEST_HEADER_NBYTES
    bits = chain(
        all_bits(start, MANIFEST_HEADER_NBYTES),
        one_bit_per_byte(header_end, state - header_end),
        one_bit_per_byte(state, start + nbytes - state, every=8),
    )
    assert set(pool.check(bits, oldest=STEPS - 1)) == {f"step {STEPS - 1}"}


def test_older_manifests(pool: Pool, reader: PoolReader) -> None:
    for checkpoint in checkpoints(reader)[1:]:
        start, nbytes = manifest_of(reader, checkpoint)
        pool.check(one_bit_per_byte(start, nbytes), oldest=STEPS)


def test_the_newest_payload(pool: Pool, reader: PoolReader) -> None:
    newest = checkpoints(reader)[0]
    base = reader.superblock.slots[newest.record.slot][0]
    for entry in newest.entries.values():
        seen = pool.check(all_bits(base + entry.offset, entry.nbytes), oldest=STEPS - 1)
        assert set(seen) == {f"step {STEPS - 1}"}


def test_older_payloads(pool: Pool, reader: PoolReader) -> None:
    for checkpoint in checkpoints(reader)[1:]:
        base = reader.superblock.slots[checkpoint.record.slot][0]
        for entry in checkpoint.entries.values():
            pool.check(all_bits(base + entry.offset, entry.nbytes), oldest=STEPS)


def test_anywhere(pool: Pool) -> None:
    rng = random.Random(SEED)
    pool.check((rng.randrange(8 * len(pool.map)) for _ in range(3000)), oldest=STEPS - 1)


def test_two_flips_in_two_checkpoints_cost_two_checkpoints(pool: Pool, reader: PoolReader) -> None:
    """Bits of the two newest checkpoints, flipped together: recovery gives the third, or a typed error."""
    rng = random.Random(SEED)
    first, second = (manifest_of(reader, v) for v in checkpoints(reader)[:2])
    has_third = len(checkpoints(reader)) > 2
    for _ in range(100):
        bits = [8 * (start + rng.randrange(nbytes)) + rng.randrange(8) for start, nbytes in (first, second)]
        pool.map.flip(bits[0] // 8, 1 << bits[0] % 8)
        outcome = pool.flipped(bits[1])
        pool.map.flip(bits[0] // 8, 1 << bits[0] % 8)
        if has_third:
            assert outcome == Recovered(STEPS - 2, STEPS - 2, pool.truths[STEPS - 2])
        else:
            assert isinstance(outcome, Refused)
            assert outcome.error == "CorruptPoolError"


def test_a_restart_writes_over_what_is_lost_before_it_writes_over_a_fall_back(pool: Pool, reader: PoolReader) -> None:
    held = {v.step for v in checkpoints(reader)}
    damage = {
        "nothing": [],
        "the newest line": [8 * reader.superblock.commit_record_offset(max(reader.commit_log().records)) + 100],
        "the newest manifest": [8 * manifest_of(reader, checkpoints(reader)[0])[0] + 100],
    }
    for what, bits in damage.items():
        path = pool.path.with_name("restarted.pool")
        path.write_bytes(pool.map.file[:])
        path.chmod(0o600)
        for bit in bits:
            toys.flip(path, bit // 8, 1 << bit % 8)
        model, optimizer = build()
        with lightck.attach(model, path, optimizer=optimizer, resume=True) as session:
            left = held - ({STEPS} if bits else set())
            assert session.step == max(left)
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        again = open_pool(str(path))
        expected = sorted(left | {max(left) + 1})[-3:]
        assert sorted({v.step for v in checkpoints(again)}) == expected, what
        again.close()
        path.unlink()
