"""One writer per pool, whatever happens to the lock file while a training runs."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import signal
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from toys import adam, everything, in_child, is_pmdk, is_step, net, pool_with, train

import lightck
from lightck.errors import BackgroundError, PoolLockedError
from lightck.pool.storage.lock import PoolLock, holder_of


@pytest.fixture(params=["of the open file", "of the process"])
def kernel(request, monkeypatch):
    """The locks that the system has."""
    if request.param == "of the process":
        real = fcntl.fcntl

        def fcntl_of_old(fd: int, what: int, *more: Any) -> Any:
            if what == fcntl.F_OFD_SETLK:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, what, *more)

        monkeypatch.setattr(fcntl, "fcntl", fcntl_of_old)
    return request.param


def started(pool: Path) -> tuple[Any, Any, lightck.Session]:
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    train(model, optimizer, 2)
    session.flush()
    return model, optimizer, session


def is_refused(pool: Path) -> bool:
    """To another process."""

    def tries() -> bool:
        try:
            pool_with(pool, 1, resume=True)
        except PoolLockedError as err:
            return f"pid {os.getppid()}" in str(err)
        return False

    return bool(in_child(tries))


def test_a_pool_has_one_writer(pool, kernel):
    training = started(pool)
    assert is_refused(pool)
    holder = in_child(lambda: (found := holder_of(str(pool))) and found.pid)
    assert holder == os.getpid()
    training[-1].close()
    assert holder_of(str(pool)) is None
    assert not is_refused(pool)


def test_a_copy_of_the_folder_made_by_the_training_drops_no_lock(pool, tmp_path):
    training = started(pool)
    shutil.copytree(pool.parent, tmp_path / "backup")
    assert is_refused(pool)
    training[-1].close()


def test_a_lock_file_taken_for_a_pool_drops_no_lock(pool):
    training = started(pool)
    with pytest.raises(lightck.LightckError):
        lightck.recover(f"{pool}.lock")
    assert is_refused(pool)
    training[-1].close()


def test_a_removed_lock_file_is_made_again_before_the_next_checkpoint(pool, kernel, caplog):
    model, optimizer, session = started(pool)
    os.unlink(f"{pool}.lock")
    with caplog.at_level(logging.WARNING, "lightck"):
        train(model, optimizer, 2, start=2)
        session.flush()
    assert "was removed while its pool is in use" in caplog.text
    assert is_refused(pool)
    seen = everything(model, optimizer)
    session.close()
    assert is_step(lightck.recover(pool), seen)
    assert not is_refused(pool)


@pytest.mark.parametrize("has_ended", [True, False], ids=["ended", "runs"])
def test_where_another_training_has_the_pool_since_nothing_more_is_written(pool, has_ended):
    """The lock file was removed, and the other one made its own."""
    model, optimizer, session = started(pool)
    os.unlink(f"{pool}.lock")
    if has_ended:
        if is_pmdk(pool):  # libpmemobj has a lock of its own on the file, and keeps the other one out
            with pytest.raises(AssertionError, match="held open by another program"):
                in_child(lambda: pool_with(pool, 3, resume=True) and None)
            session.close()
            return
        in_child(lambda: pool_with(pool, 3, resume=True) and None)
    else:
        other = os.fork()
        if other == 0:
            PoolLock(str(pool))
            signal.pause()
        while in_child(lambda: holder_of(str(pool))) is None:
            pass
    before = pool.read_bytes()
    try:
        with pytest.raises(BackgroundError, match=r"run\.pool\.lock.*Another training may be") as caught:
            train(model, optimizer, 2, start=2)
        assert caught.value.errno == errno.ENOLCK
        with pytest.raises(BackgroundError):
            session.close()
        assert is_pmdk(pool) or pool.read_bytes() == before  # libpmemobj writes that it was closed
    finally:
        if not has_ended:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
    assert lightck.recover(pool).step == (5 if has_ended else 2)


def test_a_forked_child_keeps_no_lock_when_its_parent_is_killed(pool):
    """As the worker of a DataLoader that outlives the training."""
    read, write = os.pipe()

    trainer = os.fork()
    if trainer == 0:
        started(pool)
        worker = os.fork()
        if worker == 0:
            signal.pause()
        os.write(write, str(worker).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    worker = int(os.read(read, 100))
    os.waitpid(trainer, 0)
    try:
        pool_with(pool, 1, resume=True)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(read)
        os.close(write)
    assert lightck.recover(pool).step == 3


def test_a_worker_that_is_yet_to_close_its_descriptor_is_waited_for(pool):
    """Its parent was killed, with the record lock; for an instant it has the other one."""
    pool_with(pool, 2)
    worker = os.open(f"{pool}.lock", os.O_RDWR)
    fcntl.fcntl(worker, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 1, 1, 0))
    threading.Timer(0.05, os.close, (worker,)).start()
    pool_with(pool, 1, resume=True)
    assert lightck.recover(pool).step == 3
