"""Whole numbers that modules keep as plain attributes and change at each step, and that no checkpoint restores.

Examples are a counter, or the pointer of a queue. After a resume such a number has the value with which its module was
built. A *sample*, which is a walk through all modules, finds the numbers that change. A sample takes time, so samples
are taken at the first checkpoints and then more and more rarely. The values of the numbers that change are part of each
checkpoint. A resume compares these values with the live ones when the model's first training forward begins, because a
loop that sets such numbers itself has set them by then. Numbers that change only sometimes (the longest input so far)
are left out. Floats (a temperature) are left out as well: a float that matters changes the gradients of the first
update, which a resume compares anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightck.errors import listed

log = logging.getLogger("lightck")
_FIRST_CHECKPOINTS = 3
"""A sample is taken at each of the first ``_FIRST_CHECKPOINTS`` checkpoints of a session, and later at each checkpoint
whose number, counted from 1, is a power of two."""
_INT64_LIMIT = 2**63
_RESTORED = "_lightck_restores_attributes"
"""Attribute that an integration sets to True if it restores the attributes of this module."""


class ModuleNumbers:
    """The numbers of one session's model. Attributes whose names begin with an underscore are left out: they are
    private to their module, as the counters of torchmetrics are."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._n_checkpoints = 0
        self._n_samples = 0
        """How many samples were taken since, and including, the first sample that found a changed number."""
        self._last = {name: attributes[key] for name, attributes, key in _numbers(model)}
        """Name -> value at the last sample. The constructor takes the first sample."""
        self._changes: dict[str, int] = {}
        """Name -> how many samples found the number changed since the sample before."""
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        """Name -> the dict and the key of each number in ``_changes``."""

    def values_at_checkpoint(self) -> dict[str, int]:
        """Take a sample if one is due, and return the values of the numbers that changed at more than half of the
        samples: ``module.attribute`` -> value. To be called at each checkpoint, which this counts."""
        self._n_checkpoints += 1
        n = self._n_checkpoints
        if n <= _FIRST_CHECKPOINTS or n & (n - 1) == 0:
            self._sample()
        if not self._changes:
            return {}
        often = [name for name, count in self._changes.items() if 2 * count > self._n_samples]
        found = ((name, *self._places[name]) for name in often)
        return {name: attributes[key] for name, attributes, key in found if _is_number(attributes.get(key))}

    def _sample(self) -> None:
        self._n_samples += bool(self._changes)
        for name, attributes, key in _numbers(self._model):
            if self._last.get(name, attributes[key]) != attributes[key]:
                self._n_samples += not self._changes  # the first change: counting begins with this sample
                self._changes[name] = self._changes.get(name, 0) + 1
                self._places[name] = attributes, key
            self._last[name] = attributes[key]

    def compare(self, saved: Mapping[str, int], step: int) -> None:
        """Warn about numbers that differ from those of the checkpoint of ``step``. To be called before the first
        training forward after a resume. ``saved``: name -> value."""
        now = {name: attributes[key] for name, attributes, key in _numbers(self._model) if name in saved}
        other = [f"{name} is {value} and was {saved[name]}" for name, value in now.items() if value != saved[name]]
        if other:
            log.warning(
                "lightck: The numbers that modules keep as plain attributes are not restored, and at the first "
                "training forward after the resume some of them differ from step %d: %s. If the training depends on "
                "such a number, make it a buffer (register_buffer), or set it from session.step. To exclude a number "
                "from this check, begin its name with an underscore",
                step,
                listed(other),
            )


def _numbers(model: nn.Module) -> Iterator[tuple[str, dict[str, object], str]]:
    """Yield (``module.attribute``, dict, key) of each whole number that is a public attribute of a module."""
    for prefix, module in model.named_modules():
        if vars(module).get(_RESTORED):
            continue
        for key, value in vars(module).items():
            if _is_number(value) and not key.startswith("_"):
                yield f"{prefix}.{key}" if prefix else key, vars(module), key


def _is_number(value: object) -> bool:
    return type(value) is int and -_INT64_LIMIT <= value < _INT64_LIMIT
