"""Send to a tier what the drain of a training has left in the pool (``lightck drain``). It runs without torch, but for
pools with gradient records.

    find     the pools: one, or those of the ranks in a directory, and the newest checkpoint that all of them have
    refuse   a checkpoint whose claim is not in the tier: this claims nothing, so it may not write there
    look     the manifest of the checkpoint is in the tier: there is nothing to do
    send     below the claim that the checkpoint itself names, as its own drain would have (``tier_writer.py``)

Invariant: a claim and rank have one writer at a time. So whoever calls ``send`` holds ``POOL.drain`` of each pool
(``DrainLock``), which the drain of a training holds as long as it lives. Nothing is deleted here: which checkpoints
are to stay is known to the drain of the next training, which deletes the others.

Failure cases: the checkpoint is overwritten while it is sent (the newest one is sent); a newer training has claimed
the tier (``SupersededError``: nothing is sent); this process is killed (what it has put is named by no manifest; the
next one sends the checkpoint again).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from lightck.errors import CorruptPoolError, NoCheckpointError, PoolError, TierClaimedError, TierError, UnsupportedError
from lightck.pool.commit_log import candidates
from lightck.pool.format.saved_by import saved_by
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.pool.storage.backends import readable_path
from lightck.pool.storage.lock import holder_of
from lightck.ranks.directory import open_worlds
from lightck.tiers.claiming import claim_if_there, claim_of
from lightck.tiers.codecs import refuse_missing_libraries
from lightck.tiers.decisions import Listing, highest_claim, is_superseded
from lightck.tiers.drain_lock import DrainLock
from lightck.tiers.held_checkpoint import OverwrittenError, held
from lightck.tiers.last_of_group import generations_at_end
from lightck.tiers.names import Claim, TierCheckpoint, Writer
from lightck.tiers.rates import Pacer
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import read_manifest
from lightck.tiers.tier_writer import TierWriter

_N_OVERWRITTEN_MAX = 20


class SupersededError(TierClaimedError):
    """A newer claim than that of the checkpoint is in the tier. ``went_on``: whether the training that made it went on
    from this very checkpoint. (Then it may be the next training in this pool, which has committed nothing yet.)"""

    def __init__(self, message: str, *, went_on: bool) -> None:
        super().__init__(message)
        self.went_on = went_on


class PoolOfRank(NamedTuple):
    path: str
    rank: int = 0
    world_size: int = 1


class NewestRecord(NamedTuple):
    """What the newest commit record of a pool says."""

    uuid: bytes
    generation: int
    """The generation of the record. (An adoption has a record with a generation of its own.)"""
    kind: int


class Pools:
    """The pool of one process, or the pools of a group's ranks in a directory. They need not be there yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = readable_path(path)
        """What the given path named when ``find`` looked last, without symbolic links."""
        self._given = os.path.abspath(path)
        self.all: tuple[PoolOfRank, ...] = ()
        """The pools that were found by ``find``."""
        self._has_all_ranks = True

    def find(self) -> None:
        """Look which pools there are. Raises ``PoolError`` and ``RankError``."""
        self.path = readable_path(self._given)
        if not os.path.isdir(self.path):
            self.all = (PoolOfRank(self.path),)
            return
        with open_worlds(self.path) as worlds:
            world = worlds[0]
            pools = {rank: each.path for rank, each in world.readers.items() if rank not in world.ranks_from_copies}
            self.all = tuple(PoolOfRank(path, rank, world.world_size) for rank, path in pools.items())
            self._has_all_ranks = len(self.all) == world.world_size

    def newest(self) -> tuple[NewestRecord, ...]:
        """Return what the newest record of each pool says. Raises ``PoolError`` (also ``NoCheckpointError``), and
        ``UnsupportedError`` for the pool of a single rank."""
        found = []
        for each in self.all:
            with closing(open_pool(each.path, gradients=True)) as reader:
                if each.world_size == 1 and reader.group is not None and reader.group.world_size > 1:
                    raise UnsupportedError(
                        f"{each.path!r} is the pool of rank {reader.group.rank} of {reader.group.world_size}, and a "
                        "checkpoint counts when the parts of all ranks are in the tier. Pass the directory of the pools"
                    )
                records = candidates(reader.commit_log())
                if not records:
                    raise _no_checkpoint(each.path)
                found.append(NewestRecord(reader.superblock.uuid, records[0].generation, records[0].kind))
        return tuple(found)

    def have_moved(self) -> bool:
        """Whether the given path names something else since ``find`` looked: a symbolic link was changed."""
        return readable_path(self._given) != self.path

    def is_in_use(self) -> bool:
        """Whether a training has a pool open."""
        return any(holder_of(each.path) is not None for each in self.all)

    @contextmanager
    def locked_for_sending(self) -> Iterator[bool]:
        """Hold ``POOL.drain`` of each pool during a ``with`` block. Yields False if the drain of a training, or another
        process, holds one of them."""
        locks = [DrainLock(each.path) for each in self.all]
        try:
            yield all(lock.take() for lock in locks)
        finally:
            for lock in locks:
                lock.release()

    def to_be_sent(self, pool: PoolOfRank) -> Sequence[int | None]:
        """Return the generations of the checkpoints of a pool that the other ranks send too; None: the newest one.
        Raises ``PoolError``."""
        if pool.world_size == 1:
            return [None]
        return generations_at_end(pool.path, [each.path for each in self.all] if self._has_all_ranks else [])


@dataclass
class Delivered:
    """A checkpoint that is in a tier."""

    tier: str
    claim: str
    step: int
    nbytes: int = 0
    """Of its tensors, in the pools that were looked at."""
    sent_nbytes: int = 0
    """0: it was there."""
    ranks: int = 0
    """How many ranks' parts are there now, of the pools that were looked at."""


class LateDrain:
    """Sends to one tier what is left in the pools of a training."""

    def __init__(
        self,
        pools: Pools,
        store: Store,
        written_by: str,
        bytes_per_second: float | None = None,
        codec: str | None = None,
    ) -> None:
        """``written_by``, ``codec``: as for ``TierWriter``. ``bytes_per_second``: the largest rate. Raises
        ``TierError`` if the library for the codec is missing."""
        refuse_missing_libraries([codec])
        self._pools, self.store, self._written_by, self._codec = pools, store, written_by, codec
        self._pacer = Pacer(bytes_per_second)

    def lift_rate(self) -> None:
        """Send as fast as the tier takes it from now on. A signal handler may call this."""
        self._pacer.lift()

    def send(self) -> list[Delivered]:
        """Send what the tier lacks. The caller holds ``POOL.drain``. Returns the checkpoints that are there now, the
        newest one first. Raises ``TierClaimedError`` and ``UnsupportedError`` for what is refused (the module's text),
        ``TierError``, and ``PoolError``."""
        found: dict[tuple[str, int], Delivered] = {}
        for pool in self._pools.all:
            newest: Delivered | None = None
            for generation in self._pools.to_be_sent(pool):
                one = self._send(pool, generation, "" if newest is None else newest.claim)
                if one is None:
                    continue
                newest = newest or one
                whole = found.setdefault((one.claim, one.step), Delivered(one.tier, one.claim, one.step))
                whole.nbytes += one.nbytes
                whole.sent_nbytes += one.sent_nbytes
                whole.ranks += 1
        if not found:
            raise _no_checkpoint(self._pools.path, " that all ranks have")
        return sorted(found.values(), key=lambda each: (each.claim, each.step), reverse=True)

    def refuse_foreign(self) -> None:
        """Raise as ``send`` does if the newest checkpoint would be refused for another reason than a newer claim.
        Nothing is sent."""
        for pool in self._pools.all:
            with closing(open_pool(pool.path, gradients=True)) as reader, held(reader) as stored:
                if stored is not None:
                    self._claim_of(stored)

    def _send(self, pool: PoolOfRank, generation: int | None, only: str) -> Delivered | None:
        """Send one checkpoint of one pool. The checkpoint of a rank is never replaced by a newer one, because the other
        ranks send the same one. ``only``: if not empty, the claim that the checkpoint must name; None is returned for
        another one."""
        for _ in range(_N_OVERWRITTEN_MAX if generation is None else 1):
            try:
                with closing(open_pool(pool.path, gradients=True)) as reader, held(reader, generation) as stored:
                    if stored is None:
                        raise _no_checkpoint(pool.path)
                    if only and saved_by(stored.state).claim != only:
                        return None
                    return self._deliver(stored, pool)
            except OverwrittenError:
                continue
            except DamagedError as err:
                raise CorruptPoolError(
                    f"A checkpoint of the pool {pool.path!r} is damaged: {err}. It was not sent to the tier "
                    f"{str(self.store)!r}. Look at the pool with lightck verify."
                ) from err
        raise PoolError(
            f"The checkpoints of the pool {pool.path!r} were overwritten while they were sent to the tier "
            f"{str(self.store)!r}: a training goes on in it. Its own drain sends them."
        )

    def _deliver(self, stored: StoredCheckpoint, pool: PoolOfRank) -> Delivered:
        claim = self._claim_of(stored)
        own = Writer(claim, pool.rank, pool.world_size)
        nbytes = sum(entry.nbytes for entry in stored.entries.values())
        done = Delivered(str(self.store), str(claim), stored.step, nbytes, ranks=1)
        listing = self.store.listing()
        if self._is_there(listing, own, stored):
            return done
        if is_superseded(listing, claim):
            raise self._superseded(listing, TierCheckpoint(claim, stored.step))
        try:
            # A new one each time: a drain of the training may have written, and removed, something since the last.
            writer = TierWriter(self.store, own, self._written_by, pace=self._pacer.spend, codec=self._codec)
            writer.use_own()
            done.sent_nbytes = writer.send(stored).nbytes
        except TierClaimedError:
            raise
        except (DamagedError, PoolError, TierError) as err:
            if stored.owns_slot():
                raise
            raise OverwrittenError(str(err)) from err
        return done

    def _claim_of(self, stored: StoredCheckpoint) -> Claim:
        """Return the claim that a checkpoint names. Raises ``UnsupportedError`` if it names none, and
        ``TierClaimedError`` if the claim is not in the tier."""
        by = saved_by(stored.state)
        claim, root = claim_of(by.claim), str(self.store)
        if claim is None:
            raise UnsupportedError(
                f"The training that saved step {stored.step} of the pool {stored.path!r} named no tier, and only a "
                "training claims one (attach(..., tiers=[...])). Nothing was sent. Continue it with tiers=; or, "
                f"if it is a single process, send the checkpoint: lightck copy {stored.path} {root}."
            )
        file = claim_if_there(self.store, claim)
        if file is None:
            raise TierClaimedError(
                f"{root!r} is no tier of the training that saved step {stored.step} of the pool {stored.path!r}: its "
                f"claim {claim} is not there. Nothing was sent. Name a tier that the training was given; or, if it "
                f"is a single process, send the checkpoint to a new place: lightck copy {stored.path} NEW."
            )
        if by.run_id and file.run != by.run_id:
            raise TierClaimedError(
                f"The tier {root!r} belongs to another run than the pool {stored.path!r}. Nothing was sent. Name a "
                "tier of this run."
            )
        return claim

    def _is_there(self, listing: Listing, own: Writer, stored: StoredCheckpoint) -> bool:
        """Whether the tier has this checkpoint. (A step may have been committed twice, and sent twice.)"""
        for name in listing.manifests:
            if name.writer == own and name.step == stored.step:
                try:
                    manifest = read_manifest(self.store, name)
                except DamagedError:
                    continue
                if manifest.record.payload_generation == stored.record.payload_generation:
                    return True
        return False

    def _superseded(self, listing: Listing, lacking: TierCheckpoint) -> SupersededError:
        highest = highest_claim(listing)
        assert highest is not None, "it is higher than this one"
        file = claim_if_there(self.store, highest)
        return SupersededError(
            f"The tier {str(self.store)!r} lacks step {lacking.step}, and a newer training has made the claim "
            f"{highest} there, so nothing more is sent below the claim {lacking.claim} of this checkpoint. The pool is "
            "intact. A recovery from the tier takes the newest checkpoint of the newer training; as long as that has "
            "sent none, the newest older one. To keep this step elsewhere: lightck copy POOL NEW; of several ranks, "
            "copy the directory of the pools.",
            went_on=file is not None and lacking in file.path,
        )


def _no_checkpoint(path: str, which: str = "") -> NoCheckpointError:
    return NoCheckpointError(
        f"The pool {path!r} holds no checkpoint{which}, so there is nothing to send. Wait until the training has saved "
        "its first one."
    )
