"""Bugs that the fault campaigns have to find: each undoes one thing that the library does, in the stage's process."""

from __future__ import annotations

import os
import signal

from lightck.errors import BackgroundError, PoolTruncatedError
from lightck.pipeline import pipeline
from lightck.pool import engine, reader
from lightck.pool.storage import extents, file
from lightck.pool.storage.lock import PoolLock
from lightck.session import commits, session


def _replace(owner: object, name: str, by: object) -> None:
    if not hasattr(owner, name):  # a renamed function would otherwise leave the bug out
        os._exit(99)
    setattr(owner, name, by)


def short_reads_are_believed() -> None:
    """A call that gives less than asked for is taken for the end of the file."""
    _replace(extents, "_read_run", lambda fd, at, nbytes: os.pread(fd, nbytes, at))


def a_refused_attach_keeps_its_lock() -> None:
    _replace(PoolLock, "release", lambda self: None)


def a_failed_sync_is_good() -> None:
    """The engine reports that a checkpoint failed, and the report is ignored."""
    _replace(engine.Job, "_raise_if_failed", lambda self, status: None)


def a_failure_is_reported_once() -> None:
    _replace(commits.Commits, "raise_failure", lambda self: None)


def nothing_is_allocated() -> None:
    """The file is made long, and has no space behind it."""
    _replace(file, "_allocate", lambda path, fd, nbytes: os.ftruncate(fd, nbytes))


def size_is_not_compared() -> None:
    _replace(reader.PoolReader, "_check_size", lambda self, superblock: None)


def a_cut_file_is_foreign() -> None:
    """The wrong one of lightck's own errors."""

    def wrong(self: reader.PoolReader, superblock: object) -> None:
        try:
            right(self, superblock)
        except PoolTruncatedError as err:
            raise BackgroundError(str(err)) from err

    right = reader.PoolReader._check_size
    _replace(reader.PoolReader, "_check_size", wrong)


def an_interrupt_ends_the_session() -> None:
    """Any exception in the loop also drops the checkpoint of the step."""
    _replace(pipeline.Pipeline, "finish", lambda self, timeout=None: (self._in_flight.clear(), True)[1])


def nothing_is_finished_at_exit() -> None:
    """The interpreter's end is not survived."""
    _replace(session.Session, "abandon", lambda self: os.kill(os.getpid(), signal.SIGSEGV))
