"""Which pool holds which part of a tensor, and reads of a part of a tensor without the rest of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lightck.errors import CorruptPoolError, NoCheckpointError
from lightck.pool.format.boxes import Box, Ints, whole_box
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import DamagedError
from lightck.restore.contents import empty_for
from lightck.restore.logical import LogicalCheckpoint, Relocated


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor that a pool holds. All numbers are elements of the whole tensor, one for each dimension."""

    rank: int | None
    """The rank whose pool it is; None for the pool of a single process."""
    path: str
    """The pool's file."""
    start: tuple[int, ...]
    """First element."""
    size: tuple[int, ...]


Pieces: TypeAlias = "Callable[[str], tuple[StoredPiece, ...]]"
"""From the name of a stored tensor to its pieces; see ``Checkpoint.pieces``."""


def pieces_of_ranks(logical: LogicalCheckpoint) -> Pieces:
    """Return the pieces in the pools of several ranks. They do not keep the pools open."""
    pools = [(None if one.reader.group is None else one.reader.group.rank, one.path) for one in logical.of_ranks]
    held = {name: [(one.position, one.pieces) for one in holders] for name, holders in logical.holders.items()}
    return lambda name: tuple(
        StoredPiece(*pools[position], piece.start, piece.size) for position, pieces in held[name] for piece in pieces
    )


def pieces_of_pool(path: str, entries: Mapping[str, Entry]) -> Pieces:
    """Return the pieces in the pool of a single process, which holds each tensor whole."""

    def of(name: str) -> tuple[StoredPiece, ...]:
        start, size = whole_box(entries[name].shape)
        return () if 0 in size else (StoredPiece(None, path, start, size),)

    return of


class RangeReader:
    """Reads parts of the tensors of one checkpoint, verified. ``opened``: keeps the pools open until ``close``."""

    def __init__(self, opened: ExitStack, logical: LogicalCheckpoint) -> None:
        self._opened: ExitStack | None = opened
        self._relocated = Relocated(logical, {})

    def read(self, name: str, box: Box, out: torch.Tensor | None) -> torch.Tensor:
        """Read a box of a tensor into ``out`` (None: into a new tensor), and return it. See ``Checkpoint.read``."""
        if self._opened is None:
            raise ValueError("The checkpoint is closed, and its pools with it. Recover it again to read from it.")
        cut = self._relocated.cut(name, box)
        target = out if out is not None and out.is_cpu and out.is_contiguous() else empty_for(cut.entries[name], "cpu")
        try:
            cut.read_into(name, target.data_ptr())
        except DamagedError as err:
            if self._relocated.owns_slot():
                raise CorruptPoolError(
                    f"The tensor {name!r} of step {cut.step} cannot be read: {err}. A checkpoint that is "
                    "recovered with lazy=True is verified as it is read. Recover it without lazy=: then an older "
                    "checkpoint is taken if this one is damaged.",
                    (str(err),),
                ) from err
        if not self._relocated.owns_slot():
            raise NoCheckpointError(
                f"Step {cut.step} was overwritten by the training while it was read from {cut.path!r}, as pools keep "
                "only the newest steps. Nothing of it was returned. Recover again; or pin the step in the training "
                "(session.pin()), or give the pool more slots."
            )
        if out is None or out is target:
            return target
        with torch.no_grad():
            return out.copy_(target)

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


def checked_box(name: str, shape: Ints, start: Sequence[int] | None, size: Sequence[int] | None) -> Box:
    """Return the box that the arguments of ``Checkpoint.read`` mean. Raises ``ValueError`` if it is not inside the
    tensor."""
    begin = (0,) * len(shape) if start is None else tuple(start)
    if len(begin) == len(shape) and size is None:
        size = tuple(n - at for n, at in zip(shape, begin, strict=True))
    wanted = tuple(size or ())
    ints = all(isinstance(one, int) for one in (*begin, *wanted))
    if not ints or not len(begin) == len(wanted) == len(shape):
        raise ValueError(
            f"start={begin} and size={wanted} do not fit the tensor {name!r}, whose shape is {tuple(shape)}: pass an "
            f"int for each of its {len(shape)} dimensions."
        )
    if any(at < 0 or n < 0 or at + n > whole for at, n, whole in zip(begin, wanted, shape, strict=True)):
        raise ValueError(
            f"start={begin} and size={wanted} reach beyond the tensor {name!r}, whose shape is {tuple(shape)}."
        )
    return Box(begin, wanted)


def checked_out(out: torch.Tensor | None, dtype: torch.dtype, size: Ints) -> None:
    """Raise ``TypeError`` or ``ValueError`` if a box cannot be read into ``out``."""
    if out is None:
        return
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out={out!r} is a {type(out).__name__}. Pass a tensor, or leave it out.")
    if tuple(out.shape) != tuple(size) or out.dtype != dtype:
        raise ValueError(
            f"out has the shape {tuple(out.shape)} and the dtype {out.dtype}; the part that is read has "
            f"{tuple(size)} ({math.prod(size)} elements) and {dtype}."
        )
