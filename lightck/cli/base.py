"""What all commands share: exit statuses, errors on stderr, a closed pipe, options, completion of pool paths.

Exit status: 0 as promised; 1 damaged, different or unusable; 2 it could not be done (usage, no pool there, not a pool);
130 interrupted; 141 the reader of our output went away. A ``LightckError``, or what the system refuses, is one line on
stderr. A traceback is a mistake of ours.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from lightck.cli.text import clean, say_json
from lightck.errors import CorruptPoolError, LightckError, PoolTruncatedError

OK, BAD, TROUBLE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
_LOOKED_AT_MAX = 200
"""Files that a completion opens at most."""
_SYSTEM = (OSError, ImportError)
"""What is no fault of ours: a path that the system refuses, a library that is not installed."""
_NO_WORDS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""``lightck`` alone. Its message is the whole help; before click 8.2 there is none, and click prints the help."""


def complain(message: str) -> None:
    """One line on stderr: the fact, the reason, the cure."""
    click.echo(click.style("error: ", fg="red") + clean(" ".join(message.split("\n"))), err=True)


def error_facts(error: Exception) -> dict[str, Any]:
    """An error as ``--json`` shows it."""
    reasons = list(getattr(error, "reasons", ()))
    return {"error": {"class": type(error).__name__, "message": str(error), "reasons": reasons}}


class Command(click.Command):
    """A command that answers with its exit status."""

    damage: tuple[type[LightckError], ...] = (CorruptPoolError, PoolTruncatedError)
    """Errors that say that a pool is damaged (exit 1); all others say that nothing could be done (exit 2)."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # no failure: it has an exit status of its own
            raise
        except (LightckError, *_SYSTEM) as error:
            if ctx.params.get("as_json"):
                say_json(error_facts(error))
            complain(str(error))
            return BAD if isinstance(error, self.damage) else TROUBLE


class ComparingCommand(Command):
    """A command whose exit status 1 says that two things differ: nothing else may."""

    damage = ()


class _PipeClosedError(Exception):
    """The reader of our output went away. Not the builtin error, of which click makes exit status 1: damage."""


@contextlib.contextmanager
def _pipe_watched() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _PipeClosedError from error


class Group(click.Group):
    """The ``lightck`` command: runs one command and ends the process with its exit status."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _pipe_watched():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _pipe_watched():
            return super().invoke(ctx)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, complete_var: str | None = None,
             standalone_mode: bool = True, **extra: Any) -> Any:  # fmt: skip
        def run() -> Any:
            return super(Group, self).main(args, prog_name, complete_var, standalone_mode=False, **extra)

        if not standalone_mode:
            return run()
        sys.exit(_exit_status(run))


def _exit_status(run: Callable[[], Any]) -> int:
    _open_stderr()
    if sys.stdout is None:
        complain("No answer can be given: the standard output is closed. For the exit status alone, say > /dev/null.")
        return TROUBLE
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter is no reason to fail
    try:
        status = run()
        sys.stdout.flush()
        return status if isinstance(status, int) else OK
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except (BrokenPipeError, _PipeClosedError):
        _leave_pipe()
        return PIPE_CLOSED
    except click.UsageError as error:
        return _usage(error)
    except click.ClickException as error:
        complain(error.format_message())
        return TROUBLE  # click's own is 1, which says that something is damaged
    except _SYSTEM as error:
        complain(str(error))
        return TROUBLE
    except Exception:
        traceback.print_exc()  # for whoever mends it
        complain("This is a mistake in lightck, and says nothing of the pool. Please report it, with the lines above.")
        return TROUBLE  # Python's own is 1, which says that something is damaged


def _open_stderr() -> None:
    """Python has none where the shell closed it (``2>&-``). What is printed there goes nowhere, and no file that is
    opened later gets its number."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives


def _usage(error: click.UsageError) -> int:
    if error.ctx is not None and isinstance(error, _NO_WORDS):
        click.echo(error.ctx.get_help(), err=True)
        return TROUBLE
    if error.ctx is not None:
        click.echo(error.ctx.get_usage(), err=True)
    hint = f" Try '{error.ctx.command_path} --help'." if error.ctx is not None else ""
    complain(error.format_message() + hint)
    return TROUBLE


def _leave_pipe() -> None:
    """Nobody reads on (``| head``). Python flushes stdout once more at its end: into nothing."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def trouble(message: str) -> NoReturn:
    """A usage error: exit 2."""
    raise click.UsageError(message)


class PoolPath(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A path of a pool. Completes pools; where none fits, whatever the shell would."""

    name = "pool"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        folder, start = os.path.split(incomplete)
        try:
            names = sorted(name for name in os.listdir(folder or ".") if name.startswith(start))
        except OSError:
            names = []
        paths = [os.path.join(folder, name) for name in names if start or not name.startswith(".")][:_LOOKED_AT_MAX]
        if not any(map(os.path.isdir, paths)):
            pools = _pools(paths)
            if pools:
                return [CompletionItem(path) for path in pools]
        return [CompletionItem(incomplete, type="file")]


def _pools(paths: list[str]) -> list[str]:
    from lightck.pool.backends import is_pool

    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found += [path] if is_pool(path) else []
    return found


POOL = PoolPath()
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
step_option = click.option("--step", type=click.IntRange(0), metavar="N", help="This step instead of the newest.")
