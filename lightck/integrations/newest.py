"""The newest checkpoint of a pool, opened for a look at its values."""

from __future__ import annotations

import lightck
from lightck.errors import FormatError, UnsupportedError


def newest(path: str, step: int | None = None) -> lightck.Checkpoint:
    """Return the newest checkpoint, or that of ``step``. Its tensors are not read, unless the pool has gradient
    records."""
    try:
        return lightck.recover(path, step=step, lazy=True)
    except (UnsupportedError, FormatError):
        return lightck.recover(path, step=step)
