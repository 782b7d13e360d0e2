"""Who listens to commits hears of each checkpoint in order, and who has a say in them is asked."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from toys import BIG, adam, crashed, everything, is_step, net, train

import lightck
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.listener import CommitEvents, CommitListener
from lightck.session.commits import CommitParticipants

EVENTS = {name for name, member in vars(CommitListener).items() if inspect.isfunction(member)}


class Recorder(CommitListener):
    """Writes down what it hears, with the step where there is one."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def begun(self, generation: int, step: int, entries: Any) -> None:
        self.heard.append(("begun", step))

    def committed(self, writer: Any, step: int) -> None:
        self.heard.append(("committed", step))

    def adopted(self, writer: Any, step: int) -> None:
        self.heard.append(("adopted", step))


def plain(name: str) -> Any:
    def hear(self: Recorder, *args: Any) -> Any:
        self.heard.append(name)
        return ()

    return hear


for _name in EVENTS - set(vars(Recorder)):
    setattr(Recorder, _name, plain(_name))


class Says:
    """A decision."""

    def __init__(self, allowed: bool = True, slots: frozenset[int] = frozenset()) -> None:
        self.allowed, self.slots = allowed, slots

    def may_commit(self, closing: Any) -> bool:
        return self.allowed

    def held(self, writer: Any) -> frozenset[int]:
        return self.slots


@pytest.fixture
def training(pool: Path):
    model = net(BIG)
    optimizer = adam(model)
    return model, optimizer, lightck.attach(model, pool, optimizer=optimizer, slots=3)


def test_each_checkpoint_is_heard_of_when_it_begins_and_when_it_is_durable(training):
    model, optimizer, session = training
    recorder = Recorder()
    session._pipeline.events.add(recorder)
    train(model, optimizer, 4)
    session.flush()
    for kind in ("begun", "committed"):
        assert [one[1] for one in recorder.heard if one[0] == kind] == [1, 2, 3, 4]
    for step in range(1, 5):
        assert recorder.heard.index(("begun", step)) < recorder.heard.index(("committed", step))
    session.close()
    assert recorder.heard[-2:] == ["closing", "closed"]


def test_what_is_committed_is_durable_when_it_is_heard_of(training, pool):
    model, optimizer, session = training
    images: dict[int, Path] = {}

    class Copies(CommitListener):
        def committed(self, writer: Any, step: int) -> None:
            images[step] = crashed(pool, f"{step}.pool")

    session._pipeline.events.add(Copies())
    train(model, optimizer, 3)
    session.close()
    # A commit is reported at the next event of the loop. A newer checkpoint may be durable by then.
    recovered = {step: lightck.recover(image).step for step, image in images.items()}
    assert recovered.keys() == {1, 2, 3}
    assert all(newest >= step for step, newest in recovered.items())


def test_a_new_pool_file_is_heard_of_before_and_after(training):
    model, optimizer, session = training
    train(model, optimizer, 1)
    recorder = Recorder()
    session._pipeline.events.add(recorder)
    session.pin()
    session.pin()
    said = [one for one in recorder.heard if isinstance(one, str)]
    assert said[:5] == ["stop_reading", "relayout_begins", "checkpoints_to_carry", "carry", "relayout_done"]
    session.close()


def test_a_resume_is_heard_of(training, pool, monkeypatch):
    model, optimizer, session = training
    train(model, optimizer, 2)
    session.close()
    recorder, join = Recorder(), CommitParticipants.register_with

    def joined(self: CommitParticipants, pipeline: Pipeline) -> None:
        join(self, pipeline)
        pipeline.events.add(recorder)

    monkeypatch.setattr(CommitParticipants, "register_with", joined)
    lightck.attach(model, pool, optimizer=optimizer, resume=True).close()
    assert recorder.heard == [("adopted", 2), "closing", "closed"]


def test_every_event_is_passed_on():
    """A method that is missing in the dispatcher would do nothing, and nobody would see it."""
    assert EVENTS | {"called_from_own_thread"} <= set(vars(CommitEvents))
    for name in EVENTS:
        events, recorder = CommitEvents(), Recorder()
        events.add(recorder)
        method = getattr(events, name)
        method(*[None] * len(inspect.signature(method).parameters))
        assert len(recorder.heard) == 1
        events.remove(recorder)
        method(*[None] * len(inspect.signature(method).parameters))
        assert len(recorder.heard) == 1


def test_a_checkpoint_that_may_not_become_the_newest_is_not_written(training, pool):
    model, optimizer, session = training
    says = Says()
    session._pipeline.decisions.add(says)
    train(model, optimizer, 2)
    session.flush()
    seen = everything(model, optimizer)
    says.allowed = False
    train(model, optimizer, 3, start=2)
    assert session.flush() == 2
    says.allowed = True
    assert is_step(lightck.recover(crashed(pool)), seen)
    train(model, optimizer, 1, start=5)
    assert session.flush() == 6
    session.close()


def test_a_slot_that_somebody_holds_is_not_overwritten(training, pool):
    model, optimizer, session = training
    train(model, optimizer, 2)
    session.flush()
    slots = session._pipeline.pool.writer.slots
    says = Says(slots=frozenset({slots.protected}))
    session._pipeline.decisions.add(says)
    train(model, optimizer, 7, start=2)
    session.close()
    assert lightck.recover(pool, step=2).step == 2
    assert lightck.recover(pool).step == 9
