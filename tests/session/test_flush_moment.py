"""flush() and close() in the middle of an iteration: what they save is named, and nothing is saved inside step()."""

from __future__ import annotations

import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from toys import adam, everything, forward, is_step, net, train

import lightck


def warnings(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[..., object]], None]]:
    """Installs a handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("interval", [1, 5])
def test_a_flush_at_the_end_of_an_iteration_is_silent(pool, caplog, interval):
    """The loop draws numbers and runs an evaluation before it."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, interval=interval) as session:
        session.flush()
        for step in range(4):
            train(model, optimizer, 1, start=step)
            torch.rand(3)
            with torch.no_grad():
                forward(model.eval())
            model.train()
            session.flush()
    assert not warnings(caplog)


class Program:
    """An object that is called, a method and a function, as handlers of signals."""

    def __init__(self, session: lightck.Session) -> None:
        self.session = session

    def __call__(self, *_: object) -> None:
        self.session.flush()

    def method(self, *_: object) -> None:
        self.session.flush()


def function_with(session: lightck.Session, *_: object) -> None:
    session.flush()


KINDS = {
    "object": Program,
    "method": lambda session: Program(session).method,
    "partial": lambda session: functools.partial(function_with, session),
    "function": lambda session: lambda *_: session.flush(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_updates", [0, 2])
def test_a_handler_that_flushes_after_a_draw_is_named(pool, caplog, on_signal, kind, n_updates):
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    on_signal(KINDS[kind](session))
    train(model, optimizer, n_updates)
    signal.raise_signal(signal.SIGUSR1)
    assert not warnings(caplog), "nothing was drawn since the update"
    train(model, optimizer, 1)
    torch.rand(3)
    signal.raise_signal(signal.SIGUSR1)
    session.abandon()
    (said,) = warnings(caplog)
    assert f"saved step {n_updates + 1} in the middle of an iteration: random numbers were drawn since" in said


def test_a_handler_that_flushes_before_the_first_update_is_named(pool, caplog, on_signal):
    model = net()
    session = lightck.attach(model, pool, optimizer=adam(model))
    on_signal(KINDS["function"](session))
    torch.rand(3)
    signal.raise_signal(signal.SIGUSR1)
    session.abandon()
    (said,) = warnings(caplog)
    assert "saved step 0 in the middle of an iteration: random numbers were drawn since attach" in said


def test_another_thread_that_flushes_a_step_which_was_not_due_is_named(pool, caplog):
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, interval=5)
    train(model, optimizer, 3)
    in_thread(session.flush)
    session.abandon()
    (said,) = warnings(caplog)
    assert "saved step 3 in the middle of an iteration: random numbers may have been drawn" in said


def test_a_close_after_a_forward_is_named_where_the_step_was_not_saved(pool, caplog):
    """``finally: session.close()`` after an exception."""
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, interval=5)
    train(model, optimizer, 3)
    forward(model, 3)
    session.close()
    (said,) = warnings(caplog)
    assert "saved step 3 in the middle of an iteration: the model's forward ran since update 3" in said


def test_a_close_after_a_forward_is_silent_where_the_step_was_saved(pool, caplog):
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    train(model, optimizer, 3)
    seen = everything(model, optimizer)
    forward(model, 3)
    session.close()
    assert not warnings(caplog)
    assert is_step(lightck.recover(pool), seen)


def loop(session: lightck.Session, loader: Any, model: Any, optimizer: Any, at: int = -1) -> None:
    for number, (batch,) in enumerate(loader):
        if number == at:
            session.flush()
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("at", [2, -1])
def test_a_batch_that_was_fetched_is_named(pool, caplog, at):
    model = net()
    optimizer = adam(model)
    data = torch.utils.data.TensorDataset(torch.rand(10, 4))
    with lightck.attach(model, pool, optimizer=optimizer, interval=50) as session:
        loader = session.loader(torch.utils.data.DataLoader(data, batch_size=2))
        loop(session, loader, model, optimizer, at)
        session.flush()  # after the pass
    said = warnings(caplog)
    assert len(said) == (at >= 0)
    assert at < 0 or "saved step 2 in the middle of an iteration: a batch was fetched since update 2" in said[0]


class Stopped(torch.optim.SGD):
    """Updates one parameter, and calls a function before it updates the others."""

    def __init__(self, params: Any, between: Callable[[], object]) -> None:
        super().__init__(params, lr=0.1)
        self.between = between

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, p in enumerate(self.param_groups[0]["params"]):
            p.sub_(p.grad)
            if number == 0:
                self.between()


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_saved_inside_an_update(pool, caplog, on_signal, interval, fails):
    """A handler flushes there, or the update raises an exception and ``finally:`` closes the session."""
    model = net()
    calls: list[Any] = []

    def between() -> None:
        calls.append(everything(model, optimizer))
        if len(calls) == 6 and fails:
            raise MemoryError
        if len(calls) == 6:
            signal.raise_signal(signal.SIGUSR1)

    optimizer = Stopped(model.parameters(), between)
    session = lightck.attach(model, pool, optimizer=optimizer, interval=interval)
    flushed: list[int | None] = []
    on_signal(lambda *_: flushed.append(session.flush()))
    seen: dict[int, Any] = {}
    try:
        for step in range(6):
            seen[step] = everything(model, optimizer)
            train(model, optimizer, 1, start=step)
    except MemoryError:
        session.close()
        flushed.append(session.committed)
    session.abandon()
    newest = 5 if interval == 1 else 4
    assert flushed == [newest]
    checkpoint = lightck.recover(pool, step=newest)
    assert is_step(checkpoint, seen[newest])
    said = warnings(caplog)
    assert len(said) == (interval > 1)
    assert interval == 1 or "inside optimizer.step(), or after step() had raised" in said[0]
    assert interval == 1 or "step 4 stays the newest checkpoint" in said[0]
