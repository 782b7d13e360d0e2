"""Open the store of a tier: a folder by its path, an object store by its URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TypeAlias, TypeGuard

from lightck.tiers.folder import FolderStore
from lightck.tiers.object_store import SCHEMES, ObjectStore, refuse_unusable_options, refuse_unusable_url
from lightck.tiers.store import Store

Options: TypeAlias = Mapping[str, "str | int | bool"]
"""What an object store needs beside its URL (endpoint, region, ...)."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_URL_OF_PATH = re.compile(rf"(?:{'|'.join(SCHEMES)}):/[^/]")


def is_url(root: object) -> TypeGuard[str]:
    """Whether a root is a URL. Everything else is the path of a folder."""
    return isinstance(root, str) and _URL.match(root) is not None


def root_of(root: str | os.PathLike[str]) -> str:
    """Return the absolute path of a folder, or a URL without slashes at its end: one text for each tier."""
    text = os.fspath(root)
    return text.rstrip("/") if is_url(text) else os.path.abspath(text)


def open_store(root: str | os.PathLike[str], options: Options | None = None) -> Store:
    """Open the store of a tier, without asking it for anything. ``options``: for an object store.

    Raises ``ValueError`` or ``TypeError`` for a URL or options that cannot be used, and ``TierError`` if the library
    for object stores is missing."""
    refuse_unusable_root(root, options)
    text = root_of(root)
    return ObjectStore(text, options) if is_url(text) else FolderStore(text)


def refuse_unusable_root(root: str | os.PathLike[str], options: Options | None) -> None:
    """Raise ``ValueError`` or ``TypeError`` for a root or options that cannot be those of a tier."""
    if is_url(root):
        refuse_unusable_url(root_of(root))
        refuse_unusable_options(options)
        return
    if not is_url(root) and _URL_OF_PATH.match(os.fspath(root)):
        raise ValueError(f"{os.fspath(root)!r} is a URL that lost a slash as a path object. Pass it as a str.")
    if options:
        raise TypeError(
            f"options= belongs to an object store, and {os.fspath(root)!r} is a folder. Leave it out, or pass a URL: "
            '"s3://bucket/run7".'
        )


def is_tier(root: str | os.PathLike[str], options: Options | None = None) -> bool:
    """Whether a claim of a tier lies in a folder, or below a URL. Raises as ``open_store`` does, and ``TierError``."""
    if not is_url(root) and not os.path.isdir(root):
        return False
    return open_store(root, options).has_claim()
