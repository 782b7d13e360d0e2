"""What the commands say of the pool of one rank: its place in the group, its parts, and that a recovery needs more."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pools_by_hand as by_hand
import pytest
from calls import call, call_json
from toys import damage

from lightck.cli.base import BAD, FAILED, OK
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.pieces import Replicate, Shard, StridedShard, local_pieces
from lightck.pool.reader import open_pool

RUN, WORLD = bytes(range(16)), bytes(range(16, 32))
GROUP = GroupIdentity(run_id=RUN, world_id=WORLD, rank=3, world_size=4, mesh_shape=(2, 2), coordinate=(1, 1))


def part(name: str, logical_shape: tuple[int, ...], *placements: Any) -> Any:
    shape, pieces = local_pieces(logical_shape, GROUP.mesh_shape, GROUP.coordinate, placements)
    return by_hand.entry(name, shape, logical_shape=logical_shape, pieces=pieces)


@pytest.fixture
def of_rank(pool: Path) -> Path:
    entries = [
        by_hand.entry("model/plain", (5,)),
        part("model/uneven", (13, 3), Replicate(), Shard(0)),
        part("model/empty", (1, 3), Replicate(), Shard(0)),
        part("model/strided", (12, 2), StridedShard(0, 3), Replicate()),
    ]
    by_hand.make(pool, entries, group=GROUP)
    with by_hand.writer_of(pool) as writer:
        for step in (1, 2):
            by_hand.commit(writer, step, state=by_hand.small_state())
    return pool


SHOWN = {
    "rank": 3,
    "world_size": 4,
    "mesh": [2, 2],
    "coordinate": [1, 1],
    "run_id": RUN.hex(),
    "world_id": WORLD.hex(),
}


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_rank_world_and_mesh_are_shown(of_rank: Path, command: str) -> None:
    status, facts = call_json(command, of_rank)
    assert (status, facts["group"]) == (OK, SHOWN)
    text = call(command, of_rank).stdout
    assert "rank 3 of 4, at (1, 1) of a mesh of 2x2" in text
    assert "This is the pool of one rank: a recovery needs the pools of 4 ranks." in text
    assert "resume=True" not in text


def test_run_and_world_are_shown(of_rank: Path) -> None:
    assert f"run {RUN.hex()}, world {WORLD.hex()}" in call("inspect", of_rank).stdout


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_pool_without_a_mesh_is_shown_as_one(pool: Path, command: str) -> None:
    group = GroupIdentity(run_id=RUN, world_id=WORLD, rank=0, world_size=1)
    by_hand.make(pool, [by_hand.entry("model/w", (3,))], group=group)
    result = call(command, pool)
    assert result.exit_code == OK
    assert "rank 0 of 1, without a mesh" in result.stdout
    assert "resume=True" not in result.stdout


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_pool_of_one_process_has_no_group(good: Path, command: str) -> None:
    _, facts = call_json(command, good)
    assert facts["group"] is None
    assert "rank" not in call(command, good).stdout


def test_the_logical_shape_and_the_pieces_of_each_tensor_are_listed(of_rank: Path) -> None:
    _, facts = call_json("inspect", of_rank, "--tensors")
    assert facts["shown"]["parts"] == 3
    tensors = {each["name"].removeprefix("model/"): each for each in facts["shown"]["all_tensors"]}
    assert (tensors["plain"]["logical_shape"], tensors["plain"]["pieces"]) == (None, None)
    assert (tensors["empty"]["logical_shape"], tensors["empty"]["pieces"]) == ([1, 3], [])
    assert tensors["uneven"]["pieces"] == [{"start": [7, 0], "size": [6, 3], "local_start": [0, 0]}]
    assert [piece["start"] for piece in tensors["strided"]["pieces"]] == [[2, 0], [6, 0], [10, 0]]
    lines = {line.split()[0]: line for line in call("inspect", of_rank, "--tensors").stdout.splitlines() if line}
    assert "6x3 of 13x3, 1 piece " in lines["model/uneven"]
    assert "0x3 of 1x3, 0 pieces" in lines["model/empty"]
    assert "6x2 of 12x2, 3 pieces" in lines["model/strided"]
    assert " of " not in lines["model/plain"]
    assert "3 tensors are parts of tensors that the ranks hold together" in call("inspect", of_rank).stdout


def test_a_damaged_part_is_named_with_its_logical_shape(of_rank: Path) -> None:
    damage(of_rank, "model/uneven", [2])
    status, facts = call_json("verify", of_rank)
    assert (status, facts["recoverable_step"]) == (BAD, 1)
    [found] = facts["checkpoints"][0]["damage"]
    assert (found["tensor"], found["logical_shape"]) == ("model/uneven", [13, 3])
    text = call("verify", of_rank).stdout
    assert "does not match its checksum (a part of 13x3)" in text
    assert "DAMAGED: step 1 of this rank is intact." in text
    assert "lightck export" not in text


def test_a_part_is_not_exported(of_rank: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    result = call("export", of_rank, out)
    assert result.exit_code == FAILED
    assert "rank 3 of 4" in result.stderr
    assert not out.exists()


def test_the_same_bytes_at_another_place_are_another_tensor(of_rank: Path, folder: Path) -> None:
    """``diff`` of two ranks: the local tensors are equal, and what they are parts of differs."""
    other = folder / "other.pool"
    with closing(open_pool(str(of_rank))) as reader:
        entries = [moved(entry) for entry in reader.entries]
        state = next(iter(reader.checkpoints())).state  # type: ignore[union-attr]
    by_hand.make(other, entries, group=GROUP)
    with by_hand.writer_of(other) as writer:
        by_hand.commit(writer, 2, state=bytes(state))
    status, facts = call_json("diff", of_rank, other)
    assert status == BAD
    assert [each["tensor"] for each in facts["tensors"]] == ["model/uneven"]
    assert "different parts" in facts["tensors"][0]["change"]


def moved(entry: Any) -> Any:
    if entry.name != "model/uneven":
        return entry
    return entry._replace(pieces=tuple(piece._replace(start=(0, 0)) for piece in entry.pieces))
