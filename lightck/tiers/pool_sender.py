"""Send checkpoints of a pool to a tier: once, or the newest one at each call (``lightck copy``).

    claim    the tier, when the first checkpoint of an incarnation is sent
    send     the newest checkpoint, unless it was sent already
    retain   delete the checkpoints that need not stay (``tier_writer.py``)

Failure cases: the pool is not there yet, holds no checkpoint, or was replaced (it is opened anew each time, and
its symbolic links are resolved anew); a pool of another run takes the path (``TierClaimedError``); a checkpoint is
overwritten while it is read (a newer one is sent); another process claims the tier (``TierClaimedError``: nothing more
is written).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from lightck.pool.commit_log import candidates
from lightck.pool.reader import PoolReader, RejectedCheckpoint, StoredCheckpoint, open_pool
from lightck.pool.storage.backends import readable_path
from lightck.restore.compact import Progress
from lightck.restore.contents import Contents, Saved
from lightck.restore.recover import take_newest
from lightck.restore.replayed import ReplayedCheckpoint
from lightck.restore.whole_copy import whole_copy
from lightck.tiers.claiming import claim_tier
from lightck.tiers.codecs import refuse_missing_libraries
from lightck.tiers.decisions import GRACE_SECONDS, Retention
from lightck.tiers.names import Writer
from lightck.tiers.rates import Pacer
from lightck.tiers.store import Store
from lightck.tiers.tier_writer import TierWriter


@dataclass(frozen=True, slots=True)
class Copied:
    """A checkpoint that was copied to a tier or from one. path: the pool or the tier to which it was copied. nbytes:
    the bytes of its tensors. sent_nbytes: the bytes that were written for it. rejected: notes on other checkpoints:
    newer ones that were skipped, each with the reason; after a copy from a tier also older ones with the same or a
    larger step. notes: after a copy from a tier, how to continue from a checkpoint that is not the newest; after a copy
    to a tier, which checkpoints with larger steps the tier held before."""

    step: int
    path: str
    nbytes: int
    sent_nbytes: int
    rejected: tuple[str, ...]
    notes: tuple[str, ...] = ()


class PoolSender:
    """Sends checkpoints of one pool to one tier."""

    def __init__(
        self,
        pool: str | os.PathLike[str],
        store: Store,
        written_by: str,
        retention: Retention | None = None,
        grace: float = GRACE_SECONDS,
        bytes_per_second: float | None = None,
        codec: str | None = None,
    ) -> None:
        """``written_by``, ``retention``, ``grace``, ``codec``: as for ``TierWriter``. ``bytes_per_second``: the largest
        rate. Raises ``TierError`` if the library for the codec is missing."""
        refuse_missing_libraries([codec])
        self._codec, self._pacer = codec, Pacer(bytes_per_second)
        readable_path(pool)  # raises for what cannot be a path
        self._pool, self._store, self._written_by = os.path.abspath(pool), store, written_by
        self._retention, self._grace = retention, grace
        self._writer: TierWriter | None = None
        """What writes below the present claim; None: the tier is not claimed yet."""
        self._claimed_for: tuple[str, int] | None = None
        """Run and incarnation of the checkpoints that are sent below the present claim."""
        self._last: tuple[bytes, int] | None = None
        """Uuid of the pool and generation of the last checkpoint that was sent."""

    def send(self, step: int | None = None, progress: Progress | None = None) -> Copied | None:
        """Send the newest checkpoint, or that of ``step``. Returns None if the newest one was sent before. Raises
        ``PoolError``, ``TierError``, and ``UnsupportedError`` if the pool is that of a rank, or if its gradient
        records need an optimizer of another class than those of ``torch.optim``."""
        with closing(open_pool(readable_path(self._pool), gradients=True)) as reader:
            if step is None and self._is_sent(reader):
                return None

            def take(stored: Saved, contents: Contents, rejected: list[RejectedCheckpoint]) -> Copied:
                if isinstance(stored, StoredCheckpoint):
                    return self._send(stored, stored.uuid, contents, rejected, progress)
                assert isinstance(stored, ReplayedCheckpoint), "a checkpoint of a pool is stored or replayed"
                with whole_copy(stored) as copy:
                    return self._send(copy, stored.uuid, contents, rejected, progress)

            return take_newest(reader, step, take)

    def _is_sent(self, reader: PoolReader) -> bool:
        records = candidates(reader.commit_log())
        newest = records[0].payload_generation if records else None
        return newest is not None and self._last == (reader.superblock.uuid, newest)

    def _send(
        self,
        stored: StoredCheckpoint,
        uuid: bytes,
        contents: Contents,
        rejected: list[RejectedCheckpoint],
        progress: Progress | None,
    ) -> Copied:
        """``uuid``: of the pool."""
        if self._writer is not None:
            self._writer.refuse_superseded()
        sent_for = contents.run_id or uuid.hex(), stored.header.incarnation
        if self._writer is None or self._claimed_for != sent_for:
            self._writer = self._claimed(*sent_for)
        nbytes = sum(entry.nbytes for entry in stored.entries.values())
        with progress(f"step {stored.step}", nbytes) if progress else _no_progress() as advance:
            sent = self._writer.send(stored, advance=advance)
        self._last = uuid, stored.record.payload_generation
        return Copied(stored.step, str(self._store), nbytes, sent.nbytes, tuple(map(str, rejected)))

    def _claimed(self, run: str, incarnation: int) -> TierWriter:
        """Claim the tier. A training that was restarted gets a claim of its own, because it may have gone back to an
        older step, and below one claim the largest step is the newest."""
        claim = claim_tier(self._store, run, self._written_by)
        self._claimed_for = run, incarnation
        own, by = Writer(claim, 0, 1), self._written_by
        return TierWriter(self._store, own, by, self._retention, self._grace, self._pacer.spend, self._codec)

    def lift_rate(self) -> None:
        """Send as fast as the tier takes it from now on. A signal handler may call this."""
        self._pacer.lift()

    def retain(self) -> int:
        """Delete what is no longer needed, and return how many files were deleted. Raises ``TierError``."""
        return 0 if self._writer is None else self._writer.retain()


@contextmanager
def _no_progress() -> Iterator[Callable[[int], None]]:
    yield lambda _: None
