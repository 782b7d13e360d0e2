"""``lightck.preemption``: a signal ends the loop behind the present step, with its checkpoint in the pool."""

from __future__ import annotations

import faulthandler
import gc
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
import torch
from toys import adam, everything, forward, in_child, is_step, net, same, train

import lightck
from lightck.errors import SessionError, UnsupportedError

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def _default_actions() -> Iterator[None]:
    before = [(number, signal.signal(number, signal.SIG_DFL)) for number in (TERM, USR1)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def attached(pool: Path, **options: Any) -> tuple[Any, Any, lightck.Session]:
    model = net()
    optimizer = adam(model)
    return model, optimizer, lightck.attach(model, pool, optimizer=optimizer, **options)


def send(number: int = TERM) -> None:
    os.kill(os.getpid(), number)


def until(is_true: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def during_forward(model: Any, act: Callable[[], object]) -> None:
    """Call ``act`` once, in the next forward."""
    hook = model[0].register_forward_hook(lambda *_: (hook.remove(), act(), None)[-1])


# -- the step ends, and the loop


@pytest.mark.parametrize("interval", [1, 100])
@pytest.mark.parametrize("loop", ["plain", "end_step", "loader", "loader, asks first"])
@pytest.mark.parametrize("moment", ["forward", "between update and question"])
def test_the_present_step_ends_and_is_committed_and_the_training_goes_on_exactly(pool, interval, loop, moment):
    def run(pool: Path, stops_in: int | None) -> Any:
        model, optimizer, session = attached(pool, interval=interval, resume=True, strict_data=True)
        torch.manual_seed(1)
        data = torch.utils.data.DataLoader(torch.arange(96.0).reshape(24, 4) / 96, 3, shuffle=True)
        batches = data if loop == "plain" else session.loader(data)
        with session, lightck.preemption(session) as p:
            while session.step < 20:
                for x in batches:
                    if loop == "loader, asks first" and session.should_stop:
                        break
                    is_last = session.step + 1 == stops_in
                    if is_last and moment == "forward":
                        during_forward(model, send)
                    optimizer.zero_grad()
                    torch.nn.functional.dropout(model(x)).square().sum().backward()
                    optimizer.step()
                    if is_last and moment != "forward":
                        send()
                    if loop == "end_step":
                        session.end_step()
                    if session.step == 20 or ("first" not in loop and session.should_stop):
                        break
                if p.requested:
                    break
            assert session.should_stop is (stops_in is not None)
            return session.step, session.committed, everything(model, optimizer)

    reference = run(pool.with_name("reference.pool"), None)
    step, committed, seen = run(pool, 7)
    is_late = interval > 1 and loop == "loader, asks first" and moment != "forward"
    assert step == committed == (8 if is_late else 7)  # the step of the signal could not be saved exactly any more
    assert is_step(lightck.recover(pool), seen)
    if loop != "plain":  # a plain loop begins its pass anew
        assert same(run(pool, None)[2], reference[2])


@pytest.mark.parametrize("strategy", [lightck.Gradients(base_every=4), lightck.Replica()])
def test_with_other_strategies_the_training_goes_on_exactly_too(pool, strategy):
    def run(path: Path, stops_in: int | None) -> Any:
        model, optimizer, session = attached(path, interval=5, resume=True, strategy=strategy)
        with session, lightck.preemption(session):
            while session.step < 20 and not session.should_stop:
                if session.step + 1 == stops_in:
                    during_forward(model, send)
                train(model, optimizer, 1, start=session.step)
            return session.step, everything(model, optimizer)

    reference = run(pool.with_name("reference.pool"), None)
    assert [run(pool, each)[0] for each in (3, 9, None)] == [3, 9, 20]
    assert same(lightck.recover(pool).model, lightck.recover(pool.with_name("reference.pool")).model)
    assert is_step(lightck.recover(pool), reference[1])


def test_without_a_signal_nothing_changes(pool):
    model, optimizer, session = attached(pool)
    assert session.should_stop is False, "nobody has called preemption"
    with session:
        p = lightck.preemption(session)
        train(model, optimizer, 3)
        assert (session.should_stop, p.requested, p.signal, p.deadline) == (False, False, None, None)
    assert signal.getsignal(TERM) is signal.SIG_DFL
    assert signal.getsignal(USR1) is signal.SIG_DFL
    assert session.should_stop is False


def test_the_object_says_which_signal_came_and_how_long_is_left(pool):
    model, optimizer, session = attached(pool)
    with session, lightck.preemption(session, grace="2min") as p:
        train(model, optimizer, 1)
        send(USR1)
        assert (p.requested, p.signal) == (True, USR1)
        assert 100 < p.deadline - time.monotonic() <= 120
        assert "SIGUSR1 has come" in repr(p)
        first = p.deadline
        send(TERM)
        assert (p.signal, p.deadline) == (USR1, first), "a second signal says nothing new"
        assert session.should_stop
        assert session.should_stop, "it stays true"
        assert session.committed == 1


def test_a_signal_before_the_first_step_ends_the_loop_at_once(pool, caplog):
    _, _, session = attached(pool)
    with session, lightck.preemption(session):
        send()
        assert session.should_stop
    with pytest.raises(lightck.errors.NoCheckpointError):
        lightck.recover(pool)
    assert "came before the first update of this process: there is nothing new to save" in caplog.text


def test_what_was_resumed_and_not_trained_need_not_be_saved_again(pool):
    model, optimizer, session = attached(pool)
    with session:
        train(model, optimizer, 2)
    model, optimizer, session = attached(pool, resume=True)
    with session, lightck.preemption(session):
        send()
        assert session.should_stop
        assert session.step == 2
    assert lightck.recover(pool).step == 2


def test_it_is_false_in_the_middle_of_a_step(pool):
    model, optimizer, session = attached(pool, interval=100)
    seen = []
    with session, lightck.preemption(session):
        train(model, optimizer, 2)
        during_forward(model, lambda: (send(), seen.append(session.should_stop)))
        optimizer.zero_grad()
        loss = forward(model, 2)
        seen.append(session.should_stop)
        loss.backward()
        handle = optimizer.register_step_pre_hook(lambda *_: seen.append(session.should_stop))
        optimizer.step()
        handle.remove()
        assert seen == [False] * 3
        assert session.should_stop
        assert session.committed == 3


def test_it_is_false_while_the_weights_may_be_swapped(pool):
    model, optimizer, session = attached(pool)
    with session, lightck.preemption(session) as p:
        train(model, optimizer, 1)
        with session.paused():
            send()
            assert p.requested
            assert not session.should_stop
        assert session.should_stop


def test_of_several_optimizers_each_has_stepped(pool):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"d": torch.nn.Linear(4, 2), "g": torch.nn.Linear(4, 2)})
    optimizers = [torch.optim.Adam(part.parameters()) for part in model.values()]
    with lightck.attach(model, pool, optimizer=optimizers) as session, lightck.preemption(session):
        for part, optimizer in zip(model.values(), optimizers, strict=True):
            assert not session.should_stop
            send()
            part(torch.ones(4)).sum().backward()
            optimizer.step()
        assert session.should_stop
        assert session.committed == 1


def test_a_signal_while_lightck_waits_for_a_commit(pool, slow_memory, during_wait):
    model = net(20_000)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session, lightck.preemption(session) as p:
        train(model, optimizer, 1)
        during_wait(0.05, TERM, USR1)
        train(model, optimizer, 1, start=1)
        until(lambda: p.requested)
        assert session.should_stop
        assert session.committed == 2


def test_a_loop_on_another_thread(pool):
    model, optimizer, session = attached(pool)
    steps = threading.Event()

    def loop() -> None:
        while not session.should_stop:
            train(model, optimizer, 1, start=session.step)
            steps.set()

    with session, lightck.preemption(session):
        thread = threading.Thread(target=loop)
        thread.start()
        assert steps.wait(30)
        send()
        thread.join(30)
        assert not thread.is_alive()
        assert session.committed == session.step > 0


# -- what is said


def test_a_commit_that_comes_too_late_is_named(pool, slow_memory, caplog):
    model = net(20_000)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        lightck.preemption(session, grace=0.05)
        train(model, optimizer, 1)
        send()
        assert session.should_stop
        assert "of 0.05 s the pool lacks step 1, whose copies go on" in caplog.text
        assert f"The pool {str(pool)!r} holds no checkpoint yet" in caplog.text
    assert lightck.recover(pool).step == 1, "close() has committed it"


def test_a_loop_that_never_asks_goes_on_and_is_named(pool, caplog):
    model, optimizer, session = attached(pool)
    with session, lightck.preemption(session, grace=0.4):
        train(model, optimizer, 2)
        send()
        train(model, optimizer, 3, start=2)
        until(lambda: "if session.should_stop: break" in caplog.text)
        until(lambda: "the grace of 0.4 s is over" in caplog.text)
        assert "the loop has not read session.should_stop. The pool" in caplog.text
        train(model, optimizer, 1, start=5)
    assert lightck.recover(pool).step == 6


def test_a_step_that_does_not_end_within_the_grace_is_named(pool, caplog):
    model, optimizer, session = attached(pool)
    with session, lightck.preemption(session, grace="0.1s"):
        train(model, optimizer, 3)
        session.flush()
        during_forward(model, lambda: (send(), until(lambda: "grace of 0.1 s is over" in caplog.text)))
        train(model, optimizer, 1, start=3)
        assert "no step has ended and was committed since SIGTERM came" in caplog.text
        assert f"The pool {str(pool)!r} holds step 3" in caplog.text
        assert session.should_stop, "later, all the same"
        assert session.committed == 4


def test_a_refused_checkpoint_is_named(pool, caplog):
    model, optimizer, session = attached(pool, pause_on_nonfinite=True)
    with session, lightck.preemption(session):
        train(model, optimizer, 1)
        session.flush()
        with torch.no_grad():
            model[0].weight.fill_(float("nan"))
        train(model, optimizer, 1, start=1)
        send()
        assert session.should_stop
        assert "the pool lacks step 2 (" in caplog.text
        assert "holds step 1" in caplog.text


# -- handlers


def test_a_handler_that_was_there_is_called_too_and_comes_back(pool):
    calls: list[int] = []

    def before(number: int, _: object) -> None:
        calls.append(number)

    model, optimizer, session = attached(pool)
    with handled(USR1, before):
        with session:
            lightck.preemption(session)
            send(USR1)
            send(USR1)
            assert calls == [USR1, USR1]
            train(model, optimizer, 1)
            assert session.should_stop
        assert signal.getsignal(USR1) is before
        assert signal.getsignal(TERM) is signal.SIG_DFL


def test_ctrl_c_does_not_raise_within_the_grace_and_does_after_it(pool):
    model, optimizer, session = attached(pool)
    with session, lightck.preemption(session, signals=[signal.SIGINT], grace=0.2) as p:
        send(signal.SIGINT)
        train(model, optimizer, 1)
        until(lambda: time.monotonic() > p.deadline)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_handler_that_came_later_stays_and_may_call_lightcks(pool):
    _, _, session = attached(pool)
    with handled(TERM, signal.SIG_IGN):
        with session, lightck.preemption(session) as p:
            inner = signal.getsignal(TERM)
            signal.signal(TERM, lambda *args: inner(*args))
            later = signal.getsignal(TERM)
            send()
            assert p.requested
        assert signal.getsignal(TERM) is later
        send()  # lightck's handler acts as the one before it: nothing


def test_two_sessions_stop_and_each_ends_on_its_own(folder):
    first, second = attached(folder / "a.pool"), attached(folder / "b.pool")
    with second[2]:
        with first[2]:
            lightck.preemption(first[2])
            lightck.preemption(second[2])
            send()
            assert first[2].should_stop
        assert second[2].should_stop, "the first has closed"
        assert signal.getsignal(TERM) is not signal.SIG_DFL
    assert signal.getsignal(TERM) is signal.SIG_DFL


def test_after_close_on_another_thread_a_signal_acts_as_before(pool):
    def child() -> None:
        _, _, session = attached(pool)
        lightck.preemption(session)
        thread = threading.Thread(target=session.close)
        thread.start()
        thread.join()
        send()
        signal.pause()

    with pytest.raises(AssertionError, match=f"status -?{int(TERM)}"):
        in_child(child)


def test_after_the_grace_a_signal_ends_the_process(pool):
    def child() -> None:
        model, optimizer, session = attached(pool)
        p = lightck.preemption(session, grace=0.1)
        train(model, optimizer, 1)
        session.flush()
        send()
        until(lambda: time.monotonic() > p.deadline)
        send()
        signal.pause()

    with pytest.raises(AssertionError, match=f"status -?{int(TERM)}"):
        in_child(child)
    assert lightck.recover(pool).step == 1


def test_a_session_that_nobody_closed_leaves_the_signal_to_the_system(pool):
    def child() -> None:
        model, optimizer, session = attached(pool)
        lightck.preemption(session)
        session.abandon()
        del model, optimizer, session
        send()
        signal.pause()

    with pytest.raises(AssertionError, match=f"status -?{int(TERM)}"):
        in_child(child)


def test_a_session_that_was_collected_after_a_signal_leaves_the_next_one_to_the_earlier_handler(pool):
    """The loop has stopped and returned without close()."""
    seen: list[int] = []

    def run() -> None:
        model, optimizer, session = attached(pool)
        lightck.preemption(session, grace="60s")
        train(model, optimizer, 2)
        send()
        assert session.should_stop

    with handled(TERM, lambda number, _: seen.append(number)):
        run()
        gc.collect()
        n_before = len(seen)
        send()
        assert len(seen) == n_before + 1
        assert "lightck" not in str(getattr(signal.getsignal(TERM), "__module__", ""))


def test_a_forked_child_can_be_ended_and_survives_what_is_sent_to_the_whole_job(pool):
    _, _, session = attached(pool)
    with session, lightck.preemption(session):
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            send(USR1)
            os.write(writes, b"x")
            while True:
                signal.pause()
        assert os.read(reads, 1) == b"x"
        os.kill(pid, TERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -TERM
        os.close(reads)
        os.close(writes)


@pytest.mark.parametrize("n_workers", [2])
def test_a_signal_to_the_process_group_leaves_the_workers_of_a_loader(folder, n_workers):
    """As Slurm sends it to all processes of a step."""
    code = (
        "import os, signal, sys, torch, lightck; sys.path.insert(0, sys.argv[2]); from preempted_training import Data\n"
        "model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "loader = torch.utils.data.DataLoader(Data(0.01), 2, num_workers=int(sys.argv[3]))\n"
        "with lightck.attach(model, sys.argv[1], optimizer=optimizer) as session, lightck.preemption(session):\n"
        "    for n, x in enumerate(session.loader(loader)):\n"
        "        if n == 2: os.killpg(0, signal.SIGUSR1)\n"
        "        model(x).sum().backward(); optimizer.step()\n"
        "        if session.should_stop: break\n"
        "    for x in loader: pass  # the workers of this pass begin after the signal\n"
        "    print(session.step)\n"
    )
    path = os.pathsep.join([str(Path(lightck.__file__).parents[1]), *sys.path])
    words = [sys.executable, "-c", code, str(folder / "run.pool"), str(Path(__file__).parents[1]), str(n_workers)]
    done = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


# -- what is refused


def test_what_cannot_work_is_refused_by_name(pool):
    _, _, session = attached(pool)
    refused: list[BaseException] = []

    def elsewhere() -> None:
        try:
            lightck.preemption(session)
        except UnsupportedError as err:
            refused.append(err)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread only. Call it there" in str(refused[0])
    faulthandler.register(USR1)
    try:
        with pytest.raises(
            UnsupportedError, match=r"SIGUSR1 is handled by something outside Python.*Leave this signal"
        ):
            lightck.preemption(session)
    finally:
        faulthandler.unregister(USR1)
    assert signal.getsignal(TERM) is signal.SIG_DFL, "nothing was changed"
    with lightck.preemption(session), pytest.raises(SessionError, match="has a preemption already"):
        lightck.preemption(session)
    lightck.preemption(session)  # the first is closed
    session.close()
    with pytest.raises(SessionError, match="closed"):
        lightck.preemption(session)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"signals": [signal.SIGKILL]}, ValueError, "cannot announce the end"),
        ({"signals": [signal.SIGCHLD]}, ValueError, "cannot announce the end"),
        ({"signals": ()}, ValueError, "at least one signal"),
        ({"signals": "SIGTERM"}, TypeError, "pass a tuple of signals"),
        ({"signals": TERM}, TypeError, "pass a tuple of signals"),
        ({"signals": ["SIGTERM"]}, TypeError, "which is no signal"),
        ({"grace": "90"}, ValueError, "is no time"),
        ({"grace": 0}, ValueError, "is no time"),
        ({"grace": float("nan")}, ValueError, "is no time"),
        ({"grace": float("inf")}, ValueError, "is no time"),
        ({"grace": None}, TypeError, "is a NoneType"),
        ({"grace": True}, TypeError, "is a bool"),
    ],
)
def test_wrong_arguments_are_named(pool, options, error, text):
    _, _, session = attached(pool)
    with session, pytest.raises(error, match=text):
        lightck.preemption(session, **options)
    assert signal.getsignal(TERM) is signal.SIG_DFL


def test_no_session_is_named():
    with pytest.raises(TypeError, match="Pass what lightck"):
        lightck.preemption("run.pool")
