"""A progress bar on stderr, on a terminal, where the work is long; nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONG_NBYTES = 64 << 20


@contextmanager
def bar(label: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar over ``nbytes``; gives the function that moves it on by as many."""
    if nbytes < LONG_NBYTES or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=nbytes)
        yield lambda more: progress.advance(task, more)
