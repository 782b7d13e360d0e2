"""``trainer_state.json`` of a ``Trainer`` of transformers, as a checkpoint holds it.

The log history grows at each step, so each of its entries is encoded once.

Failure case: a value that JSON does not know is saved as the number or list that it holds (tensors, values of numpy),
and else as its text.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from transformers.trainer_callback import TrainerState


class EncodedState:
    """A ``TrainerState`` as JSON."""

    def __init__(self) -> None:
        self._encoded: list[str] = []
        """The entries of the log history as JSON, each encoded once."""
        self._last: object = None
        """The entry that was encoded last."""
        self._loaded: tuple[int, int, bytes] | None = None
        """(step, number of entries of the log, bytes that were loaded). While step and number are as at the load, these
        bytes are saved again, because the Trainer has meanwhile set max_steps anew."""

    def load(self, step: int, n_entries: int, encoded: bytes) -> None:
        """Remember the bytes from which the training goes on."""
        self._loaded = step, n_entries, encoded

    def of(self, state: TrainerState) -> bytes:
        """Return ``trainer_state.json``, as the Trainer would write it."""
        history = state.log_history
        if self._loaded is not None and self._loaded[:2] == (state.global_step, len(history)):
            return self._loaded[2]
        if len(history) < len(self._encoded) or (self._encoded and history[len(self._encoded) - 1] is not self._last):
            self._encoded.clear()
        for entry in history[len(self._encoded) :]:
            self._encoded.append(json.dumps(entry, default=_plain))
            self._last = entry
        fields = {name: getattr(state, name) for name in state.__dataclass_fields__ if name != "log_history"}
        rest = json.dumps(fields, default=_plain)
        return f'{rest[:-1]}, "log_history": [{", ".join(self._encoded)}]}}'.encode()


def _plain(value: object) -> object:
    """Return a value that JSON knows in place of one that it does not know."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.tolist()
    return repr(value)
