"""Peer copies: ``attach(..., replicas=2)`` keeps a copy of each rank's pool on another host.

    topology    The hosts are numbered in the order of their first ranks. The copies of a host's pools lie on the next
                host, those of the last host on the first one. The ranks of the next host receive them in turn.
    connect     Each rank listens, and connects to the rank that keeps its copy (``ranks/link.py``).
    first copy  Each rank copies the checkpoint from which training goes on. ``attach`` returns when all copies have
                it. So from the first step on, the training survives the loss of any one host.
    go on       From then on checkpoints are copied in the background (``ranks/copy_sender.py``), at steps that all
                ranks know, and the commit rule keeps what a recovery may need (``ranks/rule.py``).
    clean up    When all ranks have the first copy of this start, first the pools of an old world are removed, and then
                the copies of earlier starts. In the other order a kill in between would leave the pools of an old world
                that were not lost, without the copies of the lost ones. These pools may have a newer step in common,
                which this start did not choose, because the copies lacked it.

Invariant: until the first copies are made, the old pools and copies cover the loss of a host.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import msgpack

from lightck.errors import RankError, UnsupportedError
from lightck.ranks.copy_cadence import CopyCadence, FirstCopy, longest
from lightck.ranks.copy_file import PEER_COPIES, copies_in, uuid_of
from lightck.ranks.copy_receiver import CopyReceiver
from lightck.ranks.copy_sender import CopySender
from lightck.ranks.link import LinkError, LinkListener, connect, own_addresses
from lightck.ranks.meet import Meeting
from lightck.ranks.neighbours import GroupRule
from lightck.ranks.rule import CheckpointId
from lightck.session.arguments import SaveOptions
from lightck.session.group import Group, directory_id
from lightck.session.pools_of_hosts import Hosts
from lightck.session.replicas import Replicas


def hosts_of_copies(directory: str, group: Group, meeting: Meeting, replicas: Replicas) -> Hosts | None:
    """Return the hosts that keep copies; None if none are wanted. All ranks call this, before anything is loaded or
    made. Raises ``UnsupportedError`` if there is only one host, and ``RankError``."""
    own = msgpack.packb([directory_id(directory), repr(replicas)])
    found = [msgpack.unpackb(one) for one in meeting.exchange("directories", own)]
    for rank, (_, other) in enumerate(found):
        if other != found[0][1]:
            raise RankError(
                f"The ranks were attached with different arguments: replicas= is {found[0][1]} on "
                f"{meeting.name_of(0)} and {other} on {meeting.name_of(rank)}. Pass the same on all ranks."
            )
    if replicas.count == 1:
        return None
    hosts = Hosts.of([where for where, _ in found]).merged(directory, group, meeting)
    if len(hosts.ranks_of) < 2:
        raise UnsupportedError(
            "replicas=2 keeps a copy of each pool on another host, and all ranks of this group are on one host, or use "
            "one directory that all hosts share. Nothing was changed. Leave replicas= out (peer copies of an earlier "
            "start are found also then); or pass a directory on a disk or tmpfs that each host has for itself."
        )
    return hosts


_CONNECT_SECONDS_MAX = 60.0
"""The longest time for which a rank tries to connect. If ``timeout=`` of ``attach`` is shorter, it applies instead."""
_ACCEPT_SECONDS = 0.5
"""How often a rank that waits for a connection looks whether another rank has failed."""


def keeper_of(rank: int, hosts: Hosts) -> int:
    """Return the rank that keeps the copy of a rank's pool."""
    numbers = sorted(hosts.ranks_of)
    place, _ = hosts.place_in_directory(rank)
    after = numbers[(numbers.index(hosts.of_rank[rank]) + 1) % len(numbers)]
    return hosts.ranks_of[after][place % len(hosts.ranks_of[after])]


class PeerCopies:
    """The peer copies of one group, on this rank, while it attaches."""

    def __init__(self, directory: str, pool_path: str, group: Group, meeting: Meeting) -> None:
        self._directory, self._pool_path = directory, pool_path
        self._group, self._meeting = group, meeting
        self._sender: CopySender | None = None
        self._receivers: list[CopyReceiver] = []
        self._uuids: set[Any] = set()
        """Of the pools that have copies now."""
        self._gives_up = threading.Event()
        """Set if this rank cannot connect."""

    def begin(self, commit_rule: GroupRule, checkpoint_id: CheckpointId, hosts: Hosts, options: SaveOptions) -> None:
        """Copy the checkpoint with this id, which all ranks have, and keep copies from now on. All ranks call this.
        Raises ``RankError`` and ``PoolError``."""
        try:
            self._connect(hosts)
            assert self._sender is not None, "it is connected"
            began = time.perf_counter()
            if not self._sender.copy(checkpoint_id):
                raise RankError(
                    f"The checkpoint of step {checkpoint_id.step} is no longer in the pool {self._pool_path!r}, "
                    "although the ranks have just agreed on it. Is a second job using the pool? End it, and start all "
                    "ranks again."
                )
            copied = FirstCopy(time.perf_counter() - began, self._sender.n_bytes_sent, self._sender.nbytes_of_all)
            own = msgpack.packb([copied, self._sender.uuid])
            found = [msgpack.unpackb(one) for one in self._meeting.exchange("first copies", own)]
            self._uuids = {uuid for _, uuid in found}
        except BaseException:
            self.close()
            raise
        commit_rule.receivers = self._receivers
        if options.replicas.every is None and self._group.rank == 0:
            assert isinstance(options.interval, int), "replicas= is refused with another interval"
            first = longest(FirstCopy(*one) for one, _ in found)
            commit_rule.cadence = CopyCadence(first, copied.nbytes, options.interval)
        commit_rule.keep_copies(self._sender, options.replicas.every or 0)

    def _connect(self, hosts: Hosts) -> None:
        """Connect to the rank that keeps the copy of this rank's pool, and wait for the ranks whose copies this rank
        keeps."""
        kept = [rank for rank in range(self._group.world_size) if keeper_of(rank, hosts) == self._group.rank]
        try:
            with closing(LinkListener()) as listener:
                own = [own_addresses(), listener.port, listener.key]
                addresses = [msgpack.unpackb(one) for one in self._meeting.exchange("addresses", msgpack.packb(own))]
                keeper = keeper_of(self._group.rank, hosts)
                # The other ranks wait for this one to accept while this one waits for another to accept.
                with ThreadPoolExecutor(1) as executor:
                    accepted = executor.submit(self._accept, listener, kept)
                    try:
                        where, port, key = addresses[keeper]
                        link = connect(where, port, key, min(self._meeting.timeout, _CONNECT_SECONDS_MAX))
                        self._sender = CopySender(
                            link, self._pool_path, self._meeting.name_of(keeper), self._meeting.timeout
                        )
                        link.send_message({"rank": self._group.rank})
                    except BaseException:
                        self._gives_up.set()
                        raise
                    accepted.result()
        except (LinkError, OSError) as err:
            raise RankError(
                f"The ranks of different hosts cannot connect to each other, to copy their pools ({err}). Peer copies "
                "need TCP connections between the hosts: see whether a firewall forbids them, and whether each host "
                "knows the names of the others. Or leave replicas= out."
            ) from err

    def _accept(self, listener: LinkListener, kept: Sequence[int]) -> None:
        left, end = set(kept), time.monotonic() + self._meeting.timeout
        while left:
            try:
                link = listener.accept(_ACCEPT_SECONDS)
            except LinkError:
                self._meeting.raise_error_of_others()
                if time.monotonic() > end or self._gives_up.is_set():
                    raise
                continue
            rank = link.receive_message().get("rank")
            if rank not in left:
                link.close()
                continue
            left.remove(rank)
            self._receivers.append(CopyReceiver(link, self._directory, rank, self._group.world_size))

    def remove_old(self, hosts: Hosts) -> None:
        """Remove the copies of earlier starts. All ranks call this, when no other pools are left that need them."""
        if hosts.place_in_directory(self._group.rank)[0] == 0:
            for path in copies_in(self._directory):
                if uuid_of(path) not in self._uuids:
                    with suppress(OSError):
                        os.unlink(path)
            with suppress(OSError):
                os.rmdir(os.path.join(self._directory, PEER_COPIES))  # if nothing is in it
        if self._uuids:
            self._meeting.exchange("removal of old copies", b"")

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        for receiver in self._receivers:
            receiver.close()
