"""``lightck compact``: writes one checkpoint of a pool into a new pool, which holds it alone and whole."""

from __future__ import annotations

import click

from lightck.cli.base import OK, POOL, Command, ended_by_signals, json_option, step_option
from lightck.cli.output import progress_bar
from lightck.cli.text import count, print_json, print_line, size


@click.command("compact", cls=Command, short_help="Write a checkpoint into a new pool, which is as small as can be.")
@click.argument("pool", type=POOL)
@click.argument("new", type=click.Path())
@step_option
@json_option
def command(pool: str, new: str, step: int | None, as_json: bool) -> int:
    """Write the newest checkpoint of POOL (or the checkpoint of --step N) into the new pool NEW, which must not exist.
    NEW holds the whole state, and attach(..., resume=True) goes on in it. POOL is only read, and may be in use.

    If POOL has gradient records, its updates are replayed, and a training goes on in NEW with the strategy FullState.
    """
    from lightck.restore.compact import compact

    with ended_by_signals():
        done = compact(pool, new, step=step, progress=progress_bar)
    if as_json:
        facts = {"step": done.step, "path": done.path, "tensors": done.tensors, "nbytes": done.nbytes}
        facts |= {"old_nbytes": done.old_nbytes, "updates": done.updates}
        print_json({**facts, "rejected": [str(each) for each in done.rejected]})
        return OK
    for each in done.rejected:
        print_line(f"skipped: {each}")
    again = f"; {count(done.updates, 'update')} replayed" if done.updates else ""
    sizes = f"{size(done.nbytes)} in {new} (the old pool has {size(done.old_nbytes)})"
    print_line(f"step {done.step}: {count(done.tensors, 'tensor')}, {sizes}{again}")
    return OK
