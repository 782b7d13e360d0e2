"""Pools that lie in the directories of other hosts: who has which, and copies of those that a host needs.

    report      One rank per directory says which pools are in it, and which checkpoints they hold. So all ranks know
                all pools of all hosts, and choose the same world (``other_world.py``).
    fetch       Each host gets a copy of each pool of the chosen world that it lacks. A rank of a host that has the pool
                reads the file, a rank of the host that lacks it writes the copy: over a process group of gloo, a few
                MiB at a time.
    remove      The copies lie in a folder of their own, in which nobody looks for a rank's pool. It is removed at the
                end of attach, and, if the process is killed before, at the beginning of the next one. So a copy that
                has become old is never taken for the pool of its rank.

The bytes are not verified here. A copy is read as any pool is, so each block is verified by whoever reads it.

Invariants: All ranks go through the same list of copies in the same order, and a rank sends or receives all of a copy
even if it has failed to read or to write a part of it. So no rank waits for another that gave up; the error is raised
at the end, on all ranks. No pool is changed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import msgpack
import numpy as np
import torch

from lightck.errors import LightckError, NoSpaceError, PoolError, RankError
from lightck.pool.reader import open_pool
from lightck.pool.storage import lock, temporary
from lightck.pool.storage.failures import io_error
from lightck.pool.storage.file import sync_folder
from lightck.ranks.copy_file import COPIES as PEER_COPIES
from lightck.ranks.copy_file import copies_in
from lightck.ranks.directory import existing_pools, pool_name, pools_in
from lightck.ranks.meet import Meeting
from lightck.ranks.rule import CheckpointId
from lightck.restore.logical import has_shares_in_table
from lightck.restore.usable import usable_by_id
from lightck.session.group import Group

CHUNK_NBYTES = 8 << 20
COPIES = ".lightck-copies"
"""Name of the folder for copies, in the directory of a host."""


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
    """The largest step of a commit record, whether its checkpoint is usable or not."""
    has_shares: bool
    """Whether the rank wrote only its share of some tensors that all ranks of its host held."""

    @property
    def is_copy(self) -> bool:
        """Whether this is a peer copy, and not the pool that the rank writes."""
        return os.path.dirname(self.name) == PEER_COPIES


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
        return frozenset.intersection(*of_ranks)

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

    def is_at_home(self, hosts: Hosts) -> bool:
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
    """The directories of a group."""

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
        """Return the directories without those that are one: a file system that several hosts share gives each host a
        directory that looks like one of its own. One rank per directory makes a file in it, and looks which files of
        the others it sees. All ranks call this."""
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


def report(directory: str, group: Group, meeting: Meeting, hosts: Hosts) -> list[WorldFacts]:
    """Return the worlds of all pools in all directories. All ranks call this. Raises ``RankError`` if the pools belong
    to several trainings."""
    place, _ = hosts.place_in_directory(group.rank)
    own = list(_facts_of(directory)) if place == 0 and pools_in(directory) else []
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
        WorldFacts(*key, {rank: _without_dead_copies(files) for rank, files in sorted(pools.items())})
        for key, pools in found.items()
    ]


def _without_dead_copies(files: list[PoolFacts]) -> list[PoolFacts]:
    """Return the files of a rank. Of its peer copies, leave out the checkpoints that are newer than all in its pool:
    the group went back to an older one, and the rank had no time to drop them."""
    newest = max((name for one in files if not one.is_copy for name in one.ids), default=None)
    if newest is None:
        return files
    return [
        replace(one, ids=frozenset(name for name in one.ids if name <= newest)) if one.is_copy else one for one in files
    ]


def _facts_of(directory: str) -> Iterator[list[Any]]:
    for path in existing_pools(directory):
        with closing(open_pool(str(path))) as reader:
            identity = reader.group
            uuid = reader.superblock.uuid
            if identity is None and path.name != pool_name(0, 1):
                raise RankError(
                    f"The pool {str(path)!r} is that of a single process, and not of a rank. Nothing was changed. Move "
                    "it to another directory."
                )
            key = (uuid, uuid, 1, 0) if identity is None else _key(identity)
            log = reader.commit_log()
            ids = [list(one) for one in usable_by_id(reader)]
            steps = max((record.step for record in log.records.values()), default=0)
            yield [path.name, *key, ids, log.incarnation, steps, has_shares_in_table(reader)]
    for copy in copies_in(directory):
        with suppress(PoolError), closing(open_pool(copy)) as reader:  # a copy that was being made
            if reader.group is not None:
                ids = [list(one) for one in usable_by_id(reader)]
                name = os.path.join(PEER_COPIES, os.path.basename(copy))
                incarnation = reader.commit_log().incarnation
                yield [name, *_key(reader.group), ids, incarnation, 0, has_shares_in_table(reader)]


def _key(identity: Any) -> tuple[bytes, bytes, int, int]:
    return identity.run_id, identity.world_id, identity.world_size, identity.rank


# -- the copies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Copy:
    """One pool that one directory gets."""

    source: PoolFacts
    sender: int
    """Rank."""
    receiver: int
    target_directory: int


def remove_copies(directory: str) -> None:
    """Remove the copies that this or an earlier attach made in a directory."""
    shutil.rmtree(os.path.join(directory, COPIES), ignore_errors=True)


def path_of_copy(directory: str, rank: int, world_size: int) -> str:
    return os.path.join(directory, COPIES, pool_name(rank, world_size))


def fetch(directory: str, group: Group, meeting: Meeting, hosts: Hosts, world: WorldFacts) -> None:
    """Give each directory a copy of each pool of ``world`` that it lacks. All ranks call this. Raises ``NoSpaceError``,
    ``PoolIOError`` and ``RankError``."""
    copies = _copies(hosts, world)
    if not copies:
        return
    failure: Exception | None = None
    transport = _Transport(group, meeting.timeout * (1 + len(copies)))
    try:
        for copy in copies:
            try:
                if group.rank == copy.sender:
                    _send(transport, os.path.join(directory, copy.source.name), copy.receiver)
                elif group.rank == copy.receiver:
                    _receive(transport, path_of_copy(directory, copy.source.rank, world.world_size), copy.sender)
            except (OSError, LightckError) as err:
                failure = failure or err
            except RuntimeError as err:  # gloo: the other rank is gone
                raise RankError(
                    f"A pool could not be copied between {meeting.name_of(copy.sender)} and "
                    f"{meeting.name_of(copy.receiver)}: {err}. Nothing was changed. Start all ranks again."
                ) from err
    finally:
        transport.close()
    if failure is not None:
        raise failure
    with _more_time(meeting, len(copies)):
        meeting.exchange("copies of pools", b"")


@contextmanager
def _more_time(meeting: Meeting, n_copies: int) -> Iterator[None]:
    """In this block a wait for other ranks may take the timeout for each copy: some of them may have to copy all."""
    timeout = meeting.timeout
    meeting.timeout = timeout * (1 + n_copies)
    try:
        yield
    finally:
        meeting.timeout = timeout


def _copies(hosts: Hosts, world: WorldFacts) -> list[_Copy]:
    """Return all copies, in the order in which they are made. A file that lacks the newest common checkpoint counts as
    missing: it is an older copy."""
    newest = max(world.common)
    copies: list[_Copy] = []
    for rank, files in world.pools.items():
        holding = [one for one in files if newest in one.ids]
        have = {one.directory for one in holding}
        for number, ranks in hosts.ranks_of.items():
            if number in have:
                continue
            source = holding[len(copies) % len(holding)]
            senders = hosts.ranks_of[source.directory]
            copies.append(_Copy(source, senders[rank % len(senders)], ranks[rank % len(ranks)], number))
    return copies


class _Transport:
    """Bytes between two ranks, over a process group of gloo that is made for this."""

    def __init__(self, group: Group, timeout: float) -> None:
        dist = torch.distributed
        if not dist.is_gloo_available():
            raise RankError(
                "Pools must be copied between hosts, for which lightck uses gloo, and this torch has none. Copy the "
                "pools of all hosts into one directory that all ranks see, and pass that."
            )
        self._group = dist.new_group(
            list(group.members), timedelta(seconds=timeout), "gloo", use_local_synchronization=True
        )

    def send(self, data: torch.Tensor, rank: int) -> None:
        torch.distributed.send(data, group=self._group, group_dst=rank)

    def receive(self, data: torch.Tensor, rank: int) -> None:
        torch.distributed.recv(data, group=self._group, group_src=rank)

    def send_message(self, message: object, rank: int) -> None:
        packed = msgpack.packb(message)
        self.send(torch.tensor([len(packed)], dtype=torch.int64, device="cpu"), rank)
        self.send(torch.from_numpy(np.frombuffer(bytearray(packed), np.uint8)), rank)

    def receive_message(self, rank: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.receive(length, rank)
        data = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        self.receive(data, rank)
        return msgpack.unpackb(data.numpy().tobytes())

    def close(self) -> None:
        with suppress(Exception):  # another rank may be gone
            torch.distributed.destroy_process_group(self._group)


def _send(transport: _Transport, path: str, receiver: int) -> None:
    """Send a file. Raises ``PoolIOError`` when all has been sent, if it could not be read."""
    failure: OSError | None = None
    runs: list[tuple[int, int]] = []
    nbytes, fd = 0, -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        nbytes = os.fstat(fd).st_size
        runs = list(_runs(fd, nbytes))
    except OSError as err:
        failure = err
    try:
        transport.send_message([nbytes, runs], receiver)
        buffer = torch.empty(CHUNK_NBYTES, dtype=torch.uint8, device="cpu")
        view = memoryview(buffer.numpy().data)
        for begin, end in _chunks(runs):
            try:
                if os.preadv(fd, [view[: end - begin]], begin) != end - begin:
                    raise OSError(errno.EIO, "the file became shorter while it was read")
            except OSError as err:
                failure = failure or err
            transport.send(buffer[: end - begin], receiver)
        transport.send_message(failure is None, receiver)
    finally:
        if fd >= 0:
            os.close(fd)
    if failure is not None:
        raise io_error(f"The pool {path!r} cannot be read", failure.errno, failure.strerror) from failure


def _receive(transport: _Transport, path: str, sender: int) -> None:
    """Receive a file, and give it this name. Raises ``NoSpaceError`` or another ``PoolError`` when all has been
    received, if it could not be written."""
    nbytes, runs = transport.receive_message(sender)
    with _NewFile(path, nbytes, runs) as file:
        buffer = torch.empty(CHUNK_NBYTES, dtype=torch.uint8, device="cpu")
        view = memoryview(buffer.numpy().data)
        for begin, end in _chunks(runs):
            transport.receive(buffer[: end - begin], sender)
            file.write(view[: end - begin], begin)
        if transport.receive_message(sender):
            file.finish()


class _NewFile:
    """A file that gets its name when it is complete. The first failure is kept, what follows is ignored, and the end of
    the block raises it."""

    def __init__(self, path: str, nbytes: int, runs: Sequence[Sequence[int]]) -> None:
        self._path, self._nbytes, self._runs = path, nbytes, runs
        self._failure: Exception | None = None
        self._fd = self._locked = -1

    def __enter__(self) -> _NewFile:
        try:
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            self._fd, self._locked = temporary.make(self._path)
            os.ftruncate(self._fd, self._nbytes)
            for begin, end in self._runs:
                os.posix_fallocate(self._fd, begin, end - begin)
        except (OSError, LightckError) as err:
            self._failure = err
        return self

    def write(self, data: memoryview, at: int) -> None:
        if self._failure is not None:
            return
        try:
            if os.pwrite(self._fd, data, at) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as err:
            self._failure = err

    def finish(self) -> None:
        if self._failure is not None:
            return
        try:
            os.fsync(self._fd)
            os.rename(temporary.path_of(self._path), self._path)
            sync_folder(os.path.dirname(self._path))
        except OSError as err:
            self._failure = err

    def __exit__(self, *exception: object) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.unlink(temporary.path_of(self._path))  # it is there if the file is not complete
            lock.unlock_file(self._locked)
            os.close(self._fd)
        failure = self._failure
        if failure is None:
            return
        if isinstance(failure, LightckError):
            raise failure
        assert isinstance(failure, OSError)
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                f"There is no space for a copy of the pool of another host, {self._path!r} ({self._nbytes} bytes). "
                "Nothing was changed. Free that much for each pool that this host lacks; or copy the pools of all "
                "hosts into one directory on a larger medium that all ranks see, and pass that."
            ) from failure
        raise io_error(
            f"A copy of a pool, {self._path!r}, cannot be written", failure.errno, failure.strerror
        ) from failure


def _runs(fd: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of the file that is not a hole."""
    at = 0
    while at < nbytes:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as err:
            if err.errno == errno.ENXIO:
                return  # the rest is a hole
            raise
        at = min(os.lseek(fd, begin, os.SEEK_HOLE), nbytes)
        yield begin, at


def _chunks(runs: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    for begin, end in runs:
        for start in range(begin, end, CHUNK_NBYTES):
            yield start, min(start + CHUNK_NBYTES, end)
