"""A process that reads a checkpoint keeps the training from overwriting it, and never stops the training."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from toys import adam, killed_child, net, same, train

import lightck
from lightck.errors import NoCheckpointError
from lightck.pool import slot_locks
from lightck.pool.commit_log import candidates
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import open_pool
from lightck.pool.slot_locks import SlotLocks, hold

FORK = multiprocessing.get_context("fork")
SECONDS_MAX = 60


@contextmanager
def training(pool: Path, before: Callable[[], None] = lambda: None, **options: Any) -> Iterator[Callable[[], Any]]:
    """A process that trains into the pool until the returned function is called, which returns its counters."""
    ours, theirs = FORK.Pipe()

    def run() -> None:
        before()
        model = net()
        optimizer = adam(model)
        session = lightck.attach(model, pool, optimizer=optimizer, **options)
        number = 0
        while not theirs.poll():
            train(model, optimizer, 1, start=number)
            number += 1
            if number == 3:
                theirs.send(None)
        session.close()
        theirs.send((number, session.stats()))

    process = FORK.Process(target=run)
    process.start()
    try:
        assert ours.poll(SECONDS_MAX), "no checkpoint"
        ours.recv()

        def end() -> Any:
            ours.send(None)
            assert ours.poll(SECONDS_MAX), "the training hangs"
            return ours.recv()

        yield end
    finally:
        process.kill()
        process.join()


def read_all(checkpoint: lightck.Checkpoint) -> dict[str, Any]:
    return {name: checkpoint.tensor(name) for name in checkpoint.names}


def test_a_training_overwrites_nothing_that_is_being_read(pool):
    with training(pool, slots=3) as end, lightck.recover(pool, lazy=True) as checkpoint:
        before = lightck.recover(pool, step=checkpoint.step)
        time.sleep(0.5)
        assert same(read_all(checkpoint), {name: before.tensor(name) for name in checkpoint.names})
        n_steps, stats = end()
    assert n_steps > checkpoint.step + 20, "the training waited for the reader"
    assert stats.checkpoints in (n_steps, n_steps + 1)
    assert (stats.skipped, stats.holds_overrun) == (0, 0)
    assert stats.holds_honored > 20


def test_a_reader_gets_no_slot_that_the_training_needs(pool):
    with training(pool, slots=2) as end, lightck.recover(pool, lazy=True) as checkpoint:
        time.sleep(0.3)
        n_steps, stats = end()
        with pytest.raises(NoCheckpointError, match=rf"Step {checkpoint.step} was overwritten .* more slots"):
            read_all(checkpoint)
    assert stats.checkpoints in (n_steps, n_steps + 1)
    assert stats.skipped == 0
    assert stats.holds_overrun > 0


def test_readers_of_every_slot_stop_nothing(pool):
    with training(pool, slots=4) as end, ExitStack() as readers:
        reader = open_pool(os.fspath(pool))
        readers.callback(reader.close)
        for slot in range(4):
            readers.enter_context(hold(reader.container.fd, slot))
        time.sleep(0.3)
        n_steps, stats = end()
    assert stats.checkpoints in (n_steps, n_steps + 1)
    assert stats.skipped == 0
    assert stats.holds_overrun > 20


def test_a_killed_reader_holds_nothing(pool):
    model = net()
    with lightck.attach(model, pool, optimizer=(optimizer := adam(model))):
        train(model, optimizer, 3)

    def read_and_die() -> None:
        _checkpoint = lightck.recover(pool, lazy=True)
        os.kill(os.getpid(), signal.SIGKILL)

    killed_child(read_and_die)
    fd = os.open(pool, os.O_RDWR)
    locks = SlotLocks(fd)
    assert all(locks.try_lock(slot) for slot in range(2))
    os.close(fd)


def test_a_child_of_the_reader_keeps_no_hold(pool):
    model = net()
    with lightck.attach(model, pool, optimizer=(optimizer := adam(model))):
        train(model, optimizer, 3)
    fd = os.open(pool, os.O_RDWR)
    locks, end = SlotLocks(fd), FORK.Event()
    child = FORK.Process(target=end.wait)
    with lightck.recover(pool, lazy=True):
        assert [locks.try_lock(slot) for slot in range(2)].count(False) == 1
        child.start()
    assert all(locks.try_lock(slot) for slot in range(2))
    end.set()
    child.join()
    os.close(fd)


def broken_holds(pool: Path, seed: int, before: Callable[[], None]) -> tuple[int, int]:
    """Hold checkpoints 200 times, or until one is overwritten nevertheless. Return how often a checkpoint was held, and
    how often it was overwritten."""
    chosen, n_held, n_broken = random.Random(seed), 0, 0
    with training(pool, before, slots=3) as end:
        reader = open_pool(os.fspath(pool))
        until = time.monotonic() + SECONDS_MAX
        while time.monotonic() < until and n_held < 200 and not n_broken:
            try:
                stored = reader.checkpoint(chosen.choice(list(candidates(reader.commit_log(), None))[:3]))
            except DamagedError:
                continue
            time.sleep(chosen.uniform(0, 0.004))
            with stored.hold():
                if stored.owns_slot():
                    n_held += 1
                    time.sleep(chosen.uniform(0, 0.02))
                    n_broken += not stored.owns_slot()
        reader.close()
        end()
    return n_held, n_broken


def paused_after_lock() -> None:
    """Let the training pause between the choice of a slot and the store of its header."""
    real = SlotLocks.try_lock

    def try_lock(self: SlotLocks, index: int) -> bool:
        answer = real(self, index)
        time.sleep(0.002)
        return answer

    SlotLocks.try_lock = try_lock  # type: ignore[method-assign]


def only_asked() -> None:
    """Let the training ask whether a reader holds the slot, in place of a lock of its own."""

    def try_lock(self: SlotLocks, index: int) -> bool:
        answer = slot_locks._set_lock(self._fd, slot_locks.fcntl.F_WRLCK, index)
        if answer:
            slot_locks._set_lock(self._fd, slot_locks.fcntl.F_UNLCK, index)
        return answer

    SlotLocks.try_lock = try_lock  # type: ignore[method-assign]


def test_no_hold_is_broken(pool):
    n_held, n_broken = broken_holds(pool, 1, paused_after_lock)
    assert (n_held, n_broken) == (200, 0)


def test_a_query_in_place_of_the_lock_breaks_holds(pool):
    def mutant() -> None:
        only_asked()
        paused_after_lock()

    n_held, n_broken = broken_holds(pool, 1, mutant)
    assert n_broken == 1, f"{n_held} holds"
