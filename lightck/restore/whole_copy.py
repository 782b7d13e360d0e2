"""A checkpoint of a pool with gradient records, as one that is stored whole: its updates are replayed, and the result
is written into a pool in memory. Whoever sends it elsewhere needs nothing of the pool afterwards.

It keeps its step, its incarnation and its generation. If the updates were replayed under other conditions than those of
the training, its small state says so (``NOT_EXACT_KEY``).

Memory: the units twice, and what the updates consumed. Failure case: the training overwrites a base or a record while
it is read (``DamagedError``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from lightck.pool.commit_log import candidates
from lightck.pool.engine import Engine
from lightck.pool.format.structures import CommitRecord
from lightck.pool.reader import PoolReader, StoredCheckpoint
from lightck.pool.storage.memory import MemoryBackend
from lightck.pool.writer import PoolWriter
from lightck.restore.optimizers_at_hand import OptimizersAtHand
from lightck.restore.pool_copies import pool_with_copy
from lightck.restore.recover import collector_paused
from lightck.restore.replayed import ReplayedCheckpoint, replayed_checkpoint
from lightck.restore.tensor_writes import ordinary_tensors


@contextmanager
def whole_copy(stored: ReplayedCheckpoint) -> Iterator[StoredCheckpoint]:
    """Make a checkpoint whole. Raises ``DamagedError`` if it is damaged or was overwritten, and ``UnsupportedError`` if
    an optimizer of another class than those of ``torch.optim`` is needed."""
    with closing(_copy_into_memory_pool(stored)) as writer:
        copy = writer.reader
        yield copy.checkpoint(candidates(copy.commit_log())[0])


@collector_paused()
@ordinary_tensors()
def _copy_into_memory_pool(stored: ReplayedCheckpoint) -> PoolWriter:
    """Return the writer of a pool in memory that holds the checkpoint alone."""
    generation = stored.record.payload_generation
    with closing(Engine(1)) as engine:
        _, writer = pool_with_copy(MemoryBackend(), stored.path, stored.reader, stored, engine, generation=generation)
    return writer


@contextmanager
def whole_copy_of(reader: PoolReader, record: CommitRecord) -> Iterator[StoredCheckpoint]:
    """As ``whole_copy``, of the checkpoint that a commit record names."""
    with whole_copy(replayed_checkpoint(reader, record, OptimizersAtHand())) as copy:
        yield copy
