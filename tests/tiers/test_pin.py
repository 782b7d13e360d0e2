"""``session.pin()``: a pinned checkpoint stays while the training goes on, and a relayout carries it over."""

from __future__ import annotations

import resource
import threading
from typing import Any

import pytest
import torch
from toys import (
    BIG,
    adam,
    alive,
    batch,
    checkpoints,
    crashed,
    damage,
    everything,
    in_child,
    is_step,
    left_since,
    net,
    same,
    train,
)

import lightck
from lightck.errors import CorruptPoolError, NoSpaceError, SessionError
from lightck.pipeline.current_pool import CurrentPool


def started(pool: Any, width: int = 8, **options: Any) -> tuple[Any, Any, Any]:
    model = net(width)
    optimizer = adam(model)
    return model, optimizer, lightck.attach(model, pool, optimizer=optimizer, **options)


def held(pool: Any) -> list[int]:
    return sorted(checkpoint.step for checkpoint in checkpoints(pool))


@pytest.mark.parametrize("slots", [None, 2, 3])
@pytest.mark.parametrize("width", [8, BIG])
def test_pinned_checkpoint_stays_while_the_training_goes_on(pool, slots, width):
    model, optimizer, session = started(pool, width, slots=slots)
    train(model, optimizer, 3)
    seen = everything(model, optimizer)
    pin = session.pin()
    assert pin.step == session.committed == 3
    for number in range(3, 12):
        train(model, optimizer, 1, start=number)
        session.end_step()
        assert is_step(lightck.recover(crashed(pool), step=3), seen)
        assert lightck.recover(crashed(pool)).step >= number + 2 - (slots or 2), "the promise is as it was"
    session.close()
    assert is_step(lightck.recover(pool, step=3), seen)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_released_slot_is_used_again(pool):
    model, optimizer, session = started(pool)
    train(model, optimizer, 1)
    with session.pin() as pin:
        train(model, optimizer, 5, start=1)
        assert pin.step == 1
    train(model, optimizer, 5, start=6)
    size = pool.stat().st_size
    pin.release()  # a second release does nothing
    with session.pin():
        assert pool.stat().st_size == size, "the second pin uses the slot of the first"
    session.close()
    assert 1 not in held(pool)


def test_several_pins(pool):
    model, optimizer, session = started(pool)
    seen, pins = {}, []
    for number in range(4):
        train(model, optimizer, 2, start=2 * number)
        pins.append(session.pin())
        seen[pins[-1].step] = everything(model, optimizer)
    train(model, optimizer, 4, start=8)
    assert [pin.step for pin in pins] == [2, 4, 6, 8]
    for step in seen:
        assert is_step(lightck.recover(pool, step=step), seen[step])
    pins[1].release()
    train(model, optimizer, 4, start=12)
    session.close()
    assert {2, 6, 8} <= set(held(pool))
    assert 4 not in held(pool)


def test_same_checkpoint_pinned_twice_needs_both_releases(pool):
    model, optimizer, session = started(pool)
    train(model, optimizer, 1)
    first, second = session.pin(), session.pin()
    first.release()
    train(model, optimizer, 6, start=1)
    session.flush()
    assert 1 in held(pool)
    second.release()
    train(model, optimizer, 6, start=7)
    session.close()
    assert 1 not in held(pool)


def test_pins_are_bounded(pool):
    model, optimizer, session = started(pool)
    train(model, optimizer, 1)
    for _ in range(6):
        session.pin()
    with pytest.raises(SessionError, match=r"6 are pinned.*Release a pin"):
        session.pin()
    train(model, optimizer, 3, start=1)
    session.close()
    assert lightck.recover(pool).step == 4


def test_pin_before_any_step_holds_step_0(pool):
    model, optimizer, session = started(pool)
    seen = everything(model, optimizer)
    pin = session.pin()
    assert pin.step == 0
    train(model, optimizer, 5)
    assert same(dict(lightck.recover(pool, step=0).model), seen["model"])
    session.close()


@pytest.mark.parametrize("change", ["new group", "larger state", "other kind"])
def test_pinned_checkpoint_moves_to_a_new_pool_file(pool, change):
    """For each cause of a relayout: the new file holds the pinned checkpoint, unchanged."""

    class Box:
        value = torch.zeros(3)

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    model, box = net(), Box()
    box.value = torch.arange(2000.0)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, state={"box": box})
    train(model, optimizer, 2)
    seen = everything(model, optimizer)
    pin = session.pin()
    uuid = checkpoints(pool)[0].reader.superblock.uuid
    if change == "new group":
        extra = torch.nn.Parameter(torch.ones(1 << 19))
        model.register_parameter("extra", extra)
        optimizer.add_param_group({"params": [extra]})
    elif change == "larger state":
        box.value = torch.ones(1 << 20)
    else:
        box.value = torch.ones(1 << 20, dtype=torch.float64)
    for number in range(2, 6):
        optimizer.zero_grad()
        model(batch(number)).square().sum().backward()
        optimizer.step()
    session.flush()
    assert checkpoints(pool)[0].reader.superblock.uuid != uuid, "the pool has a new file"
    checkpoint = lightck.recover(pool, step=2)
    assert is_step(checkpoint, seen)
    assert same(checkpoint.state["box"]["value"], torch.arange(2000.0))
    pin.release()
    session.close()
    assert lightck.recover(pool).step == 6


def test_pinned_checkpoint_that_is_damaged_is_reported_where_the_pool_has_to_move(pool):
    model, optimizer, session = started(pool)
    train(model, optimizer, 1)
    pin = session.pin()
    train(model, optimizer, 2, start=1)
    session.flush()
    damage(pool, "model/0.weight", [1])
    with pytest.raises(CorruptPoolError, match=r"step 1 cannot be copied to the new file.*Release the pin"):
        session.pin()
    pin.release()
    session.pin()
    train(model, optimizer, 2, start=3)
    session.close()
    assert lightck.recover(pool).step == 5


def test_pin_where_fewer_slots_were_asked_for(pool):
    """The pool has three slots, the restart asks for two: the pin needs the third."""
    model, optimizer, session = started(pool, slots=3)
    train(model, optimizer, 3)
    session.close()
    again = net(seed=1)
    again_optimizer = adam(again)
    with lightck.attach(again, pool, optimizer=again_optimizer, resume=True, slots=2) as session:
        seen = everything(again, again_optimizer)
        assert session.pin().step == 3
        train(again, again_optimizer, 6, start=3)
    assert is_step(lightck.recover(pool, step=3), seen)
    assert lightck.recover(pool).step == 9


def test_pin_and_keep_share_a_pool(pool, folder):
    model, optimizer, session = started(pool, keep=lightck.Keep(every=3, to=folder / "history"))
    train(model, optimizer, 2)
    seen = everything(model, optimizer)
    pins = [session.pin(), session.pin()]
    train(model, optimizer, 20, start=2)
    assert is_step(lightck.recover(pool, step=2), seen)
    for pin in pins:
        pin.release()
    session.close()
    assert list((folder / "history").iterdir())
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_pin_that_finds_no_space_leaves_the_session_as_it_was(pool, folder):
    """RLIMIT_FSIZE: the larger file cannot be allocated."""

    def work() -> None:
        model, optimizer, session = started(pool)
        train(model, optimizer, 2)
        session.flush()
        size = pool.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        with pytest.raises(NoSpaceError):
            session.pin()
        train(model, optimizer, 5, start=2)
        session.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert session.committed == 7
        assert 2 not in held(pool), "nothing is held by the pin that failed"
        assert session.pin().step == 7
        session.close()

    in_child(work)
    assert sorted(path.name for path in folder.iterdir()) == ["run.pool", "run.pool.lock"]
    assert lightck.recover(pool).step == 7


def test_pin_survives_a_crash_until_its_slot_is_needed(pool, folder):
    model, optimizer, session = started(pool)
    train(model, optimizer, 2)
    seen = everything(model, optimizer)
    session.pin()
    train(model, optimizer, 7, start=2)
    image = crashed(pool)
    session.close()
    assert is_step(lightck.recover(image, step=2), seen)
    again = net(seed=1)
    again_optimizer = adam(again)
    with lightck.attach(again, image, optimizer=again_optimizer, resume=True) as session:
        assert session.step == 8
        assert is_step(lightck.recover(image, step=2), seen), "attach itself overwrites no slot"
        train(again, again_optimizer, 6, start=8)
    assert 2 not in held(image)


def test_resume_after_pins_loses_no_more_than_two_slots_would(pool):
    """Since the pin the pool has three slots. How many commits may be outstanding still follows attach's ``slots``."""
    model, optimizer, session = started(pool, BIG)
    train(model, optimizer, 1)
    session.pin().release()
    for number in range(1, 8):
        train(model, optimizer, 1, start=number)
        assert lightck.recover(crashed(pool)).step >= number
    session.close()
    again = net(BIG, seed=1)
    again_optimizer = adam(again)
    with lightck.attach(again, pool, optimizer=again_optimizer, resume=True):
        for number in range(8, 14):
            train(again, again_optimizer, 1, start=number)
            assert lightck.recover(crashed(pool)).step >= number


def test_pin_of_a_resumed_checkpoint_before_the_first_step(pool):
    model, optimizer, session = started(pool)
    train(model, optimizer, 3)
    seen = everything(model, optimizer)
    session.close()
    again = net(seed=1)
    again_optimizer = adam(again)
    with lightck.attach(again, pool, optimizer=again_optimizer, resume=True) as session:
        assert session.pin().step == 3
        train(again, again_optimizer, 6, start=3)
        assert is_step(lightck.recover(pool, step=3), seen)


def test_pin_is_refused_where_flush_is(pool):
    model, optimizer, session = started(pool)
    train(model, optimizer, 1)
    with session.paused(), pytest.raises(SessionError, match="paused"):
        session.pin()
    pin = session.pin()
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.pin()
    pin.release()


def test_nothing_is_left_after_close(pool):
    before = alive()
    model, optimizer, session = started(pool)
    train(model, optimizer, 1)
    session.pin()
    session.pin()
    session.close()
    assert not left_since(before)


def test_a_release_on_another_thread_leaves_a_pin_that_is_taken_meanwhile(pool):
    """The held slots are read each time a slot is taken, so a concurrent release cannot lose a new pin."""
    model, optimizer, session = started(pool, slots=4)
    train(model, optimizer, 1)
    one = session.pin()
    session.pin().release()  # the pool has room for two now
    holds, writer = session._steps.commits.participants.holds, session._pipeline.pool.writer
    for number in range(1, 30):
        train(model, optimizer, 1, start=number)
        releasing = threading.Thread(target=one.release)
        releasing.start()
        two = session.pin()
        releasing.join()
        assert holds.held(writer) == {two._hold.record.slot}
        one = two
    train(model, optimizer, 5, start=30)
    session.flush()
    assert one.step in held(pool)
    session.close()


def test_a_pin_released_while_the_pool_gets_its_new_file_holds_nothing_there(pool, monkeypatch):
    model, optimizer, session = started(pool)
    train(model, optimizer, 1)
    one = session.pin()
    moved = CurrentPool.relayout

    def move(*args: Any) -> Any:
        result = moved(*args)
        releasing = threading.Thread(target=one.release)  # after the relayout, before the session uses the new file
        releasing.start()
        releasing.join()
        return result

    monkeypatch.setattr(CurrentPool, "relayout", move)
    train(model, optimizer, 1)
    two = session.pin()
    holds, writer = session._steps.commits.participants.holds, session._pipeline.pool.writer
    assert holds.held(writer) == {two._hold.record.slot}
    two.release()
    assert not holds.held(writer)
    session.close()
