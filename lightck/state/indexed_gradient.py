"""The indexed form of a dense gradient, in which most elements are zero: the positions and values of the others.

It has the elements whose *bits* are not zero, so a zero with a sign is one of them. Hence the gradient that is made
from its indexed form has the same bits. The form is made from the gradient itself, and not from the indices that a
forward used, so it is right too if a hook or clipping has changed the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightck.state.selection import BITS, is_selectable

INDEX_DTYPE, INDEX_NBYTES = torch.int32, 4
NUMEL_MAX = torch.iinfo(INDEX_DTYPE).max
"""The largest number of elements of a gradient that has an indexed form."""
DENSE_NBYTES_MAX = 4096
"""Gradients of at most this many bytes have no indexed form: to copy one takes no longer than to copy two smaller
tensors."""


class IndexedGradient(NamedTuple):
    """indices: positions in row-major order, ascending, int32. values: of the gradient's dtype. Both have the length of
    the capacity, and zeros after the first ``n_used`` items."""

    indices: torch.Tensor
    values: torch.Tensor
    n_used: int


def capacity(numel: int, item_nbytes: int, most: int) -> int | None:
    """Return for how many elements the indexed form of a gradient has room; None if it would save nothing. ``most``:
    how many elements of the gradient are expected not to be zero, at most."""
    dense = numel * item_nbytes
    if dense <= DENSE_NBYTES_MAX or numel > NUMEL_MAX or most * (INDEX_NBYTES + item_nbytes) >= dense:
        return None
    return most


def indexed(gradient: torch.Tensor, room: int) -> IndexedGradient | None:
    """Return the indexed form of a gradient, in new memory; None if it has more elements than there is room for, or is
    of no dtype that has an indexed form."""
    if not is_selectable(gradient):
        return None
    flat = gradient.detach().reshape(-1)
    bits = flat.view(BITS[flat.dtype])
    count = int(torch.count_nonzero(bits))
    if count > room:
        return None
    positions = torch.nonzero(bits).view(-1)
    indices = torch.zeros(room, dtype=INDEX_DTYPE, device=flat.device)
    values = torch.zeros(room, dtype=flat.dtype, device=flat.device)
    indices[:count] = positions
    values[:count] = flat[positions]
    return IndexedGradient(indices, values, count)


def dense_gradient(form: IndexedGradient, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Return the gradient that has this indexed form. ``strides``: without gaps or overlaps. The positions must be
    valid (``problem_of``)."""
    values = form.values
    flat = torch.zeros(torch.Size(shape).numel(), dtype=values.dtype, device=values.device)
    flat[form.indices[: form.n_used].long()] = values[: form.n_used]
    rows = flat.view(torch.Size(shape))
    if rows.stride() == tuple(strides):
        return rows
    return torch.empty_strided(rows.shape, tuple(strides), dtype=rows.dtype, device=rows.device).copy_(rows)


def problem_of(form: IndexedGradient, numel: int) -> str | None:
    """Return what is wrong with an indexed form that was read from a pool; None if nothing is. ``numel``: number of
    elements of the gradient."""
    indices, values, count = form
    if indices.dtype != INDEX_DTYPE or values.dtype not in BITS or indices.dim() != 1:
        return "its indices or values have a wrong dtype or number of dimensions"
    if indices.shape != values.shape or not 0 <= count <= len(indices):
        return "its indices, its values and its count do not fit each other"
    used = indices[:count]
    if count and not (int(used[0]) >= 0 and int(used[-1]) < numel and bool((used[1:] > used[:-1]).all())):
        return "its indices are not ascending positions of the gradient"
    return None
