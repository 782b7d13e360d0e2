"""At attach of a group: continue from the newest checkpoint of the ranks' pools and their tiers.

    report     for each directory, one rank says which checkpoints its pools and peer copies hold; rank 0 names the
               checkpoints of the tiers, one after the other, newest first. So all ranks come to the same decision
    compare    by (claim, incarnation, step): the newest checkpoint that all pools of one world hold, and those of the
               tiers. If every world has lost at least one pool, a checkpoint of the tiers is used
    fetch      with n ranks now, rank r fetches what the ranks r, r + n, r + 2 n, ... of the world that sent the
               checkpoint have sent, into new files beside the pools
    vote       only if all parts are whole, the new files take the place of the pools; else the next checkpoint is tried
    go on      as from any pools. If another number of ranks has sent the checkpoint, the present ranks load it as the
               checkpoint of another world

Invariant: no pool is replaced before all parts of the chosen checkpoint were fetched and verified.

Failure cases: a rank is killed between two replacements: the next start compares again, and fetches the checkpoint
again unless all pools hold it. A pool cannot be opened: nothing is fetched, and attach says what is wrong with
the pool.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from lightck.errors import CorruptPoolError, PoolError, TierClaimedError, TierError, UnsupportedError, listed
from lightck.pool.format.saved_by import saved_by
from lightck.pool.format.structures import SLOTS_MAX, DamagedError
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.storage.backend import Container
from lightck.pool.storage.backends import backend_for
from lightck.pool.storage.lock import PoolLock
from lightck.ranks.copy_file import readable_copies
from lightck.ranks.directory import pool_name, pools_in
from lightck.ranks.meet import Meeting
from lightck.restore.usable import usable_by_id
from lightck.session.group import Group, directory_id
from lightck.session.pools_of_hosts import Hosts
from lightck.tiers.candidates import Candidate, Order, Rejected, candidates_of, newest_of_all, run_of
from lightck.tiers.claiming import claim_of, refuse_other_training
from lightck.tiers.decisions import complete
from lightck.tiers.fetching import filled_pool
from lightck.tiers.open_store import open_store
from lightck.tiers.store import Store
from lightck.tiers.tier import Tier

log = logging.getLogger("lightck")


class _Offered(NamedTuple):
    """A complete checkpoint of a tier, as rank 0 reports it to all ranks."""

    tier: int
    """Number of the tier."""
    claim: str
    """The claim below whose prefix it lies."""
    step: int
    world_size: int
    order: tuple[str, int, int]
    """Claim, incarnation and step that its manifest names. (This claim is another one if ``lightck copy`` sent it.)"""

    @property
    def sort_key(self) -> Order:
        return Order.of(*self.order)


@dataclass
class _World:
    """The pools and peer copies of one world, in all directories."""

    world_size: int
    held: dict[int, set[tuple[str, int, int]]] = field(default_factory=dict)
    """Rank -> (claim, incarnation, step) of each checkpoint."""

    @property
    def newest(self) -> Order | None:
        """The newest checkpoint that all ranks have; None if a rank has no pool, or if there is none."""
        if len(self.held) < self.world_size:
            return None
        common = set.intersection(*self.held.values())
        return max((Order.of(*each) for each in common), default=None)


@dataclass
class _InPools:
    """What lies in the directories of all ranks."""

    worlds: dict[tuple[bytes, bytes, int], _World] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    """Pools that cannot be opened."""

    @property
    def newest(self) -> Order | None:
        return max((each.newest for each in self.worlds.values() if each.newest is not None), default=None)

    @property
    def runs(self) -> set[str]:
        """The runs of the pools of ranks. (The pool of a single process does not say its run.)"""
        return {run.hex() for run, world, _ in self.worlds if run != world}

    def __str__(self) -> str:
        if not self.worlds:
            return "there was no pool"
        if self.newest is not None:
            return f"the newest checkpoint that all pools of a world held was an older one, of step {self.newest.step}"
        world = max(self.worlds.values(), key=lambda each: len(each.held))
        missing = [str(rank) for rank in range(world.world_size) if rank not in world.held]
        if missing:
            return f"no pool of rank {listed(missing, 8)} is left, and no peer copy of it"
        return "the pools had no checkpoint in common"


def replace_pools_from_tier(
    directory: str, group: Group, meeting: Meeting, tiers: Sequence[Tier], backend: str
) -> None:
    """If a tier holds a newer checkpoint than the pools of the ranks have in common, make the pools anew from it. All
    ranks call this. ``backend``: as for ``attach``. Raises ``PoolError`` and ``TierError``."""
    if not tiers:
        return
    stores = [open_store(each.root, each.options) for each in tiers]
    hosts = Hosts.of([one.decode() for one in meeting.exchange("directories", directory_id(directory).encode())])
    hosts = hosts.merged(directory, group, meeting)
    is_first = hosts.place_in_directory(group.rank)[0] == 0
    rejected: list[Rejected] = []
    own = [
        list(_facts_of(directory)) if is_first else [],
        [run_of(store, store.listing()) for store in stores] if group.rank == 0 else [],
    ]
    found = [msgpack.unpackb(one) for one in meeting.exchange("checkpoints of the pools", msgpack.packb(own))]
    in_pools = _put_together([facts for facts, _ in found])
    _refuse_other_runs(stores, found[0][1], in_pools, directory)
    pool_to_compare = f"the pools in {directory!r}", in_pools.newest
    candidates = newest_of_all(stores, rejected, pool_to_compare) if group.rank == 0 else iter(())
    reasons: list[str] = []
    while (one := _next_offered(meeting, stores, candidates, rejected, reasons)) is not None:
        newest = in_pools.newest
        if newest is not None and one.sort_key <= newest:
            return
        if in_pools.unreadable:
            _log_hint(group, in_pools, stores[one.tier], one)
            return
        if newest is not None:
            pools = f"the pools in {directory!r}"
            refuse_other_training(stores[one.tier], newest.claim, one.sort_key.claim, pools)
        reason = _replace_pools(directory, group, meeting, hosts, stores[one.tier], one, backend)
        if not reason:
            _report(group, stores[one.tier], one, in_pools, reasons)
            return
        reasons.append(f"step {one.step} (claim {one.claim}): {reason}")
    if in_pools.newest is None:
        _refuse_or_report_loss(group, stores, in_pools, reasons)


def _next_offered(
    meeting: Meeting,
    stores: Sequence[Store],
    candidates: Iterator[Candidate],
    rejected: list[Rejected],
    reasons: list[str],
) -> _Offered | None:
    """Return the next checkpoint that rank 0 finds in the tiers; None if there is none. What rank 0 could not read is
    moved from ``rejected`` to ``reasons``. All ranks call this."""
    found = next(candidates, None)
    own: list[Any] = [None, [str(each) for each in rejected]]
    rejected.clear()
    if found is not None:
        first = found.manifests[0]
        order = first.claim, first.incarnation, found.checkpoint.step
        number = next(number for number, store in enumerate(stores) if store is found.store)
        own[0] = [number, str(found.checkpoint.claim), found.checkpoint.step, found.world_size, order]
    offered, unread = msgpack.unpackb(meeting.exchange("next checkpoint of the tiers", msgpack.packb(own))[0])
    reasons.extend(unread)
    return None if offered is None else _Offered(*offered)


def _refuse_or_report_loss(group: Group, stores: Sequence[Store], in_pools: _InPools, reasons: Sequence[str]) -> None:
    """Raise or warn if the tiers hold checkpoints, and none of them can be used. With pools that are left, attach goes
    on, and says what it finds in them."""
    if reasons and not in_pools.worlds:
        raise CorruptPoolError(
            f"No checkpoint in the tiers {listed([str(store) for store in stores], 4)} is whole. {'; '.join(reasons)}. "
            "Nothing was written. Look for the checkpoint in another tier, or in the pools of the hosts.",
            tuple(reasons),
        )
    if group.rank != 0:
        return
    for reason in reasons:
        log.warning("lightck: a checkpoint of a tier cannot be used: %s", reason)
    for store in stores:
        _refuse_parts_alone(store, in_pools)


def _refuse_parts_alone(store: Store, in_pools: _InPools) -> None:
    """Warn if a tier holds parts of checkpoints, and no complete one. Raise ``TierError`` if there are more than a
    killed training leaves: somebody has removed the parts of a rank, and a training must not begin anew over that."""
    listing = store.listing()
    if complete(listing) or not listing.manifests:
        return
    steps = sorted({each.step for each in listing.manifests})
    ranks = sorted({each.writer.rank for each in listing.manifests})
    world_size = max(each.writer.world_size for each in listing.manifests)
    missing = [str(rank) for rank in range(world_size) if rank not in ranks]
    fact = (
        f"The tier {str(store)!r} holds parts of {len(steps)} checkpoints, up to step {steps[-1]}, and none is complete"
        + (f": those of rank {listed(missing, 8)} are missing" if missing else "")
    )
    if len(steps) > SLOTS_MAX and not in_pools.worlds:
        raise TierError(
            f"{fact}. Nothing was changed. Put the missing parts back; or choose another folder, to begin anew."
        )
    log.warning("lightck: %s. They are not used", fact)


# -- what there is -----------------------------------------------------------------------------------------------------


def _facts_of(directory: str) -> Iterator[list[Any]]:
    """Yield, for each pool and each peer copy in a directory: run id, world id, world size, rank, (claim, incarnation,
    step) of each checkpoint, and the path if it cannot be opened."""
    for path in pools_in(directory):
        try:
            reader = open_pool(str(path), gradients=True)
        except PoolError:
            yield [b"", b"", 0, 0, [], str(path)]
            continue
        with closing(reader):
            yield [*_identity(reader), _held(reader), ""]
    for _, reader in readable_copies(directory):
        with closing(reader):
            if reader.group is not None:
                yield [*_identity(reader), _held(reader), ""]


def _identity(reader: PoolReader) -> list[Any]:
    identity = reader.group
    if identity is None:
        return [reader.superblock.uuid, reader.superblock.uuid, 1, 0]
    return [identity.run_id, identity.world_id, identity.world_size, identity.rank]


def _held(reader: PoolReader) -> list[tuple[str, int, int]]:
    found = []
    for name, (newest, *_) in usable_by_id(reader).items():
        with suppress(DamagedError):
            found.append((saved_by(newest.state).claim, name.incarnation, name.step))
    return found


def _put_together(reports: Sequence[Sequence[Any]]) -> _InPools:
    found = _InPools()
    for report in reports:
        for run_id, world_id, world_size, rank, held, unreadable in report:
            if unreadable:
                found.unreadable.append(unreadable)
                continue
            world = found.worlds.setdefault((run_id, world_id, world_size), _World(world_size))
            world.held.setdefault(rank, set()).update(tuple(one) for one in held)
    return found


def _refuse_other_runs(stores: Sequence[Store], runs: Sequence[str | None], in_pools: _InPools, directory: str) -> None:
    for store, run in zip(stores, runs, strict=True):
        if run is not None and in_pools.runs and run not in in_pools.runs:
            raise TierClaimedError(
                f"The tier {str(store)!r} holds another run than the pools in {directory!r}. Nothing was changed. To "
                "go on with the run of the pools, pass another folder in tiers=; to go on with that of the tier, "
                "pass a directory that does not exist yet."
            )


# -- what is done ------------------------------------------------------------------------------------------------------


def _replace_pools(
    directory: str, group: Group, meeting: Meeting, hosts: Hosts, store: Store, one: _Offered, backend: str
) -> str:
    """Make the pools anew from a checkpoint. Returns why that is impossible; empty if it was done. All ranks call
    this."""
    mine = range(group.rank, one.world_size, group.world_size)
    with ExitStack() as stack:
        new: list[Container] = []
        reason = ""
        for rank in mine:
            path = os.path.join(directory, pool_name(rank, one.world_size))
            stack.callback(PoolLock(path).release)
        try:
            candidate = _candidate(store, one)
            candidate.refuse_stale()
            for rank in mine:
                path = os.path.join(directory, pool_name(rank, one.world_size))
                kind = backend_for(path, backend)
                new.append(stack.enter_context(filled_pool(store, candidate.manifests[rank], path, backend=kind)))
                _refuse_single(store, new[-1], path)
        except DamagedError as err:
            reason = f"rank {group.rank} finds that {err}"
        reasons = [text.decode() for text in meeting.exchange("parts that were fetched", reason.encode())]
        if any(reasons):
            return next(filter(None, reasons))
        for container in new:
            container.publish()
        meeting.exchange("pools that were rebuilt", b"")
        _remove_others(directory, group, hosts, one)
        meeting.exchange("pools that were removed", b"")
    return ""


def _candidate(store: Store, one: _Offered) -> Candidate:
    claim, rejected = claim_of(one.claim), list[Rejected]()
    for found in candidates_of(store, store.listing(), one.step, rejected):
        if found.checkpoint.claim == claim and found.world_size == one.world_size and found.order == one.sort_key:
            return found
    raise DamagedError(f"manifests cannot be read ({rejected[0].reason if rejected else 'some are not there'})")


def _refuse_single(store: Store, container: Container, path: str) -> None:
    if PoolReader(container, path).group is None:
        raise UnsupportedError(
            f"The tier {str(store)!r} holds the checkpoints of a single process, and this is a group of ranks. Nothing "
            f"was changed. Fetch one into the directory, under the name of a rank ({pool_name(0, 1)}): lightck copy "
            f"{store} {os.path.join(os.path.dirname(path), pool_name(0, 1))}. Then attach the group to the directory, "
            "with another folder as its tier."
        )


def _remove_others(directory: str, group: Group, hosts: Hosts, one: _Offered) -> None:
    """Remove the pools of this directory that are older than the fetched checkpoint, or belong to a world that has
    lost a pool. Else the ranks would have to choose between two histories."""
    number = hosts.of_rank[group.rank]
    if hosts.place_in_directory(group.rank)[0] != 0:
        return
    new = {
        pool_name(rank, one.world_size)
        for rank in range(one.world_size)
        if hosts.of_rank[rank % group.world_size] == number
    }
    for path in map(str, pools_in(directory)):
        if os.path.basename(path) not in new:
            with ExitStack() as locked:
                locked.callback(PoolLock(path).release)
                backend_for(path).discard(path)
            log.warning("lightck: the pool %r was removed: the pools were rebuilt from a tier", path)


def _log_hint(group: Group, in_pools: _InPools, store: Store, one: _Offered) -> None:
    if group.rank == 0:
        log.warning(
            "lightck: the pool %r cannot be used, and step %d is in the tier %r. To continue from it, move the "
            "pool away",
            in_pools.unreadable[0],
            one.step,
            str(store),
        )


def _report(group: Group, store: Store, one: _Offered, in_pools: _InPools, reasons: Sequence[str]) -> None:
    if group.rank != 0:
        return
    for reason in reasons:
        log.warning("lightck: a newer checkpoint of a tier cannot be used, and an older one is fetched: %s", reason)
    log.warning(
        "lightck: the pools of all ranks were rebuilt from step %d of the tier %r (claim %s), because %s. Updates "
        "after that step, if there were any, are lost",
        one.step,
        str(store),
        one.claim,
        in_pools,
    )
