"""Write a new file in the folder of a tier: past the page cache (``O_DIRECT``) where lightck trusts the file system.

    direct  whole pages, from memory that begins at a page, into a file that was just made
    cached  the bytes after the last whole page, small files, and everything where the above does not hold, or where the
            kernel refuses a direct write

Both store the same bytes, and neither survives anything before the caller has synced the file. A direct write costs no
copy into the page cache, which the training needs more than a checkpoint that is read only after a crash.
"""

from __future__ import annotations

import errno
import fcntl
import os

import numpy as np

from lightck.pool.direct_writes import DIRECT_NBYTES_MIN, why_untrusted
from lightck.pool.format.structures import PAGE

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""How a kernel refuses a direct write, or to open for one. Other errors are those of the medium."""


def write_file(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes of a new file, of which ``fd`` is the only descriptor. Raises ``OSError``."""
    view = memoryview(data).cast("B")
    if _takes_direct(fd, view):
        view = view[_write_directly(fd, view) :]
    while view:
        view = view[os.write(fd, view) :]


def _takes_direct(fd: int, view: memoryview) -> bool:
    """Whether the file is to be written directly."""
    if len(view) < DIRECT_NBYTES_MIN or np.frombuffer(view, np.uint8).ctypes.data % PAGE:
        return False
    return why_untrusted(f"/proc/self/fd/{fd}") is None


def _write_directly(fd: int, view: memoryview) -> int:
    """Write whole pages, and return how many bytes were written: fewer if the kernel refuses to go on."""
    flags, written, end = fcntl.fcntl(fd, fcntl.F_GETFL), 0, len(view) // PAGE * PAGE
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        while written < end and written % PAGE == 0:
            written += os.write(fd, view[written:end])
    except OSError as err:
        if err.errno not in _REFUSALS:
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return written
