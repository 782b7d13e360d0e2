"""Which code a row was measured with: its sources as a short number."""

from __future__ import annotations

import hashlib
from pathlib import Path

import lightck

_GENERATED = "_lck_ffi.py"
"""Made from the header when lightck is built."""


def fingerprint() -> str:
    """Of all Python files of the package, and of the native sources where they lie beside it: an installed lightck,
    which has none, is other code than the tree that it came from."""
    package = Path(str(lightck.__file__)).resolve().parent
    native = package.parent / "native"
    found = [path for path in package.rglob("*.py") if path.name != _GENERATED]
    if (native / "include" / "lck.h").is_file():
        found += [path for path in native.rglob("*") if path.suffix in (".c", ".h")]
    digest = hashlib.sha256()
    for path in sorted(found):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(package.parent)}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:12]
