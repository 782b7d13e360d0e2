"""The streams that a command prints to, as a shell left them: closed, full, without some letters, gone in mid-way; and
a progress bar on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from lightck.failure_recording import FailureRecordingFile


def prepare() -> TextIO | None:
    """Gives the standard output as it was, for ``restore``.

    Where the shell closed stderr (``2>&-``), what is printed there goes nowhere, and no file that is opened later gets
    its number. A terminal that lacks a letter is no reason to fail. Stdout is buffered, ``PYTHONUNBUFFERED`` or not:
    without a buffer Python takes no notice of what a full disk has no room for.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        return out
    out.reconfigure(errors="backslashreplace")
    with contextlib.suppress(io.UnsupportedOperation):  # of a test, in memory
        raw = FailureRecordingFile(out.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), out.encoding, "backslashreplace", line_buffering=out.line_buffering
        )
    return out


def restore(out: TextIO | None) -> None:
    """Whoever called a command from a program of his own prints on."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout is not None:
            sys.stdout.flush()
    sys.stdout = out


def failed(error: BaseException) -> bool:
    """Whether this is an error of the standard output."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, FailureRecordingFile) and raw.failure is error


def leave() -> None:
    """What could not be printed is still there, and Python prints it once more at its end: into nothing."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


LONG_NBYTES = 64 << 20


@contextmanager
def bar(label: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar over ``nbytes``, on a terminal, where the work is long; nothing anywhere else. Gives the function that
    moves it on by as many."""
    if nbytes < LONG_NBYTES or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=nbytes)
        yield lambda more: progress.advance(task, more)
