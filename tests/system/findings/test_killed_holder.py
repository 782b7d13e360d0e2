"""A restart that comes right after ``kill -9``: the dead process keeps the pool's locks until its last thread has
ended, and that one has idle priority. A restart waits for it; a holder that lives is refused at once."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lightck
from lightck.errors import PoolLockedError
from lightck.pool.storage import dying_holder

pytestmark = pytest.mark.long


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))


def _attach(pool: Path, **options: bool) -> lightck.Session:
    model = _model()
    return lightck.attach(model, pool, optimizer=torch.optim.AdamW(model.parameters()), **options)


def _train_for_ever(pool: Path, tell: int) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    session = lightck.attach(model, pool, optimizer=optimizer)
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 512)).square().mean().backward()
        optimizer.step()
        if session.committed is not None:
            os.write(tell, b".")


def _forked(cpu: int, work, *args) -> int:
    child = os.fork()
    if child == 0:
        try:
            os.sched_setaffinity(0, {cpu})
            work(*args)
        finally:
            os._exit(1)
    return child


def _spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def _killed(pool: Path, others: int) -> Iterator[int]:
    """The pid of a training that was killed this moment, on a processor on which ``others`` compute without a pause."""
    cpu = min(os.sched_getaffinity(0))
    read, write = os.pipe()
    trainer = _forked(cpu, _train_for_ever, pool, write)
    os.close(write)
    for _ in range(4):
        assert os.read(read, 1) == b"."
    load = [_forked(cpu, _spin) for _ in range(others)]
    time.sleep(0.2)
    os.kill(trainer, signal.SIGKILL)
    try:
        yield trainer
    finally:
        for child in load:
            os.kill(child, signal.SIGKILL)
        for child in (trainer, *load):
            os.waitpid(child, 0)
        os.close(read)


def _ends(pid: int) -> bool:
    """Whether no thread of the dead process is left. Its last one has closed the pool's file when the lock is free, and
    may still be on its way out, which takes a while on a busy processor."""
    deadline = time.monotonic() + 60
    while dying_holder.has_threads(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_restart_waits_for_a_training_that_was_killed(pool):
    with _killed(pool, others=2) as pid:
        assert dying_holder.is_dying(pid)
        session = _attach(pool, resume=True)
        assert _ends(pid)
    assert session.step > 0
    session.close()


def test_a_longer_wait_is_said(pool, monkeypatch, caplog):
    """As where nothing may be done for the one that is dying."""
    monkeypatch.setattr(dying_holder, "hasten", lambda pid: None)
    monkeypatch.setattr(dying_holder, "_SECONDS_QUIET", 0.0)
    monkeypatch.setattr(dying_holder, "SECONDS_MAX", 600.0)
    with _killed(pool, others=1) as pid, caplog.at_level(logging.WARNING, "lightck"):
        session = _attach(pool, resume=True)
        said = [record.getMessage() for record in caplog.records]
        assert _ends(pid)
    assert session.step > 0
    session.close()
    assert len([line for line in said if f"(pid {pid}) was killed and has not ended yet" in line]) == 1


def test_a_wait_has_an_end(pool, monkeypatch):
    monkeypatch.setattr(dying_holder, "hasten", lambda pid: None)
    monkeypatch.setattr(dying_holder, "SECONDS_MAX", 0.0)
    with _killed(pool, others=2) as pid, pytest.raises(PoolLockedError, match=rf"pid {pid}, which was killed"):
        _attach(pool, resume=True)
    _attach(pool, resume=True).close()


@pytest.mark.parametrize("is_stopped", [False, True], ids=["runs", "stopped"])
def test_a_holder_that_lives_is_refused_at_once(pool, is_stopped):
    read, write = os.pipe()
    trainer = _forked(min(os.sched_getaffinity(0)), _train_for_ever, pool, write)
    try:
        assert os.read(read, 1) == b"."
        if is_stopped:
            os.kill(trainer, signal.SIGSTOP)
            os.waitpid(trainer, os.WUNTRACED)
        assert not dying_holder.is_dying(trainer)
        begin = time.process_time()
        with pytest.raises(PoolLockedError, match=f"open in another process .pid {trainer}"):
            _attach(pool, resume=True)
        assert time.process_time() - begin < 5
    finally:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        os.close(read)
        os.close(write)


MAIN_THREAD_ENDS = """
import ctypes, signal, threading
threading.Thread(target=signal.pause, daemon=True).start()
ctypes.PyDLL(None).pthread_exit(None)
"""
"""In a process of its own. If this one has used several threads of OpenMP, the main thread of a fork waits for them at
its end."""


def test_a_process_whose_main_thread_has_ended_is_alive():
    """The other threads go on: it is no process that was killed, though procfs calls it a zombie."""
    process = subprocess.Popen([sys.executable, "-c", MAIN_THREAD_ENDS])
    child = process.pid
    try:
        deadline = time.monotonic() + 20
        while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert dying_holder.has_threads(child)
        assert not dying_holder.is_dying(child)
        os.kill(child, signal.SIGKILL)
        while dying_holder.has_threads(child):
            assert dying_holder.is_dying(child)
    finally:
        process.kill()
        process.wait()


def test_nothing_is_done_to_a_process_that_lives():
    """``hasten`` frees memory of a process that is dying: the kernel refuses it for any other."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        block = bytearray(b"1" * (1 << 20))
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(7 if block.count(b"1") == 1 << 20 else 8))
        os.write(write, b".")
        while True:
            signal.pause()
    assert os.read(read, 1) == b"."
    dying_holder.hasten(child)
    os.kill(child, signal.SIGUSR1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not dying_holder.is_dying(child)
    assert not dying_holder.has_threads(child)
    os.close(read)
    os.close(write)
