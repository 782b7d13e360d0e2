"""Standard output and standard error of a command, and a progress bar on stderr. An output may be closed, a file on a
full disk, a broken pipe, or a stream whose encoding lacks characters."""

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

    If the shell closed stderr (``2>&-``), /dev/null is opened as stderr, so that no file that is opened later gets the
    descriptor of stderr. Characters that the encoding lacks are printed as escapes. Stdout is buffered, even under
    ``PYTHONUNBUFFERED``, because Python's unbuffered stdout does not notice when a full disk takes only a part of a
    write.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
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
    """Flush stdout and set it to ``out``, the original one, for programs that call a command from Python."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout is not None:
            sys.stdout.flush()
    sys.stdout = out


def is_output_error(error: BaseException) -> bool:
    """Whether ``error`` was raised by a write to the standard output."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, FailureRecordingFile) and raw.failure is error


def discard_rest() -> None:
    """Redirect stdout to /dev/null. Otherwise Python would flush the unwritten rest at exit, and fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


LONG_NBYTES = 64 << 20
"""The least number of bytes for which ``progress_bar`` shows a bar."""


@contextmanager
def progress_bar(label: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over ``nbytes`` while the block runs, if the work is long (``LONG_NBYTES``) and stderr is a
    terminal. The block receives a function that advances the bar by a number of bytes."""
    if nbytes < LONG_NBYTES or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=nbytes)
        yield lambda more: progress.advance(task, more)
