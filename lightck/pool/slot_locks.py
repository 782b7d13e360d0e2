"""Locks by which a process that reads a checkpoint keeps the training from overwriting it.

Each slot has a byte of its own in the pool's file, far beyond its end, on which both sides take open file description
locks:

    reader      read lock on the slot; read the slot's header: is the checkpoint still there? Read it; unlock (``hold``)
    training    write lock on the slot, without waiting; store the header with the new generation; unlock
                (``SlotLocks``). If a reader holds the slot, take another one
                (``slot_without_reader`` in ``slots.py``)

Invariant: either the training sees the lock of a reader, or the reader sees the new header of the training. Therefore
the training takes the lock. If it only asked whether a reader has one, a reader could lock the slot after the answer
and before the store of the new header, and still find the old header.

A hold only lets a reader finish. The checksums show whether what it read is right. So no reader can stop a training:
holds count only while the training has two slots besides them (in a group of ranks: three). Otherwise it overwrites the
oldest held checkpoint, and its reader sees that and starts again.

Failure cases: the locks of a killed reader end as soon as the reader and all processes that inherited its descriptor
have ended. On a file system or in a sandbox without these locks, nothing is held.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager

_FLOCK = struct.Struct("hhqqi4x")
_FIRST_BYTE = 1 << 62
"""Offset of the byte of slot 0 in the file. No file is so long."""
_ATTEMPTS, _PAUSE_SECONDS = 100, 0.001
"""How often a reader tries to lock a slot that the training is about to take, and the pause between two attempts."""


class SlotLocks:
    """The write locks of a training on the slots of its pool."""

    def __init__(self, fd: int) -> None:
        """``fd``: the pool's file, open for writing."""
        self._fd = fd
        self._locked: set[int] = set()

    def try_lock(self, index: int) -> bool:
        """Lock a slot. Returns False if a reader holds it."""
        if not _set_lock(self._fd, fcntl.F_WRLCK, index):
            return False
        self._locked.add(index)
        return True

    def unlock(self, index: int) -> None:
        """Unlock a slot, if it is locked here."""
        if index in self._locked:
            self._locked.discard(index)
            _set_lock(self._fd, fcntl.F_UNLCK, index)

    def unlock_all_but(self, indexes: Container[int]) -> None:
        """Unlock all other slots: they were locked for checkpoints that were not begun."""
        if not self._locked:
            return
        for index in [index for index in self._locked if index not in indexes]:
            self.unlock(index)


@contextmanager
def hold(fd: int, index: int) -> Iterator[None]:
    """Hold a slot during the ``with`` block, which reads its checkpoint. The block must compare the slot's header with
    the generation that it reads: the training may have taken the slot before. If the training has the slot locked for
    longer than all attempts (a tenth of a second), the block runs without a lock. ``fd``: the pool's file, open for
    reading."""
    for _ in range(_ATTEMPTS):
        if _set_lock(fd, fcntl.F_RDLCK, index):
            break
        time.sleep(_PAUSE_SECONDS)  # until the training has stored the header
    try:
        yield
    finally:
        _set_lock(fd, fcntl.F_UNLCK, index)  # now: a forked child may keep the descriptor


def is_held(fd: int, index: int) -> bool:
    """Whether a reader holds a slot at this moment. This only asks the kernel, and takes no lock, so that a training
    never meets it. False if the system has no such locks. ``fd``: the pool's file."""
    probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _FIRST_BYTE + index, 1, 0)
    try:
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, probe))
    except (OSError, struct.error):
        return False
    return bool(kind == fcntl.F_RDLCK)  # a write lock is that of the training, while it begins a checkpoint


def _set_lock(fd: int, kind: int, index: int) -> bool:
    """Take or release the lock on a slot. Returns False if another descriptor's lock forbids it; True also if the
    system has no such locks."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, _FIRST_BYTE + index, 1, 0))
    except OSError as err:
        return err.errno not in (errno.EAGAIN, errno.EACCES)
    return True
