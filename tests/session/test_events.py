"""Step events: each listener hears what a training does, in the stated order, and only while its session is live."""

from __future__ import annotations

import inspect
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightck
from lightck.events import SessionLock, StepEvents, StepListener

EVENTS = {name for name, member in vars(StepListener).items() if inspect.isfunction(member)}


def recorder(heard: list[str], who: str = "") -> StepListener:
    """A listener that writes down the name of each event."""

    def hear(name: str) -> Any:
        return lambda self, *args: heard.append(who + name)

    return type("Recorder", (StepListener,), {name: hear(name) for name in EVENTS})()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.fixture
def training(tmp_path: Path) -> tuple[nn.Linear, torch.optim.SGD, lightck.Session]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, lightck.attach(model, tmp_path / "pool", optimizer=optimizer)


def test_one_step_in_order(training):
    model, optimizer, session = training
    heard: list[str] = []
    session._steps.events.add(recorder(heard))
    step(model, optimizer)
    assert heard == [
        "before_forward",
        "forward_begins",
        "forward_ended",
        "before_step",
        "gate",
        "update_begins",
        "after_step",
        "step_ended",
    ]
    session.close()


def test_the_newest_listener_hears_first_and_the_session_last(training):
    model, optimizer, session = training
    heard: list[str] = []
    events = session._steps.events
    events.add(recorder(heard, "first "))
    second = recorder(heard, "second ")
    events.add(second)
    assert events.listeners[-1] is session._steps
    step(model, optimizer)
    assert heard[:4] == [
        "second before_forward",
        "first before_forward",
        "second forward_begins",
        "first forward_begins",
    ]
    events.remove(second)
    heard.clear()
    step(model, optimizer)
    assert heard[:2] == ["first before_forward", "first forward_begins"]
    session.close()


def test_layers_are_heard(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lightck.layerwise(model, optimizer)
    with lightck.attach(model, tmp_path / "pool", optimizer=optimizer) as session:
        heard: list[str] = []
        session._steps.events.add(recorder(heard))
        step(model, optimizer)
        assert heard[heard.index("forward_ended") + 1 :][:3] == ["layers_begin", "layer_updated", "layer_updated"]


def test_a_step_that_changed_nothing_is_heard_as_such(tmp_path):
    class Skips(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """As a fused optimizer whose gradients hold inf."""

    model = nn.Linear(4, 4)
    optimizer = Skips(model.parameters(), lr=0.1)
    with lightck.attach(model, tmp_path / "pool", optimizer=optimizer) as session:
        heard: list[str] = []
        session._steps.events.add(recorder(heard))
        optimizer.found_inf = torch.ones(1)  # as GradScaler puts it there
        step(model, optimizer)
        assert heard[-1] == "skipped_step"


def test_nobody_hears_of_a_closed_session(training):
    model, optimizer, session = training
    heard: list[str] = []
    session._steps.events.add(recorder(heard))
    session.close()
    step(model, optimizer)
    assert not heard


def test_a_forked_child_hears_nothing_even_where_a_thread_was_inside():
    lock, heard = SessionLock(), []
    events = StepEvents(lock)
    events.add(recorder(heard))
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with lock:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        events.gate()
        with lock:  # does not wait for a thread that does not exist here
            os._exit(len(heard))
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    events.gate()
    assert heard == ["gate", "update_begins"]


def test_what_a_listener_raises_reaches_the_loop_and_ends_the_turn(training):
    model, optimizer, session = training

    class Fails(StepListener):
        def gate(self) -> None:
            raise RuntimeError("of the listener")

    fails = Fails()
    session._steps.events.add(fails)
    with pytest.raises(RuntimeError, match="of the listener"):
        step(model, optimizer)
    session._steps.events.remove(fails)
    free = []
    thread = threading.Thread(target=lambda: free.append(session.flush()))
    thread.start()
    thread.join(30)
    assert free == [0]
    session.close()


def test_every_event_is_passed_on():
    """A method that is missing in the dispatcher would do nothing, and nobody would see it."""
    assert set(vars(StepEvents)) >= EVENTS
    for name in EVENTS:
        heard: list[str] = []
        events = StepEvents(SessionLock())
        events.add(recorder(heard))
        method = getattr(events, name)
        method(*[None] * len(inspect.signature(method).parameters))
        assert heard[0] == name


def test_a_session_shows_what_a_user_calls(training):
    _, _, session = training
    assert {name for name in dir(session) if not name.startswith("_")} == {
        "abandon",
        "close",
        "committed",
        "common",
        "copied",
        "done",
        "durability",
        "end_step",
        "flush",
        "found",
        "is_open",
        "iteration",
        "loader",
        "log",
        "on_commit",
        "path",
        "paused",
        "paused_reason",
        "pin",
        "rank",
        "recovered",
        "should_stop",
        "stats",
        "step",
        "trace",
        "world",
    }
    session.close()


def test_repr_says_where_it_stands(training):
    model, optimizer, session = training
    assert repr(session).startswith(f"<lightck.Session step 0, committed None, pool {session.path!r} (")
    step(model, optimizer)
    session.flush()
    assert "step 1, committed 1," in repr(session)
    assert str(session.durability) in repr(session)
    session.close()
    assert repr(session).endswith(", closed>")
