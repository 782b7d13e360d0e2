"""How the commands open a tier, and how they tell it from a pool and from the directory of a group of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from lightck.cli.base import STORE_OPTIONS, usage_error

if TYPE_CHECKING:
    from lightck.tiers.open_store import Options
    from lightck.tiers.store import Store


def is_tier(path: str, options: Options | None = None) -> bool:
    """Whether a path or a URL is a tier. Raises ``TierError`` if that cannot be seen."""
    from lightck.tiers.open_store import is_tier

    with _usage_errors():
        return is_tier(path, options_of(path, options))


def is_of_ranks(path: str) -> bool:
    """Whether a path is the directory of a group of ranks: a folder that is no tier."""
    return os.path.isdir(path) and not is_tier(path)


def open_tier(path: str, options: Options | None = None) -> Store:
    """Return the store of a tier. ``options``: as for ``options_of``. Raises ``TierError``, and a usage error if there
    is no tier."""
    from lightck.ranks.directory import lost_claim_in, lost_claims_text
    from lightck.tiers.open_store import is_url, open_store

    if not is_tier(path, options):
        if not is_url(path) and not os.path.lexists(path):
            usage_error(f"There is nothing at {path!r}. Check the path.")
        lost = None if is_url(path) else lost_claim_in(path)
        if lost is not None:
            usage_error(f"No claim lies in {path!r}. {lost_claims_text(lost)}")
        cure = "" if is_url(path) else f" For a pool: lightck inspect {path}."
        usage_error(f"{path!r} is no tier: no folder in it has a claim.json, which every tier has.{cure}")
    return open_store(path, options_of(path, options))


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn the error of a URL or an option that cannot be used into one of wrong usage."""
    try:
        yield
    except (ValueError, TypeError) as err:
        usage_error(str(err))


def options_of(path: str, options: Options | None = None) -> Options | None:
    """Return the options of a tier: ``options``, if given; otherwise, for a URL, the values of ``--store-option`` of
    the command that runs."""
    from lightck.tiers.open_store import is_url

    context = click.get_current_context(silent=True)
    if options is not None or context is None or not is_url(path):
        return options
    found: Options | None = context.meta.get(STORE_OPTIONS)
    return found
