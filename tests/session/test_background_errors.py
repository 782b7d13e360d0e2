"""Errors of background work reach the training loop, at its next step and again at close; older checkpoints are
intact."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from toys import BIG, adam, crashed, everything, forward, is_step, net, same, train

import lightck
from lightck import _native
from lightck._native import lib
from lightck.errors import BackgroundError
from lightck.pipeline import guard

OPERATIONS = [
    (_native.lib.LCK_OP_COPY, errno.EIO),
    (_native.lib.LCK_OP_SYNC, errno.EIO),
    (_native.lib.LCK_OP_COPY, errno.ENOSPC),
]
IDS = ["copy", "sync", "copy, no space"]


@pytest.fixture(autouse=True)
def _no_fault_is_left() -> Iterator[None]:
    yield
    for operation in (_native.lib.LCK_OP_COPY, _native.lib.LCK_OP_SYNC):
        lib.lck_fault(operation, 0, 0)


def inject(operation: int, error: int, nth: int = 1) -> None:
    assert lib.lck_fault(operation, nth, error) == lib.LCK_OK


def started(pool: Any, **options: Any) -> tuple[nn.Module, Any, Any, Any]:
    """A session that has committed two steps, and what the second one is."""
    model = net(BIG)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, **options)
    train(model, optimizer, 2)
    seen = everything(model, optimizer)
    session.flush()
    return model, optimizer, session, seen


def check(error: BaseException, code: int) -> None:
    assert type(error) is BackgroundError
    assert isinstance(error, OSError)
    assert error.errno == code
    text = str(error)
    for part in ("checkpoint", "checkpoints committed before are intact", "resume=True"):
        assert part in text


@pytest.mark.parametrize(("operation", "code"), OPERATIONS, ids=IDS)
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_error_reaches_the_next_step_and_close(pool, operation, code, nth):
    model, optimizer, session, seen = started(pool)
    held = {2: seen}
    inject(operation, code, nth)
    with pytest.raises(BackgroundError) as caught:
        for number in range(2, 8):
            train(model, optimizer, 1, start=number)
            held[session.step] = everything(model, optimizer)
    check(caught.value, code)
    failed_at = session.step
    intact = session.committed
    before = everything(model, optimizer)
    with pytest.raises(BackgroundError) as again:  # the error is raised again
        optimizer.step()
    check(again.value, code)
    assert same(everything(model, optimizer), before), "a step that is refused changes nothing"
    for call in (session.flush, session.end_step, session.close):
        with pytest.raises(BackgroundError) as again:
            call()
        check(again.value, code)
    assert 2 <= intact < failed_at
    assert session.committed == intact
    checkpoint = lightck.recover(pool)
    # A commit record whose own sync failed is complete in the page cache, so its checkpoint is intact.
    assert checkpoint.step in (intact, intact + 1)
    assert is_step(checkpoint, held[checkpoint.step])


@pytest.mark.parametrize(("operation", "code"), OPERATIONS, ids=IDS)
def test_pool_can_be_resumed_after_the_error(pool, operation, code):
    model, optimizer, session, _ = started(pool)
    inject(operation, code)
    with pytest.raises(BackgroundError):
        train(model, optimizer, 6, start=2)
    with pytest.raises(BackgroundError):
        session.close()
    again = net(BIG, seed=1)
    again_optimizer = adam(again)
    with lightck.attach(again, pool, optimizer=again_optimizer, resume=True) as session:
        start = session.step
        assert start >= 2
        train(again, again_optimizer, 6 - start, start=start)
    straight = net(BIG)
    straight_optimizer = adam(straight)
    train(straight, straight_optimizer, 6)
    assert is_step(lightck.recover(pool), everything(straight, straight_optimizer))


@pytest.mark.parametrize(("operation", "code"), OPERATIONS, ids=IDS)
def test_earlier_checkpoint_is_intact_at_every_moment(pool, operation, code):
    model, optimizer, session, seen = started(pool)
    inject(operation, code)
    forward(model)
    with pytest.raises(BackgroundError):
        train(model, optimizer, 3, start=2)
    checkpoint = lightck.recover(crashed(pool))
    assert checkpoint.step == session.committed
    if checkpoint.step == 2:
        assert is_step(checkpoint, seen)
    with pytest.raises(BackgroundError):
        session.close()


@pytest.mark.parametrize(("operation", "code"), OPERATIONS, ids=IDS)
def test_error_at_flush_is_reported_by_flush(pool, operation, code):
    model, optimizer, session, _ = started(pool)
    train(model, optimizer, 1, start=2)
    inject(operation, code)
    with pytest.raises(BackgroundError) as caught:
        session.flush()
    check(caught.value, code)
    assert session.committed == 2
    with pytest.raises(BackgroundError):
        session.close()
    assert lightck.recover(pool).step == 2


@pytest.mark.parametrize(("operation", "code"), OPERATIONS, ids=IDS)
def test_error_in_the_last_checkpoint_is_reported_by_close(pool, operation, code):
    model, optimizer, session, _ = started(pool)
    with pytest.raises(BackgroundError) as caught, session:
        train(model, optimizer, 1, start=2)
        inject(operation, code)
    check(caught.value, code)
    assert lightck.recover(pool).step == 2
    lightck.attach(model, pool, optimizer=optimizer, overwrite=True).close()  # lock, threads and mapping were released


def test_exception_of_the_loop_is_not_replaced_by_that_of_the_background(pool):
    model, optimizer, session, _ = started(pool)
    with pytest.raises(ZeroDivisionError), session:
        train(model, optimizer, 1, start=2)
        inject(_native.lib.LCK_OP_SYNC, errno.EIO)
        forward(model)
        raise ZeroDivisionError
    assert lightck.recover(pool).step == 2
    lightck.attach(model, pool, optimizer=optimizer, overwrite=True).close()


def test_committed_and_stats_do_not_raise(pool):
    model, optimizer, session, _ = started(pool)
    train(model, optimizer, 1, start=2)
    inject(_native.lib.LCK_OP_SYNC, errno.EIO)
    forward(model)
    for _ in range(200):
        assert session.committed == 2
    assert session.stats().committed == 2
    with pytest.raises(BackgroundError):
        train(model, optimizer, 2, start=3)
    with pytest.raises(BackgroundError):
        session.close()


def test_error_while_the_pool_is_made_leaves_nothing_behind(folder, pool):
    model = net()
    inject(_native.lib.LCK_OP_SYNC, errno.EIO)
    with pytest.raises(OSError) as caught:
        lightck.attach(model, pool, optimizer=adam(model))
    assert isinstance(caught.value, lightck.LightckError)
    assert [p.name for p in folder.iterdir()] == ["run.pool.lock"]
    lightck.attach(model, pool, optimizer=adam(model)).close()


def test_error_during_the_adoption_leaves_the_pool_and_lets_it_be_resumed(pool):
    _, _, session, seen = started(pool)
    session.close()
    other = net(BIG, seed=1)
    inject(_native.lib.LCK_OP_SYNC, errno.EIO)
    with pytest.raises(OSError) as caught:
        lightck.attach(other, pool, optimizer=adam(other), resume=True)
    assert isinstance(caught.value, lightck.LightckError)
    assert is_step(lightck.recover(pool), seen)
    other = net(BIG, seed=1)
    gc.collect()
    with lightck.attach(other, pool, optimizer=adam(other), resume=True) as session:
        assert session.step == 2


def test_error_while_the_pool_moves_to_a_new_file_leaves_the_old_one(folder, pool):
    class Box:
        value = torch.zeros(3)

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    box = Box()
    model, optimizer, session, seen = started(pool, state={"box": box})
    train(model, optimizer, 1, start=2)
    box.value = torch.zeros(1 << 20)
    inject(_native.lib.LCK_OP_COPY, errno.EIO)
    with pytest.raises(OSError) as caught:
        session.flush()
    assert isinstance(caught.value, lightck.LightckError)
    with pytest.raises(lightck.LightckError):
        session.close()
    assert is_step(lightck.recover(pool), seen)
    assert sorted(p.name for p in folder.iterdir()) == ["run.pool", "run.pool.lock"]


def test_a_hook_of_the_user_that_raises_leaves_the_session_sound(pool):
    model, optimizer, session, _ = started(pool)

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("in a hook")

    handle = optimizer.register_step_pre_hook(broken)
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, 1, start=2)
    handle.remove()
    assert session.step == 2
    train(model, optimizer, 1, start=2)
    seen = everything(model, optimizer)
    session.close()
    assert is_step(lightck.recover(pool), seen)
    assert lightck.recover(pool).step == 3


def test_errors_while_checkpoints_are_begun_take_no_slots(pool, monkeypatch):
    """After an error of lightck, or without memory, a loop that catches the error loses only this checkpoint."""
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, slots=3)
    train(model, optimizer, 1)
    session.flush()

    def fails(*_: Any) -> Any:
        raise MemoryError("injected")

    for _ in range(4):
        forward(model, 1).sum().backward()
        optimizer.step()
        with monkeypatch.context() as patched, pytest.raises(MemoryError):
            patched.setattr(guard, "SourceWatch", fails)
            session.flush()
    assert session.flush() == 5
    train(model, optimizer, 2, start=5)
    seen = everything(model, optimizer)
    session.close()
    assert lightck.recover(pool).step == 7
    assert is_step(lightck.recover(pool), seen)


@pytest.mark.parametrize("loss", ["removed", "moved", "replaced", "truncated", "emptied"])
def test_pool_that_disappears_while_it_is_in_use_is_reported(folder, pool, loss):
    """As a cleaner of temporary files does it: the mapping goes on, and a crash would find nothing."""
    model, optimizer, session, _ = started(pool)
    if loss == "removed":
        pool.unlink()
    elif loss == "truncated":
        os.truncate(pool, pool.stat().st_size // 2)
    elif loss == "emptied":
        os.truncate(pool, 0)
    else:
        pool.rename(folder / "elsewhere.pool")
    if loss == "replaced":
        pool.write_bytes(b"somebody else's")
    with pytest.raises(BackgroundError, match=r"run\.pool.* was removed.*attach to another path") as caught:
        train(model, optimizer, 3, start=2)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(BackgroundError):
        session.close()
    assert session.committed == 2
    if loss in ("truncated", "emptied"):
        pool.unlink()
    if loss != "replaced":
        with lightck.attach(model, pool, optimizer=optimizer) as session:
            train(model, optimizer, 1)
        assert lightck.recover(pool).step == 1
