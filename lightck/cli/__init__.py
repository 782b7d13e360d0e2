"""The ``lightck`` command. Each command parses, asks the library, and turns the answer into text or JSON and an exit
status (``cli/base.py``). No command writes to a pool or takes its lock, so all of them work on a pool in use;
``inject`` writes to the copy that it made. Torch is imported only by the commands that need it, and a command's module
when the command is asked for: where the native library does not load, ``doctor`` still says so.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os

import click

from lightck.cli.base import Group

NAMES = ("bench", "completion", "demo", "diff", "doctor", "export", "inject", "inspect", "trace", "verify")


class _Commands(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in NAMES:
            return None
        found: click.Command = importlib.import_module(f"lightck.cli.{cmd_name}").command
        return found


def _show_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    try:
        version = importlib.metadata.version("lightck")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed: a source tree)"
    click.echo(f"lightck, version {version}")
    ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Say which.")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Every finished training step of a PyTorch model survives a crash.

    Exit status: 0 as promised; 1 damaged, different or unusable; 2 it could not be done.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False
