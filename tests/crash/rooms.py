"""A small tmpfs in a mount namespace of its own, where the kernel lets us make one. Nobody else sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CLONE_NEWNS = 0x00020000
_MS_REMOUNT, _MS_REC, _MS_PRIVATE = 32, 0x4000, 0x40000
_libc = ctypes.CDLL(None)


@contextmanager
def small_room(folder: str) -> Iterator[Callable[[int | None], None] | None]:
    """Over ``folder``, for this process and what it forks from here on. Gives what changes its size (None: as large as
    memory), or None where mounts are not permitted. The namespace ends with the process, so this is for a victim."""
    place = folder.encode()
    is_ours = not _libc.unshare(_CLONE_NEWNS) and not _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    if not is_ours or _libc.mount(b"tmpfs", place, b"tmpfs", 0, b"mode=700"):
        yield None
        return

    def resize(nbytes: int | None) -> None:
        size = b"size=80%" if nbytes is None else b"size=%d" % nbytes
        if _libc.mount(b"tmpfs", place, b"tmpfs", _MS_REMOUNT, size):
            raise OSError("the small tmpfs cannot be resized")

    yield resize
