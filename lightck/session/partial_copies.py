"""Copies of pools that lie on other hosts, with what the ranks of this host need of them.

    begin       Each host gets a partial copy (``pool/partial_copy.py``) of each pool of the chosen world that it lacks:
                the metadata. So its ranks know all checkpoints of that world.
    want        Each rank says which blocks it needs for its parts of one checkpoint. If several pools hold the same
                bytes, it chooses a pool on its own host if there is one (``restore/relocated.py``).
    fetch       One rank per copy receives what all ranks of its host want, once, from a rank of a host that has the
                pool, over a process group of gloo. If several hosts have the same pool, each sends a part of it.
    verify      Each rank verifies the blocks that it wanted. A damaged one is fetched again, from each of the hosts
                that have the pool. If it is damaged in all, the rank reads from the pools of other ranks instead. If
                these do not hold all that it needs, the checkpoint counts as damaged.
    remove      The copies lie in a folder of their own, in which nobody searches for a rank's pool. It is removed at
                the end of attach, and, if the process is killed before, at the beginning of the next one. So a copy
                that has become old is never taken for the pool of its rank.

Invariants: All ranks go through the same list of copies in the same order, and a rank sends or receives all of what was
agreed even if it has failed to read or to write a part of it. So no rank waits for another that gave up; the error is
raised at the end, on all ranks. No pool is changed. A rank has at most one buffer of ``CHUNK_NBYTES``, and one more
while a pool is read into it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import msgpack
import numpy as np
import torch

from lightck.errors import LightckError, NoSpaceError, RankError
from lightck.pool.partial_copy import ByteRanges, PartialCopy, metadata_of
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.storage.failures import io_error, is_medium_error
from lightck.ranks.directory import pool_name
from lightck.ranks.meet import Meeting
from lightck.session.group import Group
from lightck.session.pools_of_hosts import Hosts, PoolFacts, WorldFacts

log = logging.getLogger("lightck")
CHUNK_NBYTES = 8 << 20
PARTIAL_COPIES = ".lightck-copies"
"""Name of the folder for partial copies, in the directory of a host."""
Ranges: TypeAlias = Sequence[Sequence[int]]
"""(begin, end) pairs: bytes of a pool."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A file from which blocks are fetched."""

    name: str
    sender: int
    """The rank that reads it."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """What one directory gets of the pool of one rank."""

    rank: int
    directory: int
    """Number of the directory that gets it."""
    receiver: int
    """The rank that writes it."""
    sources: tuple[_Source, ...]
    """Files with the same bytes, on different hosts. The first one also gives the metadata."""

    @property
    def attempts_max(self) -> int:
        """The number of fetches of a block after which each source has sent it. (The first fetch takes a block from any
        of the sources, and each further fetch from the next source.)"""
        return 1 if len(self.sources) == 1 else 1 + len(self.sources)


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
            first = holding[len(copies) % len(holding)]
            same = [one for one in holding if one.digest == first.digest and one.directory != first.directory]
            sources = tuple(_source(hosts, one, rank) for one in (first, *same))
            copies.append(_Copy(rank, number, ranks[rank % len(ranks)], sources))
    return copies


def _source(hosts: Hosts, file: PoolFacts, rank: int) -> _Source:
    senders = hosts.ranks_of[file.directory]
    return _Source(file.name, senders[rank % len(senders)])


def remove_partial_copies(directory: str) -> None:
    """Remove the partial copies that this or an earlier attach made in a directory."""
    shutil.rmtree(os.path.join(directory, PARTIAL_COPIES), ignore_errors=True)


class PartialCopies:
    """All partial copies of one attach, as one rank sees them. All ranks call each method that says so."""

    def __init__(self, directory: str, group: Group, meeting: Meeting, hosts: Hosts, world: WorldFacts) -> None:
        """All ranks call this. Raises ``RankError``."""
        self._directory, self._rank, self._meeting, self._hosts = directory, group.rank, meeting, hosts
        self._copies, self._world_size = _copies(hosts, world), world.world_size
        self._own: dict[int, PartialCopy] = {}
        """Number of a copy in this directory -> what it has."""
        self.n_received = 0
        """Bytes of other hosts' pools that this rank has written to copies."""
        self._transport = _Transport(group, meeting, self._timeout) if self._copies else None

    @property
    def _timeout(self) -> float:
        """Seconds that one wait for other ranks may take. It grows with the number of copies, because one rank may have
        to make all of them."""
        return self._meeting.timeout * (1 + len(self._copies))

    def _path(self, copy: _Copy) -> str:
        return os.path.join(self._directory, PARTIAL_COPIES, pool_name(copy.rank, self._world_size))

    def begin(self) -> None:
        """Make all copies, with nothing but metadata. All ranks call this. Raises ``NoSpaceError``, ``PoolIOError`` and
        ``RankError``."""
        self._for_each(range(len(self._copies)), self._copy_metadata)
        if self._copies:
            self._wait("copies of pools")

    @property
    def is_needed(self) -> bool:
        """Whether any host lacks a pool. It is the same on all ranks."""
        return bool(self._copies)

    def open(self, stack: ExitStack) -> dict[int, PoolReader]:
        """Open the copies in this directory, until the end of ``stack``. Returns rank -> pool. Call after ``begin``."""
        found: dict[int, PoolReader] = {}
        for number, copy in enumerate(self._copies):
            if copy.directory == self._hosts.of_rank[self._rank]:
                found[copy.rank] = open_pool(self._path(copy))
                stack.callback(found[copy.rank].close)
                found[copy.rank].partial = self._own[number] = PartialCopy()
        return found

    def fetch_wanted(self) -> bool:
        """Fetch the blocks that any rank wants (``PartialCopy.want``). Returns whether there were any. If so, some may
        be wanted again, because they were damaged. All ranks call this. Raises as ``begin`` does."""
        wanted = {number: found for number, one in self._own.items() if (found := one.take_wanted())}
        own = msgpack.packb(list(wanted))
        wanted_by = [set(msgpack.unpackb(one)) for one in self._meeting.exchange("blocks that are needed", own)]
        numbers = sorted(set().union(*wanted_by))
        if not numbers:
            return False
        requests = {
            number: [[attempt, *blocks.stored.range_of(*blocks[1:])] for blocks, attempt in many]
            for number, many in wanted.items()
        }
        self._for_each(numbers, lambda number: self._copy_blocks(number, wanted_by, requests.get(number, [])))
        self._wait("copies of blocks")
        for number, many in wanted.items():
            for blocks, _ in many:
                self._own[number].received(blocks, self._copies[number].attempts_max)
        return True

    def close(self) -> None:
        """End the transport, and remove the copies. They can be read as long as they are open."""
        if self.n_received:
            log.info(
                "lightck: rank %d has fetched %d bytes of pools on other hosts, into %r",
                self._rank,
                self.n_received,
                self._directory,
            )
        remove_partial_copies(self._directory)
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    # -- what the ranks do for each copy -----------------------------------------------------------------

    def _for_each(self, numbers: Sequence[int], do: Callable[[int], None]) -> None:
        """Call ``do`` for these copies, and raise the first error at the end. If gloo fails, raise ``RankError`` at
        once."""
        failure: Exception | None = None
        for number in numbers:
            try:
                do(number)
            except (OSError, LightckError) as err:
                failure = failure or err
            except RuntimeError as err:  # gloo: the other rank is gone
                copy = self._copies[number]
                raise RankError(
                    f"A pool could not be copied between {self._meeting.name_of(copy.sources[0].sender)} and "
                    f"{self._meeting.name_of(copy.receiver)}: {err}. Nothing was changed. Start all ranks again."
                ) from err
        if failure is not None:
            raise failure

    def _wait(self, what: str) -> None:
        timeout = self._meeting.timeout
        self._meeting.timeout = self._timeout
        try:
            self._meeting.exchange(what, b"")
        finally:
            self._meeting.timeout = timeout

    def _copy_metadata(self, number: int) -> None:
        copy = self._copies[number]
        source = copy.sources[0]
        if self._rank == source.sender:
            with _SourceFile(os.path.join(self._directory, source.name)) as file:
                self._gloo.send_message([file.nbytes, file.metadata], copy.receiver)
                self._send(file, file.metadata, copy.receiver)
        elif self._rank == copy.receiver:
            nbytes, ranges = self._gloo.receive_message(source.sender)
            if not nbytes:
                return  # the sender cannot open the pool, and raises that
            with _CopyFile(self._path(copy), nbytes, ranges) as out:
                self._receive(out, ranges, source.sender)

    def _copy_blocks(self, number: int, wanted_by: Sequence[set[int]], own: Sequence[Sequence[int]]) -> None:
        """Copy the blocks that ranks of the receiver's host want. ``wanted_by``: rank -> numbers of the copies of which
        it wants blocks. ``own``: attempt, begin and end of each range that this rank wants."""
        copy = self._copies[number]
        of_host = self._hosts.ranks_of[copy.directory]
        asking = [one for one in of_host if number in wanted_by[one] and one != copy.receiver]
        if self._rank in asking:
            self._gloo.send_message(own, copy.receiver)
        elif self._rank == copy.receiver:
            wanted = [*own, *(one for rank in asking for one in self._gloo.receive_message(rank))]
            portions = _portions(wanted, len(copy.sources))
            with _CopyFile(self._path(copy), 0, [one for portion in portions for one in portion]) as out:
                for source, portion in zip(copy.sources, portions, strict=True):
                    self._gloo.send_message(portion, source.sender)
                    self._receive(out, portion, source.sender)
        for source in copy.sources:
            if self._rank == source.sender:
                with _SourceFile(os.path.join(self._directory, source.name)) as file:
                    self._send(file, self._gloo.receive_message(copy.receiver), copy.receiver)

    @property
    def _gloo(self) -> _Transport:
        assert self._transport is not None, "there are copies, and they are not closed"
        return self._transport

    def _send(self, file: _SourceFile, ranges: Ranges, receiver: int) -> None:
        for batch in _batches(ranges):
            self._gloo.send(file.read(batch), receiver)

    def _receive(self, out: _CopyFile, ranges: Ranges, sender: int) -> None:
        for batch in _batches(ranges):
            buffer = torch.empty(sum(end - begin for begin, end in batch), dtype=torch.uint8, device="cpu")
            self._gloo.receive(buffer, sender)
            out.write(memoryview(buffer.numpy().data), batch)
            self.n_received += len(buffer)


def _portions(wanted: Ranges, n_sources: int) -> list[list[tuple[int, int]]]:
    """Return what each source sends. ``wanted``: attempt, begin and end of each range. What is wanted for the first
    time is dealt evenly; what was damaged then is sent by one source after the other."""
    portions: list[list[tuple[int, int]]] = [[] for _ in range(n_sources)]
    of_attempts: dict[int, ByteRanges] = {}
    for attempt, begin, end in wanted:
        of_attempts.setdefault(attempt, ByteRanges()).add(begin, end)
    for attempt, ranges in of_attempts.items():
        if attempt > 0:
            portions[(attempt - 1) % n_sources] += ranges
            continue
        size, taken = max(1, -(-ranges.nbytes // n_sources)), 0
        for begin, end in ranges:
            while begin < end:
                n = min(end - begin, size - taken % size)
                portions[taken // size].append((begin, begin + n))
                begin, taken = begin + n, taken + n
    return portions


def _batches(ranges: Ranges) -> Iterator[list[tuple[int, int]]]:
    """Yield what is sent at a time: ranges with ``CHUNK_NBYTES`` together, of which the last one may be cut."""
    batch: list[tuple[int, int]] = []
    free = CHUNK_NBYTES
    for begin, end in ranges:
        while begin < end:
            n = min(end - begin, free)
            batch.append((begin, begin + n))
            begin, free = begin + n, free - n
            if not free:
                yield batch
                batch, free = [], CHUNK_NBYTES
    if batch:
        yield batch


# -- the files ---------------------------------------------------------------------------------------------------------


class _SourceFile:
    """A pool that is sent. Zeros are sent for what cannot be read, and the receiver finds that they do not match the
    checksums. The first failure is raised at the end of the ``with`` statement. Bytes that the medium cannot read are
    no failure: they count as damaged."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._failure: Exception | None = None
        self._reader: PoolReader | None = None
        self.nbytes = 0
        self.metadata: list[tuple[int, int]] = []

    def __enter__(self) -> _SourceFile:
        try:
            self._reader = open_pool(self._path)
            self.nbytes, self.metadata = self._reader.superblock.nbytes, metadata_of(self._reader)
        except (OSError, LightckError) as err:
            self._failure = err
        return self

    def read(self, batch: Ranges) -> torch.Tensor:
        buffer = torch.zeros(sum(end - begin for begin, end in batch), dtype=torch.uint8, device="cpu")
        view, at = memoryview(buffer.numpy().data), 0
        for begin, end in batch:
            data = self._bytes(begin, end - begin)
            view[at : at + len(data)] = data
            at += end - begin
        return buffer

    def _bytes(self, begin: int, nbytes: int) -> bytes:
        if self._reader is None or self._failure is not None:
            return b""
        try:
            return self._reader.container.read(begin, nbytes)
        except OSError as err:
            if is_medium_error(err.errno):
                log.warning("lightck: %d bytes of the pool %r cannot be read: %s", nbytes, self._path, err.strerror)
            else:
                self._failure = io_error(f"The pool {self._path!r} cannot be read", err.errno, err.strerror)
            return b""

    def __exit__(self, *exception: object) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._failure is not None and exception[0] is None:
            raise self._failure


class _CopyFile:
    """A partial copy that is written. After the first failure nothing more is written, and the end of the ``with``
    statement raises the failure. ``nbytes``: length of a new file; 0: the file is there. ``ranges``: what will be
    written in the statement."""

    def __init__(self, path: str, nbytes: int, ranges: Ranges) -> None:
        self._path, self._nbytes, self._ranges = path, nbytes, ranges
        self._failure: OSError | None = None
        self._fd = -1

    def __enter__(self) -> _CopyFile:
        try:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            if self._nbytes:
                os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
                flags |= os.O_CREAT | os.O_EXCL
            self._fd = os.open(self._path, flags, 0o600)
            if self._nbytes:
                os.ftruncate(self._fd, self._nbytes)
            nbytes = os.fstat(self._fd).st_size
            for begin, end in self._ranges:
                if not 0 <= begin < end <= nbytes:
                    raise OSError(errno.EINVAL, f"the bytes {begin} to {end} lie outside of the pool")
                os.posix_fallocate(self._fd, begin, end - begin)
        except OSError as err:
            self._failure = err
        return self

    def write(self, data: memoryview, batch: Ranges) -> None:
        """Write the bytes of these ranges, which follow each other in ``data``."""
        at = 0
        for begin, end in batch:
            if self._failure is not None:
                return
            try:
                if os.pwrite(self._fd, data[at : at + end - begin], begin) != end - begin:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as err:
                self._failure = err
            at += end - begin

    def __exit__(self, *exception: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        failure = self._failure
        if failure is None or exception[0] is not None:  # an error of gloo (the other rank is gone) takes precedence
            return
        if failure.errno in (errno.ENOSPC, errno.EDQUOT):
            nbytes = sum(end - begin for begin, end in self._ranges)
            raise NoSpaceError(
                f"There is no space for what this host needs of the pool of another host, {self._path!r} ({nbytes} "
                "bytes). Nothing was changed. Free that much for each pool that this host lacks; or copy the pools of "
                "all hosts into one directory on a larger medium that all ranks see, and pass that."
            ) from failure
        raise io_error(
            f"A copy of a pool, {self._path!r}, cannot be written", failure.errno, failure.strerror
        ) from failure


# -- gloo --------------------------------------------------------------------------------------------------------------


class _Transport:
    """Bytes between two ranks, over a process group of gloo that is made for this.

    It is made without ``torch.distributed.new_group``, which all ranks would have to have called equally often: torch
    names a group by the number of groups that a rank belongs to.
    """

    def __init__(self, group: Group, meeting: Meeting, timeout: float) -> None:
        """Raises ``RankError``."""
        dist = torch.distributed
        if not dist.is_gloo_available():
            raise RankError(
                "Pools must be copied between hosts, for which lightck uses gloo, and this torch has none. Copy the "
                "pools of all hosts into one directory that all ranks see, and pass that."
            )
        connection: Any = group.connect()
        store = dist.PrefixStore(meeting.new_key("pools"), connection)
        try:
            self._gloo: Any = dist.ProcessGroupGloo(store, group.rank, group.world_size, timedelta(seconds=timeout))
        except Exception as err:  # of the store, or of gloo
            raise RankError(
                f"The ranks cannot connect to each other, to copy pools between hosts ({type(err).__name__}: {err}). "
                "gloo needs TCP connections between the hosts: see whether a firewall forbids them, and whether "
                "GLOO_SOCKET_IFNAME names an interface of this host. Or copy the pools of all hosts into one directory "
                "that all ranks see, and pass that."
            ) from err

    def send(self, data: torch.Tensor, rank: int) -> None:
        self._gloo.send([data], rank, 0).wait()

    def receive(self, data: torch.Tensor, rank: int) -> None:
        self._gloo.recv([data], rank, 0).wait()

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
        del self._gloo
