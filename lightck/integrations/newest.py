"""The newest checkpoint of a pool, opened without reading its tensors, if that is possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightck
from lightck.errors import FormatError, NoCheckpointError, PoolNotFoundError, UnsupportedError
from lightck.session.fetch_before_attach import fetch_newest, is_empty_directory


def newest(path: str, step: int | None = None) -> lightck.Checkpoint:
    """Return the newest checkpoint, or that of ``step``. Its tensors are not read, unless the pool has gradient
    records."""
    try:
        return lightck.recover(path, step=step, lazy=True)
    except (UnsupportedError, FormatError):  # gradient records, in a group and in a single pool
        return lightck.recover(path, step=step)


def newest_of_training(path: str, *, resume: bool, options: Mapping[str, Any]) -> lightck.Checkpoint | None:
    """Return the checkpoint from which ``attach`` will continue; None if there is none. If a tier of ``tiers=`` holds a
    newer one than the pool, the pool is first made anew from it, as ``attach`` does. ``options``: keywords of
    ``attach``. Raises as ``recover`` and ``attach`` do."""
    if resume:
        known = {name: options[name] for name in ("backend", "group", "timeout") if name in options}
        fetch_newest(path, options.get("tiers"), **known)
    if is_empty_directory(path):
        return None
    try:
        return newest(path)
    except (PoolNotFoundError, NoCheckpointError):
        return None
