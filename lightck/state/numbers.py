"""Whole numbers that modules keep as plain attributes and change at each step, and that no checkpoint restores.

The pointer of a queue or a counter are examples: a resumed module has the value that it was built with. A walk through
all modules finds the numbers that change; because it takes time, it happens at the first checkpoints and then more and
more rarely. The values of the numbers that change are part of each checkpoint. A resume compares them when the model's
first training forward begins; a loop that sets such numbers itself has set them by then. Numbers that change only now
and then (the longest input so far) are left out. Floats, such as a temperature, are left out too: a float that matters
changes the gradients of the first update.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightck.errors import listed

log = logging.getLogger("lightck")
_FIRST_CHECKPOINTS = 3
"""All modules are walked through at this many first checkpoints, and later at each checkpoint whose number is a power
of two."""
_INT64_LIMIT = 2**63


class ModuleNumbers:
    """The numbers of one session's model. Names that begin with an underscore are private to modules and left out
    (torchmetrics keeps counters in such attributes)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._n_checkpoints = self._n_samples = 0
        self._last = {name: home[key] for name, home, key in _numbers(model)}
        self._changes: dict[str, int] = {}
        """Name -> at how many samples the number differed from the sample before. Samples are counted from the first
        one at which any number differed."""
        self._homes: dict[str, tuple[dict[str, Any], str]] = {}

    def now(self) -> dict[str, int]:
        """Return the values of the numbers that change, by ``module.attribute``. To be called at each checkpoint."""
        self._n_checkpoints += 1
        n = self._n_checkpoints
        if n <= _FIRST_CHECKPOINTS or n & (n - 1) == 0:
            self._sample()
        often = [name for name, count in self._changes.items() if 2 * count > self._n_samples]
        found = ((name, *self._homes[name]) for name in often)
        return {name: home[key] for name, home, key in found if _is_number(home.get(key))}

    def _sample(self) -> None:
        self._n_samples += bool(self._changes)
        for name, home, key in _numbers(self._model):
            if self._last.get(name, home[key]) != home[key]:
                self._n_samples += not self._changes  # the first change: counting begins with this sample
                self._changes[name] = self._changes.get(name, 0) + 1
                self._homes[name] = home, key
            self._last[name] = home[key]

    def compare(self, saved: Mapping[str, int], step: int) -> None:
        """Warn about numbers that differ from those of the checkpoint of ``step``. To be called before the first
        training forward of a resume."""
        now = {name: home[key] for name, home, key in _numbers(self._model) if name in saved}
        other = [f"{name} is {value} and was {saved[name]}" for name, value in now.items() if value != saved[name]]
        if other:
            log.warning(
                "lightck: The numbers that modules keep as plain attributes are not restored, and at the first "
                "training forward after the resume some are not what they were at step %d: %s. If the "
                "training depends on one, make it a buffer (register_buffer), or set it from session.step. To "
                "exclude one from this check, begin its name with an underscore",
                step,
                listed(other),
            )


def _numbers(model: nn.Module) -> Iterator[tuple[str, dict[str, object], str]]:
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if _is_number(value) and not key.startswith("_"):
                yield f"{prefix}.{key}" if prefix else key, vars(module), key


def _is_number(value: object) -> bool:
    return type(value) is int and -_INT64_LIMIT <= value < _INT64_LIMIT
