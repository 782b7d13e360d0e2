"""``lightck list``: which checkpoints lie in tiers, how old and how large they are, and what was logged of them."""

from __future__ import annotations

import time

import click

from lightck.cli.base import OK, POOL, Command, json_option, store_option, usage_error
from lightck.cli.text import Facts, clean, columns, count, print_json, print_line, size


@click.command("list", cls=Command, short_help="List the checkpoints in tiers.")
@click.argument("tiers", metavar="TIER...", type=POOL, nargs=-1, required=True)
@store_option
@json_option
def command(tiers: tuple[str, ...], store_options: dict[str, str], as_json: bool) -> int:
    """List the complete checkpoints of each TIER (a folder or a URL), newest first: when they were sent, their size
    and their metrics.

    Only the manifests are read. `lightck inspect` lists those of a pool.
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
    from lightck.tiers.candidates import Candidate, Rejected, candidates_of, run_of
    from lightck.tiers.decisions import manifests_of
    from lightck.tiers.names import TierCheckpoint
    from lightck.tiers.open_store import is_tier, open_store

    if not is_tier(path, options):
        usage_error(f"{path!r} is no tier: no claim lies in it. For a pool: lightck inspect {path}.")
    store = open_store(path, options)
    listing = store.listing()
    rejected: list[Rejected] = []
    newest_of_step: dict[TierCheckpoint, Candidate] = {}
    for each in candidates_of(store, listing, None, rejected):
        newest_of_step.setdefault(each.checkpoint, each)
    rows: list[Facts] = []
    for found in newest_of_step.values():
        sent_at = max(listing.manifests[name] for name in manifests_of(listing, found.checkpoint))
        row: Facts = {"step": found.checkpoint.step, "claim": str(found.checkpoint.claim), "sent_at": sent_at}
        row |= {"nbytes": found.nbytes, "metrics": dict(found.manifests[0].metrics), "ranks": found.world_size}
        rows.append(row)
    unreadable = [{"step": one.step, "claim": str(one.checkpoint.claim), "reason": one.reason} for one in rejected]
    return {"path": path, "run": run_of(store, listing), "checkpoints": rows, "unreadable": unreadable}


def _print(facts: Facts) -> None:
    checkpoints, unreadable = facts["checkpoints"], facts["unreadable"]
    print_line(f"{facts['path']}: {count(len(checkpoints), 'checkpoint')} of the run {str(facts['run'])[:8]}")
    rows = [("step", "sent", "size", "claim", "metrics")]
    for each in checkpoints:
        metrics = ", ".join(f"{clean(name)} {value:g}" for name, value in sorted(each["metrics"].items()))
        rows.append((str(each["step"]), _age(each["sent_at"]), size(each["nbytes"]), each["claim"], metrics))
    for line in columns(rows, right=(0, 1, 2)) if checkpoints else []:
        print_line(f"  {line}".rstrip())
    for each in unreadable:
        print_line(f"  step {each['step']} (claim {each['claim']}) cannot be read: {each['reason']}")


def _age(sent_at: float) -> str:
    seconds = max(0.0, time.time() - sent_at)
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds / 86400:.0f} days ago"
