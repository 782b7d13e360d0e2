"""Signals and other threads: what they call in the middle of lightck's work cuts nothing in half."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from toys import BIG, adam, everything, in_child, is_step, net, train

import lightck
from lightck.errors import SessionError
from lightck.pipeline import pipeline
from lightck.pipeline.current_pool import CurrentPool
from lightck.pool.engine import Engine, Medium
from lightck.pool.reader import open_pool
from lightck.pool.storage.durability import MEDIUM_CACHE

SIGNALS = pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD])


@contextmanager
def handled(number: int, handler: Callable[[], Any]) -> Iterator[None]:
    before = signal.signal(number, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.fixture
def training(pool: Path, slow_memory: None) -> Iterator[Any]:
    """A session whose checkpoints take a quarter of a second each."""
    model = net(20_000)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, overwrite=True)
    yield model, optimizer, session
    session.close()


def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.001)


@SIGNALS
def test_a_handler_that_flushes_while_a_checkpoint_is_waited_for(pool, training, during_wait, number):
    model, optimizer, session = training
    flushed: list[tuple[int, int, int | None]] = []

    def flush() -> None:
        step = session.step
        committed = session.flush()
        flushed.append((step, lightck.recover(pool).step, committed))

    with handled(number, flush):
        for count, seconds in enumerate((0.05, 0.1, 0.15, 0.2), 1):
            during_wait(seconds, number)
            train(model, optimizer, 2, start=session.step)
            until(lambda count=count: len(flushed) == count)
    assert session.step == 8
    assert len(flushed) == 4
    assert all(step == found == committed for step, found, committed in flushed)
    seen = everything(model, optimizer)
    session.flush()
    assert is_step(lightck.recover(pool), seen)


class _Stop(Exception):
    """A batch took too long."""


@SIGNALS
@pytest.mark.parametrize("slots", [2, 3])
def test_a_handler_that_raises_while_a_checkpoint_begins(pool, monkeypatch, number, slots):
    """The worst moment: the job of a checkpoint exists, and nothing refers to it that would end it."""
    model = net(BIG)
    optimizer = adam(model)
    made = pipeline.InFlightCheckpoint

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        if session.step == 3:
            signal.raise_signal(number)
        return made(*args, **kwargs)

    def stop() -> None:
        raise _Stop

    monkeypatch.setattr(pipeline, "InFlightCheckpoint", checkpoint)
    with handled(number, stop), lightck.attach(model, pool, optimizer=optimizer, slots=slots) as session:
        train(model, optimizer, 3)
        with pytest.raises(_Stop):
            train(model, optimizer, 1, start=3)
        optimizer.zero_grad()
        train(model, optimizer, 5, start=3)
        assert session.step == 8
        seen = everything(model, optimizer)
        assert session.flush() == 8
        assert is_step(lightck.recover(pool), seen)


def test_a_handler_that_closes_the_session_while_a_checkpoint_is_waited_for(pool, training, during_wait):
    model, optimizer, session = training
    train(model, optimizer, 2)
    with handled(signal.SIGUSR1, session.close):
        during_wait(0.05, signal.SIGUSR1)
        session.end_step()
        train(model, optimizer, 1, start=2)
        until(lambda: not session.is_open)
    assert not session.is_open
    assert lightck.recover(pool).step == 2
    train(model, optimizer, 2, start=3)
    assert lightck.recover(pool).step == 2


def test_a_pin_whose_session_a_handler_closes(pool, training, during_wait):
    model, optimizer, session = training
    train(model, optimizer, 2)
    with handled(signal.SIGUSR1, session.close):
        during_wait(0.05, signal.SIGUSR1)
        with pytest.raises(SessionError, match="closed"):
            session.pin()
    assert lightck.recover(pool).step == 2


def test_of_two_signals_both_are_handled(pool, training, during_wait):
    model, optimizer, session = training
    reported: list[str] = []

    def stop() -> None:
        reported.append("stop")
        raise _Stop

    train(model, optimizer, 1)
    with handled(signal.SIGUSR1, stop), handled(signal.SIGUSR2, lambda: reported.append("two")):
        during_wait(0.05, signal.SIGUSR1, signal.SIGUSR2)
        with pytest.raises(_Stop):
            session.flush()
        until(lambda: len(reported) == 2)
    assert sorted(reported) == ["stop", "two"]
    assert session.flush() == 1


def test_handlers_are_those_of_the_user_outside_of_lightck(pool):
    model = net()
    optimizer = adam(model)

    def mine(*_: Any) -> None: ...

    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGALRM)
    before = [signal.signal(number, mine) for number in numbers]
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with lightck.attach(model, pool, optimizer=optimizer) as session:
            train(model, optimizer, 3)
            session.flush()
            assert {signal.getsignal(number) for number in numbers} == {mine}
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        for number, handler in zip((*numbers, signal.SIGUSR2), (*before, ignored), strict=True):
            signal.signal(number, handler)


def test_a_handler_that_is_set_in_the_midst_of_it_stays(pool):
    """By the state_dict() of something that starts workers."""

    class Sets:
        def state_dict(self) -> dict[str, Any]:
            signal.signal(signal.SIGUSR1, other)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def mine(*_: Any) -> None: ...

    def other(*_: Any) -> None: ...

    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, state={"sets": Sets()}) as session:
        before = signal.signal(signal.SIGUSR1, mine)
        try:
            train(model, optimizer, 1)
            session.end_step()
            assert signal.getsignal(signal.SIGUSR1) is other
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_is_set_in_the_midst_of_it_may_call_the_one_before_it(pool):
    """torch's handler of CHLD does, which the first DataLoader with workers installs."""
    called = []

    class Chains:
        before: Any = None

        def state_dict(self) -> dict[str, Any]:
            if self.before is None and signal.getsignal(signal.SIGUSR1) is not mine:  # lightck has put its own there
                self.before = signal.signal(signal.SIGUSR1, self.handle)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

        def handle(self, number: int, frame: Any) -> None:
            called.append("theirs")
            self.before(number, frame)

    def mine(*_: Any) -> None:
        called.append("mine")

    model = net()
    optimizer = adam(model)
    before = signal.signal(signal.SIGUSR1, mine)
    try:
        with lightck.attach(model, pool, optimizer=optimizer, state={"chains": Chains()}) as session:
            for _ in range(2):
                train(model, optimizer, 1)
                session.end_step()
                os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert called == ["theirs", "mine"] * 2


class ChainsLate:
    """Installs a handler in the ``at``-th call of ``state_dict``, which calls the handler before it."""

    def __init__(self, name: str, at: int, called: list[str]) -> None:
        self._name, self._at, self._called, self._n = name, at, called, 0
        self.before: Any = None

    def state_dict(self) -> dict[str, Any]:
        self._n += 1
        if self.before is None and self._n >= self._at:
            self.before = signal.signal(signal.SIGUSR1, self.handle)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def handle(self, number: int, frame: Any) -> None:
        self._called.append(self._name)
        self.before(number, frame)


def test_handlers_that_are_set_one_after_the_other_in_the_midst_of_it_form_a_chain(pool):
    called: list[str] = []
    first, second = ChainsLate("first", 2, called), ChainsLate("second", 4, called)
    model = net()
    optimizer = adam(model)
    before = signal.signal(signal.SIGUSR1, lambda *_: called.append("mine"))
    try:
        state = {"first": first, "second": second}
        with lightck.attach(model, pool, optimizer=optimizer, state=state) as session:
            while second.before is None:
                train(model, optimizer, 1)
                session.end_step()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert called == ["second", "first", "mine"]
            called.clear()
            signal.signal(signal.SIGUSR1, second.before)  # undone
            train(model, optimizer, 1)
            session.end_step()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert called == ["first", "mine"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_child_that_is_forked_in_the_midst_of_it_has_the_handlers_of_the_user(pool):
    """A loader's worker, say: it would take no SIGTERM any more."""

    class Forks:
        def state_dict(self) -> dict[str, Any]:
            seen.append(in_child(lambda: signal.getsignal(signal.SIGUSR1) is mine))
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def mine(*_: Any) -> None: ...

    seen: list[bool] = []
    model = net()
    optimizer = adam(model)
    before = signal.signal(signal.SIGUSR1, mine)
    try:
        with lightck.attach(model, pool, optimizer=optimizer, state={"forks": Forks()}):
            seen.clear()
            train(model, optimizer, 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen
    assert all(seen)


def test_a_watchdog_thread_may_flush_and_close_while_the_loop_trains(pool, training):
    model, optimizer, session = training
    flushed: list[int | None] = []
    errors: list[BaseException] = []

    def watch() -> None:
        try:
            for _ in range(3):
                time.sleep(0.1)
                flushed.append(session.flush())
            session.close()
        except BaseException as err:
            errors.append(err)

    watchdog = threading.Thread(target=watch)
    watchdog.start()
    while watchdog.is_alive():
        train(model, optimizer, 1, start=session.step)
    watchdog.join()
    assert not errors
    assert flushed == sorted(flushed)
    assert lightck.recover(pool).step >= flushed[-1] > 0
    assert not session.is_open


_ASKS = """
import sys, threading
from lightck.pool.engine import Engine

asked, over = [None], threading.Event()

def ask():
    while not over.is_set():
        if asked[0] is not None:
            asked[0].cpu_seconds

sys.setswitchinterval(1e-5)
thread = threading.Thread(target=ask)
thread.start()
for _ in range(1500):
    asked[0] = engine = Engine(4)
    engine.close()
over.set()
thread.join()
"""


def test_a_thread_that_asks_for_numbers_while_the_engine_closes():
    environment = {**os.environ, "PYTHONPATH": str(Path(lightck.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", _ASKS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_a_session_used_is_known_after_it_was_closed(pool):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 3)
        session.flush()
        before = session.stats().cpu_seconds
    assert session.stats().cpu_seconds >= before


def test_to_leave_one_file_does_not_wait_until_another_one_is_populated(folder):
    small, large = folder / "small", folder / "large"
    engine = Engine(2)
    media = []
    for path, nbytes in ((small, 4 << 20), (large, 1 << 30)):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, nbytes)
        media.append(Medium(fd, ((0, nbytes),), MEDIUM_CACHE))
    try:
        engine.populate(media[1])
        while not _resident(large):
            time.sleep(0.001)
        assert engine.quiesce(media[0])
        assert _resident(large) < 1 << 29
    finally:
        for medium in media:
            engine.quiesce(medium)
            medium.close()
        engine.close()


def _resident(path: Path) -> int:
    """Bytes of this file's mapping that are mapped."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(f" {path}"):
            return next(int(rest.split()[1]) << 10 for rest in lines if rest.startswith("Rss:"))
    return 0


def test_a_wait_that_is_left_for_a_signal_keeps_what_was_asked_for(pool, training, monkeypatch):
    """The pool is to have more slots, and a signal comes while it is laid out anew."""
    model, optimizer, session = training
    train(model, optimizer, 1)
    session.close()
    reported: list[int] = []
    moved = CurrentPool.relayout

    def move(*args: Any) -> Any:
        if not reported:
            os.kill(os.getpid(), signal.SIGUSR1)
        return moved(*args)

    monkeypatch.setattr(CurrentPool, "relayout", move)
    with (
        handled(signal.SIGUSR1, lambda: reported.append(1)),
        lightck.attach(model, pool, optimizer=optimizer, resume=True, slots=4),
    ):
        train(model, optimizer, 2, start=1)
    assert reported == [1]
    assert lightck.recover(pool).step == 3
    reader = open_pool(str(pool))
    assert len(reader.superblock.slots) == 4
    reader.close()
