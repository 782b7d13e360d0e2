"""Which tensors the ranks of a group have, in attach: whether they fit each other, and who differs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeAlias

import msgpack

from lightck.errors import RankError, listed
from lightck.pool.format.layout import Entry
from lightck.pool.reader import PoolReader
from lightck.ranks.agreement import Report
from lightck.ranks.meet import Meeting
from lightck.ranks.rule import CheckpointId
from lightck.restore.replayed import ReplayedCheckpoint
from lightck.restore.usable import RankCheckpoint
from lightck.session.pool_file import PoolFile

NAMES_NBYTES_MAX = 1 << 20
"""The largest number of bytes that a rank sends of its tensors' names, for the error that lists differences."""
Stored: TypeAlias = dict[CheckpointId, list[RankCheckpoint]]
"""The usable checkpoints in one pool, by id. If a step was saved twice, its list has two items, the newer one first."""


def refuse_other_tensors(file: PoolFile, reports: Sequence[Report], meeting: Meeting) -> None:
    """Raise ``RankError`` if the tensors of a rank differ from those of the first rank (of the same pipeline stage); or
    if a tensor has another dtype or shape on another stage. The ranks of one stage exchange the names of their tensors
    only if they differ, for the message. All ranks call this."""
    first_of = {one.stage: rank for rank, one in reversed(list(enumerate(reports)))}
    pairs = ((first_of[one.stage], rank) for rank, one in enumerate(reports))
    pair = next(((one, other) for one, other in pairs if reports[one].tensors != reports[other].tensors), None)
    if pair is None:
        if len(first_of) > 1:
            _refuse_other_kinds(file, sorted(first_of.values()), meeting)
        return
    one, other = pair
    first, second = lines_of(meeting, one, other, "names of tensors", _tensor_lines(file))
    raise RankError(
        f"The tensors of model and optimizer on {meeting.name_of(other)} differ from those on {meeting.name_of(one)}. "
        f"Only on rank {one}: {listed(sorted(first - second)) or 'none'}. Only on rank {other}: "
        f"{listed(sorted(second - first)) or 'none'}. All ranks of a group must build the same model and optimizer. "
        "If they are stages of a pipeline, pass layout=Layout(..., stage=..., stages=...)."
    )


def _refuse_other_kinds(file: PoolFile, ranks: Sequence[int], meeting: Meeting) -> None:
    """Raise ``RankError`` if two pipeline stages have a tensor of one name with different dtypes or shapes. ``ranks``:
    the first one of each stage."""
    kinds = {
        entry.name: [entry.dtype, list(_logical_shape(entry))]
        for entry in file.entries.values()
        if entry.role != "state"
    }
    own = zlib.compress(msgpack.packb(kinds), 1) if meeting.rank in ranks else b""
    texts = meeting.exchange("tensors of the stages", own)
    known: dict[str, tuple[int, list[object]]] = {}
    for rank in ranks:
        for name, kind in msgpack.unpackb(zlib.decompress(texts[rank])).items():
            other, other_kind = known.setdefault(name, (rank, kind))
            if other_kind != kind:
                raise RankError(
                    f"The tensor {name!r} is {other_kind[0]} {other_kind[1]} on {meeting.name_of(other)} and {kind[0]} "
                    f"{kind[1]} on {meeting.name_of(rank)}, which are two pipeline stages. One name stands for one "
                    "tensor of the whole model. If these are two tensors, give them different names, with rename in "
                    "layout=; if they are parts of one, correct its rule in layout=."
                )


def lines_of(meeting: Meeting, one: int, other: int, what: str, lines: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the lines of two ranks. All ranks call this, for a message about a difference that all have found.
    ``lines``: those of this rank. ``what``: says what is exchanged."""
    own = "\n".join(lines).encode("utf-8", "replace")[:NAMES_NBYTES_MAX]
    texts = meeting.exchange(what, own if meeting.rank in (one, other) else b"")
    first, second = (set(texts[rank].decode("utf-8", "replace").splitlines()) for rank in (one, other))
    return first, second


def has_parts(file: PoolFile, reader: PoolReader | None, stored: Stored) -> bool:
    """Whether this rank holds parts of tensors, now or in a checkpoint, or has a layout: then no other rank has what
    it holds."""
    if file.arguments.layout is not None:
        return True
    entries = [*file.entries.values(), *(() if reader is None else reader.entries)]
    # A ``ReplayedCheckpoint`` is left out: its parameters and its optimizer state are among ``reader.entries`` already.
    whole = [one for many in stored.values() for one in many if not isinstance(one, ReplayedCheckpoint)]
    entries += [entry for one in whole for entry in one.entries.values()]
    return any(entry.pieces is not None for entry in entries)


def digest_of_lines(lines: Sequence[str]) -> str:
    return blake2b("\n".join(lines).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def digest_of_tensors(file: PoolFile) -> str:
    """Return a digest of names, logical shapes and dtypes of the tensors."""
    return digest_of_lines(_tensor_lines(file))


def _logical_shape(entry: Entry) -> tuple[int, ...]:
    return entry.shape if entry.logical_shape is None else entry.logical_shape


def _tensor_lines(file: PoolFile) -> list[str]:
    """Return a line with name, dtype and logical shape of each tensor of model and optimizers, and one with the class
    of each optimizer. Ranks that hold different parts of the same tensors have the same lines."""
    lines = [
        f"{entry.name} ({entry.dtype}, {list(_logical_shape(entry))})"
        for entry in file.entries.values()
        if entry.role != "state"
    ]
    return sorted([*lines, *(view.class_name for view in file.capture.optimizers)])
