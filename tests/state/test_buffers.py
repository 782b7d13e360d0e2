"""Copies of the buffers, which are made right after each update."""

from __future__ import annotations

import torch
from torch import nn

from lightck.state import buffers
from lightck.state.buffers import BufferCopies
from lightck.state.inventory import ModelView


def test_a_buffer_with_a_call_of_its_own_is_copied_once_for_each_update(monkeypatch):
    """A buffer with gaps in its memory, which no call for all buffers can copy; nor can it copy one on a device."""
    model = nn.Module()
    model.register_buffer("with_gaps", torch.arange(8.0)[::2])
    copies, view, clone, sources = BufferCopies(), ModelView(model), buffers._clone, []

    def counted(tensor: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        sources.append(tensor)
        return clone(tensor, last)

    monkeypatch.setattr(buffers, "_clone", counted)
    for update in range(1, 4):
        model.with_gaps.add_(1)
        (taken,) = copies.take(view)
        assert torch.equal(taken.copy, model.with_gaps)
        assert len(sources) == update
