"""The native library, loaded and checked: ``ffi``, ``lib`` and its constants.

Everything that touches ``liblck.so`` goes through this module. Prototypes and structs come from the generated
``_lck_ffi``, which was made from the same header as the library; whether the two belong together is checked here
once, because in cffi's ABI mode nothing else would notice.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_STRUCTS = ("lck_copy", "lck_commit", "lck_job_info", "lck_event", "lck_extent", "lck_read", "lck_span")
"""By the numbers that lck_sizeof knows them by."""
_REBUILD = "Run `pip install .` in the source folder (or reinstall the wheel) to build both anew."


class NativeError(OSError):
    """A call of the native library failed. ``status`` is its LCK_E... number; ``errno`` is set where there is one."""

    def __init__(self, status: int, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.errno = code


def _bindings() -> ModuleType:
    """The generated module: beside this file, or in the installed package where Python found the sources first (a
    script that is run in the source folder). Whether the two fit is checked like everything else."""
    for folder in (str(Path(__file__).parent.parent), *sys.path):
        path = Path(folder, "lightck", "_lck_ffi.py")
        spec = importlib.util.spec_from_file_location("lightck._lck_ffi", path) if path.is_file() else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    try:  # an editable install finds it by an import hook of its own
        return importlib.import_module("lightck._lck_ffi")
    except ImportError as error:
        raise ImportError(
            f"lightck's native bindings (lightck/_lck_ffi.py) are not here: {error}. They are generated when "
            f"lightck is built, and this copy was not built. {_REBUILD}"
        ) from error


def _open_library(bindings: ModuleType) -> Any:
    # Beside the generated module, not beside this file: in an editable install the two lie in different folders.
    path = Path(str(bindings.__file__)).with_name("liblck.so")
    try:
        return bindings.ffi.dlopen(str(path))
    except OSError as error:
        raise ImportError(
            f"lightck's native library {path} cannot be loaded: {error}. It is missing, or was built for another "
            f"machine. {_REBUILD}"
        ) from error


def _check_abi(ffi: Any, lib: Any) -> None:
    found = lib.lck_abi_version()
    if found != lib.LCK_ABI_VERSION:
        raise ImportError(
            f"lightck's native library has interface {found}, its Python bindings have {lib.LCK_ABI_VERSION}. One of "
            f"the two is left over from another version. {_REBUILD}"
        )
    for number, name in enumerate(_STRUCTS):
        if lib.lck_sizeof(number) != ffi.sizeof(name):
            raise ImportError(
                f"struct {name} has {lib.lck_sizeof(number)} bytes in lightck's native library and "
                f"{ffi.sizeof(name)} in its Python bindings. One of the two is left over from another version. "
                f"{_REBUILD}"
            )


def _honour_isa(lib: Any, name: str | None) -> None:
    if name and lib.lck_isa_set(name.encode()) != lib.LCK_OK:
        raise ImportError(
            f"LIGHTCK_ISA={name!r} cannot be used: this processor does not support it, or it is not one of auto, "
            "portable, sse2, avx2, avx512. Unset LIGHTCK_ISA or name another."
        )


def _honour_kill(lib: Any, text: str | None) -> None:
    if not text:
        return
    site, _, nth = text.partition(":")
    if not nth.isdecimal() or lib.lck_kill(site.encode(), int(nth)) != lib.LCK_OK:
        raise ImportError(
            f"LIGHTCK_KILL={text!r} cannot be used: it is not SITE:N with a number N and one of the sites header, "
            "block, manifest, sealed, body, word, ack. Unset LIGHTCK_KILL or correct it."
        )


_module = _bindings()
ffi: Any = _module.ffi
lib: Any = _open_library(_module)
_check_abi(ffi, lib)
_honour_isa(lib, os.environ.get("LIGHTCK_ISA"))
_honour_kill(lib, os.environ.get("LIGHTCK_KILL"))

OK: int = lib.LCK_OK
EINVAL: int = lib.LCK_EINVAL
ENOMEM: int = lib.LCK_ENOMEM
ESYS: int = lib.LCK_ESYS
EFORK: int = lib.LCK_EFORK
ETIMEDOUT: int = lib.LCK_ETIMEDOUT
EBUSY: int = lib.LCK_EBUSY
ECHECKSUM: int = lib.LCK_ECHECKSUM
ESHORT: int = lib.LCK_ESHORT
EDROPPED: int = lib.LCK_EDROPPED
ESTATE: int = lib.LCK_ESTATE
EMISSING: int = lib.LCK_EMISSING

TIER_CACHE: int = lib.LCK_TIER_CACHE
TIER_DISK: int = lib.LCK_TIER_DISK
TIER_PM: int = lib.LCK_TIER_PM
TIER_PM_EADR: int = lib.LCK_TIER_PM_EADR
TIER_PM_EMULATED: int = lib.LCK_TIER_PM_EMULATED

MARK_BEGIN: int = lib.LCK_MARK_BEGIN
MARK_ACK: int = lib.LCK_MARK_ACK
MARK_USER: int = lib.LCK_MARK_USER

EV_STORE: int = lib.LCK_EV_STORE
EV_COPY: int = lib.LCK_EV_COPY
EV_FLUSH: int = lib.LCK_EV_FLUSH
EV_FENCE: int = lib.LCK_EV_FENCE
EV_SYNC: int = lib.LCK_EV_SYNC
EV_MARK: int = lib.LCK_EV_MARK

OP_COPY: int = lib.LCK_OP_COPY
OP_SYNC: int = lib.LCK_OP_SYNC

NOW: int = lib.LCK_NOW

JOB_COPYING: int = lib.LCK_JOB_COPYING
JOB_COPIED: int = lib.LCK_JOB_COPIED
JOB_COMMITTED: int = lib.LCK_JOB_COMMITTED
JOB_FAILED: int = lib.LCK_JOB_FAILED
JOB_DROPPED: int = lib.LCK_JOB_DROPPED

_REASONS = {
    EINVAL: "an argument is out of range",
    ENOMEM: "out of memory",
    EFORK: "called in a forked child, which has no part in its parent's pool",
    ETIMEDOUT: "timed out",
    EBUSY: "all entries are in use",
    ECHECKSUM: "a block does not match its checksum",
    ESHORT: "the file ends early",
    EDROPPED: "the version was dropped before it committed",
    ESTATE: "not possible in this state, or the ticket is unknown",
}


def check(status: int, what: str) -> None:
    """Raise `NativeError` unless status is LCK_OK. To be called on the thread that made the native call."""
    if status == OK:
        return
    raise NativeError(status, f"{what}: {reason(status)}", errno_of(status))


def reason(status: int) -> str:
    """Why a native call failed, for people. On the thread that made it."""
    code = errno_of(status)
    if status == ESYS and code:
        return os.strerror(code)
    return _REASONS.get(status, f"status {status}")


def errno_of(status: int) -> int | None:
    """The errno behind a status, if there is one. On the thread that made the call."""
    if status == ESYS:
        return int(lib.lck_last_errno()) or None
    return errno.ENOMEM if status == ENOMEM else None
