"""``replicas=2``: each rank's pool has a copy on another host, and a training goes on that has lost a host.

``LIGHTCK_TEST_HOST`` and a folder stand for a host.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import Ended, run_ranks, values

import lightck
from lightck.session.group import HOST_VARIABLE

from .worlds import WORLDS, build, is_equal, updates, whole_of

Hosts = Sequence[int]
"""Rank -> number of its host."""


def rank_body(name: str, pools: Path, hosts: Hosts, upto: int, **options: Any) -> Callable[[int], Any]:
    """Attach, and train up to a step. Returns the whole tensors after attach and at the end, and what the session says
    of the resume."""

    def body(rank: int) -> Any:
        os.environ[HOST_VARIABLE] = f"host-{hosts[rank]}"
        pools.mkdir(exist_ok=True)
        model, optimizer = build(WORLDS[name], seed=0)
        torch.manual_seed(50 + rank)
        keywords = {"resume": True, "timeout": 30, "replicas": lightck.Replicas(2, every=2)} | options
        with lightck.attach(model, pools / f"host-{hosts[rank]}", optimizer=optimizer, **keywords) as session:
            began = whole_of(session.step, model, optimizer)
            updates(WORLDS[name], rank, model, optimizer, range(session.step, upto))
            end = whole_of(session.step, model, optimizer)
        return began, end, session.recovered

    return body


def train(name: str, pools: Path, hosts: Hosts, upto: int, **options: Any) -> list[Any]:
    return values(run_ranks(len(hosts), rank_body(name, pools, hosts, upto, **options)))


def errors(name: str, pools: Path, hosts: Hosts, upto: int, **options: Any) -> list[BaseException]:
    found: list[Ended] = run_ranks(len(hosts), rank_body(name, pools, hosts, upto, **options))
    assert all(one.error is not None for one in found), [one.value for one in found]
    return [one.error for one in found if one.error is not None]


@pytest.mark.parametrize("lost", [0, 1])
def test_training_goes_on_without_a_host(tmp_path: Path, lost: int) -> None:
    train("fsdp 2", tmp_path / "pools", [0, 1], 9)
    shutil.rmtree(tmp_path / "pools" / f"host-{lost}")
    found = train("fsdp 2", tmp_path / "pools", [0, 1], 12)
    began, end, recovered = found[0]
    assert recovered.step % 2 == 0
    expected = train("fsdp 2", tmp_path / "other", [0, 1], recovered.step)[0][1]
    assert is_equal(began, expected)
    assert is_equal(end, train("fsdp 2", tmp_path / "whole", [0, 1], 12)[0][1])
    print(recovered)
