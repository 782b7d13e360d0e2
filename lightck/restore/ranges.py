"""Which pool holds which part of a tensor, and reads of a part of a tensor without the rest of the checkpoint."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from lightck.errors import CorruptPoolError, NoCheckpointError
from lightck.pool.format.boxes import Box, Ints, whole_box
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import DamagedError
from lightck.restore.contents import MemorySource, empty_for, in_memory
from lightck.restore.logical import LogicalCheckpoint
from lightck.restore.relocated import Relocated
from lightck.state.local_tensors import is_dtensor


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor that a pool holds. ``start`` and ``size`` count elements of the whole tensor, one number for
    each dimension."""

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


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class RangeReader:
    """Reads tensors of one checkpoint, and parts of them, from open pools, verified. ``open_pools``: the stack
    that closes these pools. The reader closes it in ``close``, or when the reader itself is garbage-collected."""

    def __init__(self, open_pools: ExitStack, logical: LogicalCheckpoint) -> None:
        self._relocated = Relocated(logical, {})
        self._close = weakref.finalize(self, open_pools.close)

    def box(self, name: str, box: Box, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read a box of a tensor into ``out`` (None: into a new tensor), and return it. ``out`` has gone through
        ``can_read_into``."""
        only_box = self._relocated.only_box(name, box)
        target = empty_for(only_box.entries[name], "cpu") if out is None else out
        with self._errors(f"The tensor {name!r}"):
            only_box.read_into(name, target.data_ptr())
        return target

    def whole(self, name: str) -> torch.Tensor:
        """Read a tensor, with the strides that it has in the pool."""
        alone = self._relocated.alone(name)
        target = empty_for(alone.entries[name], "cpu")
        with self._errors(f"The tensor {name!r}"):
            alone.read_into(name, target.data_ptr())
        return target

    def all(self) -> MemorySource:
        """Read all tensors."""
        with self._errors("A tensor"):
            return in_memory(Relocated(self._relocated.logical, {}))

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Raise the public error for a block that cannot be used: ``CorruptPoolError`` if it is damaged,
        ``NoCheckpointError`` if the training has overwritten the checkpoint."""
        if not self._close.alive:
            raise ValueError("The checkpoint is closed, and its pools with it. Recover it again to read from it.")
        step = self._relocated.step
        try:
            yield
        except DamagedError as err:
            if self._relocated.owns_slot():
                raise CorruptPoolError(
                    f"{what} of step {step} cannot be read: {err}. A checkpoint that is recovered with lazy=True is "
                    "verified as it is read. Recover it without lazy=: then an older checkpoint is taken if this one "
                    "is damaged.",
                    (str(err),),
                ) from err
        if not self._relocated.owns_slot():
            raise NoCheckpointError(
                f"Step {step} was overwritten by the training while it was read from {self._path!r}, as pools keep "
                "only the newest steps. What was passed as out= may be partly overwritten. Recover again; or pin the "
                "step in the training (session.pin()), or give the pool more slots."
            )

    @property
    def _path(self) -> str:
        pools = self._relocated.logical.of_ranks
        return pools[0].path if len(pools) == 1 else self._relocated.path

    def close(self) -> None:
        self._close()


def checked_box(name: str, shape: Ints, start: object, size: object) -> Box:
    """Return the box that the arguments of ``Checkpoint.read`` mean. Raises ``TypeError`` for what is no sequence of
    ints, and ``ValueError`` if the box is not inside the tensor."""
    begin = (0,) * len(shape) if start is None else _ints("start", start)
    if size is None:
        wanted = tuple(n - at for n, at in zip(shape, begin, strict=False)) if len(begin) == len(shape) else ()
    else:
        wanted = _ints("size", size)
    said = f"start={begin}" if size is None else f"start={begin} and size={wanted}"
    if len(begin) != len(shape) or len(wanted) != len(shape):
        raise ValueError(
            f"{said} does not fit the tensor {name!r}, whose shape is {tuple(shape)}: pass an int for each of its "
            f"{len(shape)} dimensions."
        )
    if any(at < 0 or n < 0 or at + n > whole for at, n, whole in zip(begin, wanted, shape, strict=True)):
        raise ValueError(f"{said} reaches beyond the tensor {name!r}, whose shape is {tuple(shape)}.")
    return Box(begin, wanted)


def _ints(argument: str, given: Any) -> Ints:
    try:
        found = tuple(given)
        if any(isinstance(one, (bool, np.bool_)) for one in found):
            raise TypeError
        return tuple(operator.index(one) for one in found)
    except TypeError:
        raise TypeError(f"{argument}={given!r}: pass a tuple with an int for each dimension of the tensor.") from None


def refuse_unfit_out(out: torch.Tensor | None, dtype: torch.dtype, size: Ints) -> None:
    """Raise ``TypeError`` or ``ValueError`` if a box cannot be read into ``out``."""
    if out is None:
        return
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out={out!r} is a {type(out).__name__}. Pass a tensor, or leave it out.")
    if is_dtensor(out):
        raise TypeError(
            "out= is a DTensor. Pass its local tensor, out.to_local(), with start= and size= of the part that it holds."
        )
    if out.is_meta or (out.is_cpu and type(out) in _PLAIN and not _has_memory(out)):
        raise ValueError(
            "out has no memory (it is on the meta device, or its storage was resized). Pass another tensor."
        )
    if tuple(out.shape) != tuple(size) or out.dtype != dtype:
        raise ValueError(
            f"out has the shape {tuple(out.shape)} and the dtype {out.dtype}; the part that is read has "
            f"{tuple(size)} ({math.prod(size)} elements) and {dtype}."
        )


def can_read_into(out: torch.Tensor) -> bool:
    """Whether bytes of a pool can be read straight into the memory of this tensor: it lies on the CPU, is contiguous,
    and is no subclass, no lazy view and no inference tensor."""
    is_plain = type(out) in _PLAIN and out.is_cpu and out.is_contiguous()
    return is_plain and not (out.is_conj() or out.is_neg() or out.is_inference())


def _has_memory(out: torch.Tensor) -> bool:
    """Whether the storage of a tensor is as large as the tensor needs. (If not, torch writes beyond it.)"""
    if not out.numel():
        return True
    last = out.storage_offset() + sum((n - 1) * stride for n, stride in zip(out.shape, out.stride(), strict=True))
    return out.untyped_storage().nbytes() >= (last + 1) * out.element_size()
