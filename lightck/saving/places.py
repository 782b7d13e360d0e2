"""Where a save goes: what each rank finds at the path, and, from the reports of all ranks, what each of them does.

``survey`` runs on each rank, ``decide`` on one of them. The caller carries reports and orders between the ranks. No
rank writes while another one surveys. So a decision rests on what all pools hold.

Invariant: an order names the newest checkpoint that all ranks of the group have (``Order.common``), and no rank
overwrites it. Each save has an incarnation of its own, larger than all in the pools that stay (with ``overwrite`` none
stay), so a save that only some ranks have committed never has the id of another one. Such a checkpoint can never become
common, and may be overwritten.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

from lightck.errors import CheckpointExistsError, PoolPathError, RankError, UnsupportedError
from lightck.events import ClosingEvent
from lightck.pool.format.boxes import Box, Ints
from lightck.pool.format.group import ID_NBYTES, GroupIdentity
from lightck.pool.format.pieces import Piece
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import RESUMABLE_NUMBER_MAX, open_pool
from lightck.pool.storage.backends import is_pool, pool_path
from lightck.ranks.directory import make_directory, pool_name, pools_in
from lightck.ranks.rule import CheckpointId, newest_common, next_incarnation
from lightck.restore.contents import Contents
from lightck.restore.logical import uncovered_box
from lightck.restore.usable import parse_state, usable_by_id

log = logging.getLogger("lightck")


class FoundPool(NamedTuple):
    """A pool that a rank has found."""

    name: str
    """The name of its file in the directory; "" if the path itself is that of the pool."""
    group: GroupIdentity | None
    ids: frozenset[CheckpointId]
    """The ids of its usable checkpoints."""
    incarnation: int
    """The largest incarnation in it."""
    is_saved_without_session: bool
    """Whether its newest checkpoint was saved by ``saving/``, without a session. Those of a training are not
    overwritten unasked."""


class Report(NamedTuple):
    """What a rank says before a save."""

    rank: int
    path: str
    step: int | None
    """The number that the caller gives the checkpoint; None: one more than that of the newest one."""
    overwrite: bool
    is_directory: bool | None
    """Whether the path is that of a directory; None if nothing is there."""
    pools: tuple[FoundPool, ...]
    """Empty with ``overwrite``."""
    names: frozenset[str]
    """The names of the pools in the directory that belong to this rank."""


class Order(NamedTuple):
    """What a rank does in a save."""

    name: str
    """The name of the pool's file in the directory; "" if the path itself is that of the pool."""
    group: GroupIdentity | None
    id: CheckpointId
    goes_on: bool
    """Whether the pool exists, and its checkpoints stay. If neither this nor ``discards`` is True, a new pool is made
    where nothing is."""
    common: CheckpointId | None
    """The checkpoint that must stay. (For a process alone: the newest one in its pool.)"""
    is_first_of_world: bool
    """Whether the pools of this world do not exist yet. Until all ranks have one, the pools of an older world count."""
    discards: bool
    """Whether what is at the path is replaced (``overwrite``)."""


def survey(path: str | os.PathLike[str], rank: int, step: int | None, *, overwrite: bool) -> Report:
    """Return what this rank finds at the path. Raises the errors of ``open_pool``, for example if a file is no pool
    (with ``overwrite``, a damaged pool is no error), and ``TypeError`` or ``ValueError`` for an invalid step."""
    if step is not None and type(step) is not int:
        raise TypeError(f"step={step!r} is a {type(step).__name__}. Pass an int, or None.")
    if step is not None and not 0 <= step < RESUMABLE_NUMBER_MAX:
        raise ValueError(f"step={step} is no number of a checkpoint. Pass one from 0 to {RESUMABLE_NUMBER_MAX - 1}.")
    path = pool_path(path)
    if os.path.isdir(path):
        beginning = pool_name(rank, 1).partition("-of-")[0] + "-of-"  # of this rank's pool in a world of any size
        mine = [one for one in pools_in(path) if one.name.startswith(beginning)]
        pools = () if overwrite else tuple(_found(str(one), one.name) for one in mine)
        return Report(rank, path, step, overwrite, True, pools, frozenset(one.name for one in mine))
    if not os.path.lexists(path):
        return Report(rank, path, step, overwrite, None, (), frozenset())
    is_discarded = overwrite and is_pool(path)
    return Report(rank, path, step, overwrite, False, () if is_discarded else (_found(path, ""),), frozenset())


def is_saved_without_session(contents: Contents) -> bool:
    """Whether a checkpoint was saved by ``saving/``, and not by a session."""
    return contents.event == ClosingEvent.SAVE.value


def _found(path: str, name: str) -> FoundPool:
    with closing(open_pool(path, gradients=True)) as reader:
        ids = usable_by_id(reader)
        newest = ids[max(ids)][0] if ids else None
        is_saved = False
        with suppress(DamagedError):
            is_saved = newest is not None and is_saved_without_session(parse_state(newest))
        return FoundPool(name, reader.group, frozenset(ids), reader.commit_log().incarnation, is_saved)


def decide(reports: Sequence[Report]) -> list[Order]:
    """Return the order of each rank. ``reports``: those of all ranks, in their order.

    Raises ``RankError`` if the ranks disagree or if the directory holds pools of several series of saves,
    ``CheckpointExistsError`` for a pool of a training, or with no usable checkpoint, ``PoolPathError`` for a file where
    ranks need a directory, and ``UnsupportedError`` if the ranks do not know their numbers."""
    ranks = [one.rank for one in reports]
    if ranks != list(range(len(reports))):
        raise UnsupportedError(
            f"{len(reports)} ranks save together, and the numbers that they got are {ranks}: this release of torch "
            "does not call set_up_storage_writer(..., rank=). Nothing was written. Use a release that does (2.13)."
        )
    steps = {one.step for one in reports}
    if len(steps) > 1:
        given = ", ".join(sorted(map(str, steps)))
        raise RankError(f"The ranks save under different steps: {given}. Nothing was written. Pass each the same step.")
    pools = [pool for one in reports for pool in one.pools]
    _refuse_trainings(reports[0].path, pools)
    newest = max((id_ for pool in pools for id_ in pool.ids), default=CheckpointId(0, 0))
    step = newest.step + 1 if reports[0].step is None else reports[0].step
    if step < newest.step:
        log.warning(
            "lightck: step %d is saved into %r, whose newest checkpoint has step %d. The new one is the newest from "
            "now on, and the save after it overwrites the checkpoint with the larger step. If the script forgot to "
            "load, stop it, and load with PoolReader",
            step,
            reports[0].path,
            newest.step,
        )
    checkpoint_id = CheckpointId(next_incarnation(pool.incarnation for pool in pools), step)
    if len(reports) == 1 and not reports[0].is_directory:
        common = newest_common(pool.ids for pool in pools)
        order = Order(
            name="",
            group=None,
            id=checkpoint_id,
            goes_on=bool(pools),
            common=common,
            is_first_of_world=False,
            discards=reports[0].overwrite,
        )
        return [order]
    files = [one.path for one in reports if one.is_directory is False]
    if files:
        raise PoolPathError(
            f"{files[0]!r} is a file, and {len(reports)} ranks save together: each needs a pool of its own. Nothing "
            f"was written. Name a directory. (To keep the file, make one and move it there as {pool_name(0, 1)}.)"
        )
    return _orders_of_group(reports, pools, checkpoint_id)


def _refuse_trainings(path: str, pools: Sequence[FoundPool]) -> None:
    foreign = [pool for pool in pools if not pool.is_saved_without_session]
    if foreign:
        what = (
            "a training's checkpoints (lightck.attach)" if any(one.ids for one in foreign) else "no usable checkpoint"
        )
        where = os.path.join(path, foreign[0].name) if foreign[0].name else path
        raise CheckpointExistsError(
            f"The pool {where!r} holds {what}, and would be overwritten. Nothing was written. Name another path, or "
            "pass overwrite=True to discard what is there."
        )


def _orders_of_group(reports: Sequence[Report], pools: Sequence[FoundPool], id_: CheckpointId) -> list[Order]:
    n_ranks, path = len(reports), reports[0].path
    runs = {pool.group.run_id for pool in pools if pool.group is not None}
    if len(runs) > 1:
        raise RankError(
            f"The pools in {path!r} belong to {len(runs)} different series of saves. Nothing was written. Keep those "
            "of one in the directory, or pass overwrite=True to discard them all."
        )
    world = _newest_world(reports, n_ranks)
    if world:
        common = newest_common(pool.ids for pool in world)
        return [
            Order(pool.name, pool.group, id_, goes_on=True, common=common, is_first_of_world=False, discards=False)
            for pool in world
        ]
    run_id, world_id = (*runs, os.urandom(ID_NBYTES))[0], os.urandom(ID_NBYTES)
    is_taken = any(pool_name(one.rank, n_ranks) in one.names for one in reports)
    suffix = os.urandom(4).hex() if is_taken else ""
    return [
        Order(
            pool_name(rank, n_ranks, suffix),
            GroupIdentity(run_id=run_id, world_id=world_id, rank=rank, world_size=n_ranks),
            id_,
            goes_on=False,
            common=None,
            is_first_of_world=True,
            discards=reports[0].overwrite,
        )
        for rank in range(n_ranks)
    ]


def _newest_world(reports: Sequence[Report], n_ranks: int) -> list[FoundPool]:
    """Return the pools, one for each rank, of the world of this size whose common checkpoint is the newest one; [] if
    there is no such world with the pools of all ranks."""
    of_ranks = [
        {
            pool.group.world_id: pool
            for pool in one.pools
            if pool.group is not None and (pool.group.rank, pool.group.world_size) == (one.rank, n_ranks)
        }
        for one in reports
    ]
    worlds = [[mine[id_] for mine in of_ranks] for id_ in of_ranks[0] if all(id_ in mine for mine in of_ranks)]
    return max(worlds, key=lambda world: newest_common(pool.ids for pool in world) or CheckpointId(0, 0), default=[])


def path_of(path: str | os.PathLike[str], order: Order) -> str:
    """Return the path of the pool of an order. For a rank, the directory is created. Raises ``PoolError``."""
    path = pool_path(path)
    if order.group is None:
        return path
    make_directory(path)
    return os.path.join(path, order.name)


def refuse_incomplete(tensors: Mapping[str, tuple[Ints, Collection[Box]]]) -> None:
    """Raise ``RankError`` if the boxes of all ranks together are not the whole of a tensor. ``tensors``: name -> shape
    and boxes."""
    for name, (shape, boxes) in tensors.items():
        try:
            box = uncovered_box(shape, tuple((Piece(one.start, one.size, one.start),) for one in boxes))
        except DamagedError as err:
            raise RankError(f"The tensor {name!r} cannot be saved: {err}. Nothing was written.") from err
        if box is not None:
            raise RankError(
                f"The tensor {name!r} of shape {list(shape)} is not whole: no rank saves the part of size "
                f"{list(box.size)} at {list(box.start)}. Nothing was written. Save on all ranks that hold parts of it."
            )
