"""Judges crash images: the true state of each checkpoint, and the state that recovery returns.

Uses nothing of lightck but its public API.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
from torch import nn

import lightck


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a recovery returned. ``generation`` is that of the payload: it names the content."""

    generation: int
    step: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """The error that a recovery raised. ``typed``: one of lightck's own."""

    error: str
    message: str
    typed: bool


Outcome: TypeAlias = "Recovered | Refused"


def recovery(path: str, step: int | None = None) -> Outcome:
    """``lightck.recover`` of the file at ``path``, as a value."""
    try:
        checkpoint = lightck.recover(path, step=step)
        content = digest([dict(checkpoint.model), checkpoint.optimizer, checkpoint.state])
    except Exception as err:
        said = str(err).replace(repr(path), "POOL")  # the same for the same bytes, wherever they lie
        return Refused(type(err).__name__, said, isinstance(err, lightck.LightckError))
    return Recovered(checkpoint.record.payload_generation, checkpoint.step, content)


def truth(model: nn.Module, optimizer: torch.optim.Optimizer, **state: Any) -> bytes:
    """The digest that a recovery of this moment has to have. ``state``: what attach got under that name."""
    return digest([dict(model.state_dict()), optimizer.state_dict(), {n: o.state_dict() for n, o in state.items()}])


def digest(value: Any) -> bytes:
    """Equal for values that are equal in type, dtype, shape and every bit; the order of dicts does not matter."""
    state = blake2b(digest_size=16)
    _feed(state.update, value)
    return state.digest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    update(type(value).__name__.encode() + b"\0")
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().contiguous().reshape(-1)
        update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            update(repr(key).encode() + b"\0")
            _feed(update, value[key])
    elif isinstance(value, (list, tuple)):
        update(struct.pack("<Q", len(value)))
        for item in value:
            _feed(update, item)
    elif isinstance(value, float):
        update(struct.pack("<d", value))
    else:
        update(repr(value).encode() + b"\0")
