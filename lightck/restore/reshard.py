"""Write the checkpoint of a group of ranks as the pools of another number of ranks, without a training.

Each parameter with at least one dimension is cut into rows, as ``fully_shard`` does, and so is optimizer state of its
shape. Buffers stay whole. Or each rank gets all tensors whole, as with DistributedDataParallel. The old pools are only
read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from lightck.errors import PoolPathError
from lightck.pool.create import create
from lightck.pool.engine import Engine
from lightck.pool.format.group import ID_NBYTES, GroupIdentity
from lightck.pool.format.pieces import Shard, local_pieces
from lightck.pool.reader import PoolReader, RejectedCheckpoint
from lightck.pool.storage.backends import backend_for
from lightck.pool.storage.failures import undo_on_error
from lightck.pool.writer import PoolWriter
from lightck.ranks.directory import pool_name
from lightck.ranks.rule import CheckpointId
from lightck.restore.averages import describe_averaged
from lightck.restore.directory import recover_newest
from lightck.restore.logical import LogicalCheckpoint
from lightck.restore.moved_state import have_same_random_states, key_of_rank, moved_state, refuse_disagreeing_ranks
from lightck.restore.pool_copies import commit_copy, state_for_copy
from lightck.restore.relocated import Relocated
from lightck.state import values
from lightck.state.parts import Part

SLOTS = 3
"""Number of slots of each pool: the least number that a rank's pool may have."""
_Rejected: TypeAlias = Sequence[RejectedCheckpoint]


@dataclass(frozen=True, slots=True)
class Resharded:
    """What was written."""

    step: int
    paths: list[str]
    nbytes: int
    """Bytes of all pools together."""
    restarted: list[str]
    """The loaders whose pass over the data begins again."""
    averaged: str
    """What to say about tensors whose mean was taken; "" if there is none."""
    rejected: tuple[RejectedCheckpoint, ...]
    """Newer checkpoints that were skipped."""


def reshard(directory: str, to: str, n_ranks: int, *, is_replicated: bool, step: int | None) -> Resharded:
    """Write the newest checkpoint of a directory (of ``step``, if given) as the pools of ``n_ranks`` ranks into the
    folder ``to``, which is created. ``is_replicated``: whether each rank gets whole tensors.

    Raises ``PoolPathError`` if ``to`` exists and is not an empty folder, what ``recover`` raises, ``RankError`` if
    ranks that should hold the same bytes do not, ``UnsupportedError`` for optimizer state that cannot be cut, and
    ``NoSpaceError``. After an error no pool is left in ``to``."""
    _make_folder(to)
    write = partial(_write_all, to=to, n_ranks=n_ranks, is_replicated=is_replicated)
    return recover_newest(os.path.realpath(directory), step, write)


def _make_folder(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path) or os.listdir(path):
            raise PoolPathError(
                f"{path!r} exists and is not an empty folder. Nothing was written. Name a folder that does not exist."
            ) from None
    except OSError as err:
        raise PoolPathError(
            f"The folder {path!r} cannot be created: {err.strerror}. Nothing was written. Name a new folder "
            "inside one that you can write to."
        ) from err


def _write_all(
    _: str, logical: LogicalCheckpoint, rejected: _Rejected, *, to: str, n_ranks: int, is_replicated: bool
) -> Resharded:
    """Write the pools of all ranks. Raises ``DamagedError`` if a block cannot be read."""
    refuse_disagreeing_ranks(logical)
    world_id, restarted = os.urandom(ID_NBYTES), list[str]()
    paths = [os.path.join(to, pool_name(rank, n_ranks)) for rank in range(n_ranks)]
    try:
        for rank, path in enumerate(paths):
            parts = {} if is_replicated else _rows(logical, n_ranks, rank)
            restarted = _write_one(path, logical, parts, rank, n_ranks, world_id)
    except BaseException:
        for path in paths:
            with suppress(OSError):
                os.unlink(path)
        raise
    nbytes = sum(map(os.path.getsize, paths))
    return Resharded(logical.step, paths, nbytes, restarted, describe_averaged(logical.averaged_names), tuple(rejected))


def _rows(logical: LogicalCheckpoint, n_ranks: int, rank: int) -> dict[str, Part]:
    """Return the parts of a rank if each parameter is cut into rows."""
    found: dict[str, Part] = {}
    for name, entry in logical.entries.items():
        if entry.role == "param" and entry.shape and n_ranks > 1:
            shape, pieces = local_pieces(entry.shape, (n_ranks,), (rank,), [Shard(0)])
            found[name] = Part(shape, entry.shape, pieces)
    return found


def _write_one(
    path: str, logical: LogicalCheckpoint, parts: dict[str, Part], rank: int, n_ranks: int, world_id: bytes
) -> list[str]:
    """Write the pool of one rank. Returns the loaders whose pass over the data begins again."""
    first = logical.of_ranks[0]
    old = first.reader.group
    run_id, n_saved = (first.uuid, 1) if old is None else (old.run_id, old.world_size)
    has_same_ranks = n_saved == n_ranks == len(logical.of_ranks)
    if has_same_ranks:
        logical = LogicalCheckpoint(logical.of_ranks, rank)
    relocated = Relocated(logical, parts, rank)
    key = None
    if not has_same_ranks:
        key = key_of_rank(run_id, logical.step, 0 if have_same_random_states(logical) else rank)
    changed, restarted = moved_state(relocated, n_saved, key)
    state = values.pack(state_for_copy(relocated) | changed, path="state")
    mesh, place = ((n_ranks,), (rank,)) if parts else ((), ())
    group = GroupIdentity(
        run_id=run_id, world_id=world_id, rank=rank, world_size=n_ranks, mesh_shape=mesh, coordinate=place
    )
    kind, engine = backend_for(path), Engine(1)
    with closing(engine):
        container, _ = create(
            kind, path, list(relocated.entries.values()), slots=SLOTS, state_nbytes=len(state), group=group
        )
        with undo_on_error(container.close):
            writer = PoolWriter(PoolReader(container, path), engine, kind.probe(path))
        with closing(writer):
            checkpoint_id = CheckpointId(first.header.incarnation, logical.step)
            commit_copy(writer, checkpoint_id, relocated, state)
            container.publish()
    return restarted
