"""PMDK's libpmemobj as Python objects, through the native library: pools with an explicit ``close``, and errors.

libpmemobj is loaded at run time: ``$LIGHTCK_LIBPMEMOBJ``, else ``libpmemobj.so.1``. lightck calls libpmemobj to make,
open and close a container, and never in between. One setting of libpmemobj is global to the process, so a lock
serialises opening. A forked child does not own its parent's pools and closes none of them.
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
"""Maximum bytes of libpmemobj's messages that are logged at once. The native library keeps no more."""

log = logging.getLogger("lightck")
# Guards ``_open``, and libpmemobj's global setting. Re-entrant: a garbage collection on the thread that holds the lock
# may end a session, which then closes its pool.
_lock = threading.RLock()
_open: dict[int, CData] = {}
"""``id`` of each open ``Pool`` of this process -> its native handle."""
_abandoned: list[Pool] = []
"""Pools that cannot be closed (``Pool.abandon``)."""


class MissingError(Exception):
    """libpmemobj cannot be loaded; the message is the reason. Internal."""


class PmemobjError(OSError):
    """A call of libpmemobj failed, with its ``errno`` and message. Internal: a backend turns it into a
    ``PoolError``."""


def load() -> None:
    """Load libpmemobj, once per process. Raises ``MissingError``."""
    with _lock:
        status = lib.lck_pmdk_load((os.environ.get(LIBRARY_VARIABLE) or LIBRARY).encode())
        why = _message()
        _log_messages()
    if status != lib.LCK_OK:
        raise MissingError(why)


def is_available() -> bool:
    """Whether libpmemobj can be loaded."""
    try:
        load()
    except MissingError:
        return False
    return True


class Pool:
    """A pool that libpmemobj has open. No other process can open the pool until ``close`` or the end of this
    process."""

    def __init__(self, path: str, layout: str, nbytes: int, *, create: bool = False, shutdown_state: bool) -> None:
        """``nbytes``: size of the file. ``create``: format the file, which must be all zeros, as a pool.
        ``shutdown_state``: whether the pool counts unsafe shutdowns (``pmdk_file.has_shutdown_state``). Raises
        ``MissingError`` or ``PmemobjError``."""
        load()
        out = ffi.new("lck_pmdk **")
        with _lock:
            status = lib.lck_pmdk_open(os.fsencode(path), layout.encode(), nbytes, create, shutdown_state, out)
            _check(status)
            _open[id(self)] = out[0]
        self._handle: CData | None = out[0]
        self._pid = os.getpid()

    def root(self, nbytes: int) -> int:
        """Return the file offset of the root object. If the pool has no root object, allocate one of ``nbytes``. Raises
        ``PmemobjError``."""
        out = ffi.new("uint64_t *")
        _check(lib.lck_pmdk_root(self._handle, nbytes, out))
        return out[0]

    def alloc(self, place: int, nbytes: int, kind: int) -> None:
        """Allocate an object of ``nbytes``. Afterwards the 16 bytes at file offset ``place`` refer to the object.
        Raises ``PmemobjError``."""
        _check(lib.lck_pmdk_alloc(self._handle, place, nbytes, kind))

    def store(self, offset: int, data: bytes) -> None:
        """Store bytes at a file offset in an object, durably. Raises ``PmemobjError``."""
        _check(lib.lck_pmdk_store(self._handle, offset, data, len(data)))

    def close(self) -> None:
        """Close the pool. In a forked child, which does not own the pool, this only forgets the handle."""
        handle, self._handle = self._handle, None
        if handle is not None and os.getpid() == self._pid:
            with _lock:
                _open.pop(id(self), None)
                lib.lck_pmdk_close(handle)
                _log_messages()

    def abandon(self) -> None:
        """Keep the pool open until the process ends. For a pool whose file was truncated: libpmemobj would store into
        missing pages while closing."""
        _abandoned.append(self)


def _check(status: int) -> None:
    """Raise ``PmemobjError`` if a call failed. Call it on the thread that made the native call."""
    if status == lib.LCK_OK:
        return
    code = errno_of(status) or 0
    why = _message() if status == lib.LCK_ESYS else reason(status)
    _log_messages()
    raise PmemobjError(code, why)


def _message() -> str:
    """Return libpmemobj's text for the last failure on this thread."""
    return ffi.string(lib.lck_pmdk_message()).decode("utf-8", "replace")


def _log_messages() -> None:
    """Log the messages that libpmemobj has written since the last call."""
    out = ffi.new("char[]", _LOG_NBYTES)
    nbytes = lib.lck_pmdk_log(out, _LOG_NBYTES)
    for line in bytes(ffi.buffer(out, nbytes)).decode("utf-8", "replace").splitlines():
        log.error("lightck: libpmemobj: %s", line)


def _reset_in_child() -> None:
    """Reset the state in a forked child, which owns none of its parent's pools."""
    global _lock
    _lock = threading.RLock()
    for handle in _open.values():
        lib.lck_pmdk_forked(handle)
    _open.clear()


# A fork waits for the lock, which ``Pool`` holds while it opens a pool. So no child inherits a mapping for which
# MADV_DONTFORK is not set yet.
os.register_at_fork(
    before=lambda: _lock.acquire(), after_in_parent=lambda: _lock.release(), after_in_child=_reset_in_child
)
