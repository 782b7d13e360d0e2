"""Standard output and error of a command, which may be closed, full, a broken pipe or of a narrow encoding; and a
progress bar on stderr."""

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
    """Set up stdout and stderr for a command. Returns the original stdout, for ``restore``.

    A stderr that the shell closed (``2>&-``) becomes /dev/null, so that no file opened later gets its descriptor.
    Characters that the encoding lacks are printed as escapes. Stdout is buffered, even under ``PYTHONUNBUFFERED``,
    because Python's unbuffered stdout does not notice that a full disk took only a part of a write.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        return out
    out.reconfigure(errors="backslashreplace")
    with contextlib.suppress(io.UnsupportedOperation):  # stdout of a test, in memory
        raw = FailureRecordingFile(out.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), out.encoding, "backslashreplace", line_buffering=out.line_buffering
        )
    return out


def restore(out: TextIO | None) -> None:
    """Put the original stdout back, for programs that call a command from Python."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout is not None:
            sys.stdout.flush()
    sys.stdout = out


def is_output_error(error: BaseException) -> bool:
    """Whether ``error`` was raised by a write to the standard output."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, FailureRecordingFile) and raw.failure is error


def discard_rest() -> None:
    """Redirect stdout to /dev/null, so that Python's flush at exit does not fail once more on the unwritten rest."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


LONG_NBYTES = 64 << 20
"""The least number of bytes for which a progress bar is shown."""


@contextmanager
def progress_bar(label: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over ``nbytes``, only for long work on a terminal. Gives a function that advances it by bytes."""
    if nbytes < LONG_NBYTES or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=nbytes)
        yield lambda more: progress.advance(task, more)
