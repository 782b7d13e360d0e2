"""Copy one checkpoint into another pool file: read and verify its tensors, and commit them there."""

from __future__ import annotations

import numpy as np
import torch

from lightck.pool.engine import ENDED
from lightck.pool.writer import CopyPlan, PoolWriter
from lightck.ranks.rule import CheckpointId
from lightck.restore.contents import Saved, load_tensors


def load_to_copy(stored: Saved) -> dict[str, torch.Tensor]:
    """Read and verify those tensors of a checkpoint that have bytes. (A tied tensor has none of its own.) Raises
    ``DamagedError``."""
    return load_tensors(stored, [name for name, entry in stored.entries.items() if entry.nbytes])


def copy_plan(stored: Saved, numbers: dict[str, int], tensors: dict[str, torch.Tensor], state: bytes) -> CopyPlan:
    """Return the plan that copies a checkpoint to another pool file. ``numbers``: name -> record number in that file,
    of each tensor of the checkpoint. ``tensors``: from ``load_to_copy``. ``state``: the small state of the copy."""
    return CopyPlan(
        step=stored.step,
        iteration=stored.iteration,
        records=np.array([numbers[name] for name in tensors], np.int64),
        sources=np.array([tensor.data_ptr() for tensor in tensors.values()], np.uint64),
        at_boundary=np.ones(len(tensors), np.bool_),
        unchanged=np.array([], np.int64),
        recorded_only=np.array([n for name, n in numbers.items() if name not in tensors], np.int64),
        n_tensors=len(numbers),
        state=state,
    )


def commit_copy(
    writer: PoolWriter, checkpoint_id: CheckpointId, stored: Saved, state: bytes, tensors: dict[str, torch.Tensor]
) -> None:
    """Commit a copy of ``stored`` in an empty pool, and wait until it is durable. ``checkpoint_id``: of the copy.
    ``state``: its small state. ``tensors``: from ``load_to_copy``."""
    writer.incarnation = checkpoint_id.incarnation
    plan = copy_plan(stored, {name: writer.numbers[name] for name in stored.entries}, tensors, state)
    slot = writer.slots.choose()
    assert slot is not None, "the pool is new"
    job = writer.begin(plan, slot, tensors).job
    try:
        job.release()
        job.wait(ENDED)
    finally:
        job.abandon()
