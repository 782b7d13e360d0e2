"""Copies of the persistent buffers as they are between an update and the next forward, in memory that is reused.

The forward of the next step changes buffers. If no event closes the checkpoint before that forward, the next call of
``optimizer.step()`` closes it, and the checkpoint holds these copies. One call of torch copies all buffers, as long as
all of them are dense, lie in host memory, and are the same tensors with the same memory layouts as the last time.
Otherwise each buffer is copied by a call of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightck.state.device_transfers import transfer_of
from lightck.state.inventory import Live, ModelView, in_plain_memory, is_plain
from lightck.state.signatures import MemoryLayouts, all_same
from lightck.state.storable import refuse_unstorable


class BufferCopy(NamedTuple):
    """A copy of the buffer that a module holds in ``owner`` under ``key``; None if it held None. (The name of the
    buffer may change: if another module takes the place of its module, for example.)"""

    owner: object
    key: Any
    copy: torch.Tensor | None


class BufferCopies:
    """The copies of a model's buffers, which are made after each update, into the same memory if it fits."""

    def __init__(self) -> None:
        self._buffers_or_none: list[torch.Tensor | None] = []
        """What ``ModelView.buffers_or_none`` returned when ``_lives`` was made."""
        self._places: object = None
        """``ModelView.buffer_places`` at that time."""
        self._layouts: MemoryLayouts | None = None
        """Memory layouts of the buffers. None if the buffers cannot all be copied by one call."""
        self._lives: list[Live] = []
        self._sources: list[torch.Tensor] = []
        """The buffers, detached; used only with ``_layouts``."""
        self._copies: list[torch.Tensor] = []
        """The copy of each of ``_lives``."""

    @torch.inference_mode(False)  # a copy made in inference mode could not be overwritten outside of it
    def take(self, model: ModelView) -> list[BufferCopy]:
        """Copy every persistent buffer. The next call may overwrite the copies. Raises ``StateValueError`` for a buffer
        that cannot be stored."""
        now = model.buffers_or_none()
        if model.buffer_places is not self._places or not self._is_unchanged(now):
            self._rebuild(model, now)  # it makes the copies too
        else:
            torch._foreach_copy_(self._copies, self._sources)
        copies = {id(live.registered): copy for live, copy in zip(self._lives, self._copies, strict=True)}
        places = zip(model.buffer_places, now, strict=True)
        return [BufferCopy(owner, key, copies.get(id(held))) for (owner, key, *_), held in places]

    def _is_unchanged(self, now: list[torch.Tensor | None]) -> bool:
        same = len(now) == len(self._buffers_or_none) and all_same(now, self._buffers_or_none)
        return same and self._layouts is not None and self._layouts.are_unchanged()

    def _rebuild(self, model: ModelView, now: list[torch.Tensor | None]) -> None:
        last = {live.name: copy for live, copy in zip(self._lives, self._copies, strict=True)}
        self._lives, self._buffers_or_none, self._layouts = list(model.buffers()), now, None
        self._places = model.buffer_places
        for live in self._lives:
            refuse_unstorable(live.name, live.tensor)
        self._copies = [_clone(live.tensor, last.get(live.name)) for live in self._lives]
        if self._lives and all(is_plain(live.tensor) and live.tensor.numel() for live in self._lives):
            self._sources = [live.tensor.detach() for live in self._lives]
            self._layouts = MemoryLayouts([live.tensor for live in self._lives])


def _clone(tensor: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of a tensor. ``last``: the previous copy, or None. If its shape, dtype and strides fit, it is
    overwritten, because new memory costs a page fault for every page. The copy of a tensor on a device lies on the same
    device, because a copy to the host would wait for all pending work of the device."""
    source = in_plain_memory(tensor) if transfer_of(tensor) is None else tensor.detach().resolve_conj().resolve_neg()
    if last is not None and (last.shape, last.dtype, last.stride()) == (source.shape, source.dtype, source.stride()):
        return last.copy_(source)
    return source.clone()
