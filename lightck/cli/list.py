"""``lightck list``: which checkpoints lie in tiers, how old and how large they are, and their metrics."""

from __future__ import annotations

import click

from lightck.cli import tier_checkpoints
from lightck.cli.base import OK, POOL, Command, json_option, store_option
from lightck.cli.open_tier import open_tier
from lightck.cli.text import Facts, count, print_json, print_line


@click.command("list", cls=Command, short_help="List the checkpoints in tiers.")
@click.argument("tiers", metavar="TIER...", type=POOL, nargs=-1, required=True)
@store_option
@json_option
def command(tiers: tuple[str, ...], store_options: dict[str, str], as_json: bool) -> int:
    """List the complete checkpoints of each TIER (a folder or a URL), newest first: when they were sent, their size
    and their metrics.

    Only claims and manifests are read, and no tensor. `lightck inspect` lists the checkpoints of a pool.
    """
    from lightck.tiers.open_store import is_url

    found = [facts_of(path, store_options if is_url(path) else {}) for path in tiers]
    if as_json:
        print_json({"tiers": found})
    else:
        for facts in found:
            _print(facts)
    return OK


def facts_of(path: str, options: dict[str, str]) -> Facts:
    """Return what lies in a tier. Raises ``TierError``, and a usage error if there is no tier."""
    from lightck.tiers.candidates import run_of

    store = open_tier(path, options)
    listing = store.listing()
    found = tier_checkpoints.find(store, listing)
    rows = [tier_checkpoints.row(each) for each in found.without_repeats]
    return {"path": path, "run": run_of(store, listing), "checkpoints": rows, "unreadable": found.unreadable}


def _print(facts: Facts) -> None:
    checkpoints, unreadable = facts["checkpoints"], facts["unreadable"]
    print_line(f"{facts['path']}: {count(len(checkpoints), 'checkpoint')} of the run {str(facts['run'])[:8]}")
    for line in tier_checkpoints.table(checkpoints):
        print_line(f"  {line}")
    for each in unreadable:
        print_line(f"  step {each['step']} (claim {each['claim']}) cannot be read: {each['reason']}")
