"""``lightck completion``: prints the shell script that completes commands, options and pool paths."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from lightck.cli.base import FAILED, OK, Command, print_error

VARIABLE = "_LIGHTCK_COMPLETE"


@click.command("completion", cls=Command, short_help="Print a script that lets your shell complete commands and pools.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> int:
    """Print the completion script for SHELL. To use the script in every shell, add one line to the shell's start file:

    \b
      bash   ~/.bashrc                    eval "$(lightck completion bash)"
      zsh    ~/.zshrc                     eval "$(lightck completion zsh)"
      fish   ~/.config/fish/config.fish   lightck completion fish | source
    """
    found = get_completion_class(shell)
    assert found is not None, "click supports all three shells"
    try:
        script = found(ctx.find_root().command, {}, "lightck", VARIABLE).source()
    except OSError as error:  # click runs bash to get its version
        print_error(
            f"{shell} cannot be run here: {error.strerror}. The completion script depends on the version of {shell}. "
            f"Install {shell} first."
        )
        return FAILED
    click.echo(script)
    return OK
