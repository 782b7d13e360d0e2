"""Copy threads run on the processors next to the pool's memory, where a machine has more than one node."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from toys import adam, everything, is_step, net, train

import lightck
from lightck.pool.engine import Engine
from lightck.pool.storage import durability
from lightck.pool.storage import system as system_module
from lightck.pool.storage.system import System

AFFINITY = os.sched_getaffinity
MINE = sorted(AFFINITY(0))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with these nodes: number -> cpulist. Pools on it lie in memory of node 1."""

    def make(**nodes: str) -> System:
        for name, processors in nodes.items():
            folder = tmp_path / "devices" / "system" / "node" / name
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(processors + "\n")
        system = System(sys=str(tmp_path))
        monkeypatch.setattr(system_module, "System", lambda: system)
        probe = durability.probe
        monkeypatch.setattr(durability, "probe", lambda *args, **more: replace(probe(*args, **more), numa_node=1))
        return system

    return make


def copy_threads() -> dict[str, set[int]]:
    """Of each copy thread of this process the processors on which it may run."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended since
            if (task / "comm").read_text().startswith("lightck-copy-"):
                found[task.name] = os.sched_getaffinity(int(task.name))
    return found


@pytest.fixture
def mine():
    """The copy threads that were not there before."""
    before = copy_threads().keys()
    return lambda: [on for thread, on in copy_threads().items() if thread not in before]


@pytest.mark.skipif(len(MINE) < 2, reason="one processor: there is nothing to choose")
def test_copies_run_next_to_the_pool_and_the_training_where_it_was(pool, machine, mine, monkeypatch):
    """The node has processors that only this test knows of: the kernel takes those that it has."""
    machine(node0=f"{MINE[0]}", node1=f"{MINE[-1]},{MINE[-1] + 1}-{MINE[-1] + 8}")
    allowed = {*MINE, *range(MINE[-1] + 1, MINE[-1] + 9)}
    monkeypatch.setattr(system_module.os, "sched_getaffinity", lambda pid: allowed if pid == 0 else AFFINITY(pid))
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 3)
        session.flush()
        assert mine()
        assert all(on == {MINE[-1]} for on in mine())
        assert sorted(AFFINITY(os.getpid())) == MINE
        assert is_step(lightck.recover(pool), everything(model, optimizer))


@pytest.mark.parametrize(
    "nodes",
    [
        {"node0": f"{MINE[0]}"},  # the pool's node has no processors here
        {"node0": f"{MINE[0]}", "node1": f"{MINE[-1] + 1}-{MINE[-1] + 4}"},  # this process may use none of them
        {"node1": f"{MINE[0]}-{MINE[-1]}"},  # or has no others
        {"node1": f"{MINE[-1]}"},  # one processor, which the training fills as well
        {"node1": "0-"},
        {"node1": "0-9999999999"},
        {"node1": ""},
    ],
)
def test_where_there_is_nothing_to_choose_copies_run_anywhere(pool, machine, mine, nodes):
    machine(**nodes)
    with lightck.attach(net(), pool):
        assert mine()
        assert all(sorted(on) == MINE for on in mine())


def test_lists_of_processors_are_read_as_the_kernel_writes_them(machine):
    system = machine(node0="0-3,8,10-11", node1="4")
    assert system.processors(0) == {0, 1, 2, 3, 8, 10, 11}
    assert system.processors(1) == {4}
    assert system.processors(2) == frozenset()


def test_a_system_that_refuses_leaves_them_where_they_are_and_it_is_reported(caplog, mine):
    engine = Engine()
    try:
        with caplog.at_level(logging.WARNING, "lightck"):
            engine.run_on(frozenset({60_000}))  # no machine has it
        assert "next to the pool's memory, so copies may be slower: Invalid argument" in caplog.text
        assert all(sorted(on) == MINE for on in mine())
    finally:
        engine.close()


def test_for_a_pool_elsewhere_they_run_anywhere_again(mine):
    engine = Engine()
    try:
        engine.run_on(frozenset({MINE[-1]}))
        assert all(on == {MINE[-1]} for on in mine())
        engine.run_on(frozenset())
        assert all(sorted(on) == MINE for on in mine())
    finally:
        engine.close()
