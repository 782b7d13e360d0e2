"""The ``lightck`` command. Each subcommand parses its arguments, calls the library, and prints text or JSON.

Exit statuses are in ``cli/base.py``. No command but ``repair`` writes to an existing pool or takes its lock, so every
other command works on a pool in use (some hold the slots that they read). ``inject`` writes to a copy that it made;
``compact`` and ``reshard`` make new pools; ``copy`` makes a new pool or sends to a tier; ``drain`` sends to a tier what
a training would have sent; ``repair`` also mends tiers; ``gc`` removes files from a tier. The module of a command is
imported when the command runs or the help lists it, and torch when a command that needs it runs. So ``doctor`` also
works where the native library does not load.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os

import click

from lightck.cli.base import Group

NAMES = (
    "bench",
    "compact",
    "completion",
    "copy",
    "demo",
    "diff",
    "docs",
    "doctor",
    "drain",
    "export",
    "gc",
    "inject",
    "inspect",
    "list",
    "repair",
    "reshard",
    "run",
    "trace",
    "verify",
    "watch",
)


class _Commands(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        # Not list(NAMES): once lightck.cli.list is imported, the name ``list`` in this module is that submodule.
        return [*NAMES]

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
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Print the version of lightck.",
)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Every finished training step of a PyTorch model survives a crash.

    Exit status: 0 success; 1 damaged, different or unusable; 2 the command could not be carried out. lightck run
    returns the status of the command that it runs.
    """
    if os.environ.get("NO_COLOR"):
        ctx.color = False
