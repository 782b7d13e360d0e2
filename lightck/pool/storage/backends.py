"""Which backend a path gets: the one that claims what lies there; a new pool is a PMDK pool on persistent memory where
PMDK is installed, else a plain file. ``$LIGHTCK_BACKEND`` names another one for new pools that are files.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lightck.errors import PoolError, PoolPathError
from lightck.pool.storage import pmemobj
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.devdax import DevdaxBackend
from lightck.pool.storage.file import FileBackend
from lightck.pool.storage.pmdk import PmdkBackend

DEVDAX = DevdaxBackend()
BACKENDS: dict[str, Backend] = {"devdax": DEVDAX, "file": FileBackend(), "pmdk": PmdkBackend()}
"""In the order in which they are asked: no file is looked for on a device."""
BACKEND_VARIABLE = "LIGHTCK_BACKEND"


def backend_for(path: str, name: str = "auto") -> Backend:
    """The backend for a pool path. ``name`` is ``"auto"`` or a backend's name."""
    if name != "auto":
        return _named(name, f"backend={name!r}")
    return next((backend for backend in BACKENDS.values() if backend.claims(path)), None) or _for_new(path)


def _for_new(path: str) -> Backend:
    wanted = os.environ.get(BACKEND_VARIABLE) or "auto"
    if wanted != "auto":
        return _named(wanted, f"{BACKEND_VARIABLE}={wanted!r}")
    try:
        is_pm = BACKENDS["file"].probe(path).is_persistent_memory
    except PoolError:  # there is no folder to make a pool in: said where one is made
        is_pm = False
    return BACKENDS["pmdk" if is_pm and pmemobj.is_available() else "file"]


def _named(name: str, said: str) -> Backend:
    if name not in BACKENDS:
        known = ", ".join(["'auto'", *map(repr, BACKENDS)])
        raise ValueError(f"{said} is not known. Choose one of {known}.")
    return BACKENDS[name]


def is_pool(path: str) -> bool:
    """Whether a pool lies there, by its signature; what cannot be opened is none. Raises ``PoolIOError`` as
    ``ask_file`` does."""
    absolute = os.path.abspath(path)  # a device is known by it
    try:
        mode = os.lstat(absolute).st_mode
    except OSError:
        return False
    is_pool_like = stat.S_ISREG(mode) or stat.S_ISCHR(mode)
    return is_pool_like and any(backend.recognises(absolute) for backend in BACKENDS.values())


def readable_path(path: str | os.PathLike[str]) -> str:
    """The path of a pool that is only read: links are resolved, once, to the file that is opened then."""
    return os.path.realpath(pool_path(path))


def pool_path(path: str | os.PathLike[str]) -> str:
    """The path as one absolute string. The last component is not resolved: a link there is refused on open."""
    if not isinstance(path, (str, os.PathLike)) or isinstance(text := os.fspath(path), bytes):
        kind = "None" if path is None else f"of type {type(path).__name__}"
        raise TypeError(f"The pool's path is {kind}. Pass a str or a path object that names a file, as 'run.pool'.")
    if not text:
        raise PoolPathError("The pool's path is empty. Name a file, as 'run.pool'.")
    if text.startswith("~") and not os.path.lexists(text.split(os.sep)[0]):
        raise PoolPathError(
            f"The path {text!r} begins with ~, which the shell expands and Python does not. Use "
            "os.path.expanduser(path)."
        )
    if "\0" in text:
        raise PoolPathError(f"The path {text!r} has a NUL in it. No name of a file can have one. Choose another path.")
    absolute = Path(os.path.abspath(text))
    return str(Path(os.path.realpath(absolute.parent)) / absolute.name)
