"""What ranks on several hosts tell each other while training runs, through the key-value store of the process group.

Ranks on one host read each other's pools (``neighbours.py``). They cannot read the pools on other hosts, so each rank
also publishes what its own pool holds. A helper thread of each rank does all this; the training thread never uses the
store.

*Data flow.* When a checkpoint is committed, the training thread leaves the new ``PoolView`` with the helper, which
writes it into the store. The helper of rank 0 reads the views of all ranks and writes what they have *together*, as one
value. The other helpers read that value, until it says that all ranks have what this one has. The training thread
finds it in ``together`` when it chooses a slot.

*Invariant.* What is published was true of that pool at some moment. So a view may be late, and late news only delay
an overwrite (``ranks/rule.py``).

*Failure cases.* The helper of rank 0 stands still, or its session is closed: a helper for which the value does not
change reads the views of all ranks itself. The store fails: the helper tries again each second, and if a rank has to
wait for others, the error at the end of its wait says so. The ranks are restarted: what the earlier attempt left in the
store has another nonce in its keys, and is not read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import msgpack

from lightck.ranks.meet import Store
from lightck.ranks.rule import CheckpointId, PoolView
from lightck.ranks.store_thread import SLEEP_SECONDS_MAX, StoreThread

log = logging.getLogger("lightck")
_UNCHANGED_SECONDS = 0.25
"""After so many seconds without news from rank 0, a helper reads the views of all ranks itself, and again after each
further such period. In a group of more than ``_SLOWER_ABOVE_RANKS`` ranks the time is longer in proportion, because
each of them reads that many values."""
_SLOWER_ABOVE_RANKS = 64


def packed(view: PoolView) -> bytes:
    return bytes(msgpack.packb([sorted(view.committed), view.newest, sorted(view.copied)]))


def unpacked(data: bytes) -> PoolView:
    """Raises ``ValueError`` or ``TypeError`` for bytes that ``packed`` did not make."""
    committed, newest, copied = msgpack.unpackb(data)
    return PoolView(
        frozenset(CheckpointId(*one) for one in committed),
        newest and CheckpointId(*newest),
        frozenset(CheckpointId(*one) for one in copied),
    )


class Publication(StoreThread):
    """The views of all ranks of a group, exchanged by a helper thread."""

    def __init__(self, store: Store, key: Callable[[str, int], str], rank: int, world_size: int, own: PoolView) -> None:
        """``store``: over a connection that belongs to this object from now on. ``key``: (what, rank) -> key of the
        store. ``own``: what this rank's pool holds now."""
        super().__init__(store, "lightck-ranks", has_final_exchange=True)
        self.together = PoolView.of(())
        """One view of the pools of all ranks, this one included (``PoolView.together``), as far as this rank has
        read."""
        self.views: Mapping[int, PoolView] = {}
        """Other rank -> its view, as far as this rank has read. Empty until this rank has read the views of all ranks
        itself."""
        self._rank, self._world_size = rank, world_size
        self._keys = [key("view", one) for one in range(world_size)]
        self._together_key, self._copy_every_key = key("together", 0), key("copy-every", 0)
        self._copied: frozenset[CheckpointId] = frozenset()
        self._to_announce: int | None = None
        self.expects_copy_every = False
        """Whether rank 0 will announce the number of steps between two copies (``CopyCadence``)."""
        self.copy_every: int | None = None
        """The number of steps between two copies, once this rank has learnt it from rank 0."""
        self._own, self._published = own, PoolView.of(())
        self._unchanged_seconds = _UNCHANGED_SECONDS * max(1.0, world_size / _SLOWER_ABOVE_RANKS)
        self._read_at = time.monotonic()
        """When this rank last had news, published some, or read the views of all ranks."""
        self._begin()

    # -- the training thread -----------------------------------------------------------------------------

    def publish(self, own: PoolView) -> None:
        """Leave the view of this rank's pool with the helper, which writes it into the store."""
        self._own = own
        self._wake.set()

    def publish_copied(self, copied: frozenset[CheckpointId]) -> None:
        """Leave the checkpoints in this rank's peer copy with the helper. Called on any thread."""
        self._copied = copied
        self._wake.set()

    def announce(self, copy_every: int) -> None:
        """Tell all ranks the number of steps between two copies. Called once, on rank 0."""
        self._to_announce = copy_every
        self._wake.set()

    def close(self) -> None:
        """Publish what was left last, and end the helper. Returns after a second even if the store does not answer."""
        self._end()

    # -- the helper --------------------------------------------------------------------------------------

    def _longest_sleep(self) -> float | None:
        return SLEEP_SECONDS_MAX if self._expects_news() else None

    def _expects_news(self) -> bool:
        """Whether another rank lacks, as far as is known, what this one has committed last, or copied last."""
        newest_copy = max(self._copied, default=None)
        return self._own.newest not in self.together.committed or (
            newest_copy is not None and newest_copy not in self.together.copied
        )

    def _exchange(self) -> bool:
        """Publish this rank's view if it has changed, and read the news. Returns whether there were any."""
        self._exchange_copy_every()
        own, now = self._own._replace(copied=self._copied), time.monotonic()
        if own != self._published:
            self._store.set(self._keys[self._rank], packed(own))
            self._published, self._read_at = own, now
        if self._rank == 0:
            found = self._put_together()
        elif now > self._read_at + self._unchanged_seconds:
            found, self._read_at = self._put_together(), now
        else:
            found = self._read_together()
        if found is None or found == self.together or _is_older(found, self.together):
            return False
        self.together, self._read_at = found, now
        if self._rank == 0:
            self._store.set(self._together_key, packed(found))
        return True

    def _exchange_copy_every(self) -> None:
        """Write the number of steps between two copies that is to be announced, or read it."""
        if not self.expects_copy_every or self.copy_every is not None:
            return
        if self._to_announce is not None:
            self._store.set(self._copy_every_key, msgpack.packb(self._to_announce))
            self.copy_every = self._to_announce
        elif self._rank and self._store.check([self._copy_every_key]):
            self.copy_every = int(msgpack.unpackb(self._store.multi_get([self._copy_every_key])[0]))

    def _read_together(self) -> PoolView | None:
        """Return what rank 0 has put together last; None if it has not done so yet."""
        if not self._store.check([self._together_key]):
            return None
        return unpacked(self._store.multi_get([self._together_key])[0])

    def _put_together(self) -> PoolView | None:
        """Return what the views of all ranks say together; None if a rank has published none yet."""
        if not self._store.check(self._keys):
            return None
        views = [unpacked(data) for data in self._store.multi_get(self._keys)]
        self.views = {rank: view for rank, view in enumerate(views) if rank != self._rank}
        return PoolView.together(views)


def _is_older(one: PoolView, other: PoolView) -> bool:
    """Whether a view was true at an earlier moment than another. (The value that rank 0 has written may be older than
    what this rank has put together itself.)"""
    return other.newest is not None and (one.newest is None or one.newest < other.newest)
