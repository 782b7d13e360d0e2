"""Restore the checkpoint of another world: each rank reads its parts, and all vote.

Where pools of that world lie on other hosts, each rank first names the blocks that it needs, and they are fetched
(``partial_copies.py``). If it then needs others, because it found damage, they are fetched too, and all read again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

from lightck.errors import RankError, listed
from lightck.pool.format.structures import DamagedError
from lightck.pool.partial_copy import BlocksMissingError
from lightck.ranks.agreement import describe_from_world, describe_lost, describe_missing, describe_other_parts
from lightck.ranks.meet import Meeting
from lightck.ranks.rule import CheckpointId
from lightck.restore.averages import describe_averaged
from lightck.restore.directory import CheckpointsPerPool, logical_of
from lightck.restore.logical import LogicalCheckpoint
from lightck.restore.moved_state import describe_restarted, key_of_rank, moved_state, refuse_disagreeing_ranks
from lightck.restore.recover import LiveRestore
from lightck.restore.relocated import Relocated
from lightck.restore.stages import flags_of, held_by, names_of_model, refuse_tensors_without_holder
from lightck.restore.usable import RankCheckpoint, parse
from lightck.session.group import Group
from lightck.session.lost_pool import no_longer_intact
from lightck.session.other_world import OtherWorlds
from lightck.session.world_fit import layout_now, own_place_of
from lightck.state import rng

log = logging.getLogger("lightck")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What all ranks have restored from the pools of another world."""

    checkpoint_id: CheckpointId
    checkpoint: Relocated
    is_done: bool
    """Whether the training was declared finished there."""
    reason: str
    """Why the continuation is not bit-identical."""
    changed_state: Mapping[str, object]
    """What the small state of the new pool has in place of what ``checkpoint`` has."""


def load(other: OtherWorlds, group: Group, meeting: Meeting, restore: LiveRestore) -> Loaded:
    """Restore the newest checkpoint of ``other.source`` that all ranks can restore. Raises ``RankError`` if there is
    none; and what a restore raises if the checkpoint does not fit."""
    reasons: list[str] = []
    for checkpoint_id, held in other.candidates:
        loaded, problems = _load_on_all(other, group, meeting, checkpoint_id, held, restore)
        failed = next((rank for rank, one in enumerate(problems) if one), None)
        if failed is None:
            assert loaded is not None, "this rank has voted for it"
            return loaded
        reasons.append(f"step {checkpoint_id.step}: {meeting.name_of(failed)} cannot restore it: {problems[failed]}")
        log.warning("lightck: no rank uses this checkpoint, and an older one is tried: %s", reasons[-1])
    raise RankError(
        f"No checkpoint in {os.path.dirname(other.path)!r} can be restored on all ranks. {'; '.join(reasons)}. Nothing "
        "was overwritten. Use another copy of these pools; attach(..., overwrite=True) on all ranks discards all pools "
        "and starts afresh."
    )


def _load_on_all(
    other: OtherWorlds,
    group: Group,
    meeting: Meeting,
    checkpoint_id: CheckpointId,
    held: CheckpointsPerPool,
    restore: LiveRestore,
) -> tuple[Loaded | None, list[str]]:
    """Restore one checkpoint. If a rank lacks blocks of it (it must take them from another pool than planned), they are
    fetched, and all restore it again. Returns what this rank has restored, and for each rank why it could not, or
    ""."""
    logical: LogicalCheckpoint | None = None
    relocated: Relocated | None = None
    # Only with pipeline stages can a tensor be missing on all ranks. Without stages no names are compared.
    problem, has_compared_names = "", not other.tensors.is_stage
    while True:
        loaded, lacks_blocks = None, False
        try:
            if not problem:
                logical = logical or _logical_of(other, group, held)
                relocated = relocated or _relocated(other, group, logical, restore)
                relocated.want_remote_blocks()
        except DamagedError as err:
            problem = str(err)
        except BlocksMissingError:
            lacks_blocks = True
        if other.partial_copies is not None and other.partial_copies.fetch_wanted():
            continue
        if not has_compared_names:
            _refuse_tensors_without_holder(other, meeting, logical)
            has_compared_names = True
        try:
            if relocated is not None and not problem:
                loaded = _load_one(other, group, checkpoint_id, relocated, restore)
        except DamagedError as err:
            problem = str(err)
        except BlocksMissingError:
            lacks_blocks = True
        own = msgpack.packb([problem, lacks_blocks])
        votes = [msgpack.unpackb(one) for one in meeting.exchange("votes", own)]
        if not any(lacks for _, lacks in votes):
            return loaded, [text for text, _ in votes]


def fetch_for_copy(other: OtherWorlds, source: Relocated) -> None:
    """Fetch the blocks of other hosts' pools that the copy in this rank's new pool needs and the restore did not. All
    ranks call this. Raises ``CorruptPoolError``."""
    while True:
        try:
            source.want_remote_blocks()
        except BlocksMissingError:
            pass  # they are fetched now
        except DamagedError as err:
            raise no_longer_intact(source, err) from err
        if other.partial_copies is None or not other.partial_copies.fetch_wanted():
            return


def _logical_of(other: OtherWorlds, group: Group, held: CheckpointsPerPool) -> LogicalCheckpoint:
    """Return one checkpoint as logical tensors. Raises ``DamagedError``, and ``BlocksMissingError`` if that needs
    blocks of another host's pool that were not fetched yet."""
    assert other.source is not None, "a checkpoint is loaded"
    rank_of_state = group.rank if other.has_same_ranks(group) else 0
    return logical_of(os.path.dirname(other.path), other.source, held, rank_of_state, warns=group.rank == 0)


def _relocated(other: OtherWorlds, group: Group, logical: LogicalCheckpoint, restore: LiveRestore) -> Relocated:
    """Return this rank's parts of one checkpoint. Raises ``DamagedError``, and ``BlocksMissingError`` if that needs
    blocks of another host's pool that were not fetched yet."""
    refuse_disagreeing_ranks(logical)
    layout = layout_now(logical, restore.layout)
    own_place = own_place_of(logical, layout) if other.has_same_ranks(group) else None
    tensors = other.tensors
    return Relocated(logical, tensors.parts, group.rank, held=held_by(tensors), ties=tensors.ties, own_place=own_place)


def _refuse_tensors_without_holder(other: OtherWorlds, meeting: Meeting, logical: LogicalCheckpoint | None) -> None:
    """Raise ``RankError`` if the checkpoint has a tensor that no rank holds. All ranks call this. ``logical``: None if
    this rank cannot read it."""
    names = [] if logical is None else names_of_model(logical.entries)
    flags = meeting.exchange("tensors that are held", flags_of(names, other.tensors.names))
    if logical is not None and all(len(one) == len(names) for one in flags):
        refuse_tensors_without_holder(names, logical.entries, flags, f"The checkpoint of step {logical.step}")


def _other_parts(own: RankCheckpoint, now: Relocated) -> list[str]:
    """Return the names of the parameters of which this rank now holds another part than before. ``own``: the checkpoint
    in its pool of the old world. ``now``: this rank's parts of the checkpoint."""
    return [
        name
        for name, entry in now.entries.items()
        if entry.role == "param" and name in own.entries and own.entries[name].held_pieces not in (None, entry.pieces)
    ]


def _load_one(
    other: OtherWorlds, group: Group, checkpoint_id: CheckpointId, relocated: Relocated, restore: LiveRestore
) -> Loaded:
    """Restore this rank's parts of one checkpoint. Raises ``DamagedError`` and ``BlocksMissingError``."""
    assert other.source is not None, "a checkpoint is loaded"
    has_same_ranks, logical = other.has_same_ranks(group), relocated.logical
    layout = layout_now(logical, restore.layout)
    if other.source.world_size == group.world_size and other.source.missing:
        reason = describe_missing(other.source.missing)
    else:
        reason = describe_from_world(other.source.world_size, group.world_size)
    if other.from_peer_copies:
        reason += f"; {describe_lost(other.from_peer_copies)} lost, and the peer copy is used"
    averaged = logical.averaged_names if relocated.own_place is None else []
    if averaged:
        reason += f"; {describe_averaged(averaged)}"
    key = None if has_same_ranks else key_of_rank(other.source.run_id, checkpoint_id.step, 0)
    changed, restarted = moved_state(relocated, other.source.world_size, key, rng.capture(), layout)
    changed["means"] = averaged  # the key of ``Contents.averaged_names``
    if restarted:
        reason += f"; {describe_restarted(restarted)}"
    if has_same_ranks and restore.layout is not None and group.world_size > 1:
        reason += describe_other_parts(_other_parts(logical.state_checkpoint, relocated))
    contents = parse(relocated)
    restore.take(relocated, contents, [])
    differing = [] if has_same_ranks else logical.differing(("buffer",))
    if differing:
        reason += f"; buffers that differed between the ranks are those of the first rank ({listed(differing, 3)})"
    return Loaded(checkpoint_id, relocated, contents.done, reason, changed)
