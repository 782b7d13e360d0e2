"""``lightck export``: writes one committed checkpoint of a pool to a file that other programs read."""

from __future__ import annotations

from pathlib import Path

import click

from lightck.cli.base import (
    OK,
    POOL,
    Command,
    any_store_option,
    ended_by_signals,
    json_option,
    refuse_existing,
    step_option,
)
from lightck.cli.open_tier import options_of
from lightck.cli.text import count, listed, print_json, print_line, size

_FORMATS = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")}
"""Suffix of a file name -> its format."""


@click.command("export", cls=Command, short_help="Write a checkpoint as a safetensors or torch file, or for DCP.")
@click.argument("pool", type=POOL)
@click.argument("to", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors", "torch", "dcp"]),
    help="dcp: a folder for torch.distributed.checkpoint. [default: safetensors if TO ends in .safetensors, torch if "
    "it ends in .pt, .pth, .bin or .ckpt]",
)
@click.option(
    "--what",
    type=click.Choice(["model", "all"]),
    default="model",
    show_default=True,
    help="Write the model's state_dict, or everything that was saved.",
)
@step_option
@click.option("--overwrite", is_flag=True, help="Replace an existing file, or an existing folder of --format dcp.")
@json_option
@any_store_option
def command(
    pool: str, to: Path, file_format: str | None, what: str, step: int | None, overwrite: bool, as_json: bool
) -> int:
    """Write the newest checkpoint of POOL (or the checkpoint of --step N) to the file TO (for --format dcp: into the
    new folder TO). The pool is only read."""
    import lightck
    from lightck.export import export_checkpoint

    kind = file_format or _format_of(to)
    if kind == "dcp":
        from lightck.export.dcp import refuse_existing_folder

        refuse_existing_folder(str(to), overwrite=overwrite)
    else:
        refuse_existing(str(to), overwrite=overwrite)  # before the pool is opened
    with ended_by_signals():
        checkpoint = lightck.recover(pool, step=step, options=options_of(pool))
        done = export_checkpoint(checkpoint, to, format=kind, what=what, overwrite=overwrite)
    if as_json:
        print_json(
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
        print_line(f"skipped: {each}")
    if done.tied:
        print_line("tied tensors, written once: " + listed(f"{name} = {stored}" for name, stored in done.tied.items()))
    print_line(f"step {checkpoint.step}: {count(done.tensors, 'tensor')}, {size(done.nbytes)} in {done.path} ({kind})")
    return OK


def _format_of(to: Path) -> str:
    kind = _FORMATS.get(to.suffix.lower())
    if kind is None:
        raise click.UsageError(
            f"The name {to.name!r} does not say which format to write. Name the file *.safetensors or *.pt, or pass "
            "--format safetensors, torch or dcp."
        )
    return kind
