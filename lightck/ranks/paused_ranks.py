"""The ranks of a group tell each other that they commit nothing for now, because of values that are not finite
(``pause_on_nonfinite=True``).

A rank whose state is broken gives its checkpoint up at once, and so do the others soon: what they commit meanwhile can
never become common. Without a word from the broken rank they would fill their slots, and then wait for it, while it
waits for them in a collective.

    pause    a rank gives up its checkpoint, and writes why
    give up  another rank has no slot that it may overwrite, and sees that a rank pauses: it gives its checkpoint up too
    go on    the rank has committed a checkpoint again, and then writes that it pauses no more

*Data flow.* A helper thread of each rank writes and reads through the key-value store of the process group, over a
connection of its own. It reads only while the training thread of its rank waits for a slot (``any_paused``). The
training thread never uses the store.

*Invariant.* A rank withdraws its pause only after a commit, and a rank that gave a checkpoint up commits the next one
within its boundary (``commits_within_boundary``). So when a rank that waits sees that nobody pauses, two things hold
for each rank that had paused: it has committed a checkpoint that is newer than what the waiting rank holds, and it
lacks some checkpoint that the waiting rank holds. So the waiting rank finds a slot (``never_common``).
``tests/ranks/test_pausing.py`` runs this through every interleaving of small groups, with news that come late.

*Failure cases.* A rank is closed after it gave its last checkpoint up: it pauses for ever, and none waits for it. The
store fails: the helper tries again each second. A rank that waits until its timeout raises as if no rank paused. The
ranks are restarted: keys of the earlier attempt have another nonce.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgpack

from lightck.pool.listener import CommitListener
from lightck.pool.writer import PoolWriter
from lightck.ranks.meet import Store
from lightck.ranks.store_thread import SLEEP_SECONDS_MAX, StoreThread

log = logging.getLogger("lightck")
_REASON_MAX = 300
"""The longest reason that is written, in characters."""


class PausedRanks(StoreThread, CommitListener):
    """Which ranks of a group pause, as far as this rank knows."""

    def __init__(self, store: Store, key: Callable[[str, int], str], rank: int, world_size: int) -> None:
        """``store``: over a connection that belongs to this object from now on. ``key``: (what, rank) -> key of the
        store."""
        super().__init__(store, "lightck-paused", has_final_exchange=True)
        self._rank = rank
        self._keys = [key("paused", one) for one in range(world_size)]
        self._reason = self._written = ""
        """Why this rank pauses (empty: it does not), and what the store says."""
        self._reasons: dict[int, str] = {}
        """Other rank -> why it pauses, as it was read last."""
        self._found: dict[int, str] = {}
        """What ``any_paused`` has found last. (The helper may read something newer at any moment.)"""
        self._is_asked = False
        """Whether the training thread waits for news."""
        self._named: dict[int, str] = {}
        """The reasons for which this rank gave checkpoints up last; a warning has named them."""
        self._begin()

    # -- the training thread -----------------------------------------------------------------------------

    def pause(self, reason: str) -> None:
        """Tell the other ranks that this one has given up a checkpoint, and commits nothing for now."""
        self._reason = reason[:_REASON_MAX]
        self._wake.set()

    def committed(self, writer: PoolWriter, step: int) -> None:
        """This rank commits again."""
        self._named = {}
        if self._reason:
            self._reason = ""
            self._wake.set()

    def any_paused(self) -> bool:
        """Whether another rank pauses. Called again and again while this rank waits for a slot. The answer may be late;
        a call lets the helper look again."""
        if not self._is_asked:
            self._is_asked, self._reasons = True, {}
            self._wake.set()
        self._found = self._reasons
        return bool(self._found)

    @property
    def reason(self) -> str | None:
        """Which ranks pause, and why, if this rank has given up its last checkpoint for them; else None."""
        if not self._named:
            return None
        return "; ".join(f"rank {rank} commits nothing ({why})" for rank, why in sorted(self._named.items()))

    def wait_ended(self, *, gives_way: bool) -> None:
        """The wait for a slot is over. ``gives_way``: because ``any_paused()`` was true, so this rank gives its
        checkpoint up."""
        self._is_asked = False
        if not gives_way:
            return
        is_new, self._named = not self._named, dict(self._found)
        if is_new:
            log.warning(
                "lightck: this rank commits no checkpoint for now: %s. The newest checkpoint that all ranks have stays "
                "in their pools",
                self.reason,
            )

    def closed(self) -> None:
        """End the helper. If the last checkpoint of this rank was given up, the store goes on to say that it pauses, so
        that no other rank waits for it. Returns after a second even if the store does not answer."""
        self._is_asked = False
        if self._named and not self._reason:
            self._reason = "its session was closed while another rank paused"
        self._end()

    # -- the helper --------------------------------------------------------------------------------------

    def _longest_sleep(self) -> float | None:
        return SLEEP_SECONDS_MAX if self._is_asked else None

    def _exchange(self) -> bool:
        reason = self._reason
        if reason != self._written:
            self._store.set(self._keys[self._rank], msgpack.packb(reason))
            self._written = reason
        if self._is_asked:
            there = [(rank, key) for rank, key in enumerate(self._keys) if rank != self._rank]
            there = [(rank, key) for rank, key in there if self._store.check([key])]
            found = self._store.multi_get([key for _, key in there]) if there else []
            reasons = {rank: str(msgpack.unpackb(data)) for (rank, _), data in zip(there, found, strict=True)}
            self._reasons = {rank: why for rank, why in reasons.items() if why}
        return False
