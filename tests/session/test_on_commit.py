"""``session.on_commit``: which steps a callback gets, when, on which thread, and what follows from what it raises."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import run_ranks
from torch.nn.parallel import DistributedDataParallel
from toys import adam, forward, net, same, train, weights

import lightck
from lightck.errors import SessionError


def attached(pool: Path, **options: Any) -> tuple[Any, Any, lightck.Session]:
    model = net()
    optimizer = adam(model)
    return model, optimizer, lightck.attach(model, pool, optimizer=optimizer, **options)


def test_each_committed_step_comes_once_in_order_and_the_last_one_at_close(pool):
    model, optimizer, session = attached(pool)
    seen: list[int] = []
    session.on_commit(seen.append)
    train(model, optimizer, 4)
    assert seen == [1, 2, 3], "step 4 is not closed yet"
    session.close(done=True)
    assert seen == [1, 2, 3, 4]


def test_a_step_comes_before_the_update_that_follows_its_commit(pool):
    model, optimizer, session = attached(pool)
    events: list[Any] = []
    session.on_commit(lambda step: events.append((step, weights(model))))
    with session:
        train(model, optimizer, 1)
        of_step_1 = weights(model)
        optimizer.zero_grad()
        forward(model, 1).backward()
        assert events == []
        optimizer.step()
        ((step, then),) = events
    assert step == 1
    assert same(then, of_step_1), "the callback runs before the next update"


@pytest.mark.parametrize("strategy", [lightck.FullState(), lightck.Gradients(base_every=3), lightck.Replica()])
@pytest.mark.parametrize("slots", [None, 3])
def test_the_step_is_in_the_pool_when_the_callback_runs(pool, strategy, slots):
    options = {} if slots is None or isinstance(strategy, lightck.Gradients) else {"slots": slots}
    model, optimizer, session = attached(pool, strategy=strategy, **options)
    found: list[tuple[int, int]] = []
    session.on_commit(lambda step: found.append((step, lightck.recover(pool).step)))
    train(model, optimizer, 6)
    session.close()
    steps = [step for step, _ in found]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert all(there >= step for step, there in found)


def test_only_saved_steps_come(pool):
    model, optimizer, session = attached(pool, interval=3)
    seen: list[int] = []
    session.on_commit(seen.append)
    train(model, optimizer, 8)
    session.close()
    assert seen == [3, 6, 8]


def test_flush_and_log_deliver_at_their_end(pool, tmp_path):
    model, optimizer, session = attached(pool)
    seen: list[int] = []
    with session:
        train(model, optimizer, 1)
        session.on_commit(seen.append)
        assert session.flush() == 1
        assert seen == [1]
        session.flush()
        assert seen == [1], "nothing was committed since"


def test_a_callback_gets_what_is_committed_after_it_was_added(pool):
    model, optimizer, session = attached(pool)
    first: list[int] = []
    second: list[int] = []
    session.on_commit(first.append)
    train(model, optimizer, 3)
    session.on_commit(second.append)
    session.close()
    assert (first, second) == ([1, 2, 3], [3])


def test_several_callbacks_come_in_order_and_can_be_removed(pool):
    model, optimizer, session = attached(pool)
    seen: list[tuple[str, int]] = []
    before = session._steps.events.listeners
    handles = [session.on_commit(lambda step, name=name: seen.append((name, step))) for name in "ab"]
    handles.append(session.on_commit(lambda step: handles[2].remove()))
    train(model, optimizer, 3)
    assert seen == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    handles[0].remove()
    train(model, optimizer, 1, start=3)
    assert seen[4:] == [("b", 3)]
    handles[1].remove()
    train(model, optimizer, 2, start=4)
    assert len(seen) == 5
    assert session._steps.events.listeners == before, "without callbacks nothing listens"
    session.close()
    assert len(seen) == 5


def test_what_a_callback_raises_is_raised_by_step_before_the_update(pool):
    model, optimizer, session = attached(pool)
    seen: list[tuple[str, int]] = []

    def fails_at_2(step: int) -> None:
        seen.append(("first", step))
        if step == 2:
            raise RuntimeError("the disk of the metrics is full")

    session.on_commit(fails_at_2)
    session.on_commit(lambda step: seen.append(("second", step)))
    train(model, optimizer, 2)
    optimizer.zero_grad()
    forward(model, 2).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match="the disk of the metrics is full"):
        optimizer.step()
    assert same(weights(model), before), "the update was not made"
    assert lightck.recover(pool).step == 2, "the checkpoint stays"
    optimizer.step()
    train(model, optimizer, 1, start=3)
    session.close()
    assert lightck.recover(pool).step == 4
    assert seen == [(name, step) for step in (1, 2, 3, 4) for name in ("first", "second")]


def test_what_a_callback_raises_does_not_change_the_training(pool, tmp_path):
    model, optimizer, session = attached(pool)
    with session:
        train(model, optimizer, 4)
    expected = weights(model)
    model, optimizer, session = attached(tmp_path / "other.pool")

    def fails(step: int) -> None:
        raise ValueError(step)

    session.on_commit(fails)
    for number in range(4):
        optimizer.zero_grad()
        forward(model, number).backward()
        while True:
            try:
                optimizer.step()
            except ValueError:
                continue
            break
    with pytest.raises(ValueError, match="4"):
        session.close()
    assert same(weights(model), expected)
    assert same(dict(lightck.recover(tmp_path / "other.pool").model), expected)


def test_close_makes_all_calls_releases_the_pool_and_raises_the_first_error(pool, caplog):
    model, optimizer, session = attached(pool)
    seen: list[int] = []

    def fails(step: int) -> None:
        raise RuntimeError(f"first at {step}")

    def fails_too(step: int) -> None:
        raise RuntimeError(f"second at {step}")

    train(model, optimizer, 1)
    for callback in (fails, fails_too, seen.append):
        session.on_commit(callback)
    with pytest.raises(RuntimeError, match="first at 1"):
        session.close()
    assert seen == [1]
    assert "another callback of on_commit() raised at close()" in caplog.text
    assert not session.is_open
    attached(pool, resume=True)[2].close()


def test_a_callback_may_call_the_session(pool, tmp_path):
    model, optimizer, session = attached(pool, slots=4, tiers=[lightck.Tier(tmp_path / "tier", every="1h")])
    seen: list[int] = []

    def uses(step: int) -> None:
        assert session.stats().committed >= step
        assert session.committed >= step
        assert session.step >= step
        session.log(loss=float(step))
        session.flush()
        session.on_commit(lambda _: None).remove()
        if step == 2:
            session.pin().release()
        seen.append(step)

    session.on_commit(uses)
    train(model, optimizer, 4)
    session.close()
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("strategy", [lightck.FullState(), lightck.Gradients(base_every=3), lightck.Replica()])
def test_a_callback_may_close_the_session(pool, strategy):
    model, optimizer, session = attached(pool, strategy=strategy)
    session.on_commit(lambda step: session.close() if step == 2 else None)
    session.trace(pool.parent / "trace.json")
    train(model, optimizer, 5)
    assert not session.is_open
    assert lightck.recover(pool).step == 2
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    with lightck.attach(model, pool, optimizer=optimizer, overwrite=True) as session:
        train(model, optimizer, 3)
    assert lightck.recover(pool).step == 3


def test_a_loop_without_optimizers_gets_a_step_at_the_end_of_end_step(pool):
    model = net()
    session = lightck.attach(model, pool, optimizer=[])
    seen: list[int] = []
    session.on_commit(seen.append)
    for number in range(3):
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        session.end_step()
        assert seen == list(range(1, number + 2))
    session.close()
    assert seen == [1, 2, 3]


def test_with_layerwise_updates_nothing_is_called_inside_the_backward_pass(pool):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lightck.layerwise(model, optimizer)
    session = lightck.attach(model, pool, optimizer=optimizer)
    in_backward: list[bool] = []
    state = {"backward": False}
    session.on_commit(lambda _: in_backward.append(state["backward"]))
    for number in range(4):
        loss = forward(model, number)
        state["backward"] = True
        loss.backward()
        state["backward"] = False
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    assert in_backward == [False] * 4


def test_the_training_thread_is_called_even_if_another_one_flushes(pool):
    model, optimizer, session = attached(pool)
    threads: list[int] = []
    session.on_commit(lambda _: threads.append(threading.get_ident()))
    train(model, optimizer, 2)
    other = threading.Thread(target=session.flush)
    other.start()
    other.join()
    assert len(threads) == 1, "step 2 was committed on the other thread, and comes later"
    train(model, optimizer, 1, start=2)
    session.close()
    assert threads == [threading.get_ident()] * 3


def remember(session: lightck.Session) -> None:
    session.on_commit(lambda _: session.stats())


def test_a_callback_that_knows_the_session_does_not_keep_it(pool):
    model, optimizer, session = attached(pool)
    remember(session)
    train(model, optimizer, 3)
    gone = weakref.ref(session)
    del session, model, optimizer
    gc.collect()
    assert gone() is None
    attached(pool, resume=True)[2].close()


def test_its_time_counts_as_the_work_of_the_loop(pool):
    model, optimizer, session = attached(pool)
    seconds: list[float] = []

    def work(_: int) -> None:
        began = time.perf_counter()
        threading.Event().wait(0.01)
        seconds.append(time.perf_counter() - began)

    session.on_commit(work)
    train(model, optimizer, 4)
    assert len(seconds) == 3
    assert session._steps.meter.loop_seconds >= sum(seconds)
    session.close()


def test_a_signal_is_handled_while_a_callback_runs(pool):
    model, optimizer, session = attached(pool)
    handled: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append("handler"))

    def raises_a_signal(_: int) -> None:
        signal.raise_signal(signal.SIGUSR1)
        handled.append("end of the callback")

    try:
        session.on_commit(raises_a_signal)
        train(model, optimizer, 2)
        session.flush()
        session.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == ["handler", "end of the callback"] * 2


def test_a_session_that_ends_with_an_exception_calls_nothing_more(pool):
    model, optimizer, session = attached(pool)
    seen: list[int] = []
    session.on_commit(seen.append)
    with pytest.raises(RuntimeError, match="of the loop"), session:
        train(model, optimizer, 3)
        forward(model, 3).backward()  # closes step 3
        raise RuntimeError("of the loop")
    assert seen == [1, 2]
    assert lightck.recover(pool).step == 3


def test_what_cannot_be_called_and_a_closed_session_are_refused(pool):
    _, _, session = attached(pool)
    with pytest.raises(TypeError, match="takes a function that is called with the step"):
        session.on_commit("step")  # type: ignore[arg-type]
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.on_commit(print)


def test_each_rank_has_its_own_callbacks(pool):
    pools = pool.with_name("pools")

    def body(rank: int) -> list[int]:
        model = net()
        wrapped = DistributedDataParallel(model)
        optimizer = adam(model)
        seen: list[int] = []
        with lightck.attach(wrapped, pools, optimizer=optimizer) as session:
            if rank == 1:
                session.on_commit(seen.append)
            train(wrapped, optimizer, 3)
        return seen

    ended = run_ranks(2, body)
    assert [one.text for one in ended] == ["", ""]
    assert [one.value for one in ended] == [[], [1, 2, 3]]
