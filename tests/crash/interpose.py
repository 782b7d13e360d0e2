"""``interpose.c`` as Python functions: built with the machine's C compiler, armed inside a process started under it."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHORT = -1
"""Instead of an errno: the call transfers half of what it was asked for."""
EVER = 1 << 60
"""As ``times``: the fault stays."""


def build(folder: str) -> str:
    """The library, made in this folder."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("No C compiler (cc) was found, which faults of system calls need. Install gcc or clang.")
    source, library = Path(__file__).with_name("interpose.c"), os.path.join(folder, "interpose.so")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-fvisibility=hidden", "-o", library, str(source), "-ldl"], check=True
    )
    return library


def name_of(error: int) -> str:
    return "SHORT" if error == SHORT else errno.errorcode[error]


@contextmanager
def watching(folder: str) -> Iterator[None]:
    """Count calls about files in this folder, and those of the native library, until the end of the block."""
    library = _library()
    library.lckf_start(os.fsencode(folder))
    try:
        yield
    finally:
        library.lckf_stop()


def arm(call: str, nth: int, times: int, error: int) -> None:
    """Fail ``times`` calls from the nth counted on."""
    if _library().lckf_arm(call.encode(), nth, times, error) != 0:
        raise ValueError(f"{call!r} is not among the calls of interpose.c.")


def disarm() -> None:
    """Faults and counting end here."""
    _library().lckf_stop()


def failed() -> int:
    """How many calls were failed since the watching began."""
    return int(_library().lckf_failed())


def counts() -> dict[str, int]:
    """Calls since the watching began, by name."""
    library, found, number = _library(), {}, 0
    while name := library.lckf_name(number):
        found[name.decode()] = int(library.lckf_count(number))
        number += 1
    return found


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.lckf_name.restype = ctypes.c_char_p
    library.lckf_count.restype = library.lckf_failed.restype = ctypes.c_uint64
    library.lckf_arm.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
    return library
