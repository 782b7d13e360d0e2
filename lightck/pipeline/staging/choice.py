"""Which way tensors leave their device where the user named none: each that can be gone carries some versions, and the
one that held the training up least stays."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from lightck.pipeline.staging.kinds import Kind
from lightck.pipeline.staging.methods import TransferMethod

log = logging.getLogger("lightck")

WARM_UP = 2
"""Versions before anything is measured: the first steps of a training are unlike the others."""
TRIALS = 3
"""Versions by each way. The first is not counted (memory is pinned, registered); of the others the least stall."""
_ALIKE, _ALIKE_SECONDS = 1.1, 0.0002
"""Ways that differ by less are alike, and the one that comes first is taken: it needs less."""


class Choice:
    """Among these, in the order of what they need, least first; ``is_made``: the first of them that can be gone. One of
    them, ``Host()``, always can."""

    def __init__(self, methods: Sequence[TransferMethod], *, is_made: bool = False) -> None:
        self._methods = list(methods)
        self._found: dict[Kind, float] = {}
        """The least stall of a version, in seconds."""
        self._at = 0
        self._over = -WARM_UP
        """Versions by the way whose turn it is."""
        self._before: float | None = None
        self._left: list[TransferMethod] = []
        self._is_made = is_made or len(self._methods) == 1

    @property
    def method(self) -> TransferMethod:
        """Whose turn it is."""
        return self._methods[self._at]

    @property
    def is_made(self) -> bool:
        """Versions go this way from here on."""
        return self._is_made

    def take_left(self) -> list[TransferMethod]:
        """Those that are not gone any more, told once after each decision."""
        left, self._left = self._left, []
        return left

    def next(self, stall_seconds: float) -> TransferMethod:
        """The way of the version that begins now; ``stall_seconds``: of the session so far."""
        if not self._is_made:
            before, self._before = self._before, stall_seconds
            if before is not None:
                self._note(stall_seconds - before)
        return self.method

    def unavailable(self, why: str) -> TransferMethod:
        """The way whose turn it is cannot be gone: another one."""
        log.info("lightck: tensors do not leave their device by %s: %s", self.method.kind, why)
        self._found.pop(self.method.kind, None)
        del self._methods[self._at]
        self._over = min(self._over, 0)
        if self._is_made or self._at == len(self._methods) or len(self._methods) == 1:
            self._decide()
        return self.method

    def forget(self) -> None:
        """All give back what they hold. Nothing is under way."""
        for method in self._methods:
            method.forget()

    def _note(self, seconds: float) -> None:
        """The last version is over, and held the training up for so long."""
        self._over += 1
        if self._over >= 2:
            self._found[self.method.kind] = min(seconds, self._found.get(self.method.kind, seconds))
        if self._over == TRIALS:
            self._at, self._over = self._at + 1, 0
            if self._at == len(self._methods):
                self._decide()

    def _decide(self) -> None:
        best = min(self._found.values(), default=math.inf)
        alike = [n for n, method in enumerate(self._methods) if self._cost(method) <= _ALIKE * best + _ALIKE_SECONDS]
        self._at, self._is_made = alike[0], True
        self._left = [method for method in self._methods if method is not self.method]
        if len(self._methods) > 1:
            costs = ", ".join(f"{kind} {1e3 * seconds:.2f} ms" for kind, seconds in self._found.items())
            log.info(
                "lightck: tensors leave their device by %s from here on (a version held the training up: %s)",
                self.method.kind,
                costs,
            )

    def _cost(self, method: TransferMethod) -> float:
        return self._found.get(method.kind, math.inf)
