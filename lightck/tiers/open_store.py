"""Open the store of a tier: a folder by its path, an object store by its URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TypeAlias

from lightck.tiers.folder import FolderStore
from lightck.tiers.store import Store

Options: TypeAlias = Mapping[str, "str | int | bool"]
"""What an object store needs beside its URL (endpoint, region, ...)."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(root: object) -> bool:
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
    text = root_of(root)
    refuse_options_of_folder(text, options)
    return FolderStore(text)


def refuse_options_of_folder(root: str, options: Options | None) -> None:
    """Raise ``TypeError`` for options of a folder."""
    if options and not is_url(root):
        raise TypeError(
            f"options= belongs to an object store, and {root!r} is a folder. Leave it out, or pass a URL: "
            '"s3://bucket/run7".'
        )


def is_tier(root: str | os.PathLike[str], options: Options | None = None) -> bool:
    """Whether a claim of a tier lies in a folder, or below a URL. Raises as ``open_store`` does, and ``TierError``."""
    text = root_of(root)
    if not is_url(text) and not os.path.isdir(text):
        return False
    return open_store(text, options).has_claim()
