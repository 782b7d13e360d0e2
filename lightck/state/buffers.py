"""Copies of the persistent buffers as they are right after an update, in memory that is used again at the next.

The forward of the next step changes buffers, and where no event comes before it these copies are what its version
holds. While every buffer is the one that it was, all of them are copied by one call.
"""

from __future__ import annotations

import torch

from lightck.state.device_transfers import transfer_of
from lightck.state.inventory import Live, ModelView, is_plain, staged
from lightck.state.signatures import Signatures, all_same
from lightck.state.storable import refuse_unstorable


class BufferCopies:
    """The copies of the last update."""

    def __init__(self) -> None:
        self._found: list[torch.Tensor | None] = []
        self._signatures: Signatures | None = None
        self._lives: list[Live] = []
        self._sources: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    @torch.inference_mode(False)  # the update may be made under it, and the next one not
    def take(self, model: ModelView) -> dict[str, torch.Tensor]:
        """Copy every persistent buffer: name -> copy, which the next call overwrites. Refuses what cannot be stored."""
        found = model.buffers_or_none()
        if not self._is_unchanged(found):
            self._rebuild(model, found)
        if self._signatures is not None:
            torch._foreach_copy_(self._copies, self._sources)
        else:
            self._copies = [_clone(live.tensor, last) for live, last in zip(self._lives, self._copies, strict=True)]
        return {live.name: copy for live, copy in zip(self._lives, self._copies, strict=True)}

    def _is_unchanged(self, found: list[torch.Tensor | None]) -> bool:
        same = len(found) == len(self._found) and all_same(found, self._found)
        return same and self._signatures is not None and self._signatures.are_unchanged()

    def _rebuild(self, model: ModelView, found: list[torch.Tensor | None]) -> None:
        last = {live.name: copy for live, copy in zip(self._lives, self._copies, strict=True)}
        self._lives, self._found, self._signatures = list(model.buffers()), found, None
        for live in self._lives:
            refuse_unstorable(live.name, live.tensor)
        self._copies = [_clone(live.tensor, last.get(live.name)) for live in self._lives]
        if self._lives and all(is_plain(live.tensor) and live.tensor.numel() for live in self._lives):
            self._sources = [live.tensor.detach() for live in self._lives]
            self._signatures = Signatures([live.tensor for live in self._lives])


def _clone(tensor: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    """A copy; into the last one where it fits, since fresh memory costs a fault on every page. One on a device stays
    there: bringing it here would wait for all that the device has to do."""
    source = staged(tensor) if transfer_of(tensor) is None else tensor.detach().resolve_conj().resolve_neg()
    if last is not None and (last.shape, last.dtype, last.stride()) == (source.shape, source.dtype, source.stride()):
        return last.copy_(source)
    return source.clone()
