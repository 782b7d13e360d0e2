"""Inputs for the parsers one by one: what the whole reader would seldom let through to them.

Each takes bytes and gives a value, or raises ``DamagedError`` or an error of ours. Nothing else may come out of them.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from crash import container, mutations
from crash.document import Base
from crash.messages import Node, parse
from lightck.errors import LightckError
from lightck.pool.format import layout
from lightck.pool.format.gradients import HOME_ROW_DTYPE, ChainEntry, GradientPart, checked_homes, part_offset
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.pieces import Placement, Shard, StridedShard, flat_pieces, is_flat, local_pieces
from lightck.pool.format.shares import Cut, Share, dim_to_divide
from lightck.pool.format.structures import (
    INCOMPAT_GRADIENTS,
    MIB,
    NEXT_ENTRIES_MAX,
    NEXT_NBYTES,
    SUPERBLOCK_NBYTES,
    CommitRecord,
    DamagedError,
    ManifestHeader,
    NextBatch,
    Superblock,
    crc64,
    pack_next_batch,
    unpack_next_batch,
    unpack_slot_header,
)
from lightck.pool.storage import pmdk_file
from lightck.restore.contents import Contents
from lightck.state import values
from lightck.state.rng import RngState

_U64 = struct.Struct("<Q")
_GROUP = GroupIdentity(
    run_id=bytes(16), world_id=bytes(range(16)), rank=3, world_size=4, mesh_shape=(2, 2), coordinate=(1, 1)
)


class Inputs:
    """Draws an input for a parser from a good pool. ``good`` is its file."""

    def __init__(self, base: Base, good: bytes) -> None:
        self._base = base
        self._rng_tree = _part(base, b"\xa3rng")
        self._rank_tree = parse(layout.encode(_parts(), _GROUP))
        self._shares_tree = parse(layout.encode(_shares(), _GROUP, has_shares=True))
        self._homes_tree = parse(layout.encode(_in_homes(), has_gradients=True))
        self._with_homes = _superblock_with_homes(base.sb)
        is_pmdk = good.startswith(pmdk_file.SIGNATURE)
        self._container = container.Base.of(good) if is_pmdk else None
        if is_pmdk:
            self._fd = os.memfd_create("lightck-parsers", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, len(good))

    def draw(self, rng: random.Random) -> tuple[str, Callable[[], str]]:
        """A parser's name, and the call."""
        draws = [
            self._superblock,
            self._line,
            self._header,
            self._next,
            self._manifest,
            self._table,
            self._extras,
            self._table_of_rank,
            self._table_with_shares,
            self._table_with_homes,
            self._homes,
            self._bases,
            self._state,
            self._values,
            self._random_state,
        ]
        if self._container is not None:
            draws += [self._root] * 3
        chosen = rng.choice(draws)
        return "parser", lambda: f"{chosen.__name__[1:]}: {_parsed(chosen, rng)}"

    def _superblock(self, rng: random.Random) -> None:
        body = bytearray(self._base.superblock[:-8])
        for _ in range(rng.choice((1, 2, 4))):
            mutations.word(rng, body, 8, 168 + 32 * len(self._base.sb.slots), self._base.nbytes)
        Superblock.unpack((bytes(body) + _U64.pack(crc64(bytes(body))))[: rng.choice((SUPERBLOCK_NBYTES, 4095, 0))])

    def _line(self, rng: random.Random) -> None:
        CommitRecord.unpack(
            self._sealed(rng, self._base.records[self._base.checkpoints[0].position]), self._base.sb.uuid
        )

    def _header(self, rng: random.Random) -> None:
        unpack_slot_header(self._sealed(rng, self._base.headers[0]), 0, self._base.sb.uuid)

    def _next(self, rng: random.Random) -> None:
        uuid, generation = self._base.sb.uuid, rng.choice((0, 1, (1 << 64) - 1))
        entries = [NextBatch(rng.randbytes(8), rng.randrange(8), rng.getrandbits(32)) for _ in range(rng.randrange(4))]
        body = bytearray(pack_next_batch(generation, entries, uuid)[:-8])
        mutations.word(rng, body, 8, 24, self._base.nbytes)
        data = bytes(body) + _U64.pack(crc64(uuid + bytes(body))) + rng.randbytes(rng.choice((0, 7, 2048)))
        found = unpack_next_batch(data[: rng.choice((NEXT_NBYTES, len(data), rng.randrange(32)))], generation, uuid)
        assert found is None or len(found) <= NEXT_ENTRIES_MAX, "more than there is room for"

    def _sealed(self, rng: random.Random, data: bytes) -> bytes:
        body = bytearray(data[:56])
        mutations.word(rng, body, 0, 56, self._base.nbytes)
        return bytes(body) + _U64.pack(crc64(self._base.sb.uuid + bytes(body)))

    def _manifest(self, rng: random.Random) -> None:
        data = bytearray(self._base.checkpoints[0].header + self._base.checkpoints[0].records)
        for _ in range(rng.choice((1, 2, 4))):
            mutations.word(rng, data, 8, 128, len(data))
        ManifestHeader.unpack(bytes(data[: rng.choice((len(data), 128, 127))]))

    def _table(self, rng: random.Random) -> None:
        data = mutations.changed_tree(rng, self._base.table_tree)
        data = data if rng.random() < 0.8 else mutations.damaged(rng, data)
        layout.decode(data, low=0, high=1 << 40)

    def _extras(self, rng: random.Random) -> None:
        layout.decode_extras(mutations.changed_tree(rng, self._base.table_tree.children[1]), low=0, high=1 << 40)

    def _table_of_rank(self, rng: random.Random) -> None:
        data = mutations.changed_tree(rng, self._rank_tree)
        data = data if rng.random() < 0.8 else mutations.damaged(rng, data)
        layout.decode_of_rank(data, low=0, high=1 << 40)

    def _table_with_shares(self, rng: random.Random) -> None:
        data = mutations.changed_tree(rng, self._shares_tree)
        data = data if rng.random() < 0.8 else mutations.damaged(rng, data)
        layout.decode_of_rank(data, low=0, high=1 << 40, has_shares=True)

    def _table_with_homes(self, rng: random.Random) -> None:
        data = mutations.changed_tree(rng, self._homes_tree)
        data = data if rng.random() < 0.8 else mutations.damaged(rng, data)
        layout.decode(data, low=0, high=1 << 40, home_nbytes=1 << 40)

    def _homes(self, rng: random.Random) -> None:
        body = bytearray(self._with_homes.pack()[:-8])
        for _ in range(rng.choice((1, 2, 4))):
            mutations.word(rng, body, 8, 168 + 32 * 3, self._with_homes.nbytes)
        Superblock.unpack(bytes(body) + _U64.pack(crc64(bytes(body))))

    def _bases(self, rng: random.Random) -> None:
        """What a manifest says of bases and of the chain, with records that say something else."""
        header = ManifestHeader(20, 1, 9, 9, bytes(16), bytes(16), 3, 3, 224, 9, 260, 0, 260, 4, 1)
        records, part = (
            bytearray(_rows((16, 7, 0, 0, 0), (14, 6, 256, 1, 1), (20, 9, 0, 2, 0)).tobytes()),
            _part_of_bases(),
        )
        data = bytearray(bytes(part_offset(header)) + part.pack())
        for _ in range(rng.choice((0, 1, 2, 4))):
            mutations.word(rng, data, part_offset(header), len(data), len(data))
            mutations.word(rng, records, 0, len(records), len(data))
        sent = bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
        found = GradientPart.unpack(sent, header, self._with_homes, 2)
        checked_homes(np.frombuffer(bytes(records), HOME_ROW_DTYPE), _in_homes()[:3], 9, found, header, MIB)

    def _state(self, rng: random.Random) -> None:
        checkpoint = self._base.checkpoints[0]
        Contents.parse(mutations.changed_tree(rng, checkpoint.state_tree), 1, 1, {})

    def _values(self, rng: random.Random) -> None:
        data = mutations.changed_tree(rng, self._base.checkpoints[0].state_tree)
        values.unpack(data if rng.random() < 0.8 else mutations.damaged(rng, data))

    def _random_state(self, rng: random.Random) -> None:
        RngState.from_value(values.unpack(mutations.changed_tree(rng, self._rng_tree)))

    def _root(self, rng: random.Random) -> None:
        assert self._container is not None
        base = self._container
        for at, data in (
            (0, base.header),
            (container.LAYOUT_AT, base.layout),
            (container.ROOT_AT, base.where),
            (base.root_at, base.root),
            *container.change(rng, base),
        ):
            os.pwrite(self._fd, data, at)
        pmdk_file.read_extents(self._fd, "it", base.file_nbytes)


def _parts() -> list[layout.Entry]:
    """Entries of a rank: one without pieces, and parts of several kinds."""
    found = [layout.Entry("model/plain", "param", "float32", (4,), (1,), 16)]
    logical_shape = (12, 3)
    cuts: list[tuple[Placement, ...]] = [(Shard(0), Shard(1)), (StridedShard(0, 3), Shard(1)), (Shard(1), Shard(1))]
    for number, placements in enumerate(cuts):
        (rows, columns), pieces = local_pieces(logical_shape, _GROUP.mesh_shape, _GROUP.coordinate, placements)
        found.append(
            layout.Entry(
                name=f"model/{number}",
                role="param",
                dtype="float32",
                shape=(rows, columns),
                stride=(columns, 1),
                nbytes=4 * rows * columns,
                logical_shape=logical_shape,
                pieces=pieces,
            )
        )
    flat = layout.Entry("model/flat", "param", "float32", (14,), (1,), 56)
    found.append(flat._replace(logical_shape=(3, 4, 2), pieces=flat_pieces((3, 4, 2), 5, 17)))
    return layout.assign_offsets(found, 0)[0]


def _shares() -> list[layout.Entry]:
    """Entries of a rank that are shares: of a whole tensor, and of parts; and one that the rank writes whole. A tensor
    of flat pieces is never divided."""
    found = []
    for number, entry in enumerate(_parts()):
        dim = dim_to_divide(entry.shape, entry.stride)
        if dim is None or (entry.pieces is not None and is_flat(entry.pieces)):
            continue
        rows = entry.shape[dim]
        cut = Cut(entry.shape, dim, (0, rows // 2, rows), (1, 3))
        found.append(layout.entry_of_share(entry, Share(cut, 1, is_whole=number == 2)))
    return layout.assign_offsets(found, 0)[0]


def _in_homes() -> list[layout.Entry]:
    """Entries of a pool with gradient records: two tensors in homes, a gradient, and a unit that lies in slots."""
    plain = layout.Entry("model/a", "param", "float32", (4,), (1,), 16)
    exp_avg = plain._replace(name="optimizer/a/exp_avg", role="optimizer", offset=256, place=layout.HOME_PLACE)
    gradient = plain._replace(name="gradient/model/a", role=layout.GRADIENT_ROLE)
    whole = plain._replace(name="model/b", offset=512), exp_avg._replace(name="optimizer/b/exp_avg", place="slot")
    return [plain._replace(place=layout.HOME_PLACE), exp_avg, gradient, *whole]


def _superblock_with_homes(sb: Superblock) -> Superblock:
    first, nbytes = sb.slots[0]
    slots = tuple((first + i * nbytes, nbytes) for i in range(5))
    homes = tuple((first + 5 * nbytes + i * 2 * MIB, 2 * MIB) for i in range(2))
    end = homes[1][0] + homes[1][1]
    return replace(sb, compat=0, incompat=INCOMPAT_GRADIENTS, slots=slots, homes=homes, nbytes=end)


def _rows(*rows: tuple[int, int, int, int, int]) -> np.ndarray:
    return np.array(list(rows), HOME_ROW_DTYPE)


def _part_of_bases() -> GradientPart:
    chain = tuple(ChainEntry(step, 2 * step + 2, step, 300, step % 5, step % 2, 1) for step in (7, 8))
    older = _rows((10, 4, 0, 0, 1), (0, 0, 0, 0, 0))
    return GradientPart(older, np.array([11], np.uint32), chain, np.array([1, 2], np.uint32))


def _part(base: Base, key: bytes) -> Node:
    """The value of a key of the small state, as a tree of its own."""
    pairs = base.checkpoints[0].state_tree.children[0].children
    return parse(next(pair.children[1].raw for pair in pairs if pair.children[0].raw == key))


def _parsed(parse: Callable[[random.Random], None], rng: random.Random) -> str:
    try:
        parse(rng)
    except (DamagedError, LightckError):
        return "refused"
    return "taken"
