"""The directory of a group holds pools of another world: another number of ranks, or other parts of the tensors.

    compare     Each rank says whether its own pool, if there is one, fits the parts that it holds now. This file has
                nothing more to do if all pools fit, no pool of another number of ranks is there, and no rank that has
                lost its pool finds a peer copy, or needs a pool that lies on another host.
    choose      Each rank opens the pools in the directory. All choose the same world: the one with the newest
                checkpoint that all its pools have. If that is the world of this group, the others are left from an
                earlier change of worlds. Otherwise its checkpoint is loaded. Each rank locks the pools that it removes.
    restore     Each rank reads its parts, verified, from the pools of the chosen world (``load_other_world.py``), and
                votes. If a rank cannot, all take the next older checkpoint.
    copy        Each rank makes a pool of its own, with a copy of what it has restored under the name that the
                checkpoint has. From then on it goes on as ``group_start.py`` says.
    remove      When all ranks have adopted the copy, the pools of all other worlds are removed.

Invariant: no pool of the old world is changed before all ranks of the new world hold the checkpoint. So if a process is
killed at any moment, the next start of either world finds the checkpoint: in the pools of the old world, or in those of
the new one. Both hold the same bytes under the same name, so no rank can take another checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass

import msgpack

from lightck.errors import CheckpointExistsError, NoSpaceError, PoolError, RankError, UnsupportedError, listed
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.storage.backends import backend_for
from lightck.pool.storage.lock import PoolLock
from lightck.ranks.agreement import describe_lost
from lightck.ranks.copy_file import PEER_COPIES, copies_in, is_peer_copy
from lightck.ranks.directory import World, open_worlds, pool_name, pools_in
from lightck.ranks.meet import Meeting
from lightck.ranks.rule import CheckpointId
from lightck.restore.directory import CheckpointsPerPool, common_checkpoints
from lightck.restore.together import refuse_other_layouts, refuse_unused_rules
from lightck.session.arguments import Arguments
from lightck.session.group import Group, directory_id, path_of_pool
from lightck.session.partial_copies import PartialCopies
from lightck.session.pools_of_hosts import Hosts, WorldFacts, worlds_of_hosts
from lightck.session.world_fit import fits
from lightck.state.local_tensors import reshard
from lightck.state.rules import ModelTensors, tensors_of

log = logging.getLogger("lightck")


@dataclass(slots=True)
class OtherWorlds:
    """The pools in the directory of a group, some of which are of other worlds. They are open, and those that are not
    of the group's own world are locked, until ``close``."""

    source: World | None
    """The world whose checkpoint is loaded. None: the newest checkpoint is of this group's own world, or there is none,
    or it is not wanted."""
    path: str
    """Of this rank's pool."""
    tensors: ModelTensors
    """Of the model on this rank."""
    to_remove: list[str]
    """The pools that this rank removes when all ranks have a checkpoint in their own."""
    candidates: list[tuple[CheckpointId, CheckpointsPerPool]]
    """The checkpoints that all pools of ``source`` have, newest first."""
    incarnation: int
    """The largest incarnation in all pools."""
    _open: ExitStack
    from_peer_copies: Sequence[int] = ()
    """The ranks of the old world whose pools are lost, and whose peer copies are used."""
    partial_copies: PartialCopies | None = None
    """The partial copies of pools of ``source``; None if every host has all these pools in its directory."""

    def has_same_ranks(self, group: Group) -> bool:
        """Whether each rank goes on with the state of the rank with its number in the old world."""
        return self.source is not None and self.source.world_size == group.world_size and not self.source.missing

    @contextmanager
    def discards_on_error(self) -> Iterator[None]:
        """Discard this rank's new pool if the block raises. (When the block ends, all ranks have a copy.) If there is
        no space, the error says how much is needed."""
        try:
            yield
        except BaseException as err:
            backend_for(self.path).discard(self.path)
            if isinstance(err, NoSpaceError) and self.source is not None:
                nbytes = sum(map(_used_nbytes, self.source.readers.values()))
                fact = str(err.args[0]).rstrip(".")
                err.args = (
                    f"{fact}. To load the checkpoint, the medium needs space for the new pools beside the old ones "
                    f"({nbytes} bytes), which are unchanged: copy the directory to a larger medium, and resume there.",
                    *err.args[1:],
                )
            raise

    def remove(self) -> None:
        """Remove the pools of other worlds. Call when all ranks have adopted a checkpoint of their own world."""
        for path in self.to_remove:
            log.info("lightck: the pool %r, of the ranks before the resume, is no longer needed, and is removed", path)
            _remove(path)
        self.close()

    def close(self) -> None:
        self._open.close()


def _used_nbytes(reader: PoolReader) -> int:
    """Return the bytes on the medium that a pool takes, or a partial copy of one."""
    return reader.superblock.nbytes if reader.partial is None else os.fstat(reader.container.fd).st_blocks * 512


def _remove(path: str) -> None:
    backend_for(path).discard(path)
    with suppress(OSError):
        os.unlink(f"{path}.lock")


def find_other_worlds(directory: str, group: Group, meeting: Meeting, arguments: Arguments) -> OtherWorlds | None:
    """Return the pools of other worlds in the directory; None if there are none. All ranks call this.

    Raises ``CheckpointExistsError`` if a checkpoint of another world would be loaded, and ``resume`` is not True;
    ``UnsupportedError`` if a host lacks a pool with gradient records; ``RankError`` if no checkpoint can be
    chosen; ``PoolLockedError`` if a pool is in use."""
    reshard(arguments.model)
    refuse_other_layouts(arguments.layout, meeting)
    tensors = tensors_of(arguments.model, arguments.layout)
    refuse_unused_rules(arguments.layout, tensors.names, meeting)
    is_lost = arguments.resume and path_of_pool(directory, group.rank, group.world_size) is None
    has_other_pools = _has_other_world(directory, group, tensors) or (is_lost and bool(copies_in(directory)))
    own = [has_other_pools, directory_id(directory), is_lost, _is_empty(directory)]
    found = [msgpack.unpackb(one) for one in meeting.exchange("kinds of pools", msgpack.packb(own))]
    hosts = Hosts.of([where for _, where, _, _ in found])
    has_other = any(is_other for is_other, _, _, _ in found)
    lost = _lost_ranks(found)
    if len(hosts.ranks_of) > 1 and (has_other or lost):
        hosts = hosts.merged(directory, group, meeting)
    if len(hosts.ranks_of) > 1 and has_other and arguments.overwrite:
        return _all_to_remove(directory, group, tensors, hosts)
    if len(hosts.ranks_of) > 1 and (has_other or lost):
        return _over_hosts(directory, group, meeting, arguments, tensors, hosts, lost, has_other=has_other)
    if not has_other:
        return None
    with ExitStack() as stack:
        worlds = stack.enter_context(open_worlds(directory))
        choice = _choose(meeting, directory, worlds, group, tensors, overwrite=arguments.overwrite)
        _refuse_unasked(directory, choice, arguments)
        from_peer_copies = [] if choice.world is None else choice.world.ranks_from_copies
        if from_peer_copies and group.rank == 0:
            _report_copies(from_peer_copies, max(choice.common).step, f"in {os.path.join(directory, PEER_COPIES)!r}")
        paths = _new_paths(directory, choice, group)
        kept = {*paths, *(choice.paths if choice.is_own else ())}
        readers = [reader for world in worlds for reader in world.readers.values()]
        others = [one.path for one in readers if one.path not in kept and not is_peer_copy(one.path)]
        mine = sorted(others)[group.rank :: group.world_size]
        for path in mine:
            stack.callback(PoolLock(path).release)
        # What an interrupted start left holds nothing that the chosen world lacks. It is removed now, to make room.
        interrupted = choice.left_by_interruptions(worlds)
        left = [path for path in mine if path in interrupted]
        for path in left:
            _remove(path)
        return OtherWorlds(
            source=None if choice.is_own else choice.world,
            path=paths[group.rank],
            tensors=tensors,
            to_remove=[path for path in mine if path not in left],
            candidates=sorted(choice.common.items(), reverse=True, key=lambda one: one[0]),
            incarnation=max(world.incarnation for world in worlds),
            from_peer_copies=from_peer_copies,
            _open=stack.pop_all(),
        )
    raise AssertionError("the block returns or raises")


def _is_empty(directory: str) -> bool:
    return not pools_in(directory)


def _lost_ranks(found: Sequence[tuple[bool, str, bool, bool]]) -> list[int]:
    """Return the ranks that find no pool of their own, if there is any pool at all. ``found``: what each rank sent."""
    if all(is_empty for _, _, _, is_empty in found):
        return []
    return [rank for rank, (_, _, is_lost, _) in enumerate(found) if is_lost]


def _needs_other_hosts(facts: Sequence[WorldFacts], hosts: Hosts, lost: Sequence[int]) -> bool:
    """Whether a rank of ``lost`` needs something of another host: its own pool lies there, or no pool on its own host
    can replace the lost one (``lost_pool.py``). None can if the host has no other rank's pool, or if pools hold only
    the shares of their ranks."""
    n_ranks = len(hosts.of_rank)
    hosts_with_own_pools = {hosts.of_rank[rank] for rank in range(n_ranks) if rank not in lost}
    moved = any(rank in world.pools for world in facts if world.world_size == n_ranks for rank in lost)
    holds_shares = any(one.has_shares for world in facts for files in world.pools.values() for one in files)
    return moved or any(holds_shares or hosts.of_rank[rank] not in hosts_with_own_pools for rank in lost)


def _all_to_remove(directory: str, group: Group, tensors: ModelTensors, hosts: Hosts) -> OtherWorlds:
    """``find_other_worlds`` with ``overwrite=True``: nothing is loaded, and no pool is opened."""
    paths = [os.path.join(directory, pool_name(rank, group.world_size)) for rank in range(group.world_size)]
    kept = {paths[rank] for rank in hosts.ranks_of[hosts.of_rank[group.rank]]}
    place, n_places = hosts.place_in_directory(group.rank)
    mine = [str(path) for path in pools_in(directory) if str(path) not in kept][place::n_places]
    with ExitStack() as stack:
        for path in mine:
            stack.callback(PoolLock(path).release)
        return OtherWorlds(None, paths[group.rank], tensors, mine, [], 0, stack.pop_all())
    raise AssertionError("the block returns or raises")


def _over_hosts(
    directory: str,
    group: Group,
    meeting: Meeting,
    arguments: Arguments,
    tensors: ModelTensors,
    hosts: Hosts,
    lost: Sequence[int],
    *,
    has_other: bool,
) -> OtherWorlds | None:
    """``find_other_worlds`` for ranks whose pools lie in several directories. Each directory gets partial copies of the
    pools of the chosen world that it lacks (``partial_copies.py``). From then on each rank does as with one directory,
    and fetches what it needs. ``lost``: the ranks that find no pool of their own."""
    facts = worlds_of_hosts(directory, group, meeting, hosts)
    if not has_other and not _needs_other_hosts(facts, hosts, lost):
        return None
    unfit = [
        world.world_id for world in facts if not _fits_own(directory, group, tensors, world, hosts.of_rank[group.rank])
    ]
    own = msgpack.packb([unfit, os.urandom(4).hex()])
    received = [msgpack.unpackb(one) for one in meeting.exchange("worlds", own)]
    not_own = {world_id for ids, _ in received for world_id in ids}
    chosen = _newest_of(facts, hosts, not_own)
    is_own = chosen is not None and chosen.world_id not in not_own and chosen.is_on_own_hosts(hosts)
    if not has_other and (chosen is None or is_own or (max(chosen.common).step == 0 and not chosen.copies)):
        # The start goes on as with one directory. (If the ranks have nothing in common but step 0, or nothing at all, a
        # new training may have been killed while its pools were made.)
        return None
    _refuse_loss_or_two_histories(facts, chosen)
    with ExitStack() as stack:
        copies = None
        if chosen is not None and not is_own and arguments.resume:
            if group.rank == 0:
                _report_copies_of_hosts(chosen, hosts, meeting)
            _refuse_gradients_elsewhere(chosen, hosts)
            copies = PartialCopies(directory, group, meeting, hosts, chosen)
            stack.callback(copies.close)
            copies.begin()
        local = None if chosen is None else _opened(directory, hosts.of_rank[group.rank], chosen, copies, stack)
        choice = _Choice(local, is_own, received[0][1], common_checkpoints(local) if local and local.readers else {})
        _refuse_unasked(directory, choice, arguments)
        paths = _new_paths(directory, choice, group)
        mine = _others_of(directory, group, hosts, facts, paths)
        for path in mine:
            stack.callback(PoolLock(path).release)
        incarnations = [one.incarnation for world in facts for files in world.pools.values() for one in files]
        return OtherWorlds(
            source=None if is_own else choice.world,
            path=paths[group.rank],
            tensors=tensors,
            to_remove=mine,
            candidates=_candidates_of_all(meeting, choice),
            incarnation=max(incarnations, default=0),
            partial_copies=copies if copies is not None and copies.is_needed else None,
            from_peer_copies=[] if chosen is None or is_own else list(chosen.copies),
            _open=stack.pop_all(),
        )
    raise AssertionError("the block returns or raises")


def _refuse_loss_or_two_histories(facts: Sequence[WorldFacts], chosen: WorldFacts | None) -> None:
    """Raise as ``_refuse_loss`` and ``_refuse_longer_history`` do. ``chosen``: None if the pools have no checkpoint in
    common."""
    if chosen is None:
        _refuse_loss_over_hosts(facts)
        return
    _refuse_longer_history(
        "the directories of these ranks",
        [([one.name for files in world.pools.values() for one in files], world.common) for world in facts],
        max(chosen.common),
    )


def _refuse_gradients_elsewhere(world: WorldFacts, hosts: Hosts) -> None:
    """Raise ``UnsupportedError`` if a pool with gradient records would have to be read from another host: blocks of it
    are of no use without the records from which updates are made again."""
    for rank, files in world.pools.items():
        if any(one.has_gradients for one in files) and {one.directory for one in files} != set(hosts.ranks_of):
            raise UnsupportedError(
                f"The pool of rank {rank} holds gradient records, and not every host has it in its directory. Only "
                "whole checkpoints can be fetched from another host. Nothing was changed. Copy the pools of all ranks "
                "into the directory of each host; or start the ranks on the same hosts in the same order as before."
            )


def _report_copies_of_hosts(world: WorldFacts, hosts: Hosts, meeting: Meeting) -> None:
    """Log which ranks' pools are lost, and from which hosts their peer copies are taken."""
    for number in sorted(hosts.ranks_of):
        ranks = [rank for rank, one in world.copies.items() if one.directory == number]
        if ranks:
            _report_copies(ranks, max(world.common).step, f"on host {meeting.hosts[hosts.ranks_of[number][0]]}")


def _report_copies(ranks: Sequence[int], step: int, where: str) -> None:
    """Log which ranks' pools are lost, and where the peer copies are that take their place."""
    log.warning(
        "lightck: %s lost. All ranks go back to step %d, the newest one that the peer copies %s and the other pools "
        "have",
        describe_lost(ranks),
        step,
        where,
    )


def _candidates_of_all(meeting: Meeting, choice: _Choice) -> list[tuple[CheckpointId, CheckpointsPerPool]]:
    """Return the checkpoints that all ranks find in the files that they have opened, newest first. (Somebody may have
    put an older copy into the directory of one host.)"""
    own = msgpack.packb([list(one) for one in choice.common])
    of_ranks = [msgpack.unpackb(one) for one in meeting.exchange("checkpoints to choose from", own)]
    shared = set.intersection(*({CheckpointId(*one) for one in ids} for ids in of_ranks))
    return sorted(((one, choice.common[one]) for one in shared), reverse=True, key=lambda one: one[0])


def _others_of(
    directory: str, group: Group, hosts: Hosts, facts: Sequence[WorldFacts], paths: Sequence[str]
) -> list[str]:
    """Return the pools in this directory that this rank removes. The ranks of a directory divide among themselves the
    removal of all pools in it but their own. Peer copies are removed later (``peer_copies.py``). ``paths``: of each
    rank's pool."""
    number = hosts.of_rank[group.rank]
    kept = {paths[rank] for rank in hosts.ranks_of[number]}
    files = [one for world in facts for of_rank in world.pools.values() for one in of_rank if not one.is_copy]
    place, n_places = hosts.place_in_directory(group.rank)
    here = {os.path.join(directory, one.name) for one in files if one.directory == number}
    return sorted(here - kept)[place::n_places]


def _opened(directory: str, number: int, world: WorldFacts, copies: PartialCopies | None, stack: ExitStack) -> World:
    """Open the pools of a world that this directory has, or has copies of. ``number``: of the directory."""
    newest = max(world.common)
    readers = {} if copies is None else copies.open(stack)
    for rank, files in world.pools.items():
        here = next((one for one in files if one.directory == number and newest in one.ids), None)
        if here is not None:
            readers[rank] = open_pool(os.path.join(directory, here.name), gradients=True)
            stack.callback(readers[rank].close)
    return World(world.run_id, world.world_id, world.world_size, dict(sorted(readers.items())))


def _fits_own(directory: str, group: Group, tensors: ModelTensors, world: WorldFacts, number: int) -> bool:
    """Whether this rank's own pool of a world fits its parts. True if it has none in its directory."""
    files = world.pools.get(group.rank, ())
    own = next((one for one in files if one.directory == number and not one.is_copy), None)
    if own is None:
        return True
    with closing(open_pool(os.path.join(directory, own.name), gradients=True)) as reader:
        return reader.group is not None and fits(reader, tensors)


def _newest_of(facts: Sequence[WorldFacts], hosts: Hosts, not_own: set[bytes]) -> WorldFacts | None:
    """Choose as ``_choose`` does."""
    newest = [
        (max(world.common), not world.missing, world.world_id not in not_own and world.is_on_own_hosts(hosts), number)
        for number, world in enumerate(facts)
        if world.common
    ]
    return facts[max(newest)[3]] if newest else None


def _refuse_loss_over_hosts(facts: Sequence[WorldFacts]) -> None:
    """Raise as ``_refuse_loss`` does."""
    for world in facts:
        if any(one.steps_max for files in world.pools.values() for one in files):
            raise _nothing_intact("the directories of these ranks", world.world_size)


def _refuse_unasked(directory: str, choice: _Choice, arguments: Arguments) -> None:
    """Raise ``CheckpointExistsError`` if a checkpoint would be loaded and ``resume`` is not True."""
    if choice.world is not None and not arguments.resume:
        raise CheckpointExistsError(
            f"The directory {directory!r} holds checkpoints of a group of {choice.world.world_size} ranks. They are "
            "neither loaded nor overwritten unasked. Pass attach(..., resume=True) on all ranks to load the newest of "
            "them, or overwrite=True to discard them."
        )


def _has_other_world(directory: str, group: Group, tensors: ModelTensors) -> bool:
    """Whether this rank sees that there are pools of another world. Only this rank's own pool is compared."""
    standard = {pool_name(rank, group.world_size) for rank in range(group.world_size)}
    if any(path.name not in standard for path in pools_in(directory)):
        return True
    own = os.path.join(directory, pool_name(group.rank, group.world_size))
    with suppress(PoolError), closing(open_pool(own, gradients=True)) as reader:  # the attach raises this error later
        identity = reader.group
        if identity is None:  # the pool of a single process
            return group.world_size == 1
        if (identity.rank, identity.world_size) == (group.rank, group.world_size):
            return not fits(reader, tensors)
    found = path_of_pool(directory, group.rank, group.world_size)
    if found is None:
        return False
    with closing(open_pool(found, gradients=True)) as reader:
        return not fits(reader, tensors)


# -- the choice --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    world: World | None
    """The world with the newest checkpoint; None if nothing is loaded."""
    is_own: bool
    """Whether that is the world of this group."""
    suffix: str
    """What the names of new pools get if their usual names are taken."""
    common: Mapping[CheckpointId, CheckpointsPerPool]
    """The checkpoints that all pools of the world have."""

    def left_by_interruptions(self, worlds: Sequence[World]) -> set[str]:
        """Return the pools that an interrupted start left: those of other worlds that lack the pools of some ranks and
        hold no later step than the chosen checkpoint. Return none if the chosen world lacks pools too."""
        if self.world is None or self.world.missing:
            return set()
        newest = max(self.common).step
        found: set[str] = set()
        for world in worlds:
            readers = world.readers.values()
            steps = [record.step for reader in readers for record in reader.commit_log().records.values()]
            if world is not self.world and world.missing and max(steps, default=0) <= newest:
                found |= {reader.path for reader in readers}
        return found

    @property
    def paths(self) -> list[str]:
        return [] if self.world is None else [reader.path for reader in self.world.readers.values()]


def _choose(
    meeting: Meeting,
    directory: str,
    worlds: Sequence[World],
    group: Group,
    tensors: ModelTensors,
    *,
    overwrite: bool,
) -> _Choice:
    """Choose the world with the newest checkpoint. If two worlds have it (a change of worlds was interrupted), choose
    the one that has the pools of all ranks, and then the one of this group. Raises ``RankError``."""
    unfit = [
        world.world_id
        for world in worlds
        if (reader := world.readers.get(group.rank)) is not None and (reader.group is None or not fits(reader, tensors))
    ]
    received = [msgpack.unpackb(one) for one in meeting.exchange("worlds", msgpack.packb([unfit, os.urandom(4).hex()]))]
    not_own = {world_id for ids, _ in received for world_id in ids}
    common = [common_checkpoints(world) for world in worlds]
    newest: list[tuple[CheckpointId, bool, bool, int]] = []
    for number, world in enumerate(worlds):
        is_own = world.world_size == group.world_size and world.world_id not in not_own and not world.ranks_from_copies
        if common[number] and not overwrite:
            newest.append((max(common[number]), not world.missing, is_own, number))
    best, suffix = max(newest, default=None), received[0][1]
    if best is None:
        choice = _Choice(None, False, suffix, {})
    else:
        choice = _Choice(worlds[best[3]], best[2], suffix, common[best[3]])
    own = [b"" if choice.world is None else choice.world.world_id, None if best is None else list(best[0])]
    if len(set(meeting.exchange("choices of a world", msgpack.packb(own)))) > 1:
        raise RankError(
            f"The ranks see different pools in {directory!r}, which holds pools of several groups of ranks. Is a "
            "second job using the directory? End it, and start again."
        )
    if best is None and not overwrite:
        _refuse_loss(directory, worlds)
    if best is not None:
        names = [[os.path.basename(reader.path) for reader in world.readers.values()] for world in worlds]
        _refuse_longer_history(f"the directory {directory!r}", list(zip(names, common, strict=True)), best[0])
    return choice


def _refuse_longer_history(
    where: str, worlds: Sequence[tuple[Sequence[str], Iterable[CheckpointId]]], chosen: CheckpointId
) -> None:
    """Raise ``RankError`` if a world has a checkpoint of a later step than the chosen one. A change of worlds leaves
    none: somebody has put pools of two histories together. ``worlds``: for each world, the names of its pools, and what
    all of them have."""
    for names, ids in worlds:
        longest = max((one.step for one in ids), default=0)
        if longest > chosen.step:
            raise RankError(
                f"In {where} lie pools of two continuations of one training: the newer one has reached step "
                f"{chosen.step}, and the older one step {longest} (pools {listed(list(names), 4)}). Nothing was "
                "changed. Keep the pools of one of the two there."
            )


def _refuse_loss(directory: str, worlds: Sequence[World]) -> None:
    """Raise ``RankError`` if the pools, which have no common checkpoint, hold anything but the beginning of a
    training."""
    for world in worlds:
        for reader in world.readers.values():
            steps = [record.step for record in reader.commit_log().records.values()]
            if any(steps) or reader.generations_of_erased_records():
                raise _nothing_intact(f"the directory {directory!r}", world.world_size)


def _nothing_intact(where: str, world_size: int) -> RankError:
    return RankError(
        f"In {where} lie pools of a group of {world_size} ranks, which have no intact checkpoint in common. Nothing "
        "was changed. `lightck verify` shows what is damaged. Use another copy of these pools; attach(..., "
        "overwrite=True) on all ranks discards them."
    )


def _new_paths(directory: str, choice: _Choice, group: Group) -> list[str]:
    """Return the path of each rank's pool. A pool of the chosen world keeps its file; any other rank gets a path that
    no pool of the chosen world has."""
    held = choice.world.readers if choice.world is not None and choice.is_own else {}
    taken = set(choice.paths)
    usual = [os.path.join(directory, pool_name(rank, group.world_size)) for rank in range(group.world_size)]
    suffix = choice.suffix if any(path in taken for rank, path in enumerate(usual) if rank not in held) else ""
    return [
        held[rank].path if rank in held else os.path.join(directory, pool_name(rank, group.world_size, suffix))
        for rank in range(group.world_size)
    ]
