"""The newest checkpoint of a pool, for those who read only the small state of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import lightck
from lightck.errors import FormatError, NoCheckpointError, PoolNotFoundError, UnsupportedError
from lightck.ranks.copy_file import copies_in
from lightck.ranks.directory import pools_in
from lightck.session.fetch_before_attach import fetch_newest


def newest(path: str, step: int | None = None) -> lightck.Checkpoint:
    """Return the newest checkpoint, or that of ``step``. Its tensors are not read, unless the pool has gradient
    records."""
    try:
        return lightck.recover(path, step=step, lazy=True)
    except (UnsupportedError, FormatError):
        return lightck.recover(path, step=step)


def newest_of_training(path: str, *, resume: bool, options: Mapping[str, Any]) -> lightck.Checkpoint | None:
    """Return the checkpoint from which ``attach`` will continue; None if there is none. If a tier of ``tiers=`` holds a
    newer one than the pool, the pool is first made anew from it, as ``attach`` does. ``options``: keywords of
    ``attach``. Raises as ``recover`` and ``attach`` do."""
    if resume:
        known = {name: options[name] for name in ("backend", "group", "timeout") if name in options}
        fetch_newest(path, options.get("tiers"), **known)
    if os.path.isdir(path) and not pools_in(path) and not copies_in(path):
        return None  # the directory of a group that has begun nothing yet
    try:
        return newest(path)
    except (PoolNotFoundError, NoCheckpointError):
        return None
