"""Recover from the directory of a group of ranks in one process: put the parts of all ranks together.

The newest checkpoint that all ranks have is taken; if it does not verify on one rank, the next older one. A tensor of
which the ranks hold parts is put together. A tensor that every rank holds whole is taken from rank 0, and compared with
those of the other ranks. Random states, positions of loaders and objects in ``state`` are those of rank 0.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import nn

from lightck.errors import CorruptPoolError, NoCheckpointError, PoolLockedError, listed
from lightck.pool.format.assembly import assembly
from lightck.pool.format.boxes import Box
from lightck.pool.format.layout import ITEM_NBYTES, Entry, check_ties
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import PoolReader, RejectedCheckpoint, StoredCheckpoint
from lightck.ranks.directory import open_all
from lightck.ranks.rule import CheckpointId
from lightck.restore.checkpoint import Checkpoint
from lightck.restore.contents import Contents, MemorySource, load_tensor
from lightck.restore.tensor_writes import same_bits
from lightck.restore.usable import usable_by_id
from lightck.state.inventory import contiguous_stride
from lightck.state.storable import dtype_from_name

log = logging.getLogger("lightck")
_ATTEMPTS = 20
"""The largest number of attempts. All checkpoints are tried again if a training reused slots of the pools meanwhile."""


def recover_directory(
    directory: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: object,
    state: Mapping[str, object] | None,
    *,
    step: int | None,
    device: torch.device | str,
    strict: bool,
) -> Checkpoint:
    """``recover`` for the directory of a group. Raises as ``recover`` does, and ``RankError`` if the pool of a rank is
    missing."""
    checkpoint = _recovered(os.path.realpath(directory), step, device if model is None else "cpu")
    if model is not None:
        checkpoint.restore(model, optimizer, state, strict=strict)
    return checkpoint


def _recovered(directory: str, step: int | None, device: torch.device | str) -> Checkpoint:
    """Load the newest common checkpoint (of ``step``, if given). If a pool has moved to a new file since it was opened,
    and so nothing was found, open all pools again."""
    for attempt in range(1, _ATTEMPTS + 1):
        with open_all(directory) as readers:
            try:
                return _newest(readers, step, device)
            except (NoCheckpointError, CorruptPoolError, PoolLockedError):
                if attempt == _ATTEMPTS or all(reader.container.is_current() for reader in readers):
                    raise
    raise AssertionError("the last attempt returns or raises")


def _newest(readers: Sequence[PoolReader], step: int | None, device: torch.device | str) -> Checkpoint:
    """Load the newest common checkpoint (of ``step``, if given) that verifies on all ranks."""
    for _ in range(_ATTEMPTS):
        logs = [reader.commit_log() for reader in readers]
        held = [usable_by_id(reader) for reader in readers]
        common = sorted(frozenset.intersection(*map(frozenset, held)), reverse=True)
        rejected: list[RejectedCheckpoint] = []
        for checkpoint_id in common:
            if step is not None and checkpoint_id.step != step:
                continue
            try:
                return _load([_newest_intact(of_rank[checkpoint_id]) for of_rank in held], device, rejected)
            except DamagedError as err:
                record = held[0][checkpoint_id][0].record
                rejected.append(RejectedCheckpoint(checkpoint_id.step, record.generation, str(err)))
        if [reader.commit_log() for reader in readers] == logs:
            raise _no_checkpoint_error(readers, step, common, rejected)
    raise PoolLockedError(
        f"The pools in {os.path.dirname(readers[0].path)!r} are in use, and in each of {_ATTEMPTS} attempts their "
        "checkpoints were overwritten while they were read. The pools are not damaged. Try again, or end the training "
        "first."
    )


def _newest_intact(checkpoints: Sequence[StoredCheckpoint]) -> StoredCheckpoint:
    """Return the newest checkpoint that verifies. If all but the oldest fail, return the oldest unverified, because
    ``_load`` verifies it. ``checkpoints``: the checkpoints of one step in one pool, newest first."""
    for stored in checkpoints[:-1]:
        with suppress(DamagedError):
            stored.verify()
            return stored
    return checkpoints[-1]


def _no_checkpoint_error(
    readers: Sequence[PoolReader],
    step: int | None,
    common: Sequence[CheckpointId],
    rejected: Sequence[RejectedCheckpoint],
) -> Exception:
    """Return the error for pools that have no common checkpoint (of ``step``, if given) that verifies."""
    directory = os.path.dirname(readers[0].path)
    if rejected:
        reasons = tuple(map(str, rejected))
        return CorruptPoolError(
            f"No checkpoint that all ranks have in {directory!r} can be used: {'; '.join(reasons)}. Nothing was "
            "restored. Use another copy of the pools.",
            reasons,
        )
    steps = listed([str(one.step) for one in common], 8) or "none"
    wanted = "" if step is None else f" of step {step}"
    return NoCheckpointError(
        f"The ranks in {directory!r} have no checkpoint{wanted} in common. Steps that all of them have: {steps}. "
        "`lightck inspect` shows what each rank has."
    )


def _load(
    of_ranks: Sequence[StoredCheckpoint], device: torch.device | str, rejected: Sequence[RejectedCheckpoint]
) -> Checkpoint:
    """Load one checkpoint of all ranks, put together. Raises ``DamagedError``."""
    entries: dict[str, Entry] = {}
    tensors: dict[str, torch.Tensor] = {}
    differing: list[str] = []
    for name in dict.fromkeys(name for stored in of_ranks for name in stored.entries):
        holders = _holders(name, of_ranks)
        if not holders:
            continue
        entry = entries[name] = _whole_entry(holders[0].entries[name])
        if entry.alias is None:
            whole, is_equal = _put_together(name, entry, holders)
            tensors[name] = whole.to(device)
            if not is_equal:
                differing.append(name)
    check_ties(entries)
    if not all(stored.owns_slot() for stored in of_ranks):
        raise DamagedError("its slot was reused while it was read")
    if differing:
        log.warning(
            "lightck: %d tensors of step %d differ between ranks, and those of rank 0 are taken: %s. Each rank has its "
            "own statistics of BatchNorm, so these may differ; parameters should not differ",
            len(differing),
            of_ranks[0].step,
            listed(differing),
        )
    first = of_ranks[0]
    try:
        contents = Contents.parse(first.state, first.step, first.iteration, entries)
    except CorruptPoolError as err:
        raise DamagedError(str(err)) from err
    source = MemorySource(entries, tensors)
    reader = first.reader
    return Checkpoint(
        contents, lambda: source, first.record, os.path.dirname(reader.path), reader.superblock.uuid, rejected
    )


def _holders(name: str, of_ranks: Sequence[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """Return the checkpoints from whose tensors of this name the whole tensor is put together, rank 0 first. Objects in
    ``state=`` belong to each rank: only those of rank 0 count, and other ranks may have other tensors there."""
    holders = [stored for stored in of_ranks if name in stored.entries]
    first = _whole_entry(holders[0].entries[name])
    if first.role != "state":
        return holders
    if holders[0] is not of_ranks[0]:
        return []
    others = [(stored, _whole_entry(stored.entries[name])) for stored in holders]
    return [stored for stored, one in others if (one.shape, one.dtype) == (first.shape, first.dtype)]


def _whole_entry(entry: Entry) -> Entry:
    """Return the entry of the logical tensor."""
    if entry.logical_shape is None:
        return entry
    shape = entry.logical_shape
    nbytes = 0 if entry.alias is not None else math.prod(shape) * ITEM_NBYTES[entry.dtype]
    return entry._replace(shape=shape, stride=contiguous_stride(shape), nbytes=nbytes, logical_shape=None, pieces=None)


def _put_together(name: str, entry: Entry, holders: Sequence[StoredCheckpoint]) -> tuple[torch.Tensor, bool]:
    """Return the whole tensor, and whether ranks that hold the same element hold the same bytes for it. Raises
    ``DamagedError``."""
    parts = [stored.entries[name] for stored in holders]
    if any(part.dtype != entry.dtype or _whole_entry(part).shape != entry.shape for part in parts):
        raise DamagedError(f"its tensor {name!r} has another shape or dtype on another rank")
    # The name may be a tied name on some ranks only. On such a rank the bytes lie under ``part.alias``.
    locals_ = [load_tensor(stored, part.alias or name) for stored, part in zip(holders, parts, strict=True)]
    if all(part.pieces is None for part in parts):
        return locals_[0], all(_same_bytes(locals_[0], other) for other in locals_[1:])
    if any(part.pieces is None for part in parts):
        raise DamagedError(f"its tensor {name!r} is a part on some ranks only")
    pieces = [part.pieces or () for part in parts]
    try:
        copies = assembly(entry.shape, pieces)
    except ValueError as err:
        raise DamagedError(f"its tensor {name!r} cannot be put together: {err}") from err
    # Allocate only now: ``assembly`` has checked that the parts cover the shape, which may be huge in a damaged pool.
    whole = torch.empty(entry.shape, dtype=dtype_from_name(entry.dtype))
    for copy in copies:
        _box_of(whole, copy.destination).copy_(_box_of(locals_[copy.holder], copy.source))
    is_equal = all(
        _same_bytes(_box_of(whole, Box(piece.start, piece.size)), _box_of(local, Box(piece.local_start, piece.size)))
        for local, held in zip(locals_, pieces, strict=True)
        for piece in held
    )
    return whole, is_equal


def _box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of the box of a tensor."""
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and the same bytes. NaNs with the same bytes are equal."""
    return one.shape == other.shape and same_bits(one, other)
