"""Which kinds of pool this installation can make and read: the backends, as ``lightck doctor`` shows them.

libpmemobj is looked for in the way in which the backend does it, and its version is read from the library's own file.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from lightck.cli.checks import NOTE, OK, PROBLEM, Line
from lightck.cli.machine import Machine

_ABOUT = {
    "file": "plain files on tmpfs, a disk or persistent memory",
    "devdax": "device-dax devices: persistent memory without a file system",
}


def check(machine: Machine) -> Iterator[Line]:
    from lightck.pool.storage.backends import BACKEND_VARIABLE, BACKENDS

    wanted = machine.env.get(BACKEND_VARIABLE) or "auto"
    if wanted not in ("auto", *BACKENDS):
        cure = f"Unset {BACKEND_VARIABLE}, or name one of {', '.join(BACKENDS)}."
        yield Line(BACKEND_VARIABLE, PROBLEM, f"{wanted!r} is no backend: attach refuses every new pool", cure)
    elif wanted == "devdax":
        cure = f"Unset {BACKEND_VARIABLE} for pools that are files: a device is known without it."
        yield Line(BACKEND_VARIABLE, NOTE, f"{wanted!r}: attach makes no pool that is a file", cure)
    for name in BACKENDS:
        if name != "pmdk":
            yield Line(f"backend {name}", OK, _ABOUT.get(name, "built in"))
    if find_spec("lightck.pool.storage.pmemobj") is not None:
        yield _pmdk(is_wanted=wanted == "pmdk")


def _pmdk(is_wanted: bool) -> Line:
    """``is_wanted``: for every new pool, none of which can be made without it."""
    module = importlib.import_module("lightck.pool.storage.pmemobj")
    try:
        module.load()
    except module.MissingError as error:
        cure = "Only for PMDK pools, which can be read without it: apt install libpmemobj1, or set LIGHTCK_LIBPMEMOBJ."
        level = PROBLEM if is_wanted else NOTE
        return Line("backend pmdk", level, f"libpmemobj is not there ({error}): PMDK pools cannot be made", cure)
    path = loaded("libpmemobj", Path("/proc/self/maps").read_text(errors="replace"))
    version = version_in(Path(path).read_bytes()) if path else None
    return Line("backend pmdk", OK, f"libpmemobj {version or '(of unknown version)'}{f' at {path}' if path else ''}")


def loaded(name: str, maps: str) -> str | None:
    """The path of a loaded library, from /proc/self/maps."""
    found = re.search(rf"^.* (/\S*{re.escape(name)}\S*)$", maps, re.M)
    return found[1] if found else None


def version_in(library: bytes) -> str | None:
    """PMDK writes its version into each of its libraries."""
    found = re.search(rb"src version: ([0-9][0-9A-Za-z.+~-]*)", library)
    return found[1].decode() if found else None
