"""Pieces agree with torch: its own functions, DTensors on a fake group, and parameters of FSDP2."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as shape_and_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightck.errors import UnsupportedError
from lightck.pool.format import pieces
from lightck.pool.format.pieces import Piece, local_pieces

pytestmark = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.13", reason="the rules are those of torch 2.13"
)


def plain(placement: Placement) -> pieces.Placement:
    """torch's placement as a value of ``pieces``."""
    if isinstance(placement, _StridedShard):
        return pieces.StridedShard(placement.dim, placement.split_factor)
    if isinstance(placement, Shard):
        return pieces.Shard(placement.dim)
    return pieces.Partial(placement.reduce_op) if isinstance(placement, Partial) else pieces.Replicate()


def cut(whole: torch.Tensor, local_shape: Sequence[int], held: Sequence[Piece]) -> torch.Tensor:
    """A local tensor that is filled from the pieces; -1 elsewhere."""
    local = torch.full(tuple(local_shape), -1, dtype=whole.dtype)
    for start, size, local_start in held:
        to, source = local, whole
        for dim, (a, n, b) in enumerate(zip(start, size, local_start, strict=True)):
            to, source = to.narrow(dim, b, n), source.narrow(dim, a, n)
        to.copy_(source)
    return local


def indices(*shape: int) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).reshape(shape)


def of_dtensor(tensor: DTensor, mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """``mesh``: of this rank. That of the tensor may be one of an earlier rank: torch keeps equal meshes."""
    assert tensor.device_mesh.mesh_dim_names == mesh.mesh_dim_names
    return local_pieces(tuple(tensor.shape), mesh.shape, mesh.get_coordinate(), [plain(p) for p in tensor.placements])


@contextlib.contextmanager
def rank_of(mesh_shape: tuple[int, ...], rank: int) -> Iterator[DeviceMesh]:
    """This process as one rank of a group that does not communicate."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape))
    try:
        yield init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp", "ep")[: len(mesh_shape)])
    finally:
        dist.destroy_process_group()


# -- torch's functions -----------------------------------------------------------------------------------------------


@st.composite
def worlds(draw) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    shape = tuple(draw(st.lists(st.integers(0, 17), min_size=0, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    kinds = [st.builds(Replicate)]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds += [
            st.builds(Shard, dims),
            st.builds(lambda dim, n: _StridedShard(dim, split_factor=n), dims, st.integers(1, 6)),
        ]
    return shape, mesh, [draw(st.one_of(kinds)) for _ in mesh]


@given(worlds())
@settings(max_examples=400)
def test_shapes_offsets_and_contents_are_torchs(world):
    shape, mesh, placements = world
    whole = indices(*shape)
    for coordinate in itertools.product(*map(range, mesh)):
        local_shape, held = local_pieces(shape, mesh, coordinate, [plain(p) for p in placements])
        expected_shape, offset = shape_and_offset(shape, mesh, list(coordinate), placements)
        assert local_shape == tuple(expected_shape)
        if held:
            assert held[0].start == tuple(offset)
        else:
            assert any(at == n for at, n in zip(offset, shape, strict=True)), "torch: an empty shard lies at the end"
        local = whole
        for placement, ranks, rank in zip(placements, mesh, coordinate, strict=True):
            if not isinstance(placement, Replicate):
                local = placement._select_split_tensor(local, ranks, rank, with_padding=False)
        assert torch.equal(cut(whole, local_shape, held), local)


# -- DTensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements"),
    [
        ((8, 3), (4,), [Shard(0)]),
        ((5, 3), (4,), [Shard(0)]),  # 2, 2, 1, 0 rows
        ((5, 3), (4,), [Shard(1)]),
        ((5, 3), (4,), [Replicate()]),
        ((0, 3), (2,), [Shard(0)]),
        ((), (2,), [Replicate()]),
        ((6, 6), (2, 3), [Shard(0), Shard(1)]),
        ((7, 5), (2, 3), [Shard(1), Shard(0)]),
        ((11, 2), (2, 3), [Shard(0), Shard(0)]),
        ((3, 2), (2, 3), [Shard(0), Shard(0)]),
        ((7, 5), (2, 3), [Replicate(), Shard(1)]),
        ((7, 5, 4), (2, 2, 2), [Shard(2), Shard(0), Shard(0)]),
    ],
    ids=str,
)
def test_a_dtensor_holds_its_pieces(shape, mesh_shape, placements):
    whole = indices(*shape)
    for rank in range(math.prod(mesh_shape)):
        with rank_of(mesh_shape, rank) as mesh:
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert torch.equal(cut(whole, *of_dtensor(tensor, mesh)), tensor.to_local())


def test_partial_of_torch_is_refused():
    with rank_of((2,), 1) as mesh:
        tensor = DTensor.from_local(torch.ones(3), mesh, [Partial("max")], run_check=False)
        with pytest.raises(UnsupportedError, match=r"Partial\(max\) on mesh dimension 0"):
            of_dtensor(tensor, mesh)


# -- FSDP2 -----------------------------------------------------------------------------------------------------------


class OneWeight(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def fsdp_over_tp(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """A parameter that is cut in ``dim`` by tensor parallelism, and in its rows by FSDP2."""
    model = OneWeight(distribute_tensor(whole, mesh["tp"], [Shard(dim)], src_data_rank=None))
    fully_shard(model, mesh=mesh["dp"])
    return model.weight


@pytest.mark.parametrize("rows", [8, 5, 2, 1])
def test_fsdp_holds_its_pieces(rows):
    whole = indices(rows, 3)
    for rank in range(4):
        with rank_of((4,), rank) as mesh:
            model = OneWeight(whole.clone())
            fully_shard(model, mesh=mesh)
            assert torch.equal(cut(whole, *of_dtensor(model.weight, mesh)), model.weight.to_local())


@pytest.mark.parametrize(("rows", "mesh_shape"), [(8, (2, 2)), (24, (2, 3)), (9, (2, 2)), (5, (2, 4)), (12, (3, 2))])
@pytest.mark.parametrize("dim", [0, 1])
def test_fsdp_over_tensor_parallel_holds_its_pieces(rows, mesh_shape, dim):
    whole = indices(rows, 5)
    strided = 0
    for rank in range(math.prod(mesh_shape)):
        with rank_of(mesh_shape, rank) as mesh:
            weight = fsdp_over_tp(whole, mesh, dim)
            local_shape, held = of_dtensor(weight, mesh)
            local = weight.to_local()
            if held or local.numel():  # of an empty one FSDP2 also makes the other sizes 0
                assert torch.equal(cut(whole, local_shape, held), local)
            strided += any(isinstance(placement, _StridedShard) for placement in weight.placements)
    assert strided == (math.prod(mesh_shape) if dim == 0 else 0)


def test_fsdp_over_uneven_tensor_parallel_contradicts_its_own_placements():
    """Of torch, not of lightck: what uses such a DTensor must know. FSDP2 cuts what tensor parallelism left on a rank.
    Its placements say the same by another order of cuts, and that is the same only for sizes that divide well. Some
    ranks hold other elements than their placements say, in a local tensor of the right shape; but on some other rank
    the shape is wrong, too. Cut in FSDP2's own order, the pieces are right."""
    whole, mesh_shape = indices(27), (3, 4)
    wrong_shape, wrong_elements = set(), set()
    for rank in range(12):
        with rank_of(mesh_shape, rank) as mesh:
            weight = fsdp_over_tp(whole, mesh, 0)
            at, local = tuple(mesh.get_coordinate()), weight.to_local()
            local_shape, held = of_dtensor(weight, mesh)
            assert local_shape == tuple(shape_and_offset((27,), mesh_shape, list(at), weight.placements)[0])
            if local_shape != tuple(local.shape):
                wrong_shape.add(at)
            elif not torch.equal(cut(whole, local_shape, held), local):
                wrong_elements.add(at)
            inner_first = local_pieces((27,), (4, 3), at[::-1], [pieces.Shard(0), pieces.Shard(0)])
            assert torch.equal(cut(whole, *inner_first), local)
    assert wrong_shape
    assert wrong_elements
