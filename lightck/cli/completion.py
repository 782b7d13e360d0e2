"""``lightck completion``: the script by which a shell completes commands, options and pool paths."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from lightck.cli.base import OK, TROUBLE, Command, complain

VARIABLE = "_LIGHTCK_COMPLETE"


@click.command("completion", cls=Command, short_help="A script that makes your shell complete commands and pools.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> int:
    """Print the completion script for SHELL. To have it in every shell, add one line to its start file:

    \b
      bash   ~/.bashrc                    eval "$(lightck completion bash)"
      zsh    ~/.zshrc                     eval "$(lightck completion zsh)"
      fish   ~/.config/fish/config.fish   lightck completion fish | source
    """
    found = get_completion_class(shell)
    assert found is not None, "click knows the three"
    try:
        script = found(ctx.find_root().command, {}, "lightck", VARIABLE).source()
    except OSError as error:  # bash itself is asked for its version
        complain(f"{shell} cannot be run here: {error.strerror}. Its script depends on its version. Install it first.")
        return TROUBLE
    click.echo(script)
    return OK
