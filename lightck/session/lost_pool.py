"""A rank whose pool is lost takes the checkpoint of another rank: it makes a pool of its own with a copy of it.

The rank restores from the pool of the other rank, and says whether it could, as all ranks do. Then it creates its pool
and commits the copy there, under the name that the checkpoint has in the group. From then on it goes on as if the pool
had never been lost: it reads the copy, and adopts it. The others adopt only when the copy is durable.

In the copy, tensors, options, objects in ``state=`` and positions in loaders are those of the other rank. Random states
are new: they follow from run, step and rank. What identifies the other rank's data is left out: the checksum of its
last batch, and what followed its checkpoint. The copy says from which rank it is, so a resume from it says so again.

Invariant: no pool that has a commit record is changed. The new pool gets its path when the copy is durable. So a kill
before that leaves the pool lost as before, and a kill after that leaves a pool with the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from hashlib import blake2b

from lightck.errors import CorruptPoolError, RankError
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import DamagedError
from lightck.pool.partial_copy import BlocksMissingError
from lightck.pool.reader import PoolReader, open_pool
from lightck.ranks.rule import CheckpointId
from lightck.restore.contents import Saved
from lightck.restore.logical import ROLES_THAT_MUST_AGREE
from lightck.restore.moved_state import new_random_states
from lightck.restore.pool_copies import commit_copy, state_for_copy
from lightck.restore.usable import RankCheckpoint, parse
from lightck.session.group import Group, path_of_pool
from lightck.state import values


def open_source(directory: str, group: Group, rank: int, run_id: bytes) -> PoolReader:
    """Open the pool of another rank for reading. Raises ``PoolError`` or ``RankError``."""
    path = path_of_pool(directory, rank, group.world_size)
    reader = None if path is None else open_pool(path, gradients=True)
    if reader is not None and reader.group is not None and reader.group.run_id == run_id:
        return reader
    if reader is not None:
        reader.close()
    raise RankError(
        f"The pool of rank {rank} in {directory!r} was removed or replaced while the ranks attached, before rank "
        f"{group.rank} could take its checkpoint. Is a second job using the directory? End it, and start again."
    )


def has_checkpoints_of(directory: str, rank: int, world_size: int) -> bool:
    """Whether the directory has the pool of rank ``rank``, with a commit record in it."""
    path = path_of_pool(directory, rank, world_size)
    if path is None:
        return False
    with closing(open_pool(path, gradients=True)) as reader:
        return bool(reader.commit_log().records)


def replicated_lines(stored: RankCheckpoint) -> list[str]:
    """Return lines that are equal on two ranks if these hold the same parameters and the same optimizer state: one for
    each parameter, for each tensor of an optimizer, and for the rest of each optimizer's state. A line is a name, and a
    digest of the checksums of the bytes."""
    lines = [
        f"{name} {_digest(repr((entry.dtype, entry.shape, entry.stride, entry.alias, stored.raw_checksums(name))))}"
        for name, entry in stored.entries.items()
        if entry.role in ROLES_THAT_MUST_AGREE
    ]
    optimizers = parse(stored).optimizers
    lines += [
        f"optimizer {number} {_digest(repr((one.packed_param_state, one.packed_other_state)))}"
        for number, one in enumerate(optimizers)
    ]
    return sorted(lines)


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def no_longer_intact(stored: Saved, reason: Exception) -> CorruptPoolError:
    return CorruptPoolError(
        f"The checkpoint of step {stored.step} in {stored.path!r} was intact when it was restored, and can "
        f"no longer be read: {reason}. Check the pool's medium, and start again."
    )


def copy_into_new_pool(
    pipeline: Pipeline,
    stored: Saved,
    checkpoint_id: CheckpointId,
    entries: Sequence[Entry],
    *,
    n_slots: int,
    expected_state_nbytes: int,
    changed_state: Mapping[str, object],
) -> None:
    """Create the pool of this rank, whose identity is ``pipeline.pool.group``, with a copy of ``stored``, committed
    under ``checkpoint_id``. The pool gets its path when the copy is durable, and is closed again. ``entries``: tensors
    for which the pool has space, in addition to those of ``stored``. ``expected_state_nbytes``: bytes of small state
    for which the slots must have space at least. ``changed_state``: what the copy has in its small state in place of
    what ``stored`` has."""
    pool = pipeline.pool
    state = values.pack(state_for_copy(stored) | dict(changed_state), path="state")
    pool.n_slots = n_slots
    entries = [*entries, *stored.entries.values()]
    try:
        pool.relayout(
            entries,
            max(len(state), expected_state_nbytes),
            lambda writer: commit_copy(writer, checkpoint_id, stored, state),
        )
    except (DamagedError, BlocksMissingError) as err:
        raise no_longer_intact(stored, err) from err
    finally:
        pool.close()


def state_of_lost_rank(stored: Saved, source: int, key: bytes) -> dict[str, object]:
    """Return what the copy for a rank whose pool was lost has in its small state in place of what ``stored`` has.
    ``source``: the rank whose checkpoint that is. ``key``: the random states are derived from it."""
    positions = {name: {**position, "content": None} for name, position in parse(stored).loaders.items()}
    return new_random_states(stored, key) | {"loaders": positions, "stale_after": None, "copied_from": source}
