"""What every backend must do. A new one gets a subclass of ``BackendContract`` (see ``pool/storage/backend.py``)."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import toys
from crash.memory import MemoryBackend
from torch import nn

import lightck
from lightck.errors import (
    LightckError,
    NoSpaceError,
    NotAPoolError,
    PoolNotFoundError,
    PoolPathError,
    PoolPermissionError,
)
from lightck.pool.engine import Medium
from lightck.pool.format.structures import MAGIC, MIB, POOL_NBYTES_MIN
from lightck.pool.storage import backends, extents, temporary
from lightck.pool.storage.backend import Backend, Container
from lightck.pool.storage.durability import MEDIUM_CACHE, MEDIUM_DISK
from lightck.pool.storage.file import FileBackend
from lightck.pool.storage.pmdk import PmdkBackend

NBYTES = 2 * MIB + 4096


def poke(container: Container, offset: int, data: bytes) -> None:
    """Write into the container behind the back of everything."""
    for at, n in extents.runs(container.extents, offset, len(data)):
        os.pwrite(container.fd, data[:n], at)
        data = data[n:]


class BackendContract:
    """The facts. Subclasses give the fixtures ``backend`` and ``path`` (of a pool that is not there)."""

    def made(self, backend: Backend, path: str, first: bytes = MAGIC, nbytes: int = NBYTES) -> Container:
        container = backend.create(path, nbytes)
        poke(container, 0, first)
        return container

    def published(self, backend: Backend, path: str, first: bytes = MAGIC) -> None:
        container = self.made(backend, path, first)
        container.publish()
        container.close()

    def content(self, backend: Backend, path: str, n: int = len(MAGIC)) -> bytes:
        container = backend.open(path, write=False)
        try:
            return container.read(0, n)
        finally:
            container.close()

    def test_a_new_container_is_zeroed_and_has_the_size_that_was_asked_for(self, backend: Backend, path: str) -> None:
        for nbytes in (POOL_NBYTES_MIN, NBYTES, NBYTES + 4096):
            container = backend.create(path, nbytes)
            assert container.nbytes == nbytes
            assert container.read(0, nbytes + 1) == bytes(nbytes)
            container.publish()
            container.close()
            again = backend.open(path, write=False)
            assert again.nbytes == nbytes
            again.close()

    def test_a_container_is_invisible_until_it_is_published(self, backend: Backend, path: str) -> None:
        container = self.made(backend, path)
        assert not backend.recognises(path)
        assert container.is_current(), "no path that could be lost"
        with pytest.raises(PoolNotFoundError):
            backend.open(path, write=False)
        container.publish()
        assert backend.recognises(path)
        assert backend.claims(path)
        assert container.is_current()
        assert self.content(backend, path) == MAGIC
        container.close()

    def test_publishing_replaces_at_once_and_open_readers_keep_what_they_have(
        self, backend: Backend, path: str
    ) -> None:
        self.published(backend, path, b"old pool")
        old = backend.open(path, write=True)
        new = self.made(backend, path, b"new pool")
        assert self.content(backend, path) == b"old pool"
        assert old.is_current()
        new.publish()
        assert self.content(backend, path) == b"new pool"
        assert new.is_current()
        assert not old.is_current()
        assert old.read(0, 8) == b"old pool"
        old.close()
        new.close()

    def test_a_container_that_lost_bytes_is_not_current(self, backend: Backend, path: str) -> None:
        self.published(backend, path)
        container = backend.open(path, write=False)
        assert container.is_current()
        os.truncate(f"/proc/self/fd/{container.fd}", os.fstat(container.fd).st_size - 1)
        assert not container.is_current()
        container.close()

    def test_closing_what_was_not_published_leaves_nothing(self, backend: Backend, path: str) -> None:
        self.made(backend, path).close()
        assert not backend.recognises(path)
        self.assert_nothing_is_left(path)
        self.published(backend, path, b"old pool")
        self.made(backend, path, b"new pool").close()
        assert self.content(backend, path) == b"old pool"

    def assert_nothing_is_left(self, path: str) -> None:
        pass

    def test_closing_twice_is_allowed_and_frees_the_descriptor(self, backend: Backend, path: str) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            container = self.made(backend, path)
            container.close()
            container.close()
        assert len(os.listdir("/proc/self/fd")) == before

    def test_what_is_written_after_publishing_is_seen_by_others(self, backend: Backend, path: str) -> None:
        container = self.made(backend, path)
        container.publish()
        medium = Medium(container.fd, container.extents, backend.probe(path).medium_kind)
        medium.store(4096, b"through the mapping")
        medium.sync()
        reader = backend.open(path, write=False)
        assert reader.read(4096, 19) == b"through the mapping"
        reader.close()
        medium.close()
        container.close()

    def test_a_container_opened_for_reading_cannot_be_written(self, backend: Backend, path: str) -> None:
        self.published(backend, path)
        container = backend.open(path, write=False)
        with pytest.raises(OSError):
            poke(container, 0, b"x")
        container.close()

    def test_discarding_removes_the_pool_and_does_not_mind_its_absence(self, backend: Backend, path: str) -> None:
        self.published(backend, path)
        backend.discard(path)
        with pytest.raises(PoolNotFoundError):
            backend.open(path, write=False)
        backend.discard(path)
        backend.remove_stale(path)
        self.assert_nothing_is_left(path)

    def test_only_what_has_the_signature_is_recognised(self, backend: Backend, path: str) -> None:
        assert not backend.recognises(path)
        self.published(backend, path, b"something")
        assert not backend.recognises(path)
        container = backend.create(path, NBYTES)
        poke(container, 4096, MAGIC)  # the second superblock is enough
        container.publish()
        container.close()
        assert backend.recognises(path)

    def test_what_is_promised_comes_with_evidence(self, backend: Backend, path: str) -> None:
        durability = backend.probe(path)
        assert durability.evidence
        assert not durability.power or durability.os
        assert not durability.os or (durability.process and durability.medium_kind != MEDIUM_CACHE)

    def test_a_pool_lives_on_it(self, backend: Backend, path: str) -> None:
        """The whole library over this backend: train, resume, grow into another file, recover."""
        with patch.dict(backends.BACKENDS, {backend.name: backend}):
            model, optimizer = toys.pool_with(Path(path), 3, slots=3, backend=backend.name)
            seen = toys.everything(model, optimizer)
            assert toys.is_step(lightck.recover(path), seen)
            model = toys.net(seed=5)
            optimizer = toys.adam(model)
            with lightck.attach(model, path, optimizer=optimizer, resume=True, slots=2) as session:
                assert toys.same(toys.everything(model, optimizer), seen)
                toys.train(model, optimizer, 2, session.step)
            assert toys.is_step(lightck.recover(path), toys.everything(model, optimizer))


class FileContract(BackendContract):
    """What is true of files besides. Subclasses give ``place``, a folder."""

    @pytest.fixture
    def backend(self) -> Backend:
        return FileBackend()

    @pytest.fixture
    def path(self, place: Path) -> str:
        return str(place / "run.pool")

    def assert_nothing_is_left(self, path: str) -> None:
        assert os.listdir(os.path.dirname(path)) == []

    @pytest.mark.parametrize("mask", [0, 0o777])
    def test_the_mode_is_0600_whatever_the_umask(self, backend: Backend, path: str, mask: int) -> None:
        old = os.umask(mask)
        try:
            container = self.made(backend, path)
            assert stat.S_IMODE(os.fstat(container.fd).st_mode) == 0o600
            container.publish()
            container.close()
        finally:
            os.umask(old)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600

    def test_all_of_it_is_allocated(self, backend: Backend, path: str) -> None:
        container = self.made(backend, path)
        assert os.fstat(container.fd).st_blocks * 512 >= NBYTES
        container.close()

    def test_what_a_kill_left_behind_is_removed(self, backend: Backend, path: str) -> None:
        Path(temporary.path_of(path)).write_bytes(b"half a pool")
        backend.remove_stale(path)
        self.assert_nothing_is_left(path)
        Path(temporary.path_of(path)).write_bytes(b"half a pool")
        self.published(backend, path)
        assert os.listdir(os.path.dirname(path)) == ["run.pool"]

    def test_a_file_that_is_being_made_is_no_left_one(self, backend: Backend, path: str) -> None:
        """Where the pool's lock was lost: two would write one file, or one publish what the other makes."""
        container = self.made(backend, path)
        backend.remove_stale(path)
        with pytest.raises(PoolPermissionError, match="temporary file"):
            backend.create(path, NBYTES)
        container.publish()
        container.close()
        assert self.content(backend, path) == MAGIC

    @pytest.mark.parametrize("what", ["link", "dangling link", "second name", "folder", "fifo", "another user's"])
    def test_what_was_not_made_here_stays_under_the_temporary_name(
        self, backend: Backend, path: str, place: Path, what: str
    ) -> None:
        name = Path(temporary.path_of(path))
        victim = place / "victim"
        victim.write_bytes(b"a thesis")
        if "link" in what:
            name.symlink_to(victim if what == "link" else place / "nothing")
        elif what == "second name":
            os.link(victim, name)
        elif what == "folder":
            name.mkdir()
        elif what == "fifo":
            os.mkfifo(name)
        else:
            if os.geteuid() != 0:
                pytest.skip("only root can give a file away")
            name.touch()
            os.chown(name, 12345, -1)
        backend.remove_stale(path)
        with pytest.raises(PoolPermissionError, match="temporary file") as caught:
            backend.create(path, NBYTES)
        assert str(name) in str(caught.value)
        assert name.is_symlink() or name.exists()
        assert victim.read_bytes() == b"a thesis"
        assert not (place / "nothing").exists()

    def test_a_symbolic_link_is_never_followed(self, backend: Backend, path: str, place: Path) -> None:
        victim = place / "victim"
        victim.write_bytes(MAGIC + bytes(NBYTES))
        os.symlink(victim, path)
        for write in (False, True):
            with pytest.raises(PoolPathError, match="link"):
                backend.open(path, write=write)
        assert not backend.recognises(path)
        self.published(backend, path)  # replaces the link, not what it points to
        assert victim.read_bytes() == MAGIC + bytes(NBYTES)
        assert not os.path.islink(path)

    def test_a_fifo_does_not_hang(self, backend: Backend, path: str) -> None:
        os.mkfifo(path, 0o600)
        assert not backend.recognises(path)
        for write in (False, True):
            with pytest.raises(PoolPathError):
                backend.open(path, write=write)

    def test_what_is_no_regular_file_is_refused(self, backend: Backend, path: str, place: Path) -> None:
        os.mkdir(path)
        for write in (False, True):
            with pytest.raises(PoolPathError):
                backend.open(path, write=write)
        assert not backend.recognises(path)
        container = backend.create(path, NBYTES)
        with pytest.raises(LightckError):
            container.publish()
        container.close()
        assert os.listdir(place) == ["run.pool"]
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place / "socket"))
            with pytest.raises(PoolPathError):
                backend.open(str(place / "socket"), write=False)
        with pytest.raises(PoolPathError, match=r"is a device.*file system"):
            backend.open("/dev/null", write=False)

    @pytest.mark.parametrize("nbytes", [0, 1, POOL_NBYTES_MIN - 1])
    def test_a_file_that_is_too_small_is_no_pool(self, backend: Backend, path: str, nbytes: int) -> None:
        Path(path).write_bytes(bytes(nbytes))
        os.chmod(path, 0o600)
        with pytest.raises(NotAPoolError):
            backend.open(path, write=True)
        assert Path(path).read_bytes() == bytes(nbytes)

    @pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
    def test_what_others_can_write_is_refused(self, backend: Backend, path: str, mode: int) -> None:
        self.published(backend, path)
        os.chmod(path, mode)
        with pytest.raises(PoolPermissionError, match="written by others"):
            backend.open(path, write=False)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_what_belongs_to_another_user_is_read_and_never_written(self, backend: Backend, path: str) -> None:
        self.published(backend, path)
        os.chown(path, 12345, -1)
        with pytest.raises(PoolPermissionError, match="user 12345"):
            backend.open(path, write=True)
        backend.open(path, write=False).close()

    def test_a_second_name_is_refused(self, backend: Backend, path: str) -> None:
        self.published(backend, path)
        os.link(path, path + ".other")
        with pytest.raises(PoolPermissionError, match="links"):
            backend.open(path, write=False)

    def test_a_missing_folder_is_not_made(self, backend: Backend, place: Path) -> None:
        missing = str(place / "missing" / "run.pool")
        for call in (
            lambda: backend.create(missing, NBYTES),
            lambda: backend.open(missing, write=False),
            lambda: backend.probe(missing),
        ):
            with pytest.raises(PoolNotFoundError):
                call()
        (place / "file").touch()
        with pytest.raises(PoolNotFoundError):
            backend.create(str(place / "file" / "run.pool"), NBYTES)
        assert os.listdir(place) == ["file"]

    @pytest.mark.parametrize(
        ("owner", "mode", "error"),
        [
            (None, 0o700, None),
            (None, 0o755, None),
            (None, 0o775, None),
            (None, 0o1777, None),
            (None, 0o1775, None),
            (None, 0o777, "chmod o-w"),
            (None, 0o703, "chmod o-w"),
            (None, 0o757, "chmod o-w"),
            (12345, 0o755, None),
            (12345, 0o775, "sticky"),
            (12345, 0o777, "sticky"),
            (12345, 0o1777, "user 12345"),
            (12345, 0o1775, "user 12345"),
        ],
    )
    def test_a_folder_where_others_could_swap_the_pool_is_refused(
        self, backend: Backend, place: Path, owner: int | None, mode: int, error: str | None
    ) -> None:
        if owner is not None and os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        shared = place / "shared"
        shared.mkdir()
        if owner is not None:
            os.chown(shared, owner, -1)
        shared.chmod(mode)
        if error is None:
            self.published(backend, str(shared / "run.pool"))
            return
        with pytest.raises(PoolPermissionError, match=error) as caught:
            backend.create(str(shared / "run.pool"), NBYTES)
        assert str(shared) in str(caught.value)
        assert os.listdir(shared) == []

    def test_a_forked_child_that_closes_removes_nothing(self, backend: Backend, path: str) -> None:
        container = self.made(backend, path)
        toys.in_child(container.close)
        container.publish()
        container.close()
        assert os.path.exists(path)


class TestFileOnTmpfs(FileContract):
    @pytest.fixture
    def place(self, folder: Path) -> Path:
        return folder

    def test_it_survives_the_process_only(self, backend: Backend, path: str) -> None:
        durability = backend.probe(path)
        if durability.medium != "tmpfs":
            pytest.skip(f"no tmpfs here: {durability.medium}")
        assert durability.process
        assert not durability.os
        assert durability.medium_kind == MEDIUM_CACHE

    def test_a_full_file_system_is_an_error_that_leaves_nothing(self) -> None:
        outcome = toys.in_child(lambda: _fill_a_small_tmpfs(FileBackend(), 20 * MIB))
        if isinstance(outcome, str):
            pytest.skip(outcome)
        assert outcome == (f"NoSpaceError {errno.ENOSPC}", [], [])


class TestFileOnDisk(FileContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path

    def test_it_says_what_it_relies_on(self, backend: Backend, path: str) -> None:
        durability = backend.probe(path)
        if durability.medium_kind != MEDIUM_DISK:
            pytest.skip(f"the temporary folder is no disk: {durability.medium}")
        assert durability.process
        assert any("fdatasync" in e or "unknown" in e or "volatile" in e for e in durability.evidence)


class PmdkContract(FileContract):
    """PMDK pools are files that are made, checked and published like any; what lies in them differs."""

    arena_nbytes = 2 * MIB
    """As small as can be: every pool has several, and tensors lie across their borders."""

    @pytest.fixture
    def backend(self, pmdk: None) -> Backend:
        return PmdkBackend(self.arena_nbytes)

    def test_only_what_has_the_signature_is_recognised(self, backend: Backend, path: str) -> None:
        assert not backend.recognises(path)
        self.published(backend, path, b"something")  # the container itself is signed
        assert backend.recognises(path)
        for offset, data in ((0, b"PMEMLOG\0"), (4096, b"other/1")):
            self.published(backend, path)
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(data)
            assert not backend.recognises(path)

    def test_no_byte_of_it_lies_in_two_places(self, backend: Backend, path: str) -> None:
        container = backend.create(path, 5 * MIB)
        size = os.fstat(container.fd).st_size
        assert len(container.extents) == -(-5 * MIB // self.arena_nbytes)
        ends = 0
        for at, nbytes in sorted(container.extents):
            assert at % (2 * MIB) == 0
            assert at >= ends
            ends = at + nbytes
        assert ends <= size
        container.close()


class TestPmdkOnTmpfs(PmdkContract):
    @pytest.fixture
    def place(self, folder: Path) -> Path:
        return folder

    def test_a_full_file_system_is_an_error_that_leaves_nothing(self, pmdk: None) -> None:
        outcome = toys.in_child(lambda: _fill_a_small_tmpfs(PmdkBackend(), 20 * MIB))
        if isinstance(outcome, str):
            pytest.skip(outcome)
        assert outcome == (f"NoSpaceError {errno.ENOSPC}", [], [])


class TestPmdkOnDisk(PmdkContract):
    arena_nbytes = 4 * MIB

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path


class TestMemory(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        backend = MemoryBackend()
        yield backend
        backend.close()

    @pytest.fixture
    def path(self, folder: Path) -> str:
        return str(folder / "run.pool")

    def test_a_medium_that_is_full_is_an_error_that_leaves_nothing(self, folder: Path) -> None:
        backend = MemoryBackend(capacity=3 * MIB)
        path = str(folder / "run.pool")
        with patch.dict(backends.BACKENDS, {backend.name: backend}):
            model = nn.Linear(4, 4)
            with pytest.raises(NoSpaceError):
                lightck.attach(model, path, optimizer=toys.adam(model), backend=backend.name)
        assert backend.pools == {}
        assert backend.free == 3 * MIB


def _fill_a_small_tmpfs(backend: Backend, nbytes: int) -> object:
    """In a child with mounts of its own: (error, files after it, files after attach failed); or why not."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private, recursive = 0x20000, 1 << 18, 1 << 14
    place = "/tmp"
    if libc.unshare(new_namespace) != 0 or libc.mount(b"none", b"/", None, private | recursive, None) != 0:
        return f"no mounts of our own: {os.strerror(ctypes.get_errno())}"
    if libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, f"size={nbytes}".encode()) != 0:
        return f"no tmpfs can be mounted: {os.strerror(ctypes.get_errno())}"
    path = f"{place}/run.pool"
    backend.create(path, nbytes // 2).close()
    try:
        backend.create(path, nbytes * 2)
    except NoSpaceError as err:
        error = f"{type(err).__name__} {err.errno}"
    left = os.listdir(place)
    model = nn.Linear(2000, 1000)
    try:
        lightck.attach(model, path, optimizer=toys.adam(model), backend=backend.name)
    except NoSpaceError:
        return error, left, [name for name in os.listdir(place) if not name.endswith(".lock")]
    return "a pool that does not fit was made"
