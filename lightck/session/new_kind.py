"""A training with whole checkpoints goes on with ``Gradients``: its pool is written anew, with room for records.

    restore   the newest checkpoint, from the pool as it is
    copy      it into a new file, whole: each unit into a home
    publish   the new file gets the name of the pool; then it is adopted as any pool

Invariant: until the copy is committed and durable, the pool at the path is the old one, unchanged. A kill leaves the
one or the other. Only the newest checkpoint is copied.

Failure cases: the medium has no room for both files, or the new file would save too little (the pool is unchanged, and
an error says why); a block of the checkpoint cannot be read any more (``CorruptPoolError``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lightck.pipeline.pipeline import Pipeline
from lightck.pipeline.pool_kind import WholeCheckpoints
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.reader import PoolReader
from lightck.pool.writer import PoolWriter
from lightck.ranks.rule import CheckpointId
from lightck.restore.pool_copies import commit_copy, small_state_of_new_pool
from lightck.session.lost_pool import no_longer_intact

log = logging.getLogger("lightck")


def write_with_gradient_records(
    pipeline: Pipeline, reader: PoolReader, record: CommitRecord, entries: Iterable[Entry], state_nbytes: int
) -> None:
    """Write the pool that ``reader`` has open for writing anew, as one of the pipeline's kind, with a copy of the
    checkpoint that ``record`` names. The old and the new pool are closed. ``entries``: tensors for which the pool has
    space, in addition to those of the checkpoint. ``state_nbytes``: bytes of small state for which the slots must have
    space at least. Raises ``CorruptPoolError``, and what ``Backend.create`` raises."""
    stored = reader.checkpoint(record)
    state = small_state_of_new_pool(stored)

    def copy(writer: PoolWriter) -> None:
        commit_copy(writer, CheckpointId(record.incarnation, record.step), stored, state)

    try:
        pipeline.pool.write_as_other_kind(
            reader, WholeCheckpoints(), [*entries, *stored.entries.values()], max(len(state), state_nbytes), copy
        )
    except DamagedError as err:
        raise no_longer_intact(stored, err) from err
    log.info(
        "lightck: %s held whole checkpoints, and was written anew with room for gradient records, under the same path. "
        "It holds the checkpoint of step %d; older ones were not copied",
        pipeline.path,
        record.step,
    )
