"""What is read right after an update, because the next step may change it before the checkpoint closes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from lightck.state import rng
from lightck.state.buffers import BufferCopy
from lightck.state.inventory import Live, in_plain_memory


@dataclass(slots=True)
class Provisional:
    """The state that was read right after an update. ``buffers``: their copies. ``loader_states``: name -> packed state
    of each loader in ``state=`` (session loaders are not among them), with the large tensors of these states in
    ``large``. ``extra``: name -> packed extra state of each module, with the large tensors of it in ``extra_large``."""

    rng: rng.RngState
    buffers: list[BufferCopy] = field(default_factory=list)
    loader_states: dict[str, bytes] = field(default_factory=dict)
    large: list[Live] = field(default_factory=list)
    extra: dict[str, bytes] = field(default_factory=dict)
    extra_large: list[Live] = field(default_factory=list)
    has_next_begun: bool = False
    """Whether the forward of the next step has begun."""

    def copies_of(self, lives: Iterable[Live]) -> dict[str, torch.Tensor]:
        """Return name -> copy of each of these buffers, without those that were None. ``lives``: buffers of the model
        as it is now. One that was added after the update has no copy, and is returned itself."""
        copies = {(id(one.owner), one.key): one.copy for one in self.buffers}
        found = ((live.name, copies.get((id(live.owner), live.key), live.tensor)) for live in lives)
        return {name: copy for name, copy in found if copy is not None}


def copy_tensors(lives: list[Live]) -> None:
    """Put a copy in place of each tensor, so that nobody changes it any more."""
    for live in lives:
        live.tensor = in_plain_memory(live.tensor).clone()
