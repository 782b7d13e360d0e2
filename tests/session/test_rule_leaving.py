"""Rule 10: however a training is left, closed checkpoints are finished and the open one is dropped."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import BIG, adam, alive, everything, forward, in_child, is_step, left_since, net, same, train

import lightck
from lightck.errors import SessionError
from lightck.pool.storage import emulation


def test_leaving_by_an_exception_drops_the_open_checkpoint_and_finishes_closed_ones(pool):
    model = net(BIG)
    optimizer = adam(model)
    with pytest.raises(ZeroDivisionError), lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
        seen = everything(model, optimizer)
        forward(model)  # closes checkpoint 2
        raise ZeroDivisionError
    assert is_step(lightck.recover(pool), seen)

    with pytest.raises(ZeroDivisionError), lightck.attach(model, pool, optimizer=optimizer, resume=True):
        train(model, optimizer, 2)
        raise ZeroDivisionError  # checkpoint 4 is open
    assert lightck.recover(pool).step == 3


def test_keyboard_interrupt_releases_the_pool(pool):
    model = net()
    optimizer = adam(model)
    with pytest.raises(KeyboardInterrupt), lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
        raise KeyboardInterrupt
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        assert session.step == 1


def test_interrupt_while_copies_are_waited_for_leaves_nothing_that_writes(pool, slow_memory, during_wait):
    """The next who has the lock would find an engine that still stores into its slots."""
    model = net(100 * BIG)
    optimizer = adam(model)
    with pytest.raises(KeyboardInterrupt), lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 1)
        forward(model)  # closes checkpoint 1, whose copies take a second
        during_wait(0.2, signal.SIGINT)
        raise ZeroDivisionError
    assert not session.is_open
    assert session.committed is None, "it was to be interrupted before"
    assert str(pool) not in Path("/proc/self/maps").read_text()
    with lightck.attach(model, pool, optimizer=optimizer, overwrite=True) as session:
        emulation.use(None)
        train(model, optimizer, 2)
        assert session.flush() == 2
        assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_interrupt_while_the_pool_moves_is_served_and_the_old_file_stays(pool, slow_memory):
    model = net(100 * BIG)
    optimizer = adam(model)
    emulated = emulation.active_profile()
    emulation.use(None)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
        seen = everything(model, optimizer)
    emulation.use(emulated)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, slots=3) as session:
        train(model, optimizer, 1)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            session.end_step()  # into a new file, which takes seconds
        assert session.committed == 2, "it was to be interrupted before"
        assert is_step(lightck.recover(pool), seen)
        emulation.use(None)
        assert session.flush() == 3
    assert is_step(lightck.recover(pool), everything(model, optimizer))


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    from toys import *
    torch.set_num_threads(1)
    folder = Path({folder!r})
    kept = []
    for name in ("open", "closed"):
        model = net(BIG)
        optimizer = adam(model)
        kept.append((model, lightck.attach(model, folder / f"{{name}}.pool", optimizer=optimizer)))
        train(model, optimizer, 3)
        if name == "closed":
            forward(model)
    print("left")
"""


def test_end_of_the_interpreter_finishes_closed_checkpoints_and_drops_the_open_one(folder):
    tests = str(Path(__file__).resolve().parents[1])
    script = textwrap.dedent(SCRIPT).format(tests=tests, folder=str(folder))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")
    assert lightck.recover(folder / "open.pool").step == 2
    assert lightck.recover(folder / "closed.pool").step == 3


def test_garbage_collection_of_model_and_session_releases_the_pool(pool):
    model = net(BIG)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    train(model, optimizer, 2)
    seen = everything(model, optimizer)
    forward(model)
    dead = weakref.ref(session)
    del model, optimizer, session
    gc.collect()
    assert dead() is None
    assert is_step(lightck.recover(pool), seen)
    again = net(BIG, seed=1)
    with lightck.attach(again, pool, optimizer=adam(again), resume=True) as session:
        assert session.step == 2


def test_session_that_nobody_keeps_goes_on_saving(pool):
    model = net()
    optimizer = adam(model)
    lightck.attach(model, pool, optimizer=optimizer)
    gc.collect()
    train(model, optimizer, 3)
    assert lightck.recover(pool).step == 2


def test_closed_session_keeps_nothing_alive(pool):
    model = net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    session = lightck.attach(model, pool, optimizer=optimizer)
    train(model, optimizer, 4)
    session.close()
    dead = [weakref.ref(obj) for obj in (model, optimizer, scheduler)]
    del model, optimizer, scheduler
    gc.collect()
    assert [ref() for ref in dead] == [None, None, None]
    assert (session.step, session.committed, session.stats().checkpoints) == (4, 4, 4)


def test_model_goes_on_as_if_never_attached_after_close(pool):
    model = net()
    optimizer = adam(model)
    hooks = len(optimizer._optimizer_step_pre_hooks), len(model._forward_pre_hooks), len(model._forward_hooks)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
    train(model, optimizer, 3)
    assert session.step == session.committed == 2
    assert lightck.recover(pool).step == 2
    now = len(optimizer._optimizer_step_pre_hooks), len(model._forward_pre_hooks), len(model._forward_hooks)
    assert now == hooks
    session.close()  # a second call does nothing
    for call in (session.flush, session.end_step, session.__enter__, lambda: session.loader([1])):
        with pytest.raises(SessionError, match="closed"):
            call()


def test_no_thread_and_no_descriptor_is_left(pool):
    def run(**options: Any) -> None:
        model = net()
        optimizer = adam(model)
        with lightck.attach(model, pool, optimizer=optimizer, **options):
            train(model, optimizer, 2)

    run()
    before = alive()
    run(resume=True)
    run(overwrite=True)
    assert not left_since(before)


def test_session_is_inert_in_a_forked_child(pool):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)

        def child() -> tuple[Any, ...]:
            train(model, optimizer, 2)
            errors = []
            for call in (session.flush, session.end_step):
                try:
                    call()
                except SessionError as error:
                    errors.append("forked" in str(error))
            session.close()
            return session.committed, errors

        assert in_child(child) == (1, [True, True])
        train(model, optimizer, 1, start=2)
        seen = everything(model, optimizer)
        assert session.flush() == 3
        assert is_step(lightck.recover(pool), seen)


def test_child_can_attach_to_a_pool_of_its_own(folder, pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)

        def child() -> Any:
            own = net(seed=7)
            own_optimizer = adam(own)
            with lightck.attach(own, folder / "own.pool", optimizer=own_optimizer):
                train(own, own_optimizer, 2)
            return is_step(lightck.recover(folder / "own.pool"), everything(own, own_optimizer))

        assert in_child(child)
        assert session.flush() == 2


def test_child_that_attaches_to_the_model_of_its_parent_is_refused_and_a_copy_works(folder, pool):
    model = net()
    with lightck.attach(model, pool, optimizer=adam(model)):

        def child() -> Any:
            with pytest.raises(SessionError, match="this process was forked after attach"):
                lightck.attach(model, folder / "own.pool", optimizer=adam(model))
            own = copy.deepcopy(model)
            own_optimizer = adam(own)
            with lightck.attach(own, folder / "own.pool", optimizer=own_optimizer):
                train(own, own_optimizer, 2)
            return is_step(lightck.recover(folder / "own.pool"), everything(own, own_optimizer))

        assert in_child(child)


def test_copy_of_a_model_is_not_the_model(pool):
    """EMA models are deep copies: their forwards are no boundaries."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        twin = copy.deepcopy(model)
        train(model, optimizer, 1)
        forward(twin.train())
        assert session.iteration == 0
        assert same(dict(twin.state_dict()), dict(net().state_dict()))


def test_a_closed_session_keeps_no_parameter(pool):
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    train(model, optimizer, 1)
    session.close()
    dead = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in dead] == [None] * len(dead)
    assert session.step == 1
