"""``session.trace``: it records what happens, does not change the training, and leaves nothing behind."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import BIG, adam, everything, forward, net, pool_with, same, train

import lightck
from lightck.errors import ExportExistsError, SessionError, TraceError
from lightck.profiler import events, layers, spans
from lightck.profiler.events import (
    BACKWARD,
    COMMIT,
    COMMUNICATION,
    COPY,
    FORWARD,
    STALL,
    STATE,
    STEP,
    TRAINER_COPY,
    UPDATE,
    Trace,
    read,
)
from lightck.profiler.summary import facts, is_part
from lightck.stats import Meter


@pytest.fixture
def out(folder: Path) -> Path:
    return folder / "run.json"


def traced(pool: Path, out: Path, steps: int = 3, model: nn.Module | None = None, **options: Any) -> Trace:
    model = model or net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        with session.trace(out, **options):
            train(model, optimizer, steps, start=2)
    return read(out)


def hooks_of(model: nn.Module) -> list[int]:
    modules = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return modules + [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]


# -- what is recorded ------------------------------------------------------------------------------------------------


def test_a_row_per_activity_and_every_module_in_it(pool, out):
    trace = traced(pool, out, steps=3)
    assert {STEP, FORWARD, BACKWARD, UPDATE, STALL, STATE, COMMIT} <= set(trace.rows())
    assert sorted(trace.steps()) == [3, 4, 5]
    for row in (FORWARD, BACKWARD):
        modules = [e.args["module"] for e in trace.of(row) if "module" in e.args]
        assert modules == (["0", "1", "2"] if row == FORWARD else ["2", "1", "0"]) * 3
    for number, step in trace.steps().items():
        order = [
            next(e for e in trace.of(row) if step.begin <= e.begin < step.end and e.args.get("whole", True))
            for row in (FORWARD, BACKWARD, UPDATE)
        ]
        assert [e.begin for e in order] == sorted(e.begin for e in order), number
        assert order[0].end <= order[1].begin
        assert order[1].end <= order[2].begin


def test_the_copies_of_a_checkpoint_are_all_its_bytes(pool, out):
    model = net(BIG)
    trace = traced(pool, out, steps=4, model=model)
    moments = 2 * sum(p.nbytes for p in model.parameters())
    expected = sum(p.nbytes for p in model.parameters()) + moments + 4 * len(list(model.parameters()))  # AdamW's step
    for step in (3, 4, 5):
        copies = [e for e in trace.events if e.row.startswith("copy") and e.args["step"] == step]
        assert sum(e.args["bytes"] for e in copies if not is_part(e)) == expected, step
        names = {e.name for e in copies}
        assert {"model/0.weight", "optimizer/0.weight/exp_avg", "at once"} <= names
        commit = [e for e in trace.of(COMMIT) if e.args["step"] == step]
        assert [e.name for e in commit] == ["manifest", "sync", "commit record"]
        assert max(e.end for e in copies) <= commit[0].begin


def test_the_file_is_what_trace_viewers_take(pool, out):
    """Complete events with numbers, in named rows; two events of a row are nested or do not overlap."""
    traced(pool, out)
    found = json.loads(out.read_text())
    names = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    complete = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert {e["ph"] for e in found["traceEvents"]} == {"X", "M"}
    for tid in names:
        open_until: list[float] = []
        for e in (e for e in complete if e["tid"] == tid):
            assert e["dur"] >= 0
            begin, end = round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], (names[tid], e)
            open_until.append(end)


def test_the_stalls_are_those_of_the_statistics(pool, out, monkeypatch):
    """The statistics also count the hooks around the stalls, which a trace does not show. Here they count nothing. They
    leave out the little work of the loop that lightck delays, which a trace shows within a stall."""
    monkeypatch.setattr(Meter, "count_hook", lambda *_: None)
    model, before, after = net(BIG), 0.0, 0.0
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        trace = session.trace(out, steps=None)
        before = session.stats().stall_seconds
        train(model, optimizer, 3)
        after = session.stats().stall_seconds
        trace.close()
    whole = [e for e in read(out).of(STALL) if e.name not in ("wait", "slot header")]
    assert sum(e.end - e.begin for e in whole) * 1e-9 == pytest.approx(after - before, rel=0.05)


def test_a_recording_ends_by_itself_after_its_steps(pool, out):
    trace = traced(pool, out, steps=6, model=None)
    assert len(trace.steps()) == 6
    out.unlink()
    pool.unlink()
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        recording = session.trace(out, steps=2)
        train(model, optimizer, 2)
        assert recording.is_on
        assert not out.exists()
        train(model, optimizer, 1, start=2)
        assert not recording.is_on
        trace = read(out)  # while the training goes on
        train(model, optimizer, 2, start=3)
    assert sorted(trace.steps()) == [1, 2]
    assert {e.args["step"] for e in trace.of(COMMIT)} == {1, 2}  # the copies of the last step are in it


def test_spans_of_the_users_own_make_rows(pool, out):
    model = net()
    with lightck.attach(model, pool) as session, session.trace(out) as trace:
        with trace.span("all_reduce"):
            pass
        with trace.span("augment", row="data"):
            pass
        for row in ("step", "forward", "copy: thread 1"):
            with pytest.raises(ValueError), trace.span("mine", row=row):
                pass
        for wrong in ({"name": 3}, {"name": None}, {"name": "mine", "row": 3}):
            with pytest.raises(TypeError, match=r"span\((name|row)=(3|None)\): the \1 is a (int|NoneType)"):
                trace.span(**wrong)  # at the call: nothing of the loop has run yet
        for number in range(100):
            with trace.span("x" * 20_000, row=f"row {number}"):
                pass
    found = read(out)
    assert found.about["dropped"] == 52
    assert [e.name for e in found.of(COMMUNICATION)] == ["all_reduce"]
    assert found.rows()[1] == "data"


def test_a_waiting_training_thread_is_seen_to_copy(pool, out, slow_memory):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 1)
        with session.trace(out):
            for _ in range(3):
                session.flush()  # closes the step and waits for its commit: most bytes are not copied yet
                train(model, optimizer, 1)
    trace = read(out)
    helped = sum(e.args["bytes"] for e in trace.of(TRAINER_COPY) if e.args.get("helped"))
    by_threads = sum(e.args["bytes"] for e in trace.events if e.row.startswith(COPY))
    stats = session.stats()
    assert 0 < helped <= stats.bytes_helped
    assert helped + by_threads <= stats.bytes_written


# -- models of other kinds -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A model with tuples, a module without parameters, one that is used twice, and one that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 64), nn.Linear(64, 64)
        self.act = nn.ReLU(inplace=True)
        self.rnn = nn.GRU(64, 64)
        self.same = nn.Identity()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.act(self.two(self.act(self.one(x))))
        x = checkpoint(lambda y: self.two(self.two(y).tanh()), x, use_reentrant=False)
        x, _ = self.rnn(x[None])
        return {"out": self.same(x)}


def test_in_place_modules_tuples_and_recomputation_train_the_same(pool, out, folder):
    def run(path: Path, record: Path | None) -> dict[str, Any]:
        torch.manual_seed(3)
        model = Block()
        optimizer = adam(model)
        with lightck.attach(model, path, optimizer=optimizer) as session:
            if record:
                session.trace(record, steps=3)
            for number in range(5):
                optimizer.zero_grad()
                for micro in range(2):
                    forward_dict(model, number + micro).backward()
                optimizer.step()
        return everything(model, optimizer)

    def forward_dict(model: nn.Module, number: int) -> torch.Tensor:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        return model(x)["out"].square().sum()

    assert same(run(pool, None), run(folder / "other.pool", out))
    trace = read(out)
    first = trace.steps()[1]
    ran = [e for e in trace.events if e.begin < first.end and e.row in (FORWARD, BACKWARD)]
    assert sum(bool(e.args.get("whole")) for e in ran) == 4  # two forwards, two backwards
    assert sum(bool(e.args.get("recomputed")) for e in ran) == 2
    assert {e.args["module"] for e in ran if e.row == BACKWARD and "module" in e.args} == {"one", "two", "act", "rnn"}


@pytest.mark.parametrize("attached", ["compiled", "inner"])
def test_compiled_modules_are_left_alone(pool, out, attached):
    compiles = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    model = net(BIG)
    compiled = torch.compile(model, backend=backend)
    optimizer = adam(model)
    with lightck.attach(compiled if attached == "compiled" else model, pool, optimizer=optimizer) as session:
        train(compiled, optimizer, 2)
        count = len(compiles)
        with session.trace(out, steps=2):
            train(compiled, optimizer, 3, start=2)
        train(compiled, optimizer, 2, start=5)
    assert len(compiles) == count
    trace = read(out)
    assert len(trace.steps()) == 2
    assert trace.of(COMMIT)
    if attached == "compiled":
        assert trace.about["compiled"]
        assert [e for e in trace.of(FORWARD) if e.args.get("whole")]


def test_a_copy_of_the_model_made_during_the_recording_is_not_recorded(pool, out):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session, session.trace(out, steps=None):
        train(model, optimizer, 1)
        twin = copy.deepcopy(model)
        torch.save(model, io.BytesIO())
        twin_two = pickle.loads(pickle.dumps(model))
        for other in (twin, twin_two):
            forward(other).backward()
    assert len([e for e in read(out).of(FORWARD) if "module" in e.args]) == 3


# -- it leaves nothing behind ----------------------------------------------------------------------------------------


def test_a_recording_leaves_no_hooks_and_listeners(pool, out):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 1)
        before = hooks_of(model), session._steps.events.listeners, session._steps.meter.observer
        assert before[2] is None
        with session.trace(out):
            train(model, optimizer, 2)
            assert hooks_of(model) != before[0]
        assert (hooks_of(model), session._steps.events.listeners, session._steps.meter.observer) == before
        loss = forward(model)
        with session.trace(out, overwrite=True):
            loss.backward()
            pending = forward(model)
        pending.backward()  # its graph still has the hooks, which do nothing
        assert (hooks_of(model), session._steps.events.listeners, session._steps.meter.observer) == before


def test_training_and_pool_are_the_same_with_and_without(pool, folder, out):
    ends = []
    for path, record in ((pool, False), (folder / "other.pool", True)):
        model = net(BIG)
        optimizer = adam(model)
        with lightck.attach(model, path, optimizer=optimizer) as session:
            if record:
                session.trace(out, steps=3)
            train(model, optimizer, 6)
        ends.append((everything(model, optimizer), dict(lightck.recover(path).model)))
    assert same(*ends)


def test_a_second_one_follows_the_first(pool, folder):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for name in ("one", "two"):
            with session.trace(folder / name):
                train(model, optimizer, 2)
    one, two = (read(folder / name) for name in ("one", "two"))
    assert (sorted(one.steps()), sorted(two.steps())) == ([1, 2], [3, 4])
    assert min(e.begin for e in two.events) >= 0
    assert len(two.of(COMMIT)) >= 3


def test_two_recordings_at_a_time_are_refused(pool, folder):
    session = lightck.attach(net(), pool)
    with session, session.trace(folder / "one"), pytest.raises(SessionError):
        session.trace(folder / "two")


# -- what goes wrong with it -----------------------------------------------------------------------------------------


def test_errors_that_can_be_known_are_raised_at_the_start(pool, folder, out):
    out.write_text("precious")
    with lightck.attach(net(), pool) as session:
        with pytest.raises(ExportExistsError):
            session.trace(out)
        with pytest.raises(TraceError):
            session.trace(folder / "missing" / "run.json")
        with pytest.raises(ExportExistsError):
            session.trace(folder, overwrite=True)
        for steps in (0, -1, 2.5, True):
            with pytest.raises(ValueError):
                session.trace(folder / "run", steps=steps)
        session.trace(out, overwrite=True).close()
    with pytest.raises(SessionError):
        session.trace(folder / "late")
    assert read(out).events == ()


def test_a_pool_is_never_replaced(pool, folder):
    other = folder / "other.pool"
    pool_with(other)
    with lightck.attach(net(), pool) as session:
        session.flush()
        for place in (pool, other):
            with pytest.raises(ExportExistsError, match=r"is a pool.*Choose another name"):
                session.trace(place, overwrite=True)
    assert (lightck.recover(pool).step, lightck.recover(other).step) == (0, 3)


@pytest.mark.parametrize("who", ["with", "close", "session"])
def test_a_file_that_cannot_be_written_is_an_error_at_the_end(pool, folder, who):
    place = folder / "gone"
    place.mkdir()
    model = net(BIG)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    recording = session.trace(place / "run.json", steps=2)
    place.rmdir()
    train(model, optimizer, 5)  # the recording ends here, and nothing is raised
    assert not recording.is_on
    if who == "session":
        with pytest.raises(TraceError, match=r"gone/run\.json"):
            session.close()
    else:
        with pytest.raises(TraceError), recording:
            if who == "close":
                recording.close()
        session.close()  # it was raised once
    assert lightck.recover(pool).step == 5
    assert not session.is_open


def test_a_file_that_appears_during_the_recording_is_not_replaced(pool, out):
    model = net()
    with lightck.attach(model, pool) as session:
        recording = session.trace(out)
        out.write_text("precious")
        with pytest.raises(ExportExistsError):
            recording.close()
    assert out.read_text() == "precious"


def test_a_fault_in_a_hook_is_no_fault_of_the_training(pool, out, monkeypatch):
    def fail(*_args: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(layers.ModuleHooks, "_accumulated", fail)
    monkeypatch.setattr(spans.EngineSpans, "checkpoint_begun", fail)
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        with pytest.raises(TraceError, match="planted"), session.trace(out):
            train(model, optimizer, 3)
        train(model, optimizer, 1)
    assert lightck.recover(pool).step == 4


def test_an_exception_of_the_training_comes_first_and_the_file_is_written(pool, out):
    model = net(BIG)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    with pytest.raises(ZeroDivisionError), session, session.trace(out):
        train(model, optimizer, 3)
        raise ZeroDivisionError
    assert sorted(read(out).steps()) == [1, 2, 3]


def test_a_session_that_ends_ends_its_trace(pool, out):
    model = net(BIG)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    recording = session.trace(out)
    train(model, optimizer, 2)
    session.close()
    assert not recording.is_on
    assert {e.args["step"] for e in read(out).of(COMMIT)} == {1, 2}
    recording.close()


def test_events_that_are_dropped_are_counted_and_reported(pool, out, monkeypatch, caplog):
    monkeypatch.setattr(events, "EVENTS_MAX", 40)
    trace = traced(pool, out, steps=6)
    assert trace.about["dropped"] > 0
    assert "lacks" in caplog.text
    assert len([e for e in trace.events if e.row in (FORWARD, BACKWARD)]) < 20
    assert len(trace.events) <= 40


def test_a_full_queue_of_the_engine_is_counted(pool, out, monkeypatch):
    monkeypatch.setattr(spans, "_CELLS", 4)
    trace = traced(pool, out, steps=3)
    assert trace.about["dropped"] > 0
    assert sorted(trace.steps()) == [3, 4, 5]


def test_too_little_memory_is_an_error_before_the_recording_begins(pool, out, monkeypatch):
    model = net()
    with lightck.attach(model, pool) as session:
        before = hooks_of(model), session._steps.events.listeners
        monkeypatch.setattr(spans, "_CELLS", 3)  # not a power of two: refused like a failed allocation
        with pytest.raises(TraceError):
            session.trace(out)
        assert (hooks_of(model), session._steps.events.listeners, session._steps.meter.observer) == (*before, None)
        monkeypatch.undo()
        session.trace(out).close()
    assert out.exists()


def test_a_relayout_during_the_recording(pool, out):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session, session.trace(out):
        train(model, optimizer, 2)
        pin = session.pin()
        model.append(nn.Linear(2, 50 * BIG))
        optimizer.add_param_group({"params": list(model[3].parameters())})
        train(model, optimizer, 2, start=2)
        pin.release()
    copied = {e.name for e in read(out).events if e.row.startswith("copy") and e.args["step"] == 3}
    assert {"model/3.weight", "model/0.weight"} <= copied


def test_a_forked_child_writes_nothing(pool, out):
    model = net()
    with lightck.attach(model, pool) as session:
        recording = session.trace(out)
        pid = os.fork()
        if pid == 0:
            try:
                recording.close()
            finally:
                os._exit(0 if not out.exists() else 1)
        assert os.waitpid(pid, 0)[1] == 0
        recording.close()
    assert read(out).events == ()


# -- in numbers ------------------------------------------------------------------------------------------------------


def test_the_facts_of_a_step_are_those_of_its_events():
    def event(row: str, begin: int, end: int, **args: Any) -> events.Event:
        return events.Event(row, row, begin * 1_000_000, end * 1_000_000, args)

    copies = COPY + "1"
    trace = Trace(
        (
            event(STEP, 0, 100, step=7),
            event(FORWARD, 10, 40, whole=True),
            event(FORWARD, 12, 20),
            event(BACKWARD, 40, 80),
            event(UPDATE, 90, 100),
            event(STALL, 0, 10),
            event(STALL, 2, 8),
            event(STALL, 80, 90),
            event(copies, 20, 50, bytes=300),
            event(copies, 85, 95, bytes=50),
            event(TRAINER_COPY, 80, 90, bytes=50, helped=True),
            event(TRAINER_COPY, 5, 8, bytes=100),
            event(TRAINER_COPY, 6, 7, bytes=90, helped=False),
            event(COMMIT, 95, 96),
            event(STEP, 100, 160, step=8),
            event(FORWARD, 100, 130),
        ),
        {},
    )
    one, two = facts(trace)
    assert (one.step, one.time_ms, one.forward_ms, one.backward_ms, one.update_ms) == (7, 100, 30, 40, 10)
    assert (one.stall_ms, one.copy_ms, one.commit_ms) == (20, 48, 1)
    assert one.overlap == round((300 * 30 / 30 + 50 * 5 / 10) / 500, 4)  # all of 20 to 50, and half of 85 to 95
    assert (one.copied_nbytes, one.helped_nbytes) == (500, 150)
    assert (two.time_ms, two.overlap, two.copied_nbytes) == (60, None, 0)


def drawn(rng: random.Random, steps: int, per_step: int) -> Trace:
    """A random trace: steps that follow each other or overlap, and events of any length up to the whole trace."""
    rows = (FORWARD, BACKWARD, COMMUNICATION, UPDATE, STALL, TRAINER_COPY, COMMIT, COPY + "1", COPY + "2")
    total = steps * 100
    found = [
        events.Event(
            STEP,
            "",
            n * 100 + rng.choice((0, 0, -7)),
            n * 100 + rng.choice((100, 100, 180, 0)),
            {"step": (n * 7) % (steps + 1)},
        )
        for n in range(steps)
    ]
    for _ in range(steps * per_step):
        begin = rng.randrange(total)
        end = begin + rng.choice((0, 1, rng.randrange(60), rng.randrange(60), rng.randrange(total)))
        found.append(events.Event(rng.choice(rows), "", begin, end, {"bytes": rng.randrange(999)}))
    return Trace(tuple(sorted(found, key=lambda event: (event.begin, -event.end))), {})


@pytest.mark.parametrize("seed", range(20))
def test_the_facts_of_a_step_do_not_depend_on_what_lies_outside_of_it(seed):
    trace = drawn(random.Random(seed), 12, 9)
    found = facts(trace)
    assert [each.step for each in found] == sorted(trace.steps())
    for each in found:
        step = trace.steps()[each.step]
        its = [e for e in trace.events if e is step or (e.row != STEP and e.end > step.begin and e.begin < step.end)]
        assert facts(Trace(tuple(its), {})) == [each]


class Counted(events.Event):
    """Counts how often its ``end`` is read."""

    n_reads = 0

    def __getattribute__(self, name: str) -> Any:
        Counted.n_reads += name == "end"
        return super().__getattribute__(name)


def test_twice_as_many_steps_are_twice_the_work():
    def work(steps: int) -> int:
        found = [Counted(COMMUNICATION, "epoch", 0, steps * 100, {})]
        for n in range(steps):
            found.append(Counted(STEP, "", n * 100, n * 100 + 100, {"step": n}))
            found += [Counted(COPY + "1", "", n * 100 + i, n * 100 + i + 5, {"bytes": 1}) for i in range(10)]
        Counted.n_reads = 0
        assert len(facts(Trace(tuple(found), {}))) == steps
        return Counted.n_reads

    assert work(200) < 2.5 * work(100)


def test_a_trace_of_a_loop_without_an_optimizer_ends_after_its_steps(folder, pool):
    model = net()
    session = lightck.attach(model, pool)
    recording = session.trace(folder / "run.trace", steps=2)
    for number in range(5):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(number)
        session.end_step()
    assert not recording.is_on
    session.close()
