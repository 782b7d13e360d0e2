"""Pieces that are read, prepared and put at once, and files that are written past the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import time

import numpy as np
import pytest

from lightck.errors import TierError
from lightck.tiers import folder_write, parallel_calls
from lightck.tiers.folder_write import write_file
from lightck.tiers.parallel_calls import NamedBytes, in_order, puts_to

PAGE = 4096


class Slow:
    """A store that takes a while to put, and remembers what it was given after that while."""

    def __init__(self, n_parallel: int, seconds: float = 0.002, fails_at: str | None = None) -> None:
        self.n_parallel, self._seconds, self._fails_at = n_parallel, seconds, fails_at
        self.stored: dict[str, bytes] = {}
        self._lock, self.n_now, self.n_most = threading.Lock(), 0, 0

    def put(self, name: str, data: memoryview) -> None:
        with self._lock:
            self.n_now += 1
            self.n_most = max(self.n_most, self.n_now)
        time.sleep(self._seconds)
        if name == self._fails_at:
            raise TierError(f"{name} cannot be written")
        with self._lock:
            self.stored[name] = bytes(data)
            self.n_now -= 1


def send_all(store, pieces, nbytes, *, known=frozenset(), prepare=bytes):
    """Send pieces as the drain does; the names of those that were added, and how much memory was used."""
    added, memories = [], set()
    with puts_to(store, nbytes) as puts:
        for number, piece in enumerate(pieces):
            buffer = puts.buffer()
            memories.add(buffer.ctypes.data)
            buffer[: len(piece)] = np.frombuffer(piece, np.uint8)
            data = buffer.data[: len(piece)]

            def name_of(prepared, number=number, data=data):
                assert threading.current_thread() is threading.main_thread()
                added.append(number)
                return None if number in known else NamedBytes(str(number), data if prepared is None else prepared)

            puts.prepare(buffer, lambda data=data: prepare(data), name_of)
    return added, memories


@pytest.mark.parametrize("n_parallel", [1, 2, 4])
def test_each_piece_is_stored_as_it_was_read_in_bounded_memory(n_parallel):
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    pieces = [draw.randbytes(draw.randrange(1, 5000)) for _ in range(40)]
    known = frozenset(draw.sample(range(40), 8))
    store = Slow(n_parallel)
    # half of the pieces are put from the memory into which they were read, which must not be written to meanwhile
    added, memories = send_all(
        store, pieces, 5000, known=known, prepare=lambda data: bytes(data) if len(data) % 2 else None
    )
    assert added == list(range(40)), "the order of the pieces"
    assert store.stored == {str(n): piece for n, piece in enumerate(pieces) if n not in known}
    assert len(memories) <= max(3, n_parallel)
    assert store.n_most <= n_parallel


def test_pieces_are_put_while_the_next_one_is_prepared():
    both = threading.Barrier(2, timeout=30)
    store = Slow(1)
    put = store.put

    def waiting_put(name, data):
        if name == "0":
            both.wait()
        put(name, data)

    def prepare(data):
        if data[0] == 1:
            both.wait()  # ends only if the put of the first piece has begun, and has not ended
        return bytes(data)

    store.put = waiting_put
    send_all(store, [b"\0", b"\1", b"\2"], 8, prepare=prepare)
    assert sorted(store.stored) == ["0", "1", "2"]


@pytest.mark.parametrize("where", ["prepare", "name", "put"])
def test_an_error_ends_it_and_nothing_is_stored_afterwards(where):
    store = Slow(2, fails_at="3" if where == "put" else None)

    def prepare(data):
        if where == "prepare" and data[0] == 3:
            raise TierError("3 cannot be compressed")
        return bytes(data)

    class Refused(dict):
        def __contains__(self, number):
            if where == "name" and number == 3:
                raise TierError("3 is overtaken")
            return False

    with pytest.raises(TierError, match=r"^3 "):
        send_all(store, [bytes([n]) * 8 for n in range(30)], 8, known=Refused(), prepare=prepare)
    before = dict(store.stored)
    time.sleep(0.05)
    assert store.stored == before
    assert len(before) < 30


@pytest.mark.parametrize("n", [1, 3])
def test_results_come_in_the_order_of_the_items(n):
    def call(item):
        time.sleep((item % 3) / 1000)
        return item * 2

    assert list(in_order(call, range(20), n)) == [2 * item for item in range(20)]


# -- files past the page cache


def aligned(nbytes, offset=0):
    memory = parallel_calls._page_aligned(nbytes + offset)
    memory[:] = np.frombuffer(random.Random(nbytes).randbytes(nbytes + offset), np.uint8)
    return memory[offset:]


def written(path, data):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_file(fd, data)
        assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return path.read_bytes()


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (5 << 20) + 12345])
@pytest.mark.parametrize("offset", [0, 1, 512])
def test_a_file_holds_its_bytes_however_it_is_written(tmp_path, nbytes, offset):
    data = aligned(nbytes, offset)
    assert written(tmp_path / "file", data.data) == data.tobytes()


@pytest.mark.parametrize("n_taken", [0, 1])
def test_a_direct_write_that_the_kernel_refuses_is_made_through_the_page_cache(tmp_path, monkeypatch, n_taken):
    real_write, flags = os.write, []

    def write(fd, view):
        flags.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if flags[-1]:
            if len(flags) > n_taken:
                raise OSError(errno.EINVAL, "no direct writes")
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_WRONLY)  # the first part is taken, whatever the file system
            view = view[:PAGE]
        return real_write(fd, view)

    monkeypatch.setattr(folder_write, "why_untrusted", lambda _: None)
    monkeypatch.setattr(os, "write", write)
    data = aligned((2 << 20) + 7)
    assert written(tmp_path / "file", data.data) == data.tobytes()
    assert any(flags), "a direct write was tried"
    assert not flags[-1]


def test_an_error_of_the_disk_is_raised(tmp_path, monkeypatch):
    def write(fd, view):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(folder_write, "why_untrusted", lambda _: None)
    monkeypatch.setattr(os, "write", write)
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="full"):
            write_file(fd, aligned(1 << 20).data)
    finally:
        os.close(fd)
