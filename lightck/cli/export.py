"""``lightck export``: one committed version out of a pool, as a file that other programs read."""

from __future__ import annotations

from pathlib import Path

import click

from lightck.cli.base import OK, POOL, Command, json_option, refuse_existing, step_option
from lightck.cli.text import count, listed, say, say_json, size

_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")


@click.command("export", cls=Command, short_help="Write a version as safetensors or as a torch file.")
@click.argument("pool", type=POOL)
@click.argument("to", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors", "torch"]),
    help="By default by the name of TO: torch for .pt, .pth, .bin and .ckpt, else safetensors.",
)
@click.option(
    "--what",
    type=click.Choice(["model", "all"]),
    default="model",
    show_default=True,
    help="The model's state_dict, or everything that was saved.",
)
@step_option
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
@json_option
def command(
    pool: str, to: Path, file_format: str | None, what: str, step: int | None, overwrite: bool, as_json: bool
) -> int:
    """Write the newest version of POOL (or that of --step N) to TO. The pool is only read."""
    import lightck
    from lightck.export import export_checkpoint

    refuse_existing(str(to), overwrite=overwrite)  # before the pool is read
    checkpoint = lightck.recover(pool, step=step)
    kind = file_format or ("torch" if to.suffix.lower() in _OF_TORCH else "safetensors")
    done = export_checkpoint(checkpoint, to, format=kind, what=what, overwrite=overwrite)
    if as_json:
        say_json(
            {
                "step": checkpoint.step,
                "path": str(done.path),
                "nbytes": done.nbytes,
                "tensors": done.tensors,
                "tied": dict(done.tied),
                "rejected": [str(each) for each in checkpoint.rejected],
            }
        )
        return OK
    for each in checkpoint.rejected:
        say(f"passed over: {each}")
    if done.tied:
        say("tied, stored once: " + listed(f"{name} = {stored}" for name, stored in done.tied.items()))
    say(f"step {checkpoint.step}: {count(done.tensors, 'tensor')}, {size(done.nbytes)} in {done.path} ({kind})")
    return OK
