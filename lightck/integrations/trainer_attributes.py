"""Attributes that a Trainer of a library, or of the user, changes while it trains: sums of metrics, counters, averages.

The Trainer of transformers keeps what it knows in ``TrainerState``. A class that inherits from it often adds attributes
of its own: TRL's trainers collect metrics from one log to the next, and a ``compute_loss`` may depend on an average.

Data flow: ``watch`` encodes each plain attribute before the training. ``changed`` encodes them again for a checkpoint,
and returns those that differ, or that an earlier run changed. ``restore`` sets them.

Invariant: what the training has not changed is not saved, so a restart may give such attributes other values.

Failure cases: a changed attribute that cannot be saved (a tensor, or more than ``MOST`` characters of JSON) is named in
one warning. Attributes with long values that were there before the training, and changes inside other objects, are not
seen: they belong in ``state=``.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import deque
from typing import Any

import torch
import transformers

from lightck.integrations.attributes import TensorMark, assigned_in, filled

log = logging.getLogger("lightck")
MOST = 1 << 16
"""Number of characters up to which an attribute is saved. It is encoded at each step."""


class TrainerAttributes:
    """The plain attributes of one Trainer that its own code, and not that of transformers, assigns."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self._before: dict[str, str | None] = {}
        """The encoded attributes before the training; None: too long."""
        self._tensors: dict[str, TensorMark] = {}
        """Identity and version of the attributes that are tensors."""
        self._restored: set[str] = set()
        """Attributes that an earlier run changed."""
        self._warned: set[str] = set()
        """Attributes that a warning has named."""

    def watch(self) -> None:
        """Remember what the attributes are before the training."""
        self._restored.clear()
        self._before = {name: text for name, text in self._encoded() if len(text) <= MOST}
        self._before |= {name: None for name, text in self._encoded() if len(text) > MOST}
        self._tensors = {name: TensorMark(value) for name, value in self._own() if isinstance(value, torch.Tensor)}

    def changed(self) -> dict[str, str]:
        """Return what the training has changed: name -> JSON."""
        found: dict[str, str] = {}
        skipped = {name for name, text in self._before.items() if text is None}
        for name, text in self._encoded(skipped):
            if name not in self._restored and self._before.get(name) == text:
                continue
            if len(text) > MOST:
                self._warn(name, f"has more than {MOST} characters")
            else:
                found[name] = text
        for name, value in self._own():
            if isinstance(value, torch.Tensor) and self._tensors.get(name) != TensorMark(value):
                self._warn(name, "is a tensor")
        return found

    def restore(self, saved: dict[str, str]) -> None:
        """Set the attributes that earlier runs changed."""
        for name, text in saved.items():
            setattr(self._trainer, name, filled(getattr(self._trainer, name, None), json.loads(text)))
        self._restored = set(saved)

    def _own(self) -> list[tuple[str, Any]]:
        known = assigned_by_transformers()
        return [(name, value) for name, value in vars(self._trainer).items() if name not in known]

    def _encoded(self, skipped: set[str] | frozenset[str] = frozenset()) -> list[tuple[str, str]]:
        own = [(name, value) for name, value in self._own() if name not in skipped and _is_plain(value)]
        return [(name, json.dumps(value, default=list)) for name, value in own]

    def _warn(self, name: str, reason: str) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        log.warning(
            "lightck: the %s changes its attribute %r while it trains. It %s, so it is not saved, and a resume would "
            "not know it. Put it into an object with state_dict() and load_state_dict(), and pass that to attach: "
            "state={...}",
            type(self._trainer).__name__,
            name,
            reason,
        )


@functools.cache
def assigned_by_transformers() -> frozenset[str]:
    """Return the names of all attributes that the Trainer's own code assigns. What matters of these is saved elsewhere,
    or set anew by each ``train()``."""
    return frozenset(assigned_in(transformers.Trainer))


def _is_plain(value: object) -> bool:
    """Whether the value survives JSON. Its deques come back as lists; ``filled`` keeps those that are the present value
    itself, or lie in its dicts."""
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(one) for key, one in value.items())
    if isinstance(value, (list, deque)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (int, float, str, bool)
