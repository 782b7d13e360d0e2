"""Which kinds of pool this installation can make and read: the backends, as ``lightck doctor`` shows them.

libpmemobj is looked for in the way in which the backend does it, and its version is read from the library's own file.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from lightck.cli.checks import NOTE, OK, Line

_ABOUT = {
    "file": "plain files on tmpfs, a disk or persistent memory",
    "devdax": "device-dax devices: persistent memory without a file system",
}


def check() -> Iterator[Line]:
    from lightck.pool.backends import BACKENDS

    for name in BACKENDS:
        if name != "pmdk":
            yield Line(f"backend {name}", OK, _ABOUT.get(name, "built in"))
    if find_spec("lightck.pool.pmemobj") is not None:
        yield _pmdk()


def _pmdk() -> Line:
    module = importlib.import_module("lightck.pool.pmemobj")
    try:
        module.load()
    except module.MissingError as error:
        cure = "Only for PMDK pools, which can be read without it: apt install libpmemobj1, or set LIGHTCK_LIBPMEMOBJ."
        return Line("backend pmdk", NOTE, f"libpmemobj is not there ({error}): PMDK pools cannot be made", cure)
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
