"""PMDK's libpmemobj as Python objects, through the native library: handles with an explicit ``close``, and its errors.

It is looked for at run time: ``$LIGHTCK_LIBPMEMOBJ``, else ``libpmemobj.so.1``. It is called to make, open and close a
container and never in between. One of its settings is global to the process, so opening takes turns. A forked child has
no part in its parent's pools: it closes nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from lightck._native import errno_of, ffi, lib, reason

if TYPE_CHECKING:
    from lightck._native import CData

LIBRARY_VARIABLE = "LIGHTCK_LIBPMEMOBJ"
LIBRARY = "libpmemobj.so.1"
_LOG_NBYTES = 4096

log = logging.getLogger("lightck")
# Re-entrant: a collection while it is held may end a forgotten session, which closes its pool.
_turn = threading.RLock()
_open: dict[int, CData] = {}
"""The handles of this process's pools."""
_abandoned: list[Pool] = []
"""Pools that cannot be closed any more."""


class MissingError(Exception):
    """libpmemobj cannot be loaded; the text is the reason. Internal."""


class PmemobjError(OSError):
    """libpmemobj refused; ``errno`` and its own reason. Internal: a backend turns it into a ``PoolError``."""


def load() -> None:
    """Load libpmemobj, once per process. Raises ``MissingError``."""
    with _turn:
        status = lib.lck_pmdk_load((os.environ.get(LIBRARY_VARIABLE) or LIBRARY).encode())
        reason = _reason()
        _log_messages()
    if status != lib.LCK_OK:
        raise MissingError(reason)


def is_available() -> bool:
    try:
        load()
    except MissingError:
        return False
    return True


class Pool:
    """A pool that libpmemobj holds open: nobody else can open it until ``close``, or until this process is gone."""

    def __init__(self, path: str, layout: str, nbytes: int, *, create: bool = False, shutdown_state: bool) -> None:
        """``nbytes``: of the file. ``create``: make the pool in it; all of it is zero."""
        load()
        out = ffi.new("lck_pmdk **")
        with _turn:
            status = lib.lck_pmdk_open(os.fsencode(path), layout.encode(), nbytes, create, shutdown_state, out)
            _check(status)
            _open[id(self)] = out[0]
        self._handle: CData | None = out[0]
        self._pid = os.getpid()

    def root(self, nbytes: int) -> int:
        """The file offset of the root object, which is made where there is none."""
        out = ffi.new("uint64_t *")
        _check(lib.lck_pmdk_root(self._handle, nbytes, out))
        return out[0]

    def alloc(self, place: int, nbytes: int, kind: int) -> None:
        """Make an object, which the 16 bytes at file offset ``place`` name from then on."""
        _check(lib.lck_pmdk_alloc(self._handle, place, nbytes, kind))

    def store(self, offset: int, data: bytes) -> None:
        _check(lib.lck_pmdk_store(self._handle, offset, data, len(data)))

    def close(self) -> None:
        """Give the pool up. In a forked child, which does not have it, nothing happens."""
        handle, self._handle = self._handle, None
        if handle is not None and os.getpid() == self._pid:
            with _turn:
                _open.pop(id(self), None)
                lib.lck_pmdk_close(handle)
                _log_messages()

    def abandon(self) -> None:
        """Its file lost bytes, and libpmemobj would store into them: it is not asked to close, and keeps what it has
        until the process ends."""
        _abandoned.append(self)


def _check(status: int) -> None:
    """Raise unless a call went well. On the thread that made the call."""
    if status == lib.LCK_OK:
        return
    code = errno_of(status) or 0
    why = _reason() if status == lib.LCK_ESYS else reason(status)
    _log_messages()
    raise PmemobjError(code, why)


def _reason() -> str:
    return ffi.string(lib.lck_pmdk_message()).decode("utf-8", "replace")


def _log_messages() -> None:
    """Pass on what libpmemobj logged."""
    out = ffi.new("char[]", _LOG_NBYTES)
    nbytes = lib.lck_pmdk_log(out, _LOG_NBYTES)
    for line in bytes(ffi.buffer(out, nbytes)).decode("utf-8", "replace").splitlines():
        log.error("lightck: libpmemobj: %s", line)


def _in_child() -> None:
    global _turn
    _turn = threading.RLock()
    for handle in _open.values():
        lib.lck_pmdk_forked(handle)
    _open.clear()


# A fork waits for an open to end, so that no child gets a mapping before it was kept from children.
os.register_at_fork(before=lambda: _turn.acquire(), after_in_parent=lambda: _turn.release(), after_in_child=_in_child)
