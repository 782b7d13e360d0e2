"""What is read right after an update, because the next step may change it before the checkpoint closes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lightck.state import rng
from lightck.state.inventory import Live, in_plain_memory


@dataclass(slots=True)
class Provisional:
    """The state that was read right after an update. ``buffers``: name -> copy. ``loader_states``: name -> packed state
    of each loader in ``state=`` (session loaders are not among them), with the large tensors of these states in
    ``large``. ``extra``: name -> packed extra state of each module, with the large tensors of it in ``extra_large``."""

    rng: rng.RngState
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    loader_states: dict[str, bytes] = field(default_factory=dict)
    large: list[Live] = field(default_factory=list)
    extra: dict[str, bytes] = field(default_factory=dict)
    extra_large: list[Live] = field(default_factory=list)
    has_next_begun: bool = False
    """Whether the forward of the next step has begun."""


def copy_tensors(lives: list[Live]) -> None:
    """Put a copy in place of each tensor, so that nobody changes it any more."""
    for live in lives:
        live.tensor = in_plain_memory(live.tensor).clone()
