"""Which checkpoints of a pool with gradient records were overwritten in part by newer ones.

The newest committed checkpoint is whole. An older one stays recoverable until a place that it needs is reused: a slot
of a record, or a home of a unit. What lies in each place is known from the slot headers and the manifests. So a
checkpoint that was overwritten is not taken for a damaged one, and no payload is read to know this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightck.pool.format.gradients import N_HOMES
from lightck.pool.gradient_reader import GradientCheckpoint, is_overwritten
from lightck.pool.reader import PoolReader


class Places:
    """What lies in the homes of a pool, by what its readable manifests say."""

    def __init__(self, reader: PoolReader, checkpoints: Sequence[GradientCheckpoint]) -> None:
        """``checkpoints``: the readable ones. The first is the newest that recovery may use, the others are in any
        order."""
        self._reader = reader
        self._newest = next(iter(checkpoints), None)
        n_home_entries = 0 if self._newest is None else len(self._newest.rows)
        self._generations = np.zeros((N_HOMES, n_home_entries), np.uint64)
        """[home, entry in a home] -> the newest generation that is known to lie there."""
        entries = np.arange(n_home_entries)
        for one in checkpoints:
            for rows in (one.rows, one.part.older):
                in_home = (rows["generation"] > 0) & (rows["home"] < N_HOMES)
                at = rows["home"][in_home], entries[in_home]
                self._generations[at] = np.maximum(self._generations[at], rows["generation"][in_home])

    def is_overwritten(self, checkpoint: GradientCheckpoint) -> bool:
        """Whether something that a checkpoint needs was overwritten."""
        rows = checkpoint.rows
        in_home = np.flatnonzero((rows["generation"] > 0) & (rows["home"] < N_HOMES))
        if (self._generations[rows["home"][in_home], in_home] > rows["generation"][in_home]).any():
            return True
        return any(is_overwritten(self._reader, entry) for entry in checkpoint.needed_records())

    def may_be_overwritten(self, checkpoint: GradientCheckpoint) -> bool:
        """Whether a checkpoint that is being written, or was not finished, may have overwritten a base that this one
        needs. (It does not overwrite what the newest checkpoint needs.)"""
        newest = self._newest
        if newest is None or self._is_newest(checkpoint) or self.is_at_rest:
            return False
        rows, of_newest = checkpoint.rows, newest.rows
        in_home = (rows["generation"] > 0) & (rows["home"] < N_HOMES)
        same = (rows["generation"] == of_newest["generation"]) & (rows["home"] == of_newest["home"])
        return bool((in_home & ~same).any())

    def are_older_bases_kept(self, checkpoint: GradientCheckpoint) -> bool:
        """Whether the older bases of this checkpoint, and the records that they need, are still there: nothing newer
        has overwritten them, or may have begun to."""
        return self._is_newest(checkpoint) and self.is_at_rest

    def _is_newest(self, checkpoint: GradientCheckpoint) -> bool:
        return self._newest is not None and checkpoint.header.generation == self._newest.header.generation

    @property
    def is_at_rest(self) -> bool:
        """Whether no slot belongs to a record that is newer than the newest checkpoint. Such a record is being written,
        was not finished, waits for a later commit, or is not used any more; it may have overwritten what the newest
        checkpoint does not need."""
        newest, slots = self._newest, range(len(self._reader.superblock.slots))
        generation = 0 if newest is None else newest.header.generation
        return all((self._reader.slot_generation(slot) or 0) <= generation for slot in slots)
