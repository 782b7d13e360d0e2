"""What all commands share: exit statuses, errors on stderr, a closed pipe, options, completion of pool paths.

Exit status: 0 success; 1 damaged, different or unusable; 2 the command could not be carried out (wrong usage, no such
pool, not a pool); 130 interrupted; 141 the reader of the output closed its pipe. (``lightck run`` returns the exit
status of the command that it runs.) A ``LightckError`` or an error of the operating system is printed as one line on
stderr, and with ``--json`` also as an object on stdout. A traceback is printed only for a bug in lightck.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from lightck.cli import output
from lightck.cli.text import Facts, clean, print_json
from lightck.errors import CorruptPoolError, ExportExistsError, LightckError, PoolTruncatedError

OK, BAD, FAILED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
_COMPLETED_MAX = 200
"""The largest number of paths that one shell completion examines."""
_SYSTEM = (OSError, ImportError)
"""Errors that are no bug in lightck: a path that the system refuses, a library that is not installed."""
_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""The exception that click raises for ``lightck`` without arguments; its message is the whole help. Click before 8.2
has no such exception and prints the help itself."""


def print_error(message: str) -> None:
    """Print an error message as one line on stderr."""
    click.echo(click.style("error: ", fg="red") + clean(" ".join(message.split("\n"))), err=True)


def print_progress(text: str) -> None:
    """Print progress on stderr, because stdout is for the answer only."""
    click.echo(clean(text), err=True)


def ended_by_signals() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt in a block, so that temporary files are removed."""
    return signals_handled(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Let ``handler`` handle these signals in a block. A signal that the process ignores (nohup) stays ignored."""
    before = {number: signal.getsignal(number) for number in numbers}
    for number, known in before.items():
        if known is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, known in before.items():
            signal.signal(number, known)


def error_facts(error: Exception) -> Facts:
    """Return the object that ``--json`` prints for an error."""
    name = "UsageError" if isinstance(error, click.UsageError) else type(error).__name__
    return {"error": {"class": name, "message": message_of(error), "reasons": list(getattr(error, "reasons", ()))}}


def message_of(error: Exception) -> str:
    """Return the message of an error: fact, reason and cure. An OSError has only a reason, to which this function adds
    the fact and the cure."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, LightckError) or not isinstance(error, OSError):
        return str(error)
    why = error.strerror or str(error)
    if output.is_output_error(error):
        return f"The answer could not be printed whole: {why}. Make room where the output goes, or redirect the output."
    if not isinstance(error.filename, (str, bytes)):
        return str(error)
    path = os.fsdecode(error.filename)
    return f"{path!r} cannot be used: {why}. Check the path, its owner and the free space, or name another path."


class Command(click.Command):
    """A command whose function returns the exit status. An error is printed as one line and becomes an exit status."""

    damage: tuple[type[LightckError], ...] = (CorruptPoolError, PoolTruncatedError)
    """Errors that mean that a pool is damaged (exit status 1). For any other error the exit status is 2."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # ``Group`` ends with PIPE_CLOSED
            raise
        except (LightckError, *_SYSTEM) as error:
            if output.is_output_error(error):
                raise
            if ctx.params.get("as_json"):
                print_json(error_facts(error))
            print_error(message_of(error))
            return BAD if isinstance(error, self.damage) else FAILED


class ComparingCommand(Command):
    """A command whose exit status 1 means that two checkpoints differ, and not that a pool is damaged."""

    damage = ()


class _PipeClosedError(Exception):
    """Raised instead of ``BrokenPipeError``, which click would turn into exit status 1 (damage)."""


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
    """Call ``run``, which runs a command, and return the exit status of the process."""
    if sys.stdout is None:
        print_error(
            "No answer can be given: the standard output is closed. To get only the exit status, redirect to /dev/null."
        )
        return FAILED
    try:
        status = run()
        sys.stdout.flush()
        return status if isinstance(status, int) else OK
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except (BrokenPipeError, _PipeClosedError):
        output.discard_rest()
        return PIPE_CLOSED
    except Exception as error:
        _print_why(error, as_json)
        return FAILED  # click and Python would use 1, which means damage in this program


def _print_why(error: Exception, as_json: bool) -> None:
    """Print an error that no command handled: wrong usage, a failure before the command or of its output, or a bug."""
    if output.is_output_error(error):
        output.discard_rest()
    elif as_json and not isinstance(error, _NO_ARGUMENTS):
        with contextlib.suppress(OSError):  # for callers that read stdout only
            print_json(error_facts(error))
    if isinstance(error, click.UsageError):
        _print_usage(error)
    elif isinstance(error, (click.ClickException, LightckError, *_SYSTEM)):
        print_error(message_of(error))
    else:
        traceback.print_exception(error)  # for the bug report
        print_error(
            "This is a bug in lightck, and says nothing about the pool. Please report the bug, with the lines above."
        )


def _print_usage(error: click.UsageError) -> None:
    if error.ctx is not None and isinstance(error, _NO_ARGUMENTS):
        click.echo(error.ctx.get_help(), err=True)
        return
    if error.ctx is not None:
        click.echo(error.ctx.get_usage(), err=True)
    hint = f" Try '{error.ctx.command_path} --help'." if error.ctx is not None else ""
    print_error(error.format_message() + hint)


def usage_error(message: str) -> NoReturn:
    """Raise the error for wrong usage (exit status 2)."""
    raise click.UsageError(message)


def refuse_existing(path: str, *, overwrite: bool) -> None:
    """Raise ``ExportExistsError`` if the output path exists and ``overwrite`` is False, or if it is never replaced. The
    message names the option --overwrite. The library checks the path again when it writes."""
    from lightck.export.atomic import refuse_irreplaceable

    refuse_irreplaceable(path)
    if os.path.lexists(path) and not overwrite:
        raise ExportExistsError(
            f"{path!r} exists, and an existing file is not replaced by default. Name another path, or pass --overwrite."
        )


class PoolPath(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """The path of a pool. Shell completion offers the pools that match. If there is none, or if a folder matches too,
    it offers all files."""

    name = "pool"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        folder, start = os.path.split(incomplete)
        try:
            names = sorted(name for name in os.listdir(folder or ".") if name.startswith(start))
        except OSError:
            names = []
        paths = [os.path.join(folder, name) for name in names if start or not name.startswith(".")][:_COMPLETED_MAX]
        if not any(map(os.path.isdir, paths)):
            pools = _pools(paths)
            if pools:
                return [CompletionItem(path) for path in pools]
        return [CompletionItem(incomplete, type="file")]


def _pools(paths: list[str]) -> list[str]:
    """Return the paths of pools among ``paths``."""
    from lightck.pool.storage.backends import is_pool

    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found += [path] if is_pool(path) else []
    return found


class Quantity(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A number with a unit, which a function of ``tiers/rates.py`` reads."""

    def __init__(self, name: str, function: str, examples: str) -> None:
        self.name, self._function, self._examples = name, function, examples

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from lightck.tiers import rates

        found: float | None = getattr(rates, self._function)(str(value))
        if found is None:
            self.fail(f"{value!r} is no {self.name}. Write {self._examples}.", param, ctx)
        return found


_SECRET_OPTION = re.compile("secret|token|password|sas_key|access_key|account_key|customer_key|service_account_key")
_NO_SECRET_OPTIONS = frozenset(["aws_web_identity_token_file", "web_identity_token_file", "federated_token_file"])


def _store_options(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    options = {}
    for each in given:
        key, equals, value = each.partition("=")
        if _SECRET_OPTION.search(key.lower()) and key.lower() not in _NO_SECRET_OPTIONS:
            raise click.UsageError(
                f"--store-option {key} holds a secret, and other users of this machine can read the command line. Put "
                "it into the environment, under the name that obstore reads there."
            )
        if not key or not equals:
            raise click.UsageError("--store-option takes KEY=VALUE, such as region=eu-central-1.")
        options[key] = value
    return options


POOL = PoolPath()
DURATION = Quantity("duration", "seconds_of", "30s, 5min or 1h")
rate_option = click.option(
    "--rate",
    "bytes_per_second",
    type=Quantity("rate", "bytes_per_second_of", "200MB/s, 50kB/s or 1.5GiB/s"),
    help="Send at most this many bytes in a second: 200MB/s. When a signal ends copy --every or drain --follow, the "
    "newest checkpoint is sent without this limit.",
)
compress_option = click.option(
    "--compress",
    type=click.Choice(["zstd", "lz4"]),
    help="Compress what is sent to a tier. zstd makes it smaller, lz4 is faster. [default: not compressed]",
)
store_option = click.option(
    "--store-option",
    "store_options",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_store_options,
    help="A setting of the object store that the URL does not contain, under the name that obstore gives it: "
    "endpoint=https://..., region=.... Credentials belong in the environment. May be repeated.",
)
STORE_OPTIONS = "lightck.store_options"
"""The key in click's context (``ctx.meta``) under which a command keeps the options of object stores."""


def _remember_store_options(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> None:
    ctx.meta[STORE_OPTIONS] = _store_options(ctx, param, given)


any_store_option = click.option(
    "--store-option",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_remember_store_options,
    expose_value=False,
    help="If a tier is a URL: a setting of its object store, as for lightck copy. May be repeated.",
)
"""As ``store_option``, but the value is no argument of the command: it goes into ``ctx.meta``, and ``open_tier`` finds
it there."""
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
step_option = click.option(
    "--step", type=click.IntRange(0), metavar="N", help="Use the checkpoint of step N instead of the newest."
)
