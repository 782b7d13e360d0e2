"""Bugs that the fault campaigns have to find: each undoes one thing that the library does, in the stage's process."""

from __future__ import annotations

import os

from lightck import _native, pipeline, session
from lightck.errors import BackgroundError, NotAPoolError, PoolTruncatedError
from lightck.pool import engine, extents, file, reader


def short_reads_are_believed() -> None:
    """A call that gives less than asked for is taken for the end of the file."""
    extents._run = lambda fd, at, nbytes: os.pread(fd, nbytes, at)


def a_refused_attach_keeps_its_lock() -> None:
    from lightck import attach

    attach.PoolLock.release = lambda self: None


def a_failed_sync_is_good() -> None:
    """The engine says that a version failed, and nobody listens."""
    engine.Job._raise = lambda self, status: None


def a_failure_is_told_once() -> None:
    session.Session._raise_failure = lambda self: None


def memory_errors_pass_versions_over() -> None:
    """No memory is taken for a bad block: an older version is used though the newest is sound."""
    reader.is_of_medium = lambda code: True


def nothing_is_allocated() -> None:
    """The file is made long, and has no space behind it."""
    file._allocate = lambda path, fd, nbytes: os.ftruncate(fd, nbytes)


def size_is_not_compared() -> None:
    reader.PoolReader._check_size = lambda self, superblock: None


def a_cut_file_is_foreign() -> None:
    """The wrong one of lightck's own errors."""

    def wrong(self: reader.PoolReader, superblock: object) -> None:
        try:
            right(self, superblock)
        except PoolTruncatedError as err:
            raise BackgroundError(str(err)) from err

    right = reader.PoolReader._check_size
    reader.PoolReader._check_size = wrong


def an_interrupt_ends_the_session() -> None:
    """Whatever is raised in the loop, the version of the step is thrown away with it."""
    pipeline.Pipeline.finish = lambda self, timeout=None: (self._flights.clear(), True)[1]


def nothing_is_finished_at_exit() -> None:
    """The interpreter ends under threads that go on."""
    import signal

    session.Session._abandon = lambda self: os.kill(os.getpid(), signal.SIGSEGV)


__all__ = ["NotAPoolError", "_native"]
