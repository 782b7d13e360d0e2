"""DeepSpeed as an oracle: what it puts together of the parts of ranks, pieces put together too, equal to the bit.

Of ZeRO's flat partitions it makes universal checkpoints. Of the slices of tensor parallelism it makes whole tensors, by
patterns of names or by affine maps.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from boxes_by_hand import at

from lightck.layout import Flat, Place
from lightck.pool.format.assembly import Copy, assembly, coverage, local_copies
from lightck.pool.format.boxes import Box, Ints, flat_boxes, intersection, whole_box
from lightck.pool.format.pieces import Piece, Shard, local_pieces
from lightck.restore.averages import mean_of

from . import deepspeed_slices, two_by_two, zero
from .deepspeed_slices import Merged
from .zero import KINDS, Group, Saved

pytestmark = pytest.mark.long


class Part(NamedTuple):
    """A flat range of a parameter in a rank's partition."""

    start: int
    """First element of the parameter."""
    stop: int
    """The element after the last one."""
    place: int
    """Where the first element lies in the partition."""


@pytest.fixture(scope="module")
def folder_of_all() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def filled(shape: Sequence[int], copies: list[Copy], locals_: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make the copies."""
    whole = torch.full(tuple(shape), torch.nan)
    for holder, source, destination in copies:
        whole[at(destination)] = locals_[holder][at(source)]
    return whole


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit; so a zero differs from a negative zero."""
    return one.dtype == other.dtype == torch.float32 and torch.equal(one.view(torch.int32), other.view(torch.int32))


# -- ZeRO --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(folder_of_all: Path) -> dict[str, Saved]:
    return zero.trained(folder_of_all / "zero")


def parts(stage: int, group: Group) -> list[dict[str, Part]]:
    """Which elements of each parameter each rank holds."""
    return _parts_of_zero_3(group) if stage == 3 else _parts_of_zero_1(group)


def _parts_of_zero_1(group: Group) -> list[dict[str, Part]]:
    """ZeRO-1 and 2 cut the flat buffer, with the padding that it has, into a partition for each rank."""
    length = max(len(flat) for partition in group.partitions for flat in partition.values())
    found: list[dict[str, Part]] = [{} for _ in group.partitions]
    offset = 0
    for (name, shape), padding in zip(group.shapes.items(), group.paddings, strict=True):
        end = offset + math.prod(shape)
        for rank, of_rank in enumerate(found):
            low, high = max(offset, rank * length), min(end, (rank + 1) * length)
            if low < high:
                of_rank[name] = Part(low - offset, high - offset, low - rank * length)
        offset = end + padding
    return found


def _parts_of_zero_3(group: Group) -> list[dict[str, Part]]:
    """ZeRO-3 cuts each parameter. All parts are as long as the first one; the last ones have padding."""
    found: list[dict[str, Part]] = [{} for _ in group.partitions]
    offset = 0
    for name, shape in group.shapes.items():
        n = math.prod(shape)
        each = -(-n // len(found))
        for rank, of_rank in enumerate(found):
            if rank * each < n:
                of_rank[name] = Part(rank * each, min((rank + 1) * each, n), offset)
        offset += each
    return found


class Held(NamedTuple):
    """The boxes of a parameter on all ranks. Each is a holder of its own, since its elements are a tensor of its shape
    in the partition."""

    pieces: list[list[Piece]]
    places: list[tuple[int, int]]
    """For each holder: the rank, and where the box begins in its partition."""

    def tensors(self, group: Group, kind: str) -> list[torch.Tensor]:
        """The local tensor of each holder."""
        return [
            group.partitions[rank][kind][place : place + math.prod(piece.size)].view(piece.size)
            for (piece,), (rank, place) in zip(self.pieces, self.places, strict=True)
        ]


def held(shape: Ints, of_ranks: list[Part | None]) -> Held:
    found = Held([], [])
    for rank, part in enumerate(of_ranks):
        start, stop, place = part or (0, 0, 0)
        for box in flat_boxes(shape, start, stop):
            found.pieces.append([Piece(*box, (0,) * len(shape))])
            found.places.append((rank, place))
            place += math.prod(box.size)
    return found


def parameters(saved: Saved) -> Iterator[tuple[str, Ints, Group, Held]]:
    for group in saved.groups:
        of_ranks = parts(saved.stage, group)
        for name, shape in group.shapes.items():
            yield name, shape, group, held(shape, [of_rank.get(name) for of_rank in of_ranks])


CONVERTED = [name for name in zero.CASES if name != zero.ROUND_ROBIN]


@pytest.mark.parametrize("case", CONVERTED)
def test_flat_partitions_are_the_tensors_of_the_universal_checkpoint(saved, case):
    n_tensors = 0
    for name, shape, group, of_name in parameters(saved[case]):
        assert coverage(shape, of_name.pieces) == (None, None)
        copies = assembly(shape, of_name.pieces)
        for kind in KINDS:
            whole = filled(shape, copies, of_name.tensors(group, kind))
            assert is_equal(whole, saved[case].universal[name][kind].view(shape)), f"{name}, {kind}"
            n_tensors += 1
    assert n_tensors == len(list(zero.Model().parameters())) * len(KINDS)


@pytest.mark.parametrize("case", CONVERTED)
def test_flat_rules_are_the_tensors_of_the_universal_checkpoint(saved, case):
    """What a rank's tensor would be whose rule is ``Flat``: its range, and after it what else the partition holds."""
    for group in saved[case].groups:
        of_ranks = parts(saved[case].stage, group)
        for name, shape in group.shapes.items():
            held_by = [(rank, of_rank[name]) for rank, of_rank in enumerate(of_ranks) if name in of_rank]
            rules = [Flat(shape, part.start, part.stop) for _, part in held_by]
            for kind in KINDS:
                whole = torch.full(shape, torch.nan)
                for (rank, part), rule in zip(held_by, rules, strict=True):
                    local = group.partitions[rank][kind][part.place :]
                    for start, size, place in rule.part(local.shape, Place(rank, len(of_ranks)))[1]:
                        values = local[place[0] : place[0] + math.prod(size)]
                        whole[at(Box(start, size))] = values.view(size)
                assert is_equal(whole, saved[case].universal[name][kind].view(shape)), f"{name}, {kind}"


@pytest.mark.parametrize("case", [name for name in CONVERTED if zero.CASES[name].stage < 3])
def test_who_holds_which_range_is_what_deepspeed_says(saved, case):
    for group in saved[case].groups:
        ours = [
            {name: (part.place, part.stop - part.start) for name, part in of_rank.items()}
            for of_rank in parts(saved[case].stage, group)
        ]
        assert ours == group.fragments


@pytest.mark.parametrize("case", [name for name in zero.CASES if zero.CASES[name].stage < 3])
def test_weights_in_flat_partitions_are_those_of_the_model(saved, case):
    for name, shape, group, of_name in parameters(saved[case]):
        whole = filled(shape, assembly(shape, of_name.pieces), of_name.tensors(group, "fp32"))
        assert torch.equal(whole.to(zero.CASES[case].dtype), saved[case].model[name])


@pytest.mark.parametrize("mesh", [(3,), (2, 2), (3, 2)])
@pytest.mark.parametrize("case", ["ZeRO-2 in bf16, aligned", "ZeRO-3"])
def test_flat_partitions_fill_the_shards_of_another_world(saved, case, mesh):
    """Shards of the first dimension, and for a second mesh dimension also of the last one."""
    for name, shape, group, of_name in parameters(saved[case]):
        placements = [Shard(0), Shard(len(shape) - 1)][: len(mesh)]
        for coordinate in itertools.product(*map(range, mesh)):
            local_shape, wanted = local_pieces(shape, mesh, coordinate, placements)
            copies = local_copies(shape, wanted, of_name.pieces)
            expected = saved[case].universal[name]["exp_avg"].view(shape)
            for placement, ranks, rank in zip(placements, mesh, coordinate, strict=True):
                expected = chunk(expected, ranks, rank, placement.dim)
            assert is_equal(filled(local_shape, copies, of_name.tensors(group, "exp_avg")), expected)


def chunk(tensor: torch.Tensor, chunks: int, number: int, dim: int) -> torch.Tensor:
    found = tensor.chunk(chunks, dim)
    return found[number] if number < len(found) else tensor.narrow(dim, 0, 0)


# -- ZeRO and tensor parallelism ---------------------------------------------------------------------------------------


def pieces_of_boxes(of_slice: Held, pieces: Sequence[Piece]) -> Held:
    """The boxes of a slice, cut where the pieces of the slice end, as pieces of the whole tensor."""
    found: list[list[Piece]] = []
    for (box,) in of_slice.pieces:
        common = [intersection(Box(box.start, box.size), Box(piece.local_start, piece.size)) for piece in pieces]
        found.append(
            [
                Piece(moved(one.start, piece.local_start, piece.start), one.size, moved(one.start, box.start))
                for piece, one in zip(pieces, common, strict=True)
                if one is not None
            ]
        )
    return of_slice._replace(pieces=found)


def moved(at: Ints, begin: Ints, to: Ints | None = None) -> Ints:
    """Where an element lies in a box that begins at ``to`` instead of ``begin``."""
    return tuple(a - b + c for a, b, c in zip(at, begin, to or (0,) * len(at), strict=True))


def test_flat_partitions_of_slices_are_the_tensors_of_the_universal_checkpoint(folder_of_all):
    """A flat range of a fused slice is boxes, and a box may have elements of query, key and value."""
    slices = two_by_two.trained(folder_of_all / "two-by-two")
    n_tensors = 0
    for found in zip(*map(parameters, slices), strict=True):
        name, case = found[0][0], two_by_two.LAYOUT[found[0][0]]
        holders = [pieces_of_boxes(of_slice[3], pieces) for of_slice, pieces in zip(found, case.pieces(), strict=True)]
        copies = assembly(case.shape, [pieces for of_slice in holders for pieces in of_slice.pieces])
        for kind in KINDS:
            locals_ = [tensor for _, _, group, of_slice in found for tensor in of_slice.tensors(group, kind)]
            assert is_equal(filled(case.shape, copies, locals_), slices[0].universal[name][kind]), f"{name}, {kind}"
            n_tensors += 1
    assert n_tensors == len(two_by_two.LAYOUT) * len(KINDS)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def merged(folder_of_all: Path) -> dict[str, Merged]:
    return deepspeed_slices.merged(folder_of_all / "tensor-parallel")


@pytest.mark.parametrize("name", deepspeed_slices.CASES)
def test_slices_are_the_tensor_that_deepspeed_merges(merged, name):
    case = deepspeed_slices.CASES[name]
    copies = assembly(case.logical_shape, case.pieces())
    for kind, whole in deepspeed_slices.tensors(case).items():
        ours = filled(case.logical_shape, copies, case.slices(whole))
        assert is_equal(ours, merged[name].tensors[kind])
        assert is_equal(ours, whole[: case.logical_shape[0]])


@pytest.mark.parametrize("n_ranks", [2, 3, 7])
def test_the_mean_is_that_of_deepspeed(folder_of_all, n_ranks):
    slices = [torch.randn(9, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(n_ranks)]
    slices[0][0, 0] = slices[-1][0, 0] = -0.0
    ours = mean_of(slices)
    assert is_equal(ours, deepspeed_slices.averaged(folder_of_all / f"averaged-{n_ranks}", slices))
    assert not is_equal(ours, mean_of(slices[::-1])) or n_ranks == 2, "the order counts"


@pytest.mark.parametrize("name", [name for name, case in deepspeed_slices.CASES.items() if case.map])
def test_pieces_are_the_views_of_the_affine_map(merged, name):
    assert [set(pieces) for pieces in deepspeed_slices.CASES[name].pieces()] == merged[name].pieces


@pytest.mark.parametrize("name", deepspeed_slices.CASES)
def test_slices_are_filled_from_the_tensor_that_deepspeed_merges(merged, name):
    """The way back. What no piece fills is padding."""
    case = deepspeed_slices.CASES[name]
    shape = case.logical_shape
    whole = [Piece(*whole_box(shape), (0,) * len(shape))]
    for kind, tensor in deepspeed_slices.tensors(case).items():
        tensor[shape[0] :] = torch.nan
        for pieces, expected in zip(case.pieces(), case.slices(tensor), strict=True):
            found = filled(expected.shape, local_copies(shape, pieces, [whole]), [merged[name].tensors[kind]])
            assert is_equal(found, expected)
