"""``lightck gc``: removes from a tier what no checkpoint needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from lightck.cli.base import OK, POOL, Command, any_store_option, ended_by_signals, json_option
from lightck.cli.open_tier import open_tier
from lightck.cli.output import progress_bar
from lightck.cli.text import Facts, count, print_json, print_line, size

if TYPE_CHECKING:
    from lightck.tiers.collecting import Collected

_REASONS = {
    "manifest": "of checkpoints that not all ranks have sent",
    "object": "that no manifest names",
    "claim": "of which nothing is left",
    "temporary file": "of killed processes",
}
"""Kind of file -> why such files are not needed, in words that follow the kind: "2 objects that no manifest names"."""


@click.command("gc", cls=Command, short_help="Remove from a tier what no checkpoint needs.")
@click.argument("tier", type=POOL)
@click.option(
    "--stopped",
    is_flag=True,
    help="You promise that no training and no lightck copy writes to TIER, or has written within the last hour. Then "
    "leftovers in the newest folders (claims) are removed too; otherwise they stay, because the process that made the "
    "folder may still need them.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, and list what would be removed.")
@any_store_option
@json_option
def command(tier: str, stopped: bool, dry_run: bool, as_json: bool) -> int:
    """Remove from TIER what killed processes have left behind: objects that no manifest names, manifests of
    checkpoints that not all ranks have sent, claims of which nothing is left, and temporary files. Every complete
    checkpoint stays, and so does everything that was written within the last hour (by the clock of the file system or
    object store).

    A training, and whoever reads TIER, may go on meanwhile.
    """
    from lightck.tiers.collecting import collect

    with ended_by_signals():
        done = collect(open_tier(tier), is_stopped=stopped, is_dry_run=dry_run, progress=progress_bar)
    if as_json:
        print_json(_facts(tier, done, stopped=stopped, dry_run=dry_run))
    else:
        _show(tier, done, dry_run=dry_run)
    return OK


def _facts(tier: str, done: Collected, *, stopped: bool, dry_run: bool) -> Facts:
    """Return the object that ``--json`` prints; docs/json-tiers.md lists its keys."""
    return {
        "tier": tier,
        "stopped": stopped,
        "dry_run": dry_run,
        "removed": [each._asdict() for each in done.removed],
        "nbytes": sum(each.nbytes or 0 for each in done.removed),
        "left": [each._asdict() | {"names": list(each.names)} for each in done.left],
    }


def _show(tier: str, done: Collected, *, dry_run: bool) -> None:
    verb = "would be removed" if dry_run else "removed"
    total = sum(each.nbytes or 0 for each in done.removed)
    print_line(f"{tier}: {count(len(done.removed), 'file')}, {size(total)} {verb}")
    for kind, reason in _REASONS.items():
        found = [each for each in done.removed if each.kind == kind]
        if found:
            print_line(f"  {count(len(found), kind)} {reason}, {_size([each.nbytes for each in found])}")
        for each in found if dry_run else []:
            print_line(f"    {each.name}")
    for rest in done.left:
        print_line(f"  left: {count(len(rest.names), rest.kind)}, {_size([rest.nbytes])}: {rest.reason}")


def _size(sizes: list[int | None]) -> str:
    return "of unknown size" if None in sizes else size(sum(each or 0 for each in sizes))
