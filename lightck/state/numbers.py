"""Whole numbers that modules keep as plain attributes and change at each step: they are in no checkpoint.

The pointer of a queue, a counter: a resumed module has the one that it was built with. Which numbers change is looked
for at the first checkpoints and then ever more seldom, since it means to walk through all modules. The values of those
go into each checkpoint, and a resume compares them when the model's first training forward begins: by then a loop that
sets them itself has set them. (What changes now and then is no such number, as the longest input so far; and one with a
fraction, as a temperature, is in the gradients of the first update, or was kept to be looked at.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightck.errors import listed

log = logging.getLogger("lightck")
_ALWAYS = 3
"""Checkpoints at which all modules are looked through; behind them those whose number is a power of two."""
_LARGEST = 2**63


class ModuleNumbers:
    """Of one session's model. Names with an underscore in front are modules' own business (torchmetrics counts so)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._n_checkpoints = self._n_samples = 0
        self._last = {name: home[key] for name, home, key in _numbers(model)}
        self._changes: dict[str, int] = {}
        """At how many looks a number was another one than at the look before."""
        self._homes: dict[str, tuple[dict[str, Any], str]] = {}

    def now(self) -> dict[str, int]:
        """At a checkpoint: the values of those that change, by ``module.attribute``."""
        self._n_checkpoints += 1
        n = self._n_checkpoints
        if n <= _ALWAYS or n & (n - 1) == 0:
            self._sample()
        often = [name for name, count in self._changes.items() if 2 * count > self._n_samples]
        found = ((name, *self._homes[name]) for name in often)
        return {name: home[key] for name, home, key in found if _is_number(home.get(key))}

    def _sample(self) -> None:
        self._n_samples += bool(self._changes)
        for name, home, key in _numbers(self._model):
            if self._last.get(name, home[key]) != home[key]:
                self._n_samples += not self._changes  # those before the first change say nothing
                self._changes[name] = self._changes.get(name, 0) + 1
                self._homes[name] = home, key
            self._last[name] = home[key]

    def compare(self, saved: Mapping[str, int], step: int) -> None:
        """Before the first training forward of a resume from ``step``."""
        now = {name: home[key] for name, home, key in _numbers(self._model) if name in saved}
        other = [f"{name} is {value} and was {saved[name]}" for name, value in now.items() if value != saved[name]]
        if other:
            log.warning(
                "lightck: Numbers that modules keep as plain attributes are in no checkpoint, and at the first "
                "training forward after the resume they are not what they were at step %d: %s. Where the "
                "training depends on one, make it a buffer (register_buffer), or set it from session.step; a "
                "name with an underscore in front is passed over",
                step,
                listed(other),
            )


def _numbers(model: nn.Module) -> Iterator[tuple[str, dict[str, object], str]]:
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if _is_number(value) and not key.startswith("_"):
                yield f"{prefix}.{key}" if prefix else key, vars(module), key


def _is_number(value: object) -> bool:
    return type(value) is int and -_LARGEST <= value < _LARGEST
