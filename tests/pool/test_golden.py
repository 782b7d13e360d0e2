"""Pools of released formats open for ever, bit for bit; pools of the future are refused by name.

``tests/pool/golden/make_golden.py`` made them and says what is in them.
"""

from __future__ import annotations

import json
import lzma
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import format_reference as reference
import pytest
import toys
from module_at import module_at

import lightck
from lightck.errors import CheckpointExistsError, FormatError
from lightck.pool.format.structures import crc64, next_batch_key
from lightck.pool.reader import StoredCheckpoint, open_pool

HERE = Path(__file__).parent / "golden"


golden = module_at(HERE / "make_golden.py")


@pytest.fixture(params=["v1", "v1-next"])
def v1(pool: Path, request: pytest.FixtureRequest) -> Path:
    pool.write_bytes(lzma.decompress((HERE / f"{request.param}.pool.xz").read_bytes()))
    pool.chmod(0o600)
    return pool


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return dict(json.loads((HERE / "v1.json").read_text()))


def test_version_1_recovers_exactly(v1: Path, expected: dict[str, Any]) -> None:
    assert golden.expected(v1) == expected


@pytest.fixture(params=["v1-pmdk", "v1-next-pmdk"])
def v1_pmdk(pool: Path, request: pytest.FixtureRequest) -> Path:
    pool.write_bytes(lzma.decompress((HERE / f"{request.param}.pool.xz").read_bytes()))
    pool.chmod(0o600)
    return pool


def test_version_1_in_a_pmdk_pool_recovers_exactly(v1_pmdk: Path, expected: dict[str, Any]) -> None:
    """It needs no libpmemobj."""
    assert len(toys.places(v1_pmdk)) > 1
    assert golden.expected(v1_pmdk) == expected
    assert reference.Pool(v1_pmdk.read_bytes()).checkpoints()[0].record["step"] == expected["step"]


def test_version_1_in_a_pmdk_pool_trains_on(v1_pmdk: Path, expected: dict[str, Any], pmdk: None) -> None:
    golden.train(v1_pmdk, 1, resume=True)
    assert lightck.recover(v1_pmdk).step == expected["step"] + 1


def test_version_1_verifies(v1: Path, expected: dict[str, Any]) -> None:
    reader = open_pool(str(v1))
    checkpoints = [v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint)]
    for checkpoint in checkpoints:
        checkpoint.verify()
    assert [[v.step, v.record.generation] for v in checkpoints] == [v[:2] for v in expected["versions"]]
    reader.close()


def test_version_1_is_as_drawn(v1: Path, expected: dict[str, Any]) -> None:
    newest = reference.Pool(v1.read_bytes()).checkpoints()[0]
    assert newest.record["step"] == expected["step"]
    for name, tensor in expected["model"].items():
        full = newest.aliases.get(f"model/{name}", f"model/{name}")
        if "stride" not in tensor or tensor["stride"] == sorted(tensor["stride"], reverse=True):
            assert newest.tensors[full].hex() == tensor["bytes"], name


def test_version_1_trains_on(v1: Path, expected: dict[str, Any]) -> None:
    golden.train(v1, 1, resume=True)
    assert lightck.recover(v1).step == expected["step"] + 1


@pytest.mark.parametrize("v1", ["v1-next"], indirect=True)
def test_what_followed_is_recorded(v1: Path) -> None:
    """Of the checkpoints that are in the slots: the newest was closed at the end, and nothing followed it."""
    with closing(open_pool(str(v1))) as reader:
        recorded = {
            v.step: reader.next_batches(v.record) for v in reader.checkpoints() if isinstance(v, StoredCheckpoint)
        }
    key = next_batch_key("")
    assert {step: None if e is None else [(n.key, n.kind) for n in e] for step, e in recorded.items()} == {
        6: None,
        5: [(key, 3)],
        4: None,
    }


@pytest.mark.parametrize("v1", ["v1"], indirect=True)
def test_an_older_pool_gets_no_records(v1: Path) -> None:
    golden.train(v1, 3, resume=True)
    pool = reference.Pool(v1.read_bytes())
    assert not pool.superblock["compat"]
    for offset, _ in pool.slots:
        assert not pool.data[offset + 64 : offset + 4096].strip(b"\0")


@pytest.mark.parametrize("v1", ["v1-next"], indirect=True)
def test_version_1_is_still_what_this_version_writes(v1: Path, folder: Path) -> None:
    """The parts that do not depend on torch: a change of the format must not go unnoticed."""
    fresh = folder / "fresh.pool"
    golden.make(fresh)
    old, new = reference.Pool(v1.read_bytes()), reference.Pool(fresh.read_bytes())
    assert (new.superblock, new.entries) == (old.superblock, old.entries)
    assert new.records.keys() == old.records.keys()
    for position, line in new.records.items():
        same = set(line) - {"manifest_hash", "manifest_nbytes", "check"}
        assert {k: line[k] for k in same} == {k: old.records[position][k] for k in same}


# -- the future ------------------------------------------------------------------------------------------------------


def patched(path: Path, at: int, form: str, value: int) -> Path:
    """Both superblocks with another value in one field, and right checksums."""
    for start in (0, 4096):
        data = bytearray(toys.content(path)[start : start + 4088])
        struct.pack_into(form, data, at, value)
        toys.poke(path, start, bytes(data) + struct.pack("<Q", crc64(bytes(data))))
    return path


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [(12, "<H", 2), (32, "<Q", 8), (32, "<Q", 1 << 63)],
    ids=["newer major", "incompat", "incompat, last bit"],
)
def test_a_pool_of_the_future_is_refused(v1: Path, at: int, form: str, value: int) -> None:
    before = patched(v1, at, form, value).read_bytes()
    with pytest.raises(FormatError, match="newer lightck"):
        lightck.recover(v1)
    model, optimizer, extra = golden.build()
    for options in ({}, {"resume": True}):
        with pytest.raises(FormatError):
            lightck.attach(model, v1, optimizer=optimizer, state={"extra": extra}, **options)
    assert v1.read_bytes() == before


def test_a_pool_of_the_future_can_be_discarded(v1: Path) -> None:
    patched(v1, 12, "<H", 2)
    golden.train(v1, 1, overwrite=True)
    assert lightck.recover(v1).step == 1


def test_unknown_features_that_only_matter_to_writers_allow_reading(v1: Path, expected: dict[str, Any]) -> None:
    patched(v1, 24, "<Q", 2)
    assert lightck.recover(v1).step == expected["step"]
    with pytest.raises(FormatError, match="read but not write"):
        golden.train(v1, 1, resume=True)


@pytest.mark.parametrize(("at", "form", "value"), [(14, "<H", 7), (16, "<Q", 1 << 40)], ids=["newer minor", "compat"])
def test_unknown_features_that_do_not_matter_are_ignored(
    v1: Path, expected: dict[str, Any], at: int, form: str, value: int
) -> None:
    patched(v1, at, form, value)
    assert lightck.recover(v1).step == expected["step"]
    with pytest.raises(CheckpointExistsError):
        golden.train(v1, 1)
    golden.train(v1, 1, resume=True)
