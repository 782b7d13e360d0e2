"""Which backend a path gets: the one whose signature an existing pool has, else a plain file."""

from __future__ import annotations

import os
from pathlib import Path

from lightck.pool.backend import Backend
from lightck.pool.file import FileBackend

BACKENDS: dict[str, Backend] = {"file": FileBackend()}


def backend_for(path: str, name: str = "auto") -> Backend:
    """The backend for a pool path. ``name`` is ``"auto"`` or a backend's name."""
    if name == "auto":
        return next((b for b in BACKENDS.values() if b.recognises(path)), BACKENDS["file"])
    if name not in BACKENDS:
        known = ", ".join(["'auto'", *map(repr, BACKENDS)])
        raise ValueError(f"backend={name!r} is not known. Choose one of {known}.")
    return BACKENDS[name]


def pool_path(path: str | os.PathLike[str]) -> str:
    """The path as one absolute string. The last component is not resolved: a link there is refused on open."""
    text = os.fspath(path)
    if isinstance(text, bytes):
        raise TypeError("pool_path is a str or a path object, not bytes.")
    absolute = Path(os.path.abspath(text))
    return str(Path(os.path.realpath(absolute.parent)) / absolute.name)
