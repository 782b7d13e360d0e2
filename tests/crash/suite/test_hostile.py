"""Damage and hostile files: the small campaigns, each with a planted bug that it must find, and what they found once.

The long runs are kept in docs/evidence/.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from crash import confined, messages
from crash.campaign import Order, Tally
from crash.campaigns import flips, fuzz
from crash.document import Base, Document
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import pool_with

import lightck
from lightck.cli import verify
from lightck.errors import CorruptPoolError, LightckError, NoCheckpointError
from lightck.pool import reader
from lightck.pool.format import layout
from lightck.pool.format.structures import (
    MIB,
    PAGE,
    SLOT_ALIGN,
    TABLE_OFFSET,
    CommitRecord,
    DamagedError,
    ManifestHeader,
    Superblock,
    align_up,
    layout_hash,
    pack_slot_header,
)
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.restore import contents
from lightck.state import values

pytestmark = pytest.mark.long

BACKENDS = ["file", "pmdk"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pmdk":
        request.getfixturevalue("pmdk")
        monkeypatch.setenv("PMEM_IS_PMEM_FORCE", "1")
    return str(request.param)


def play(campaign: Any, folder: Path, count: int, backend: str = "file", seed: int = 7) -> Tally:
    return campaign.run(Order(seed, range(count), backend, str(folder)))


# -- the campaigns ---------------------------------------------------------------------------------------------------


def test_flips(folder, backend):
    tally = play(flips.CAMPAIGN, folder, flips.CAMPAIGN.small, backend)
    assert not tally.findings
    for seen in ("newest, exact", "older, exact", "reported by verify --deep", "lost write", "misdirected write"):
        assert tally.counts[seen], seen


def test_fuzz(folder, backend):
    tally = play(fuzz.CAMPAIGN, folder, fuzz.CAMPAIGN.small, backend)
    assert not tally.findings
    for seen in ("loaded", "older", "CorruptPoolError from recover", "inputs to single parsers"):
        assert tally.counts[seen], seen


# -- planted bugs ----------------------------------------------------------------------------------------------------


def test_flips_find_a_reader_that_does_not_look_at_manifest_hashes(folder, monkeypatch):
    monkeypatch.setattr(reader, "manifest_hash", lambda uuid, manifest: Same())
    assert play(flips.CAMPAIGN, folder, 100).findings


class Same(int):
    """Equal to every hash."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def test_flips_find_a_reader_that_takes_blocks_as_they_are(folder, monkeypatch):
    real = StoredCheckpoint.read_into

    def lenient(checkpoint: StoredCheckpoint, name: str, address: int) -> None:
        with contextlib.suppress(DamagedError):
            real(checkpoint, name, address)

    monkeypatch.setattr(StoredCheckpoint, "read_into", lenient)
    monkeypatch.setattr(StoredCheckpoint, "read_many", contents.MemorySource.read_many)  # one by one
    assert any("other values" in f.reason for f in play(flips.CAMPAIGN, folder, 100).findings)


def test_flips_find_a_verify_that_leaves_something_out(folder, monkeypatch):
    monkeypatch.setattr(verify, "_check_header", lambda *_: (None, True))
    found = play(flips.CAMPAIGN, folder, 100).findings
    assert any("nothing is damaged" in f.reason for f in found)


def test_fuzz_finds_a_manifest_whose_bounds_are_not_checked(folder, monkeypatch):
    real = ManifestHeader.unpack.__func__  # type: ignore[attr-defined]

    def unchecked(cls: type, manifest: bytes, nbytes: int | None = None) -> ManifestHeader:
        return real(cls, Endless(manifest))

    monkeypatch.setattr(ManifestHeader, "unpack", classmethod(unchecked))
    assert play(fuzz.CAMPAIGN, folder, 700).findings


class Endless(bytes):
    """Bytes behind whose end nothing lies."""

    def __len__(self) -> int:
        return 1 << 60


def test_fuzz_finds_a_type_that_is_believed(folder, monkeypatch):
    monkeypatch.setattr(contents, "typed", lambda value, kind: value)
    assert play(fuzz.CAMPAIGN, folder, 800).findings


def test_a_trial_that_crashes_hangs_or_eats_memory_is_a_finding_and_the_others_are_played(monkeypatch):
    monkeypatch.setattr(confined, "HUNG_SECONDS", 2)
    seen = []

    def trial(number: int, tally: Tally) -> None:
        tally.counts["played"] += 1
        if number == 3:
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 6:
            time.sleep(3600)
        if number == 9:
            seen.append(mmap.mmap(-1, 64 << 20))  # malloc may have so much free late in a run of tests

    tally = confined.run(range(12), trial, 32 << 20, lambda _: None)
    assert {f.trial: f.reason for f in tally.findings} == {
        3: "the process ended with SIGSEGV",
        6: "it hung",
        9: "it took more memory than allowed",
    }


# -- what they found -------------------------------------------------------------------------------------------------


def test_extensions_that_hold_only_each_other_are_refused():
    for code in (7, 8, 9, 10, 11, 12):
        data = b"\xc4\x00"
        for _ in range(2000):
            inner = b"\x92" + data + b"\x90" if code == 7 else data
            data = messages.extension(code, inner)
        with pytest.raises(CorruptPoolError):
            values.unpack(data)


def test_many_keys_of_one_hash_are_refused():
    """A dict of them would take minutes."""
    keys = {k * sys.hash_info.modulus for k in range(20, 3000)}
    pairs = b"".join(
        b"\x92" + messages.extension(8, b"\xc4\x0a" + key.to_bytes(10, "little", signed=True)) + b"\xc0" for key in keys
    )
    with pytest.raises(CorruptPoolError, match="hash"):
        values.unpack(messages.extension(2, messages.head(messages.LIST, len(keys)) + pairs))
    for refused in (dict.fromkeys(keys), keys):
        with pytest.raises(LightckError, match="same hash"):
            values.pack(refused, path="state/x")
    fine = {k: k for k in range(-200, 200)}
    assert values.unpack(values.pack(fine, path="state/x")) == fine


def test_an_int_that_python_would_not_print_is_refused():
    for nbytes, is_taken in ((1700, True), (1701, False)):
        raw = (nbytes - 1) * b"\xff" + b"\x7f"
        data = messages.extension(8, messages.head(messages.BIN, nbytes) + raw)
        number = int.from_bytes(raw, "little")
        if is_taken:
            assert values.unpack(data) == number
            assert values.pack(number, path="x") is not None
            assert str(number)
        else:
            with pytest.raises(CorruptPoolError):
                values.unpack(data)
            with pytest.raises(LightckError):
                values.pack(number, path="x")


def test_a_list_in_a_layout_table_gets_no_room_for_items_that_are_not_there():
    lie = messages.head(messages.LIST, 90_000)
    table = (b"\x81\xa7entries" + 900 * lie).ljust(100_000, b"\xc0")
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            layout.decode(table, low=0, high=1 << 40)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(table)
    finally:
        tracemalloc.stop()


def test_a_ring_has_at_most_64_lines(pool):
    """The time to read a commit log grows with the square of its records."""
    pool_with(pool)
    sb = open_pool(str(pool)).superblock
    good = {field: getattr(sb, field) for field in sb.__slots__}
    assert Superblock.unpack(Superblock(**{**good, "ring_lines": 64, "ring_stride": 64}).pack()).ring_lines == 64
    with pytest.raises(DamagedError):
        Superblock.unpack(Superblock(**{**good, "ring_lines": 65, "ring_stride": 64}).pack())


@pytest.mark.parametrize("copy", [0, 4096])
def test_a_superblock_of_another_pool_costs_nothing(pool, folder, copy):
    pool_with(pool)
    pool_with(folder / "other.pool")
    toys.poke(pool, copy, toys.content(folder / "other.pool")[copy : copy + 4096])
    assert lightck.recover(pool).step == 3
    facts = verify.pool_facts(str(pool), None, True)
    assert [s["name"] for s in facts["structures"] if s["damaged"]] == [f"superblock {'AB'[copy > 0]}"]


def test_a_slot_header_whose_last_write_was_lost_costs_nothing(pool):
    pool_with(pool, steps=4)
    newest = toys.checkpoints(pool)[0]
    sb, slot = newest.reader.superblock, newest.record.slot
    toys.poke(pool, sb.slots[slot][0], pack_slot_header(2, slot, sb.uuid))
    assert lightck.recover(pool).step == 4
    facts = verify.pool_facts(str(pool), None, True)
    assert [s["name"] for s in facts["structures"] if s["damaged"]] == [f"header of slot {slot}"]
    assert [(v["step"], v["blocks"]) for v in facts["versions"]] == [(4, "verified"), (3, "verified")]
    pool_with(pool, steps=0, resume=True)
    assert lightck.recover(pool).step == 4


# -- files with holes ------------------------------------------------------------------------------------------------


GIB = 1 << 30


def hollow(
    path: Path,
    *,
    slot: int = 8 * GIB,
    table: bytes | int = layout.encode([]),
    commit_record_nbytes: int = 0,
    uuid: bytes = bytes(16),
) -> Superblock:
    """A pool of a few KiB whose structures pass their checks, and are said to be as long as somebody likes. ``table``:
    its bytes, or how many zeros it has. ``commit_record_nbytes``: of the manifest that a commit record names."""
    table = bytes(table) if isinstance(table, int) else table
    room = align_up(len(table), PAGE)
    first = align_up(TABLE_OFFSET + 2 * room, SLOT_ALIGN)
    manifest = (slot // 2 - PAGE) // PAGE * PAGE
    sb = Superblock(
        uuid=uuid,
        nbytes=first + 2 * slot,
        table_offsets=(TABLE_OFFSET, TABLE_OFFSET + room),
        table_nbytes=len(table),
        table_hash=layout_hash(table),
        block=MIB,
        manifest_offset=PAGE,
        manifest_nbytes=manifest,
        payload_offset=PAGE + 2 * manifest,
        reserve_offset=PAGE + 2 * manifest,
        slots=((first, slot), (first + slot, slot)),
    )
    parts = {0: sb.pack(), PAGE: sb.pack(), **{at: table.rstrip(b"\0") for at in sb.table_offsets}}
    parts |= {at: pack_slot_header(5 + i, i, uuid) for i, (at, _) in enumerate(sb.slots)}
    if commit_record_nbytes:
        seen = reader.manifest_hash(uuid, bytes(commit_record_nbytes)) if commit_record_nbytes < GIB else 0
        parts[sb.commit_record_offset(0)] = CommitRecord(5, 1, 1, 5, seen, commit_record_nbytes, 1, 0, 0).pack(uuid)
    path.touch(0o600)
    with path.open("r+b") as file:
        file.truncate(sb.nbytes)
        for offset, data in parts.items():
            file.seek(offset)
            file.write(data)
    assert path.stat().st_blocks * 512 < MIB
    return sb


def mid_batch(nbytes: int, work: Any) -> Any:
    """What ``work`` gives, in a process that gets no more memory than this beside what it has."""

    def limited() -> Any:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + nbytes, mapped + nbytes))
        try:
            return work()
        except LightckError as err:
            return type(err), str(err), getattr(err, "errno", None)

    return toys.in_child(limited)


HOLLOW = {
    "slots with nothing in them": {"slot": 40 * GIB},
    "a manifest as long as a commit record can say": {"slot": 16 * GIB, "commit_record_nbytes": 2**32 - 64},
    "a layout table of zeros": {"table": 200 * MIB},
}


@pytest.mark.parametrize("lie", HOLLOW.values(), ids=HOLLOW)
def test_a_small_file_is_given_little_memory_whatever_it_says(folder, lie):
    pool = folder / "hollow.pool"
    hollow(pool, **lie)
    kind, _, _ = mid_batch(150 * MIB, lambda: lightck.recover(pool))
    assert issubclass(kind, (CorruptPoolError, NoCheckpointError))
    model = toys.net()
    reported = mid_batch(
        150 * MIB, lambda: lightck.attach(model, pool, optimizer=toys.adam(model), resume=True).close()
    )
    assert (reported is None) == (kind is NoCheckpointError), "where there never was a checkpoint a new pool is made"
    assert reported is None or reported[0] is CorruptPoolError


_RECOVER = """
import pathlib, resource, sys, lightck
lightck.recover, lightck.errors
pool, room = sys.argv[1], int(sys.argv[2])
mapped = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + room, mapped + room))
try:
    lightck.recover(pool)
except lightck.LightckError as err:
    print(type(err).__name__, getattr(err, "errno", None), err)
"""


@pytest.mark.parametrize(("room", "answer"), [(20, "PoolIOError 12"), (60, "PoolIOError 12"), (300, "Corrupt")])
def test_a_reader_that_gets_no_memory_says_so_and_passes_nothing_over(folder, room, answer):
    """40 MiB may be read of any file: there is room for nothing of it, for all of it once, for all that is done with
    it. In a process of its own: one that ran for a while has memory that it does not use."""
    pool = folder / "hollow.pool"
    hollow(pool, commit_record_nbytes=40 * MIB)
    command = [sys.executable, "-c", _RECOVER, str(pool), str(room * MIB)]
    reported = subprocess.run(command, capture_output=True, text=True, check=False)
    assert reported.stdout.startswith(answer), reported
    assert str(pool) in reported.stdout
    assert ("Free memory" in reported.stdout) == answer.startswith("PoolIOError")


def test_a_long_manifest_is_read_where_the_file_holds_it(pool, monkeypatch):
    monkeypatch.setattr(reader, "SPARSE_READ_NBYTES_MAX", 0)
    pool_with(pool)
    assert lightck.recover(pool).step == 3


# -- numbers at their end --------------------------------------------------------------------------------------------


def other_numbers(pool: Path, **numbers: int) -> None:
    """A commit record that adopts the newest checkpoint, in the place of that checkpoint's own record."""
    with contextlib.closing(open_pool(str(pool))) as opened:
        sb, commit_log = opened.superblock, opened.commit_log()
    position, line = max(commit_log.records.items(), key=lambda item: item[1].generation)
    changed = line._replace(kind=2, **numbers)
    toys.poke(pool, sb.commit_record_offset(position), changed.pack(sb.uuid))


def other_header(pool: Path, generation: int) -> None:
    with contextlib.closing(open_pool(str(pool))) as opened:
        sb, slot = opened.superblock, toys.checkpoints(pool)[0].record.slot
    toys.poke(pool, sb.slots[slot][0], pack_slot_header(generation, slot, sb.uuid))


NUMBERS = {
    "generation": lambda pool, n: other_numbers(pool, generation=n),
    "incarnation": lambda pool, n: other_numbers(pool, incarnation=n),
    "step": lambda pool, n: other_numbers(pool, step=n),
    "payload": lambda pool, n: other_numbers(pool, payload_generation=n, generation=n),
    "slot header": other_header,
}


@pytest.mark.parametrize("number", [2**62, 2**63 - 2, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1])
@pytest.mark.parametrize("change", NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_no_training_reaches_end_in_an_answer_or_an_error_of_ours(pool, change, number):
    pool_with(pool)
    change(pool, number)
    assert lightck.recover(pool).step in (2, 3)
    before = toys.content(pool)
    model = toys.net(seed=5)
    optimizer = toys.adam(model)
    untouched = toys.everything(model, optimizer)
    try:
        session = lightck.attach(model, pool, optimizer=optimizer, resume=True)
    except CorruptPoolError as err:
        refused: Exception | None = err
    else:
        refused = None
        with session:
            toys.train(model, optimizer, 2, session.step)
    if refused is None:
        assert toys.is_step(lightck.recover(pool), toys.everything(model, optimizer)), "what is committed is found"
    else:
        assert "overwrite=True" in str(refused)
        assert toys.same(toys.everything(model, optimizer), untouched)
        assert toys.content(pool) == before
    pool_with(pool, 2, overwrite=True)
    assert lightck.recover(pool).step == 2


@pytest.mark.parametrize("number", [2**63 - 2, 2**63 - 1, 2**63, 2**64 - 1])
def test_an_iteration_at_its_end_costs_no_checkpoint(pool, number):
    pool_with(pool)
    with contextlib.closing(open_pool(str(pool))) as opened:
        document = Document(Base(opened))
        for manifest in document.manifests:
            manifest.header[32:40] = struct.pack("<Q", number)
            manifest.is_changed = True
        write_sealed(pool, document)
    if number >= 2**63:
        with pytest.raises(CorruptPoolError, match="numbers"):
            lightck.recover(pool)
        return
    assert lightck.recover(pool).iteration == number
    model = toys.net(seed=5)
    optimizer = toys.adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        toys.train(model, optimizer, 4, session.step)
    assert toys.is_step(lightck.recover(pool), toys.everything(model, optimizer))


# -- single parsers --------------------------------------------------------------------------------------------------


PLAIN = st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
WORDS = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300), min_size=1, max_size=20)


@settings(max_examples=300)
@given(WORDS)
def test_any_words_make_a_structure_or_an_error_of_ours(words):
    data = struct.pack(f"<{len(words)}Q", *words)
    body = (b"LIGHTCK\x01" + struct.pack("<IHH", 0x01020304, 1, 0) + data).ljust(4088, b"\0")[:4088]
    line = data.ljust(56, b"\0")[:56]
    sealed_record = line + struct.pack("<Q", reader.manifest_hash(bytes(16), line))
    for parse in (
        lambda: Superblock.unpack(body + struct.pack("<Q", reader.manifest_hash(b"", body))),
        lambda: CommitRecord.unpack(sealed_record, bytes(16)),
        lambda: ManifestHeader.unpack((b"LCKMANI1" + data).ljust(200, b"\0")),
    ):
        with contextlib.suppress(DamagedError, LightckError):
            parse()


@settings(max_examples=300)
@given(
    st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4), max_leaves=20),
    st.integers(0, 400),
    st.binary(min_size=1, max_size=8),
)
def test_a_message_with_other_bytes_somewhere_is_a_value_or_an_error_of_ours(value, at, junk):
    packed = bytearray(values.pack(value, path="x"))
    packed[at % len(packed) : at % len(packed) + len(junk)] = junk
    with contextlib.suppress(CorruptPoolError):
        values.unpack(bytes(packed))


def other_state(pool: Path, change: Any) -> None:
    """Change the small state of every checkpoint of a pool, as a dict in which tensors are named, and seal it again."""
    opened = open_pool(str(pool))
    document = Document(Base(opened))
    for manifest in document.manifests:
        tree = values.unpack(manifest.state)
        change(tree)
        manifest.state, manifest.is_changed = values.pack(tree, path="x"), True
    write_sealed(pool, document)
    opened.close()


def write_sealed(pool: Path, document: Document) -> None:
    """What of a pool was changed, over it, with every checksum made anew."""
    for offset, data in document.patches():
        toys.poke(pool, offset, data)


def readings(pool: Path, folder: Path) -> list[Any]:
    """All functions that read a whole checkpoint."""
    model = toys.net()
    return [
        lambda: lightck.recover(pool).optimizer,
        lambda: lightck.recover(pool, model, toys.adam(model)),
        lambda: lightck.export_checkpoint(lightck.recover(pool), folder / "exported", what="all"),
    ]


CHANGES = {
    "an array as version": lambda tree: tree.update(version=np.zeros(3)),
    "a tensor as version": lambda tree: tree.update(version=torch.zeros(3)),
    "a list as values of an optimizer": lambda tree: tree["optimizers"][0].update(values=values.pack([1], path="x")),
    "a list as rest of an optimizer": lambda tree: tree["optimizers"][0].update(rest=values.pack([1], path="x")),
    "a tensor that is not there": lambda tree: tree["optimizers"][0].update(
        values=values.pack({"weight": torch.zeros(2000)}, path="no/such", large=lambda *_: None)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_sealed_small_state_of_another_kind_is_refused(pool, tmp_path, change):
    pool_with(pool, 3)
    other_state(pool, change)
    for reading in readings(pool, tmp_path):
        with pytest.raises(LightckError, match="saved options, counters or random states"):
            reading()


@pytest.mark.parametrize("shape", [(0, 2**40, 2**40), (2**61, 2, 0)])
def test_a_shape_that_torch_cannot_count_is_refused_in_an_empty_tensor_too(shape):
    data = layout.encode([layout.Entry("model/x", "param", "float32", shape, (1,) * len(shape), 0, "cpu", 0, -1, None)])
    with pytest.raises(DamagedError, match="shape"):
        layout.decode(data, low=0, high=1 << 20)


@pytest.mark.parametrize(("dtype", "numel"), [(torch.float32, 2), (torch.float16, 1000)], ids=["shape", "dtype"])
def test_a_tensor_tied_to_a_larger_one_is_refused_and_nothing_is_written_beside_it(pool, dtype, numel):
    memory = torch.full((4000,), 7.0, dtype=dtype)
    model = torch.nn.Module()
    model.big = torch.nn.Parameter(torch.ones(1000))
    model.small = torch.nn.Parameter(memory[:numel])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer):
        for _ in range(2):
            (model.big.sum() + model.small.sum()).backward()
            optimizer.step()
    tied_in_the_table(pool, "model/small", "model/big")
    with pytest.raises(CorruptPoolError, match="tied to"):
        lightck.recover(pool, model, optimizer)
    assert (memory[numel:] == 7).all()


def tied_in_the_table(pool: Path, name: str, other: str) -> None:
    """Say of one tensor that another one holds its bytes, and seal everything again."""
    opened = open_pool(str(pool))
    document = Document(Base(opened))
    tied = [e._replace(alias=other, nbytes=0) if e.name == name else e for e in opened.entries]
    assert tied != list(opened.entries)
    document.table = layout.encode(tied)
    document.follow_table()
    write_sealed(pool, document)
    opened.close()


def test_the_reader_is_the_one_under_test():
    """Planted bugs are put where the campaigns really read."""
    assert PoolReader.checkpoint.__globals__["manifest_hash"] is reader.manifest_hash
