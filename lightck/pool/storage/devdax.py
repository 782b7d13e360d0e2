"""A pool on a device-dax device (``/dev/dax0.0``): persistent memory without a file system on it.

Such a device can only be mapped: it has no read(), write() or sync, a fixed size and a fixed name. So lightck reads
through a mapping. A record in the device's head (``devdax_head``) names the device's pool. That record is written after
the pool is complete. Invariant: ``create`` never writes to the bytes that the record names, unless the device's size
has changed since the record was written. The device's kind is read from sysfs, and its owner and mode from the
descriptor. Symbolic links are not followed.
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
    """A read-only mapping of the whole device. Opening it touches no page. Raises ``NativeError``."""

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
    """An open device: its descriptor, its mapping, and the methods that write its head."""

    def __init__(self, path: str, fd: int, facts: DaxDevice, kind: int) -> None:
        self.path = path
        self.fd = fd
        self.facts = facts
        self.kind = kind
        try:
            self.mapping = _Mapping(fd, facts.nbytes // facts.align * facts.align)
        except NativeError as err:
            raise _cannot_open(path, OSError(err.errno, os.strerror(err.errno or 0))) from err

    def head(self) -> Head:
        return head_of_device.examine(self.mapping.read)

    def record(self) -> Record | None:
        """Return ``head().record`` without reading the rest of the head."""
        return head_of_device.newest(Record.unpack(self.mapping.read(at, RECORD_NBYTES)) for at in RECORD_OFFSETS)

    def set_pool(self, start: int, nbytes: int) -> Record:
        """Make these bytes the device's pool, durably. With ``nbytes=0``, the device has no pool afterwards. Returns
        the new record."""
        before = self.record()
        record = Record(before.sequence + 1 if before is not None else 1, start, nbytes, self.facts.nbytes)
        with contextlib.closing(Medium(self.fd, self._head_extents(), self.kind)) as medium:
            if before is not None and self.mapping.read(RECORD_OFFSETS[1], RECORD_NBYTES) != before.pack():
                # The second copy must be valid while the first one is rewritten. A pool record has the size of a commit
                # record and is stored in the same order, the first eight bytes last.
                medium.store_commit_record(RECORD_OFFSETS[1], before.pack())
            for offset in RECORD_OFFSETS:  # the second copy is written after the first one is complete and durable
                medium.store_commit_record(offset, record.pack())
        return record

    def wipe(self) -> None:
        """Overwrite the head, which holds data of another program, with zeros."""
        with contextlib.closing(Medium(self.fd, self._head_extents(), self.kind)) as medium:
            medium.zero(0, HEAD_NBYTES)
            medium.sync()

    def _head_extents(self) -> Extents:
        return ((0, head_of_device.granularity(self.facts.align)),)

    def close(self) -> None:
        self.mapping.close()
        os.close(self.fd)


class DevdaxContainer:
    """The bytes of one pool on a device; see ``Container``. The length of its file extent is rounded up to whole units
    of the device's mapping. If a pool is replaced twice while a reader has it open, the second replacement may lie
    where the reader's pool was. The reader then gets checksum errors, never wrong bytes.
    """

    def __init__(self, device: _Device, start: int, nbytes: int, record: Record | None = None) -> None:
        self.nbytes = nbytes
        room = align_up(nbytes, head_of_device.granularity(device.facts.align))
        self.extents: Extents = ((start, room),)
        self.reads_from = lib.LCK_MEMORY, ((device.mapping.address + start, nbytes),)
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
    """Pools on device-dax devices, one per device; see ``Backend``. Replacing a pool needs space for both."""

    name = "devdax"

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()

    def claims(self, path: str) -> bool:
        """Whether the path is a device-dax device, whatever it contains. If nothing is at the path, but its name is
        that of a device-dax device, the result is True, so that no file is made there."""
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
        return head.pool is not None or head.is_damaged

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
        """Return the size of the device in bytes, and what a pool on the device survives. Raises the errors of
        ``open``, except those about the device's content."""
        with contextlib.closing(self._opened(path, write=False)) as device:
            return device.facts.nbytes, durability.probe_device(device.facts, system=self._system)

    def remove_stale(self, path: str) -> None:
        """Do nothing: a pool that was never published lies in free space."""

    def discard(self, path: str) -> None:
        with contextlib.closing(self._opened(path, write=True)) as device:
            head = device.head()
            if head.is_foreign:
                device.wipe()
            if head.is_foreign or head.pool is not None or head.is_damaged:
                device.set_pool(0, 0)

    def create(self, path: str, nbytes: int) -> DevdaxContainer:
        device = self._opened(path, write=True)
        with undo_on_error(device.close):
            container = DevdaxContainer(device, _place(device, nbytes), nbytes)
            with contextlib.closing(Medium(device.fd, container.extents, device.kind)) as medium:
                medium.zero(0, nbytes)
                medium.sync()
        return container

    def open(self, path: str, *, write: bool) -> DevdaxContainer:
        device = self._opened(path, write=write)
        with undo_on_error(device.close):
            record = _check_record(device, device.head())
        return DevdaxContainer(device, record.start, record.nbytes, record)

    def _opened(self, path: str, *, write: bool) -> _Device:
        """Open the device, and check its kind, owner and mode. Raises ``PoolError``."""
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
            kind = durability.probe_device(facts, system=self._system).medium_kind
            return _Device(path, fd, facts, kind)


def _place(device: _Device, nbytes: int) -> int:
    """Return the offset for a new pool, so that it does not overlap the device's present pool. Raises ``NoSpaceError``,
    or ``NotAPoolError`` if the device holds data of another program."""
    head, facts = device.head(), device.facts
    if head.is_foreign:
        raise _foreign(device.path)
    # A pool that was made when the device had another size cannot be opened now (``_check_record``), so its bytes are
    # free.
    there = head.pool if head.pool is not None and head.pool.device_nbytes == facts.nbytes else None
    start = head_of_device.offset_of_new_pool(nbytes, facts.nbytes, facts.align, there)
    if start is not None:
        return start
    alone = head_of_device.offset_of_new_pool(nbytes, facts.nbytes, facts.align, None)
    if alone is None:
        raise NoSpaceError(
            f"The pool {device.path!r} needs {nbytes / 1e6:,.1f} MB and the device has {facts.nbytes / 1e6:,.1f} MB. A "
            "pool is allocated in full when it is made. Use a larger namespace, another medium, or fewer slots."
        )
    assert there is not None, "only the present pool is in the way"
    error = NoSpaceError(
        f"A pool of {nbytes / 1e6:,.1f} MB has no room on {device.path!r} beside the pool that is there: the device "
        f"has {facts.nbytes / 1e6:,.1f} MB, and that pool takes {there.nbytes / 1e6:,.1f} MB. The old pool is intact, "
        "and must stay until the new one is complete. Use a larger namespace; or export the newest checkpoint, and "
        "start afresh with overwrite=True."
    )
    error.discard_helps = True
    raise error


def _check_record(device: _Device, head: Head) -> Record:
    """Check all fields of the device's newest record against the device, and return the record. Raises
    ``PoolError``."""
    path, facts, record = device.path, device.facts, head.record
    if head.is_foreign:
        raise _foreign(path)
    if head.is_damaged:
        raise CorruptPoolError(
            f"Both copies of the pool record in the head of {path!r} are damaged. Without a record, the pool on the "
            "device cannot be found. Use a copy of the pool; overwrite=True discards this one."
        )
    if record is None or not record.nbytes:
        raise PoolNotFoundError(
            f"There is no pool on the device {path!r}. No pool was made there, or the pool was discarded. Check the "
            "path; lightck.attach() makes a pool."
        )
    if record.device_nbytes != facts.nbytes:
        raise PoolTruncatedError(
            f"The device {path!r} had {record.device_nbytes} bytes when its pool was made and has {facts.nbytes} "
            "now. Its namespace was created again. Give the namespace its old size, or discard the pool: "
            "overwrite=True."
        )
    fits = record.start >= HEAD_NBYTES and record.start + record.nbytes <= facts.nbytes
    if record.start % PAGE or record.nbytes < POOL_NBYTES_MIN or not fits:
        raise CorruptPoolError(
            f"The pool record in the head of {path!r} names an impossible place. Use a copy of the pool; "
            "overwrite=True discards this one."
        )
    step = head_of_device.granularity(facts.align)
    if record.start % step or record.start + align_up(record.nbytes, step) > facts.nbytes // step * step:
        raise PoolPathError(
            f"The pool on {path!r} begins at {record.start}, and the device is mapped in units of {facts.align} now: "
            "its namespace was created again with a larger alignment. Create the namespace with the old alignment "
            "(ndctl create-namespace -m devdax --align=...)."
        )
    return record


def _check_owner(path: str, st: os.stat_result) -> None:
    if st.st_uid not in (0, os.geteuid()):
        raise PoolPermissionError(
            f"The device {path!r} belongs to user {st.st_uid}, not to you or root. A pool that others can write is not "
            "trusted. Change the owner to you: chown."
        )
    if st.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PoolPermissionError(
            f"The device {path!r} can be written by others (mode {stat.S_IMODE(st.st_mode):o}). A pool that others can "
            f"write is not trusted. Give the device to one user (chown, in a udev rule) and chmod 600 {path}"
        )


def _foreign(path: str) -> NotAPoolError:
    error = NotAPoolError(
        f"The first {HEAD_NBYTES >> 20} MiB of the device {path!r} hold data of another program. Nothing was changed. "
        "If nobody needs the data, overwrite=True discards it; or name another device."
    )
    error.discard_helps = True
    return error


def _no_device(path: str) -> PoolPathError:
    return PoolPathError(
        f'{path!r} is not a device-dax device according to sysfs. backend="devdax" makes pools on such devices only. '
        'Name one (ls /dev/dax*), or use backend="auto" for a file.'
    )


def _cannot_open(path: str, err: OSError) -> Exception:
    if err.errno in (errno.ENOENT, errno.ENOTDIR):
        return PoolNotFoundError(
            f"There is no device {path!r}. Its namespace is missing, or not in devdax mode. See: ndctl list -N."
        )
    if err.errno == errno.ELOOP:
        return PoolPathError(
            f"{path!r} is a symbolic link. Links are not followed, because a user who can change a link could redirect "
            "the pool. Name the device that the link points to."
        )
    if err.errno in (errno.EACCES, errno.EPERM):
        return PoolPermissionError(
            f"The device {path!r} cannot be opened: {err.strerror}. It belongs to root or to another user. Change the "
            "owner to you: chown."
        )
    return PoolPathError(
        f"The device {path!r} cannot be opened and mapped: {err.strerror}. Another driver may have it (kmem), or its "
        "namespace is disabled. See: daxctl list, ndctl list -N."
    )
