"""Load the native library, and check it. ``lib`` holds its functions and constants (``lib.LCK_...``), ``ffi`` is cffi's
object for types, casts and buffers.

All access to ``liblck.so`` goes through this module. Prototypes and structs come from ``_lck_ffi``, which the build
generates from the library's header. This module checks once that ``liblck.so`` and ``_lck_ffi`` match, because cffi
does not check this in its ABI mode.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightck._lck_ffi import FFI, Lib
    from lightck._lck_ffi import CData as CData
    from lightck._lck_ffi import Commit as Commit

_STRUCTS = ("lck_copy", "lck_commit", "lck_job_info", "lck_event", "lck_extent", "lck_read", "lck_span")
"""Names of structs, in the order in which ``lck_sizeof`` numbers them."""
_REBUILD = (
    "Run `pip install .` in the source folder, or reinstall the wheel, to replace lightck's native library and its "
    "Python bindings together."
)


class NativeError(OSError):
    """A call of the native library failed. ``status`` is the LCK_E... code of the call; ``errno`` is the system's error
    number, or None."""

    def __init__(self, status: int, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.errno = code


def _bindings() -> ModuleType:
    """Return the generated module ``_lck_ffi``: the one beside this file, or, if there is none, that of the installed
    package. (A script that is run in the source folder imports lightck from the sources, which have no generated
    module.) Raises ``ImportError``."""
    for folder in (str(Path(__file__).parent.parent), *sys.path):
        path = Path(folder, "lightck", "_lck_ffi.py")
        spec = importlib.util.spec_from_file_location("lightck._lck_ffi", path) if path.is_file() else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    try:  # an editable install finds the module by an import hook
        return importlib.import_module("lightck._lck_ffi")
    except ImportError as error:
        raise ImportError(
            f"lightck's native bindings (lightck/_lck_ffi.py) are missing: {error}. They are generated when lightck is "
            f"built, and this copy was not built. {_REBUILD}"
        ) from error


def _open_library(bindings: ModuleType) -> Lib:
    # The library lies beside the generated module. An editable install has both in another folder than this file.
    path = Path(str(bindings.__file__)).with_name("liblck.so")
    try:
        opened: Lib = bindings.ffi.dlopen(str(path))
        return opened
    except OSError as error:
        raise ImportError(
            f"lightck's native library {path} cannot be loaded: {error}. The library is missing, or was built for "
            f"another machine. {_REBUILD}"
        ) from error


def _check_abi(ffi: FFI, lib: Lib) -> None:
    found = lib.lck_abi_version()
    if found != lib.LCK_ABI_VERSION:
        raise ImportError(
            f"lightck's native library has interface number {found}, its Python bindings have {lib.LCK_ABI_VERSION}. "
            f"The library or the bindings are from another release. {_REBUILD}"
        )
    for number, name in enumerate(_STRUCTS):
        if lib.lck_sizeof(number) != ffi.sizeof(name):
            raise ImportError(
                f"struct {name} has {lib.lck_sizeof(number)} bytes in lightck's native library and "
                f"{ffi.sizeof(name)} in its Python bindings. The library or the bindings are from another release. "
                f"{_REBUILD}"
            )


def _honour_isa(lib: Lib, name: str | None) -> None:
    """Let the library use the instruction set that ``LIGHTCK_ISA`` names. Raises ``ImportError`` if it cannot."""
    if name and lib.lck_isa_set(name.encode()) != lib.LCK_OK:
        raise ImportError(
            f"LIGHTCK_ISA={name!r} cannot be used: this processor does not support it, or it is not one of auto, "
            "portable, sse2, avx2, avx512. Unset LIGHTCK_ISA, or set it to another of these names."
        )


def _honour_kill(lib: Lib, text: str | None) -> None:
    """Let the library end this process at the kill site that ``LIGHTCK_KILL`` names. Raises ``ImportError``."""
    if not text:
        return
    site, _, nth = text.partition(":")
    if not nth.isdecimal() or lib.lck_kill(site.encode(), int(nth)) != lib.LCK_OK:
        raise ImportError(
            f"LIGHTCK_KILL={text!r} cannot be used. It is for tests: SITE:N ends the process when the saving code "
            "reaches SITE for the Nth time. SITE is one of header, block, manifest, sealed, body, word, ack. Unset "
            "LIGHTCK_KILL or correct it."
        )


_module = _bindings()
ffi: FFI = _module.ffi
lib: Lib = _open_library(_module)
_check_abi(ffi, lib)
_honour_isa(lib, os.environ.get("LIGHTCK_ISA"))
_honour_kill(lib, os.environ.get("LIGHTCK_KILL"))

_REASONS = {
    lib.LCK_EINVAL: "lightck passed a wrong argument to its native library (an error in lightck: please report it)",
    lib.LCK_ENOMEM: "out of memory",
    lib.LCK_EFORK: "called in a forked child, which cannot use its parent's pool",
    lib.LCK_ETIMEDOUT: "timed out",
    lib.LCK_EBUSY: "too much is under way at once in the native library (an error in lightck: please report it)",
    lib.LCK_ECHECKSUM: "a block does not match its checksum",
    lib.LCK_ESHORT: "the file ends early",
    lib.LCK_EDROPPED: "the checkpoint was dropped before its commit",
    lib.LCK_ESTATE: "a part of the checkpoint was not copied. An earlier error says why; if there is none, this is an "
    "error in lightck: please report it",
}


def check(status: int, what: str) -> None:
    """Raise ``NativeError`` unless ``status`` is LCK_OK. ``what``: the call, for the message. Call this function on the
    thread that made the native call, because the errno is kept for each thread."""
    if status == lib.LCK_OK:
        return
    raise NativeError(status, f"{what} failed: {reason(status)}", errno_of(status))


def reason(status: int) -> str:
    """Return the reason for a failed native call as text. Call this function on the thread that made the native
    call."""
    code = errno_of(status)
    if status == lib.LCK_ESYS and code:
        return os.strerror(code)
    return _REASONS.get(status, f"status {status}")


def errno_of(status: int) -> int | None:
    """Return the system's error number of a failed native call, or None. Call this function on the thread that made the
    native call."""
    if status == lib.LCK_ESYS:
        return lib.lck_last_errno() or None
    return errno.ENOMEM if status == lib.LCK_ENOMEM else None
