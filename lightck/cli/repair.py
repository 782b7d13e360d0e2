"""``lightck repair``: mends a damaged tier, or a damaged pool that nobody has open, from another copy."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from lightck.cli import stored_checkpoints
from lightck.cli.base import BAD, OK, POOL, Command, any_store_option, ended_by_signals, json_option, usage_error
from lightck.cli.open_tier import is_tier, open_tier
from lightck.cli.output import progress_bar
from lightck.cli.text import Facts, count, print_json, print_line, print_verdict, size

if TYPE_CHECKING:
    from lightck.tiers.repairing import Repaired


@click.command("repair", cls=Command, short_help="Mend a damaged tier or pool from another copy.")
@click.argument("path", metavar="POOL_OR_TIER", type=POOL)
@click.option(
    "--from",
    "sources",
    type=POOL,
    metavar="OTHER",
    multiple=True,
    required=True,
    help="Where intact copies are: a tier or, if POOL_OR_TIER is a tier, also a pool. May be given more than once.",
)
@any_store_option
@json_option
def command(path: str, sources: tuple[str, ...], as_json: bool) -> int:
    """Mend POOL_OR_TIER from OTHER, which is only read.

    In a tier each object is read, and a damaged one is written anew: under the same name, with the same bytes, which
    its SHA-256 proves. A damaged pool, which no process may have open, is rebuilt from the newest checkpoint of the
    tier OTHER; the old file stays until the new one is verified.

    Exit status 1 if something damaged is left.
    """
    with ended_by_signals():
        done = _repair_tier(path, sources) if is_tier(path) else _repair_pool(path, sources)
    if as_json:
        print_json(_facts(path, done))
    else:
        _show(path, done)
    return BAD if done.left else OK


def _repair_tier(path: str, sources: tuple[str, ...]) -> Repaired:
    from lightck.tiers.repairing import repair_tier

    with ExitStack() as stack:
        tiers = [open_tier(each) for each in sources if is_tier(each)]
        pools = [stack.enter_context(stored_checkpoints.open_reader(each)) for each in sources if not is_tier(each)]
        return repair_tier(open_tier(path), tiers, pools, progress_bar)


def _repair_pool(path: str, sources: tuple[str, ...]) -> Repaired:
    from lightck.tiers.repairing import repair_pool

    if os.path.isdir(path):
        usage_error(f"{path!r} is a folder that is no tier, and no pool. Name a tier, or the pool of a single process.")
    for each in sources:
        if not is_tier(each):
            usage_error(
                f"A pool is repaired from a tier, and {each!r} is none. If it is a pool of the same run, make a new "
                "pool of its newest checkpoint: `lightck compact OTHER NEW`. Then give NEW the name of the damaged one."
            )
    return repair_pool(path, [open_tier(each) for each in sources], progress_bar)


def _facts(path: str, done: Repaired) -> Facts:
    """Return the object that ``--json`` prints; docs/json-tiers.md lists its keys."""
    return {
        "path": path,
        "repaired": [{"name": str(each.name), "nbytes": each.nbytes} for each in done.objects],
        "step": done.step,
        "left": [each._asdict() for each in done.left],
        "rejected": done.rejected,
    }


def _show(path: str, done: Repaired) -> None:
    for reason in done.rejected:
        print_line(f"skipped: {reason}")
    for each in done.objects:
        print_line(f"written anew: {each.name} ({size(each.nbytes)})")
    for rest in done.left:
        print_line(f"damaged still: {rest.name}: {rest.reason}")
    if done.step is not None:
        print_verdict(f"{path} was rebuilt from step {done.step}.", good=True)
    elif done.left:
        print_verdict(f"{count(len(done.left), 'file')} in {path} could not be repaired.", good=False)
    elif done.objects:
        print_verdict(f"{count(len(done.objects), 'object')} in {path} repaired: all are whole.", good=True)
    else:
        print_verdict(f"No damaged checkpoint was found in {path}. Nothing was written.", good=True)
