"""A pool on a device-dax device (``/dev/dax0.0``): persistent memory without a file system on it.

Such a device can only be mapped: there is no read, no write, no sync, no size to change and no name to give. So what is
read is read through a mapping, and a pool becomes the device's pool by a record in the device's head (``devdax_head``),
written last. Invariant: what the record names is never written by ``create``. The device's kind comes from sysfs, its
owner and mode from the descriptor; a link is not followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from typing import TYPE_CHECKING

from lightck._native import NativeError, check, ffi, lib
from lightck.errors import (
    CorruptPoolError,
    NoSpaceError,
    NotAPoolError,
    PoolNotFoundError,
    PoolPathError,
    PoolPermissionError,
    PoolTruncatedError,
)
from lightck.pool.engine import Medium
from lightck.pool.format.structures import PAGE, POOL_NBYTES_MIN, align_up
from lightck.pool.storage import devdax_head as head_of_device
from lightck.pool.storage import durability, extents
from lightck.pool.storage.devdax_head import HEAD_NBYTES, RECORD_NBYTES, RECORD_OFFSETS, Head, Record
from lightck.pool.storage.extents import Extents
from lightck.pool.storage.failures import undo_on_error
from lightck.pool.storage.file import checked_folder
from lightck.pool.storage.system import DaxDevice, System

if TYPE_CHECKING:
    from lightck._native import CData

_NODE = re.compile(r"/dev/dax\d+\.\d+")


class _Mapping:
    """The whole device, mapped to be read. No page is touched before it is read."""

    def __init__(self, fd: int, nbytes: int) -> None:
        out = ffi.new("const void **")
        check(lib.lck_map(fd, nbytes, out), "mapping the device")
        self._nbytes = nbytes
        self._start: CData | None = ffi.cast("const char *", out[0])
        self.address = int(ffi.cast("uintptr_t", out[0]))

    def read(self, offset: int, nbytes: int) -> bytes:
        assert self._start is not None, "open"
        n = max(0, min(nbytes, self._nbytes - offset))
        return bytes(ffi.buffer(self._start + offset, n)) if n else b""

    def close(self) -> None:
        if self._start is not None:
            lib.lck_unmap(self._start, self._nbytes)
            self._start = None


class _Device:
    """An open device: its descriptor, its mapping, and what it takes to write its head."""

    def __init__(self, path: str, fd: int, facts: DaxDevice, tier: int) -> None:
        self.path = path
        self.fd = fd
        self.facts = facts
        self.tier = tier
        try:
            self.mapping = _Mapping(fd, facts.nbytes // facts.align * facts.align)
        except NativeError as err:
            raise _cannot_open(path, OSError(err.errno, os.strerror(err.errno or 0))) from err

    def head(self) -> Head:
        return head_of_device.examine(self.mapping.read)

    def record(self) -> Record | None:
        """The same as ``head().record``, without a look at the rest."""
        return head_of_device.newest(Record.unpack(self.mapping.read(at, RECORD_NBYTES)) for at in RECORD_OFFSETS)

    def set_pool(self, start: int, nbytes: int) -> Record:
        """From now on this is the device's pool, durably; 0 bytes: none is."""
        before = self.record()
        record = Record(before.sequence + 1 if before is not None else 1, start, nbytes, self.facts.nbytes)
        with contextlib.closing(Medium(self.fd, self._head_extents(), self.tier)) as medium:
            if before is not None and self.mapping.read(RECORD_OFFSETS[1], RECORD_NBYTES) != before.pack():
                medium.store_commit_record(
                    RECORD_OFFSETS[1], before.pack()
                )  # it has to say what holds while the first one is written
            for offset in RECORD_OFFSETS:  # the second one is the old one until the first is whole
                medium.store_commit_record(offset, record.pack())
        return record

    def wipe(self) -> None:
        """Remove what another program left in the head."""
        with contextlib.closing(Medium(self.fd, self._head_extents(), self.tier)) as medium:
            medium.zero(0, HEAD_NBYTES)
            medium.sync()

    def _head_extents(self) -> Extents:
        return ((0, head_of_device.unit(self.facts.align)),)

    def close(self) -> None:
        self.mapping.close()
        os.close(self.fd)


class DevdaxContainer:
    """The place of one pool on a device; see ``Container``. Its extent is longer than the pool, up to what the device
    maps as a whole. Who still reads a pool that was replaced twice since finds that checksums fail, never wrong bytes.
    """

    def __init__(self, device: _Device, start: int, nbytes: int, record: Record | None = None) -> None:
        self.nbytes = nbytes
        room = align_up(nbytes, head_of_device.unit(device.facts.align))
        self.extents: Extents = ((start, room),)
        self.source = lib.LCK_MEMORY, ((device.mapping.address + start, nbytes),)
        self._device = device
        self._start = start
        self._record = record
        self._is_closed = False

    @property
    def fd(self) -> int:
        return self._device.fd

    def read(self, offset: int, nbytes: int) -> bytes:
        own = ((self._start, self.nbytes),)
        return b"".join(self._device.mapping.read(at, n) for at, n in extents.runs(own, offset, nbytes))

    def publish(self) -> None:
        assert self._record is None, "published once"
        self._record = self._device.set_pool(self._start, self.nbytes)

    def is_current(self) -> bool:
        if self._record is None:
            return True
        try:
            there = os.stat(self._device.path, follow_symlinks=False)
        except OSError:
            return False
        here = os.fstat(self.fd)
        same = (stat.S_IFMT(there.st_mode), there.st_rdev) == (stat.S_IFMT(here.st_mode), here.st_rdev)
        return same and self._device.record() == self._record

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._device.close()


class DevdaxBackend:
    """Pools on device-dax devices, one on each; see ``Backend``. Making one beside another needs room for both."""

    name = "devdax"

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()

    def claims(self, path: str) -> bool:
        """Whether this path is a device-dax device, whatever it holds, or where one would be: no file is made there."""
        try:
            return self._system.dax_device(os.stat(path, follow_symlinks=False)) is not None
        except OSError:
            return _NODE.fullmatch(path) is not None

    def recognises(self, path: str) -> bool:
        if not self.claims(path):
            return False
        try:
            with contextlib.closing(self._opened(path, write=False)) as device:
                head = device.head()
        except (PoolPathError, PoolPermissionError, PoolNotFoundError):
            return False
        return head.pool is not None or (head.is_signed and head.record is None)

    def probe(self, path: str) -> durability.Durability:
        checked_folder(path)
        try:
            facts = self._system.dax_device(os.stat(path, follow_symlinks=False))
        except OSError as err:
            raise _cannot_open(path, err) from err
        if facts is None:
            raise _no_device(path)
        return durability.probe_device(facts, system=self._system)

    def size_and_durability(self, path: str) -> tuple[int, durability.Durability]:
        """How large a device is and what a pool there survives; the errors of ``open``, whatever it holds."""
        with contextlib.closing(self._opened(path, write=False)) as device:
            return device.facts.nbytes, durability.probe_device(device.facts, system=self._system)

    def remove_stale(self, path: str) -> None:
        """What was not published lies in free space, and nothing names it."""

    def discard(self, path: str) -> None:
        with contextlib.closing(self._opened(path, write=True)) as device:
            head = device.head()
            if head.is_foreign:
                device.wipe()
            if head.is_foreign or head.pool is not None or (head.is_signed and head.record is None):
                device.set_pool(0, 0)

    def create(self, path: str, nbytes: int) -> DevdaxContainer:
        device = self._opened(path, write=True)
        with undo_on_error(device.close):
            container = DevdaxContainer(device, _place(device, nbytes), nbytes)
            with contextlib.closing(Medium(device.fd, container.extents, device.tier)) as medium:
                medium.zero(0, nbytes)
                medium.sync()
        return container

    def open(self, path: str, *, write: bool) -> DevdaxContainer:
        device = self._opened(path, write=write)
        with undo_on_error(device.close):
            record = _checked(device, device.head())
        return DevdaxContainer(device, record.start, record.nbytes, record)

    def _opened(self, path: str, *, write: bool) -> _Device:
        """The device, once its kind, owner and mode were found safe."""
        checked_folder(path)
        flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(path, flags | (os.O_RDWR if write else os.O_RDONLY))
        except OSError as err:
            raise _cannot_open(path, err) from err
        with undo_on_error(lambda: os.close(fd)):
            st = os.fstat(fd)
            facts = self._system.dax_device(st)
            if facts is None:
                raise _no_device(path)
            _check_owner(path, st)
            tier = durability.probe_device(facts, system=self._system).tier
            return _Device(path, fd, facts, tier)


def _place(device: _Device, nbytes: int) -> int:
    """Where a new pool goes. What the device holds is not written to."""
    head, facts = device.head(), device.facts
    if head.is_foreign:
        raise _foreign(device.path)
    there = head.pool if head.pool is not None and head.pool.device_nbytes == facts.nbytes else None
    start = head_of_device.place(nbytes, facts.nbytes, facts.align, there)
    if start is not None:
        return start
    alone = head_of_device.place(nbytes, facts.nbytes, facts.align, None)
    if alone is None:
        raise NoSpaceError(
            f"The pool {device.path!r} needs {nbytes / 1e6:,.1f} MB and the device has {facts.nbytes / 1e6:,.1f} MB. A "
            "pool is allocated in full when it is made. Use a larger namespace, another medium, or fewer slots."
        )
    assert there is not None, "alone it would fit"
    error = NoSpaceError(
        f"A pool of {nbytes / 1e6:,.1f} MB has no room on {device.path!r} beside the one that lies there "
        f"({there.nbytes / 1e6:,.1f} of {facts.nbytes / 1e6:,.1f} MB). The old one stays until the new one is "
        "complete, and it is intact. Use a larger namespace; or export the newest version, and begin anew with "
        "overwrite=True."
    )
    error.in_the_way = True
    raise error


def _checked(device: _Device, head: Head) -> Record:
    """The record of the device's pool, which it was found to hold."""
    path, facts, record = device.path, device.facts, head.record
    if head.is_foreign:
        raise _foreign(path)
    if record is None and head.is_signed:
        raise CorruptPoolError(
            f"Both copies of the record in the head of {path!r} are damaged. Without one the pool on it cannot be "
            "found. Use a copy of its content; overwrite=True discards it."
        )
    if record is None or not record.nbytes:
        raise PoolNotFoundError(
            f"There is no pool on the device {path!r}. Nothing was ever made there, or it was discarded. Check the "
            "path; lightck.attach() makes a pool."
        )
    if record.device_nbytes != facts.nbytes:
        raise PoolTruncatedError(
            f"The device {path!r} had {record.device_nbytes} bytes when its pool was made and has {facts.nbytes} "
            "now. Its namespace was made anew. Give it its old size, or discard the pool: overwrite=True."
        )
    fits = record.start >= HEAD_NBYTES and record.start + record.nbytes <= facts.nbytes
    if record.start % PAGE or record.nbytes < POOL_NBYTES_MIN or not fits:
        raise CorruptPoolError(
            f"The record in the head of {path!r} names a place where no pool can be. Use a copy of the pool; "
            "overwrite=True discards it."
        )
    step = head_of_device.unit(facts.align)
    if record.start % step or record.start + align_up(record.nbytes, step) > facts.nbytes // step * step:
        raise PoolPathError(
            f"The pool on {path!r} begins at {record.start}, and the device is mapped in units of {facts.align} now: "
            "its namespace was made anew with a larger align. Make it again with the old one (ndctl create-namespace "
            "-m devdax --align=...)."
        )
    return record


def _check_owner(path: str, st: os.stat_result) -> None:
    if st.st_uid not in (0, os.geteuid()):
        raise PoolPermissionError(
            f"The device {path!r} belongs to user {st.st_uid}, not to you or root. What others can write is not "
            "trusted. Have it given to you: chown."
        )
    if st.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PoolPermissionError(
            f"The device {path!r} can be written by others (mode {stat.S_IMODE(st.st_mode):o}). What others can write "
            f"is not trusted. Give it to one user (chown, in a udev rule) and chmod 600 {path}"
        )


def _foreign(path: str) -> NotAPoolError:
    error = NotAPoolError(
        f"The first {HEAD_NBYTES >> 20} MiB of the device {path!r} hold something that is not lightck's. Nothing was "
        "changed. If nobody needs it, overwrite=True discards it; or name another device."
    )
    error.in_the_way = True
    return error


def _no_device(path: str) -> PoolPathError:
    return PoolPathError(
        f'{path!r} is not a device-dax device, as sysfs says. backend="devdax" makes pools on those only. Name one '
        '(ls /dev/dax*), or leave backend="auto" for a file.'
    )


def _cannot_open(path: str, err: OSError) -> Exception:
    if err.errno in (errno.ENOENT, errno.ENOTDIR):
        return PoolNotFoundError(
            f"There is no device {path!r}. Its namespace is not there, or not in devdax mode. See: ndctl list -N."
        )
    if err.errno == errno.ELOOP:
        return PoolPathError(
            f"{path!r} is a symbolic link. Links are not followed, because whoever can change one could send the pool "
            "elsewhere. Name the device that it points to."
        )
    if err.errno in (errno.EACCES, errno.EPERM):
        return PoolPermissionError(
            f"The device {path!r} cannot be opened: {err.strerror}. It belongs to root, or to another user. Have it "
            "given to you: chown."
        )
    return PoolPathError(
        f"The device {path!r} cannot be opened and mapped: {err.strerror}. Another driver may have it (kmem), or its "
        "namespace is disabled. See: daxctl list, ndctl list -N."
    )
