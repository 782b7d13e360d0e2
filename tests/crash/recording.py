"""A training through the public API, with the trace of everything it wrote and the truth about every step.

While a ``Recorder`` is entered, every pool that is mapped for writing is traced, from its creation through each
reopening to the file that replaces it, one tape per file. The training records its true state by ``note``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from types import TracebackType
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import nn

import lightck
from crash import trace
from crash.images import pages_of
from crash.oracle import truth
from crash.trace import LOST, NOBODY, PUBLISHED, Event, Flush, Mark, Store, Sync
from lightck import _native
from lightck.pool import create, writer
from lightck.pool.engine import Medium
from lightck.pool.format.structures import MANIFEST_MAGIC, SUPERBLOCK_NBYTES, ManifestHeader, Superblock
from lightck.pool.storage import extents
from lightck.pool.storage.extents import Extents
from lightck.pool.storage.file import FileContainer
from lightck.session import pool_file


@dataclass(frozen=True, slots=True)
class Expected:
    """The true state of the checkpoint of one generation."""

    step: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where a slot has its header and its payload (up to the slot's end), from the start of the file."""

    header: int
    payload: int
    end: int


@dataclass(frozen=True, slots=True)
class Tape:
    """Everything that happened to one file: its bytes before, then the events, by offsets of the pool in it."""

    nbytes: int
    """Of the file."""
    places: Extents
    """Where in it the pool lies: all of it, or the arenas of a PMDK pool."""
    pages: Mapping[int, bytes]
    is_visible: bool
    """It lay at the pool's path from the start; else it does from its ``PUBLISHED`` mark on."""
    events: tuple[Event, ...]
    slots: tuple[SlotPlace, ...]
    expected: Mapping[int, Expected]
    """By generation of the payload."""
    content: Mapping[int, int]
    """Generation of a commit record -> generation of the payload that it names."""
    acked: int | None = None
    """The generation that was acknowledged before the recording began, if one was."""
    homes: tuple[tuple[int, int], ...] = ()
    """Of a pool with gradient records: where its homes begin and end."""


Recording: TypeAlias = "tuple[Tape, ...]"
"""A training as it was written: its files in the order in which they lay at the pool's path."""


@dataclass(slots=True)
class _File:
    fd: int
    places: Extents
    pages: dict[int, bytes]
    is_visible: bool
    events: list[Event] = field(default_factory=list)
    checkpoints: list[tuple[int, ManifestHeader]] = field(default_factory=list)
    """(session, manifest) of what was written."""
    adopted: dict[int, int] = field(default_factory=dict)


class Recorder:
    """Records the pool at ``path``; a context manager around one or more sessions.

    The files get uuids by their number, and the run gets an id by the recorder's name. So two recordings of the same
    steps are the same bytes, and no image of theirs is counted twice.
    """

    def __init__(self, path: str, name: str = "") -> None:
        """``name``: what makes the uuids differ from those of another recorder, where both made a file at ``path``."""
        self.path = path
        self._name = name
        self._files: list[_File] = []
        self._notes: dict[tuple[int, int], bytes] = {}
        self._sessions = 0
        self._open: dict[int, Medium] = {}
        self._session: lightck.Session | None = None
        self._patches = ExitStack()

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any) -> lightck.Session:
        """``lightck.attach``; from here on ``note`` refers to this session."""
        self._sessions += 1
        self._session = lightck.attach(model, self.path, optimizer=optimizer, **options)
        return self._session

    def note(self, model: nn.Module, optimizer: torch.optim.Optimizer, **state: Any) -> None:
        """Record the state that the checkpoint of the session's current step has to hold."""
        assert self._session is not None
        self._notes[self._sessions, self._session._steps.updates] = truth(model, optimizer, **state)

    def damage(self, offset: int, data: bytes, left: int) -> None:
        """The medium lost bytes: these lie there now, and generation ``left`` is what a recovery has to give. Between
        sessions only."""
        assert not self._open, "no session is open"
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            file = self._files[self._number(fd)]
            left_over = data
            for at, n in extents.runs(file.places, offset, len(data)):
                os.pwrite(fd, left_over[:n], at)
                left_over = left_over[n:]
        finally:
            os.close(fd)
        file.events.append(Mark(NOBODY, LOST, left))
        file.events += [Store(NOBODY, offset, data), Flush(NOBODY, offset, len(data)), Sync(NOBODY)]

    # -- what the pool reports ---------------------------------------------------------------------------

    def mapped(self, medium: Medium, fd: int, places: Extents) -> None:
        """A medium was opened on this file."""
        self._open[self._number(fd, places)] = medium
        trace.start(medium)

    def _number(self, fd: int, places: Extents = ()) -> int:
        for number, file in enumerate(self._files):
            if os.path.sameopenfile(file.fd, fd):
                return number
        assert places, "a file is mapped before any other event of it"
        here = os.path.exists(self.path) and os.path.samestat(os.stat(self.path), os.fstat(fd))
        # The duplicate keeps the inode from being given to another file while we record.
        self._files.append(_File(os.dup(fd), places, pages_of(fd), here))
        return len(self._files) - 1

    def unmapped(self, medium: Medium) -> None:
        for number, known in list(self._open.items()):
            if known is medium:
                del self._open[number]
                events = trace.stop(medium)
                self._files[number].events += events
                self._files[number].checkpoints += [(self._sessions, header) for header in _manifests(events)]

    def published(self, fd: int) -> None:
        """The file was made durable and renamed to the pool's path."""
        number = self._number(fd)
        if number in self._open:
            trace.mark(self._open[number], PUBLISHED, 0)
        else:
            self._files[number].events.append(Mark(0, PUBLISHED, 0))

    def store_commit_record(self, medium: Medium, store_commit_record: bytes, kind: int) -> None:
        """A commit record that no job writes begins, or is durable (``kind`` is the mark)."""
        generation, payload = (int.from_bytes(store_commit_record[at : at + 8], "little") for at in (0, 24))
        number = next(n for n, known in self._open.items() if known is medium)
        self._files[number].adopted[generation] = payload
        trace.mark(medium, kind, generation)

    # -- the recording -----------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        recorder, publish = self, FileContainer.publish

        class Recording(_RecordingMedium):
            _recorder = recorder

        def recorded_publish(container: FileContainer) -> None:
            publish(container)
            recorder.published(container.fd)

        geometry, made = create._geometry, count()

        def numbered(*args: Any) -> tuple[Superblock, bytes]:
            superblock, table = geometry(*args)
            return replace(superblock, uuid=_uuid(f"{self._name} {next(made)}")), table

        self._patches.enter_context(patch.object(create, "_geometry", numbered))
        self._patches.enter_context(patch.object(pool_file, "new_run_id", _uuid(self._name).hex))
        for module in (create, writer):
            self._patches.enter_context(patch.object(module, "Medium", Recording))
        self._patches.enter_context(patch.object(FileContainer, "publish", recorded_publish))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._patches.close()
        for number in list(self._open):
            self.unmapped(self._open[number])
        self._session = None

    def finish(self, before: Tape | None = None, acked: int | None = None) -> Recording:
        """The recording; the recorder is used up. ``before``: what made the file that this one began with, in which
        generation ``acked`` was the one to recover."""
        try:
            return tuple(self._tape(file, before if file.is_visible else None, acked) for file in self._files)
        finally:
            for file in self._files:
                os.close(file.fd)

    def _tape(self, file: _File, before: Tape | None, acked: int | None) -> Tape:
        expected = {} if before is None else dict(before.expected)
        content = {} if before is None else dict(before.content)
        content.update(file.adopted)
        for session, header in file.checkpoints:
            content[header.generation] = header.generation
            known = self._notes.get((session, header.step))
            if known is not None:
                expected[header.generation] = Expected(header.step, known)
        events: list[Event] = []
        for event in file.events:
            if isinstance(event, Mark) and event.mark == PUBLISHED:
                events.append(Sync(event.thread))  # the fsync of publish
            events.append(event)
        superblock = Superblock.unpack(extents.read(file.fd, file.places, 0, SUPERBLOCK_NBYTES))
        slots = tuple(SlotPlace(at, at + superblock.payload_offset, at + n) for at, n in superblock.slots)
        nbytes = os.fstat(file.fd).st_size
        return Tape(
            nbytes,
            file.places,
            file.pages,
            file.is_visible,
            tuple(events),
            slots,
            expected,
            content,
            acked if before is not None else None,
            tuple((at, at + n) for at, n in superblock.homes),
        )


class _RecordingMedium(Medium):
    """A medium that passes its events to a recorder."""

    _recorder: Recorder

    def __init__(self, fd: int, places: Extents, tier: int) -> None:
        super().__init__(fd, places, tier)
        self._recorder.mapped(self, fd, places)

    def store_commit_record(self, offset: int, store_commit_record: bytes) -> None:
        self._recorder.store_commit_record(self, store_commit_record, _native.lib.LCK_MARK_BEGIN)
        super().store_commit_record(offset, store_commit_record)
        self._recorder.store_commit_record(self, store_commit_record, _native.lib.LCK_MARK_ACK)

    def close(self) -> None:
        if self.handle is not None:
            self._recorder.unmapped(self)
        super().close()


def _uuid(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def _manifests(events: Sequence[Event]) -> list[ManifestHeader]:
    stores = (event.data for event in events if isinstance(event, Store))
    return [ManifestHeader.unpack(data) for data in stores if data.startswith(MANIFEST_MAGIC)]
