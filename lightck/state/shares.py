"""Which rows of its tensors this rank writes, if ranks of a host divide tensors that all of them hold.

A parameter that is divided has a ``Cut``. If it is a DTensor, its local tensor is divided. Optimizer state of the
parameter's local shape is divided in the same way. Buffers, other state and tensors of objects in ``state=`` may differ
between ranks, and each rank writes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightck.pool.format.boxes import Ints
from lightck.pool.format.layout import Entry, contiguous_stride, entry_of_share, is_dense
from lightck.pool.format.shares import Cut, Share, dim_to_divide
from lightck.state.inventory import Live, param_of


class Shares:
    """The shares of one rank."""

    def __init__(self, cuts: Mapping[str, Cut] | None = None, rank: int = 0) -> None:
        """``cuts``: name of each parameter that this rank divides with others -> its cut."""
        self.cuts = dict(cuts or {})
        self.rank = rank
        self.written_whole: set[str] = set()
        """Names of tensors of which this rank writes all rows, because its tensor differs from that of another rank, or
        because another rank may not have it."""
        self._state: set[str] = set()
        """Names of the optimizer state of divided parameters that this rank has had so far."""

    def assign(self, lives: Iterable[Live]) -> None:
        """Set ``Live.share`` of each of these tensors that is divided. (Once this rank has had optimizer state, it
        writes all rows of state that appears later, because other ranks may have no state for that parameter.)"""
        lives = list(lives) if self.cuts else []
        state = {
            live.name
            for live in lives
            if live.role == "optimizer" and self._cut(live.alias or live.name, live.role, tuple(live.tensor.shape))
        }
        if self._state:
            self.written_whole |= state - self._state
        self._state |= state
        for live in lives:
            shape, stride = tuple(live.tensor.shape), tuple(live.tensor.stride())
            live.share = self._share(live.alias or live.name, live.role, shape, stride)

    def applied_to(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return these entries of held tensors, by name. For a tensor that is divided, the result has the entry of what
        this rank writes."""
        found = dict(entries)
        for name, entry in entries.items() if self.cuts else ():
            if entry.share is None:
                share = self._share(entry.alias or name, entry.role, entry.shape, entry.stride)
                found[name] = entry if share is None else entry_of_share(entry, share)
        return found

    def applied_to_copies(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return what ``applied_to`` does, for entries of tensors that a restore reads for this rank. The rows need not
        be one run of the memory of a live tensor. If their strides leave gaps, they get contiguous strides."""
        found = dict(entries)
        for name, entry in entries.items():
            cut = self._cut(entry.alias or name, entry.role, entry.shape)
            if cut is not None:
                rows = entry_of_share(entry, Share(cut, cut.ranks.index(self.rank)))
                strides_fit = is_dense(rows.shape, rows.stride)
                found[name] = rows if strides_fit else rows._replace(stride=contiguous_stride(rows.shape))
        return found

    def _cut(self, name: str, role: str, shape: Ints) -> Cut | None:
        if role not in ("param", "optimizer"):
            return None
        cut = self.cuts.get(name if role == "param" else f"model/{param_of(name)}")
        return None if cut is None or cut.shape != shape else cut

    def _share(self, name: str, role: str, shape: Ints, stride: Ints) -> Share | None:
        """Return what this rank writes of a tensor; None: all of it. ``name``: of the tensor that has the bytes. If the
        rows are not one run of memory, because the strides have changed, the rank writes the whole tensor."""
        cut = self._cut(name, role, shape)
        if cut is None:
            return None
        is_one_run = is_dense(shape, stride) and dim_to_divide(shape, stride) == cut.dim
        share = Share(cut, cut.ranks.index(self.rank), name in self.written_whole or not is_one_run)
        # A whole tensor in which the rank has no rows of its own is stored like one that is not divided.
        return None if share.is_whole and not share.rows[1] else share
