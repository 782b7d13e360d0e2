"""Whether an update lies within ``torch.random.fork_rng()``, whose random state is thrown away behind it.

A version that a forward closes holds the random state of right after the update, since the loop's own draws (the next
batch) come behind it. After an update in such a block that is another state than the loop goes on with, and nothing in
the state itself says so. The block is a suspended generator, which holds its function and code: so their counts of
references, which cost nothing to ask, tell whether there is one.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

log = logging.getLogger("lightck")
_function: Any = getattr(torch.random.fork_rng, "__wrapped__", None)
_held: tuple[Any, ...] = (_function, getattr(_function, "__code__", None))


def _references() -> int:
    return sum(map(sys.getrefcount, _held))


class ForkWatch:
    """Made at attach: a block that is open then surrounds the whole training, and does no harm."""

    def __init__(self) -> None:
        self._at_attach = _references()
        self._is_within = False
        self._is_told = False

    def updated(self) -> None:
        self._is_within = _references() > self._at_attach

    def closed_later(self) -> None:
        """By a forward or the next update: the version holds the random state of right after its update. Warns once."""
        if self._is_within and not self._is_told:
            self._is_told = True
            log.warning(
                "lightck: an update was made within torch.random.fork_rng(), and its checkpoint is closed by "
                "the next forward: it holds the random state of the end of the update, which the block threw "
                "away. A resume would draw other random numbers. Put session.end_step() behind the block, or "
                "iterate over session.loader(loader)"
            )
