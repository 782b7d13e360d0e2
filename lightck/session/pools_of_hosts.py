"""Pools that lie in the directories of other hosts: who has which.

One rank per directory says which pools are in it, and which checkpoints they hold. So all ranks know all pools of all
hosts, and choose the same world (``other_world.py``). What a host needs of the pools that it lacks is fetched then
(``partial_copies.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import msgpack

from lightck.errors import RankError
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.storage.failures import io_error
from lightck.ranks.copy_file import PEER_COPIES, is_peer_copy, readable_copies
from lightck.ranks.directory import pool_name, pools_in
from lightck.ranks.meet import Meeting
from lightck.ranks.rule import CheckpointId
from lightck.restore.logical import has_shares_in_table
from lightck.restore.usable import RankCheckpoint, usable_by_id
from lightck.session.group import Group


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """One pool in one of the directories."""

    directory: int
    """Number of the directory in ``Hosts.ranks_of``."""
    name: str
    """Path in the directory."""
    run_id: bytes
    world_id: bytes
    world_size: int
    rank: int
    ids: frozenset[CheckpointId]
    """The usable checkpoints."""
    incarnation: int
    steps_max: int
    """The largest step of a commit record, whether its checkpoint is usable or not; 0 for a peer copy."""
    has_shares: bool
    """Whether the rank wrote only its share of some tensors that several ranks of its host held."""
    has_gradients: bool
    """Whether the pool holds gradient records."""
    digest: bytes
    """Two pools with the same digest have the same checkpoints at the same offsets, so a block can be fetched from
    either."""

    @property
    def is_copy(self) -> bool:
        """Whether this is a peer copy, and not the pool that the rank writes."""
        return is_peer_copy(self.name)


@dataclass(frozen=True, slots=True)
class WorldFacts:
    """The pools of one world, in all directories."""

    run_id: bytes
    world_id: bytes
    world_size: int
    pools: dict[int, list[PoolFacts]]
    """Rank -> its pool, and copies of it in other directories."""

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.pools]

    @property
    def common(self) -> frozenset[CheckpointId]:
        """The checkpoints that every rank has in one of its files."""
        of_ranks = [frozenset().union(*(one.ids for one in files)) for files in self.pools.values()]
        return frozenset.intersection(*of_ranks) if of_ranks else frozenset()

    @property
    def copies(self) -> dict[int, PoolFacts]:
        """Rank -> a peer copy with the newest common checkpoint, for each rank that has it in no other file."""
        found: dict[int, PoolFacts] = {}
        newest = max(self.common, default=None)
        for rank, files in self.pools.items():
            holding = [one for one in files if newest in one.ids]
            if holding and all(one.is_copy for one in holding):
                found[rank] = holding[0]
        return found

    def is_on_own_hosts(self, hosts: Hosts) -> bool:
        """Whether each rank of the group has its own pool of this world in its own directory, with the newest common
        checkpoint in it. (An old copy does not count.)"""
        newest = max(self.common, default=None)
        return self.world_size == len(hosts.of_rank) and all(
            any(
                one.directory == hosts.of_rank[rank] and not one.is_copy and (newest is None or newest in one.ids)
                for one in self.pools.get(rank, ())
            )
            for rank in range(self.world_size)
        )


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a group. Ranks that use one directory count as ranks of one host, so a host is known by the number
    of its directory."""

    of_rank: list[int]
    """Rank -> number of its directory."""
    ranks_of: dict[int, list[int]] = field(default_factory=dict)
    """Number of a directory -> its ranks."""

    @classmethod
    def of(cls, directory_ids: Sequence[str]) -> Hosts:
        numbers = {name: number for number, name in enumerate(dict.fromkeys(directory_ids))}
        hosts = cls([numbers[name] for name in directory_ids])
        for rank, number in enumerate(hosts.of_rank):
            hosts.ranks_of.setdefault(number, []).append(rank)
        return hosts

    def merged(self, directory: str, group: Group, meeting: Meeting) -> Hosts:
        """Return the hosts, in which those that use one directory are joined: a directory on a file system that several
        hosts share looks on each host like one of its own. One rank per directory makes a file in it, and looks which
        files of the others it sees. All ranks call this."""
        is_first = self.place_in_directory(group.rank)[0] == 0
        name = f".lightck-{os.urandom(8).hex()}.new"  # the next start removes it if this process is killed
        path = os.path.join(directory, name)
        with ExitStack() as stack:
            if is_first:
                stack.callback(_unlink, path)
                try:
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                except OSError as err:
                    raise io_error(f"No file can be made in {directory!r}", err.errno, err.strerror) from err
            names = [one.decode() for one in meeting.exchange("probes", name.encode() if is_first else b"")]
            seen = [
                other
                for other, one in enumerate(names)
                if is_first and one and os.path.exists(os.path.join(directory, one))
            ]
            found = [msgpack.unpackb(one) for one in meeting.exchange("probes that are seen", msgpack.packb(seen))]
        number_of = dict(enumerate(self.of_rank))
        for rank, others in enumerate(found):
            for other in others:
                old, new = sorted((number_of[rank], number_of[other]), reverse=True)
                number_of = {at: new if number == old else number for at, number in number_of.items()}
        return Hosts.of([str(number_of[rank]) for rank in range(len(self.of_rank))])

    def place_in_directory(self, rank: int) -> tuple[int, int]:
        """Return the place of a rank among the ranks of its directory, and their number."""
        ranks = self.ranks_of[self.of_rank[rank]]
        return ranks.index(rank), len(ranks)


def worlds_of_hosts(directory: str, group: Group, meeting: Meeting, hosts: Hosts) -> list[WorldFacts]:
    """Return the worlds of all pools in all directories. All ranks call this. Raises ``RankError`` if the pools belong
    to several trainings."""
    place, _ = hosts.place_in_directory(group.rank)
    own = list(_facts_of(directory)) if place == 0 else []
    found: dict[tuple[bytes, bytes, int], dict[int, list[PoolFacts]]] = {}
    for rank, data in enumerate(meeting.exchange("pools of a host", msgpack.packb(own))):
        for name, run_id, world_id, world_size, of_rank, ids, *others in msgpack.unpackb(data):
            usable = frozenset(CheckpointId(*one) for one in ids)
            facts = PoolFacts(hosts.of_rank[rank], name, run_id, world_id, world_size, of_rank, usable, *others)
            found.setdefault((run_id, world_id, world_size), {}).setdefault(of_rank, []).append(facts)
    if len({run_id for run_id, _, _ in found}) > 1:
        raise RankError(
            "The pools in the directories of these ranks belong to several trainings. Nothing was changed. Keep those "
            "of one training (`lightck inspect --json` shows the run of each pool)."
        )
    return [
        _with_copies_that_help(
            WorldFacts(*key, {rank: _without_useless_checkpoints(files) for rank, files in sorted(pools.items())})
        )
        for key, pools in found.items()
    ]


def _without_useless_checkpoints(files: list[PoolFacts]) -> list[PoolFacts]:
    """Return the files of a rank. Of its peer copies, leave out the checkpoints that its pool does not have, if the
    pool has any: the pool may have struck them, or the group went back to an older one, and there was no time to drop
    them from the copy."""
    in_pool = frozenset().union(*(one.ids for one in files if not one.is_copy))
    if not in_pool:
        return files
    return [replace(one, ids=one.ids & in_pool) if one.is_copy else one for one in files]


def _with_copies_that_help(world: WorldFacts) -> WorldFacts:
    """Return a world. If the ranks have no checkpoint in common even with their peer copies, leave the copies out. A
    rank without a pool then counts as missing, and the other ranks may have a checkpoint that holds all tensors."""
    if world.common:
        return world
    pools = {rank: [one for one in files if not one.is_copy] for rank, files in world.pools.items()}
    return replace(world, pools={rank: files for rank, files in pools.items() if files})


def _facts_of(directory: str) -> Iterator[list[Any]]:
    """Yield, for each pool and each peer copy in a directory, the fields of ``PoolFacts`` after ``directory``."""
    for path in pools_in(directory):
        with closing(open_pool(str(path), gradients=True)) as reader:
            identity = reader.group
            uuid = reader.superblock.uuid
            if identity is None and path.name != pool_name(0, 1):
                raise RankError(
                    f"The pool {str(path)!r} is that of a single process, and not of a rank. Nothing was changed. Move "
                    "it to another directory."
                )
            key = (uuid, uuid, 1, 0) if identity is None else _key(identity)
            log = reader.commit_log()
            usable = usable_by_id(reader)
            ids, digest = (
                [list(one) for one in usable],
                _digest(reader, [one for many in usable.values() for one in many]),
            )
            steps = max((record.step for record in log.records.values()), default=0)
            flags = has_shares_in_table(reader), reader.superblock.has_gradients
            yield [path.name, *key, ids, log.incarnation, steps, *flags, digest]
    for copy, reader in readable_copies(directory):
        with closing(reader):
            if reader.group is not None:
                usable = usable_by_id(reader)
                name, ids = os.path.join(PEER_COPIES, os.path.basename(copy)), [list(one) for one in usable]
                digest = _digest(reader, [one for many in usable.values() for one in many])
                incarnation = reader.commit_log().incarnation
                yield [name, *_key(reader.group), ids, incarnation, 0, has_shares_in_table(reader), False, digest]


def _digest(reader: PoolReader, usable: Sequence[RankCheckpoint]) -> bytes:
    sb, records = reader.superblock, [one.record for one in usable]
    places = sorted((one.slot, one.payload_generation, one.manifest_hash) for one in records)
    return blake2b(repr((sb.uuid, sb.nbytes, sb.slots, sb.table_hash, places)).encode(), digest_size=16).digest()


def _key(identity: Any) -> tuple[bytes, bytes, int, int]:
    return identity.run_id, identity.world_id, identity.world_size, identity.rank
