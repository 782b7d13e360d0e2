"""Copy threads run on the processors next to the pool's memory, where a machine has more than one node."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from toys import adam, everything, is_step, net, train

import lightck
from lightck.pool import durability, placement
from lightck.pool.engine import Engine
from lightck.pool.system import System

MINE = sorted(os.sched_getaffinity(0))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with these nodes: number -> cpulist. Pools on it lie in memory of node 1."""

    def make(**nodes: str) -> System:
        for name, processors in nodes.items():
            folder = tmp_path / "devices" / "system" / "node" / name
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(processors + "\n")
        system = System(sys=str(tmp_path))
        monkeypatch.setattr(placement, "System", lambda: system)
        probe = durability.probe
        monkeypatch.setattr(durability, "probe", lambda *args, **more: replace(probe(*args, **more), numa_node=1))
        return system

    return make


def copy_threads() -> list[set[int]]:
    """Of each copy thread the processors on which it may run."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("lightck-copy-"):
            found.append(os.sched_getaffinity(int(task.name)))
    return found


@pytest.mark.skipif(len(MINE) < 2, reason="one processor: there is nothing to choose")
def test_copies_run_next_to_the_pool_and_the_training_where_it_was(pool, machine):
    machine(node0=f"{MINE[0]}", node1=f"{MINE[-1]}")
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 3)
        session.flush()
        assert copy_threads()
        assert all(on == {MINE[-1]} for on in copy_threads())
        assert sorted(os.sched_getaffinity(0)) == MINE
        assert is_step(lightck.recover(pool), everything(model, optimizer))


@pytest.mark.parametrize("nodes", [
    {"node0": f"{MINE[0]}"},  # the pool's node has no processors here
    {"node0": f"{MINE[0]}", "node1": f"{MINE[-1] + 1}-{MINE[-1] + 4}"},  # this process may use none of them
    {"node1": f"{MINE[0]}-{MINE[-1]}"},  # or has no others
    {"node1": "0-"},
    {"node1": "0-9999999999"},
    {"node1": ""},
])  # fmt: skip
def test_where_there_is_nothing_to_choose_copies_run_anywhere(pool, machine, nodes):
    machine(**nodes)
    with lightck.attach(net(), pool):
        assert copy_threads()
        assert all(sorted(on) == MINE for on in copy_threads())


def test_lists_of_processors_are_read_as_the_kernel_writes_them(machine):
    system = machine(node0="0-3,8,10-11", node1="4")
    assert system.processors(0) == {0, 1, 2, 3, 8, 10, 11}
    assert system.processors(1) == {4}
    assert system.processors(2) == frozenset()
    assert placement.processors(None, system) == frozenset()


def test_a_system_that_refuses_leaves_them_where_they_are_and_it_is_told(caplog):
    engine = Engine()
    try:
        with caplog.at_level(logging.WARNING, "lightck"):
            engine.place(frozenset({60_000}))  # no machine has it
        assert "could not be moved next to the pool: Invalid argument" in caplog.text
        assert all(sorted(on) == MINE for on in copy_threads())
    finally:
        engine.close()
