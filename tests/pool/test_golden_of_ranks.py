"""Golden pools of ranks open for ever, bit for bit.

``golden/make_group_golden.py`` made them and says what is in them.
"""

from __future__ import annotations

import json
import lzma
from contextlib import closing
from pathlib import Path
from typing import Any

import format_reference as reference
import pools_by_hand as by_hand
import pytest
import torch
from module_at import module_at

from lightck.errors import FormatError
from lightck.pool.format import structures
from lightck.pool.format.assembly import assembly
from lightck.pool.format.pieces import Piece, parse_pieces
from lightck.pool.reader import StoredCheckpoint, open_pool

HERE = Path(__file__).parent / "golden"

golden = module_at(HERE / "make_group_golden.py")


@pytest.fixture(params=golden.MAKERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kept(name: str, pool: Path) -> Path:
    pool.write_bytes(lzma.decompress((HERE / f"{name}.pool.xz").read_bytes()))
    pool.chmod(0o600)
    return pool


@pytest.fixture
def expected(name: str) -> dict[str, Any]:
    return dict(json.loads((HERE / "v1-group.json").read_text())[name])


def test_a_golden_pool_is_read_as_it_was_made(kept: Path, expected: dict[str, Any]) -> None:
    assert golden.expected(kept) == expected


def test_every_block_of_a_golden_pool_verifies(kept: Path, expected: dict[str, Any]) -> None:
    with closing(open_pool(str(kept))) as reader:
        checkpoints = [v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint)]
        for checkpoint in checkpoints:
            checkpoint.verify()
    assert len(checkpoints) == len(expected["checkpoints"])


def test_a_golden_pool_is_as_drawn(kept: Path, expected: dict[str, Any]) -> None:
    """The reader that was written from docs/format.md alone sees the same."""
    drawn = reference.Pool(kept.read_bytes())
    assert drawn.group is not None
    group = expected["group"]
    assert [drawn.group[key].hex() for key in ("run", "world")] == [group["run_id"], group["world_id"]]
    assert [drawn.group[key] for key in ("rank", "size", "mesh", "coordinate")] == [
        group[key] for key in ("rank", "world_size", "mesh_shape", "coordinate")
    ]
    assert drawn.entries == expected["entries"]
    newest, wanted = drawn.checkpoints()[0], expected["checkpoints"][0]
    assert {name: data.hex() for name, data in newest.tensors.items()} == wanted["tensors"]
    assert newest.extras == wanted["extras"]


@pytest.mark.parametrize("name", ["v1-group"], indirect=True)
def test_the_golden_pool_has_each_kind_of_tensor(kept: Path) -> None:
    with closing(open_pool(str(kept))) as reader:
        newest = next(v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint))
    entries = {name.rpartition("/")[2]: entry for name, entry in newest.entries.items()}
    assert entries["plain"].pieces is entries["tied"].pieces is None
    assert entries["scale"].pieces == (Piece((), (), ()),)
    assert (entries["uneven"].logical_shape, entries["uneven"].shape) == ((13, 3), (6, 3))
    assert (entries["empty"].logical_shape, entries["empty"].shape, entries["empty"].pieces) == ((1, 3), (0, 3), ())
    assert [piece.start[0] for piece in entries["strided"].pieces or ()] == [2, 6, 10]
    assert [piece.size for piece in entries["padded"].pieces or ()] == [(4, 2)]
    assert [extra.name for extra in newest.extras] == ["state/late"]
    assert newest.extras[0].pieces == (Piece((5, 2), (4, 2), (0, 0)),)


@pytest.mark.parametrize("name", ["v1-group"], indirect=True)
def test_the_pieces_of_a_golden_pool_say_where_its_bytes_belong(kept: Path, expected: dict[str, Any]) -> None:
    """By the pieces in the pool, the local rows of the strided shard are the rows 2, 3, 6, 7, 10, 11."""
    item = next(one for one in expected["entries"] if one["name"] == "model/strided")
    pieces = parse_pieces(item["pieces"], item["logical_shape"], item["shape"])
    rest = tuple(Piece((start, 0), (2, 2), (start // 2, 0)) for start in (0, 4, 8))
    whole, other = torch.full((12, 2), -1.0), torch.zeros(6, 2)
    stored = bytes.fromhex(expected["checkpoints"][0]["tensors"]["model/strided"])
    local = torch.frombuffer(bytearray(stored), dtype=torch.float32).reshape(6, 2)
    for copy in assembly(item["logical_shape"], [pieces, rest]):
        (row, _), (n_rows, _) = copy.source
        at = copy.destination.start[0]
        whole[at : at + n_rows] = (local, other)[copy.holder][row : row + n_rows]
    assert torch.equal(whole[[2, 3, 6, 7, 10, 11]], local)
    assert not whole[[0, 1, 4, 5, 8, 9]].any()


@pytest.mark.parametrize("name", ["v1-group-shares"], indirect=True)
def test_the_golden_pool_with_shares_has_each_kind_of_share(kept: Path) -> None:
    with closing(open_pool(str(kept))) as reader:
        assert reader.superblock.incompat == structures.INCOMPAT_GROUP | structures.INCOMPAT_SHARES
        newest = next(v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint))
    entries = {name.rpartition("/")[2]: entry for name, entry in newest.entries.items()}
    assert entries["plain"].share is None
    assert (entries["whole"].logical_shape, entries["whole"].pieces) == ((5, 2), (Piece((2, 0), (3, 2), (0, 0)),))
    assert entries["shard"].pieces == (Piece((11, 0), (2, 3), (0, 0)),)
    assert [(piece.start[0], piece.local_start[0]) for piece in entries["strided"].pieces or ()] == [
        (3, 0),
        (6, 1),
        (10, 3),
    ]
    assert (entries["empty"].shape, entries["empty"].pieces) == ((0, 3), ())
    assert entries["differs"].pieces == entries["differs"].share.pieces == (Piece((4, 0), (4, 3), (0, 0)),)
    assert newest.extras[0].share == entries["shard"].share


def test_a_golden_pool_is_still_what_this_version_writes(
    kept: Path, name: str, expected: dict[str, Any], folder: Path
) -> None:
    fresh = folder / "fresh.pool"
    golden.MAKERS[name](fresh)
    assert golden.expected(fresh) == expected
    old, new = reference.Pool(kept.read_bytes()), reference.Pool(fresh.read_bytes())
    assert new.superblock == old.superblock
    (start, _), length = (old.superblock[key] for key in ("table_a", "table_b")), old.superblock["table_nbytes"]
    assert new.data[start : start + length] == old.data[start : start + length]


def test_a_golden_pool_goes_on(kept: Path, expected: dict[str, Any]) -> None:
    with by_hand.writer_of(kept) as writer:
        by_hand.commit(writer, 9)
    with closing(open_pool(str(kept))) as reader:
        newest = next(v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint))
        newest.verify()
    assert newest.step == 9
    assert golden.maps(reader, reader.entries) == expected["entries"]


def test_an_older_lightck_refuses_a_golden_pool(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "INCOMPAT_KNOWN", 0)
    before = kept.read_bytes()
    with pytest.raises(FormatError, match="newer lightck"):
        open_pool(str(kept))
    assert kept.read_bytes() == before
