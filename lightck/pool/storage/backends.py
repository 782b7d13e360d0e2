"""Choose the backend of a pool path. The backend that claims an existing path is chosen.

A new pool is a PMDK pool if the path is on persistent memory and PMDK is installed, else a plain file.
``$LIGHTCK_BACKEND`` overrides this choice for new pools.
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
"""In the order in which ``claims`` is called. Devices come first, because ``claims`` of the other backends reads the
file, and a device cannot be read."""
BACKEND_VARIABLE = "LIGHTCK_BACKEND"


def backend_for(path: str, name: str = "auto") -> Backend:
    """Return the backend for a pool path. ``name``: ``"auto"`` or a backend's name. Raises ``ValueError`` for another
    name."""
    if name != "auto":
        return _named(name, f"backend={name!r}")
    return next((backend for backend in BACKENDS.values() if backend.claims(path)), None) or _for_new(path)


def _for_new(path: str) -> Backend:
    wanted = os.environ.get(BACKEND_VARIABLE) or "auto"
    if wanted != "auto":
        return _named(wanted, f"{BACKEND_VARIABLE}={wanted!r}")
    try:
        is_pm = BACKENDS["file"].probe(path).is_persistent_memory
    except PoolError:  # for example a missing folder: ``create`` raises the error
        is_pm = False
    return BACKENDS["pmdk" if is_pm and pmemobj.is_available() else "file"]


def _named(name: str, setting: str) -> Backend:
    if name not in BACKENDS:
        known = ", ".join(["'auto'", *map(repr, BACKENDS)])
        raise ValueError(f"{setting} is not known. Choose one of {known}.")
    return BACKENDS[name]


def is_pool(path: str) -> bool:
    """Whether the path holds a pool, according to its signature. False if the path cannot be opened. Raises
    ``PoolIOError`` for errors after which the answer is unknown (out of memory, no descriptors)."""
    absolute = os.path.abspath(path)  # devices are recognised by their absolute path
    try:
        mode = os.lstat(absolute).st_mode
    except OSError:
        return False
    is_pool_like = stat.S_ISREG(mode) or stat.S_ISCHR(mode)
    return is_pool_like and any(backend.recognises(absolute) for backend in BACKENDS.values())


def readable_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path with all symbolic links resolved, for a pool that is only read. Raises as
    ``pool_path``."""
    return os.path.realpath(pool_path(path))


def pool_path(path: str | os.PathLike[str]) -> str:
    """Return an absolute path in which the folder's symbolic links are resolved. The last component is not resolved: if
    it is a link, ``Backend.open`` refuses the path.

    Raises ``TypeError`` or ``PoolPathError`` for what cannot be a path."""
    if not isinstance(path, (str, os.PathLike)) or isinstance(text := os.fspath(path), bytes):
        kind = "None" if path is None else f"of type {type(path).__name__}"
        raise TypeError(
            f"The pool's path is {kind}. Pass a str or a path object that names a file, such as 'run.pool'."
        )
    if not text:
        raise PoolPathError("The pool's path is empty. Name a file, such as 'run.pool'.")
    if text.startswith("~") and not os.path.lexists(text.split(os.sep)[0]):
        raise PoolPathError(
            f"The path {text!r} begins with ~, which the shell expands and Python does not. Use "
            "os.path.expanduser(path)."
        )
    if "\0" in text:
        raise PoolPathError(f"The path {text!r} contains a NUL. No file name can contain one. Choose another path.")
    absolute = Path(os.path.abspath(text))
    return str(Path(os.path.realpath(absolute.parent)) / absolute.name)
