"""``lightck reshard``: writes the checkpoint of a directory as the pools of another number of ranks."""

from __future__ import annotations

import os

import click

from lightck.cli.base import OK, POOL, Command, json_option, step_option
from lightck.cli.text import count, print_json, print_line, size


@click.command("reshard", cls=Command, short_help="Write the pools of another number of ranks.")
@click.argument("directory", type=POOL)
@click.argument("to", type=click.Path())
@click.option("--world", "n_ranks", type=click.IntRange(1, 1 << 16), required=True, help="The number of ranks.")
@click.option("--replicated", is_flag=True, help="Each rank gets whole tensors, as with DistributedDataParallel.")
@step_option
@json_option
def command(directory: str, to: str, n_ranks: int, replicated: bool, step: int | None, as_json: bool) -> int:
    """Write the newest checkpoint of DIRECTORY (or the checkpoint of --step N) as the pools of --world N ranks into the
    new folder TO. Each tensor is cut into rows, as fully_shard does. DIRECTORY is only read.

    A training does not need this: attach(..., resume=True) loads the pools of any number of ranks."""
    from lightck.restore.moved_state import describe_restarted
    from lightck.restore.reshard import reshard

    if not os.path.isdir(directory):
        raise click.UsageError(
            f"{directory!r} is no directory. reshard takes the directory of a group of ranks. To load the pool of a "
            "single process into a group, move it into a directory under the name rank-00000-of-00001.pool."
        )
    done = reshard(directory, os.path.abspath(to), n_ranks, is_replicated=replicated, step=step)
    if as_json:
        facts = {"step": done.step, "paths": done.paths, "nbytes": done.nbytes, "restarted": done.restarted}
        facts["averaged"] = done.averaged
        print_json({**facts, "rejected": [str(each) for each in done.rejected]})
        return OK
    for each in done.rejected:
        print_line(f"skipped: {each}")
    if done.restarted:
        print_line(f"note: {describe_restarted(done.restarted)}")
    if done.averaged:
        print_line(f"note: {done.averaged}")
    print_line(f"step {done.step}: {count(n_ranks, 'pool')}, {size(done.nbytes)} in {to}")
    return OK
