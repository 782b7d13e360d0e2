"""What all commands share: exit statuses, errors on stderr, a closed pipe, options, completion of pool paths.

Exit status: 0 as promised; 1 damaged, different or unusable; 2 it could not be done (usage, no pool there, not a pool);
130 interrupted; 141 the reader of our output went away. A ``LightckError``, or what the system refuses, is one line on
stderr, and with ``--json`` an object on stdout too. A traceback is a mistake of ours.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from lightck.cli import output
from lightck.cli.text import Facts, clean, say_json
from lightck.errors import CorruptPoolError, ExportExistsError, LightckError, PoolTruncatedError

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


def tell(text: str) -> None:
    """Progress, on stderr: stdout is the answer's alone."""
    click.echo(clean(text), err=True)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """As by Ctrl-C: what was made meanwhile is removed. A signal that is ignored (nohup) stays so."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def error_facts(error: Exception) -> Facts:
    """An error as ``--json`` shows it."""
    name = "UsageError" if isinstance(error, click.UsageError) else type(error).__name__
    return {"error": {"class": name, "message": message_of(error), "reasons": list(getattr(error, "reasons", ()))}}


def message_of(error: Exception) -> str:
    """Fact, reason and cure. The system gives the reason only, and click no stop."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, LightckError) or not isinstance(error, OSError):
        return str(error)
    why = error.strerror or str(error)
    if output.failed(error):
        return f"The answer could not be printed whole: {why}. Make room where the output goes, or send it elsewhere."
    if not isinstance(error.filename, (str, bytes)):
        return str(error)
    path = os.fsdecode(error.filename)
    return f"{path!r} cannot be used: {why}. Check the path, whose it is and what room there is, or name another."


class Command(click.Command):
    """A command that answers with its exit status."""

    damage: tuple[type[LightckError], ...] = (CorruptPoolError, PoolTruncatedError)
    """Errors that say that a pool is damaged (exit 1); all others say that nothing could be done (exit 2)."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # no failure: it has an exit status of its own
            raise
        except (LightckError, *_SYSTEM) as error:
            if output.failed(error):
                raise
            if ctx.params.get("as_json"):
                say_json(error_facts(error))
            complain(message_of(error))
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

    def invoke(self, ctx: click.Context) -> object:
        with _pipe_watched():
            return super().invoke(ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: object,
    ) -> Any:
        def run() -> object:
            return super(Group, self).main(args, prog_name, complete_var, standalone_mode=False, **extra)

        if not standalone_mode:
            return run()
        words = sys.argv[1:] if args is None else list(args)
        before = output.prepare()
        try:
            status = _exit_status(run, "--json" in itertools.takewhile("--".__ne__, words))
        finally:
            output.restore(before)
        sys.exit(status)


def _exit_status(run: Callable[[], object], as_json: bool) -> int:
    if sys.stdout is None:
        complain("No answer can be given: the standard output is closed. For the exit status alone, say > /dev/null.")
        return TROUBLE
    try:
        status = run()
        sys.stdout.flush()
        return status if isinstance(status, int) else OK
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except (BrokenPipeError, _PipeClosedError):
        output.leave()
        return PIPE_CLOSED
    except Exception as error:
        _say_why(error, as_json)
        return TROUBLE  # click's own, and Python's, is 1, which says that something is damaged


def _say_why(error: Exception, as_json: bool) -> None:
    """What no command has answered: wrong usage, what is refused before one runs, a mistake of ours."""
    if output.failed(error):
        output.leave()
    elif as_json and not isinstance(error, _NO_WORDS):
        with contextlib.suppress(OSError):  # the object, too, for whom only stdout is read
            say_json(error_facts(error))
    if isinstance(error, click.UsageError):
        _usage(error)
    elif isinstance(error, (click.ClickException, LightckError, *_SYSTEM)):
        complain(message_of(error))
    else:
        traceback.print_exception(error)  # for whoever mends it
        complain("This is a mistake in lightck, and says nothing of the pool. Please report it, with the lines above.")


def _usage(error: click.UsageError) -> None:
    if error.ctx is not None and isinstance(error, _NO_WORDS):
        click.echo(error.ctx.get_help(), err=True)
        return
    if error.ctx is not None:
        click.echo(error.ctx.get_usage(), err=True)
    hint = f" Try '{error.ctx.command_path} --help'." if error.ctx is not None else ""
    complain(error.format_message() + hint)


def trouble(message: str) -> NoReturn:
    """A usage error: exit 2."""
    raise click.UsageError(message)


def refuse_existing(path: str, *, overwrite: bool) -> None:
    """Of a file that a command is to write, in the command's words; the library looks again when it writes."""
    from lightck.export.atomic import refuse_irreplaceable

    refuse_irreplaceable(path)
    if os.path.lexists(path) and not overwrite:
        raise ExportExistsError(f"{path!r} exists. It is not replaced unasked. Name another, or pass --overwrite.")


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
    from lightck.pool.storage.backends import is_pool

    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found += [path] if is_pool(path) else []
    return found


POOL = PoolPath()
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
step_option = click.option("--step", type=click.IntRange(0), metavar="N", help="This step instead of the newest.")
