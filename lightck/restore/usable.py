"""The checkpoints of a pool, and which of them recovery may use: those whose manifest and small state verify, and that
are not stale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

from lightck.errors import CorruptPoolError
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.reader import PoolReader, RejectedCheckpoint, StoredCheckpoint
from lightck.ranks.rule import CheckpointId
from lightck.restore.contents import Contents, Saved
from lightck.restore.optimizers_at_hand import OptimizersAtHand
from lightck.restore.replayed import ReplayedCheckpoint, replayed_checkpoint, replayed_checkpoints

RankCheckpoint: TypeAlias = StoredCheckpoint | ReplayedCheckpoint
"""A checkpoint in the pool of one rank."""
STALE_REASON = (
    "it is stale: a newer checkpoint records that this one may hold wrong bytes, because lightck detected a write to a "
    "tensor, or that replaying a recorded update gives another result, only after this one was saved"
)


def checkpoints_of(
    reader: PoolReader, step: int | None = None, optimizers: OptimizersAtHand | None = None
) -> Iterator[RankCheckpoint | RejectedCheckpoint]:
    """Yield the checkpoints of a pool, from newest to oldest. ``step``: yield only those of this step. ``optimizers``:
    replay the updates of a pool with gradient records; None: the classes of ``torch.optim`` do."""
    if reader.superblock.has_gradients:
        return replayed_checkpoints(reader, optimizers or OptimizersAtHand(), step)
    return reader.checkpoints(step)


def stored_checkpoint(
    reader: PoolReader, record: CommitRecord, optimizers: OptimizersAtHand | None = None
) -> RankCheckpoint:
    """Return the checkpoint that a commit record names. ``optimizers``: as in ``checkpoints_of``. Raises
    ``DamagedError`` if it was overwritten or fails a check."""
    if reader.superblock.has_gradients:
        return replayed_checkpoint(reader, record, optimizers or OptimizersAtHand())
    return reader.checkpoint(record)


class StaleCheckpoints:
    """Which checkpoints are stale according to ``Contents.stale_after`` of newer checkpoints. Some stale checkpoints
    are still readable, because a crash came between the commit of the newer checkpoint and the strike."""

    def __init__(self) -> None:
        self._between: list[tuple[int, int]] = []
        """Pairs of generations: the checkpoints between them, both excluded, are stale."""

    @classmethod
    def of_pool(
        cls, reader: PoolReader, checkpoints: Iterable[Saved | RejectedCheckpoint] | None = None
    ) -> StaleCheckpoints:
        """Return the stale checkpoints that were not struck yet, according to the readable checkpoints of a pool.
        ``checkpoints``: those of the pool, newest first; None: those that the reader finds.

        The checkpoints are read from newest to oldest. The search ends at the first checkpoint that has no
        ``stale_after``, or whose generation is smaller than that of a struck slot: both show that the stale checkpoints
        were struck. The ``stale_after`` of this checkpoint and of older ones must be ignored: since the strike, a
        relayout may have given a valid pinned checkpoint a new generation, which lies inside their range."""
        stale, struck_generation = cls(), reader.newest_struck_generation()
        for stored in reader.checkpoints() if checkpoints is None else checkpoints:
            if not isinstance(stored, RejectedCheckpoint):
                with suppress(DamagedError):
                    contents = parse_state(stored)
                    if contents.stale_after is None or stored.record.generation < struck_generation:
                        break
                    stale.add(contents, stored.record.payload_generation)
        return stale

    def add(self, contents: Contents, generation: int) -> None:
        """Add the older checkpoints that are stale according to the checkpoint with this generation and contents."""
        if contents.stale_after is not None:
            self._between.append((contents.stale_after, generation))

    def includes(self, generation: int) -> bool:
        """Whether the checkpoint of this generation is stale."""
        return any(after < generation < before for after, before in self._between)


def parse(stored: Saved) -> Contents:
    """Parse the small state of a checkpoint. Raises ``DamagedError`` if it is malformed. ``not_exact`` is that of the
    checkpoint, if it has one (``ReplayedCheckpoint``, ``Relocated``)."""
    contents = parse_state(stored)
    not_exact: str = getattr(stored, "not_exact", contents.not_exact)
    return replace(contents, entries=stored.entries, not_exact=not_exact)


def parse_state(stored: Saved) -> Contents:
    """As ``parse``, but the contents have no entries. (To know those of a pool with gradient records, its updates must
    be replayed.)"""
    try:
        return Contents.parse(stored.state, stored.step, stored.iteration, {})
    except CorruptPoolError as err:
        raise DamagedError(str(err)) from err


def usable_checkpoints(reader: PoolReader, optimizers: OptimizersAtHand | None = None) -> Iterator[RankCheckpoint]:
    """Yield the checkpoints whose manifest and small state verify, from newest to oldest, without stale ones. This
    replays no update. ``optimizers``: as in ``checkpoints_of``."""
    stale = StaleCheckpoints()
    for stored in checkpoints_of(reader, None, optimizers):
        if isinstance(stored, RejectedCheckpoint) or stale.includes(stored.record.payload_generation):
            continue
        with suppress(DamagedError):
            stale.add(parse_state(stored), stored.record.payload_generation)
            yield stored


def usable_by_id(
    reader: PoolReader, optimizers: OptimizersAtHand | None = None
) -> dict[CheckpointId, list[RankCheckpoint]]:
    """Return id in the group -> usable checkpoints of a rank's pool with this id, newest first. Two checkpoints have
    the same id if a step was saved twice. ``optimizers``: as in ``checkpoints_of``."""
    found: dict[CheckpointId, list[RankCheckpoint]] = {}
    for stored in usable_checkpoints(reader, optimizers):
        found.setdefault(CheckpointId(stored.header.incarnation, stored.step), []).append(stored)
    return found
