"""``lightck.preemption`` in a group of ranks: real processes, signalled, and resumed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from ranked import Ended, everything, log_lines, run_ranks, values
from ranks.trainings import TOPOLOGIES, Run, batch, build, is_equal

import lightck
from lightck.errors import UnsupportedError
from tiers.test_group_tiers import drains_have_ended, plain, steps_in, until

UPDATES = 60


def trained(
    name: str, pools: Path, tier: Path | None, signalled: dict[int, float], *, interval: int = 1, grace: str = "60s"
) -> list[Ended]:
    """Run a group until it is stopped or done. ``signalled``: rank -> seconds after attach at which it gets SIGTERM. A
    rank returns its run, and the warnings."""
    topology = TOPOLOGIES[name]

    def run(rank: int) -> tuple[Run, list[str]]:
        with log_lines() as lines:
            model, optimizer = build(topology)
            torch.manual_seed(100 + rank)
            tiers = [] if tier is None else [lightck.Tier(tier, every="1h")]
            directory = topology.on_host(rank, pools)
            session = lightck.attach(
                model, directory, optimizer=optimizer, resume=True, timeout=60, tiers=tiers, interval=interval
            )
            lightck.preemption(session, grace=grace)
            called, began = topology.wrap(model), session.step
            if rank in signalled:
                threading.Timer(signalled[rank], os.kill, (os.getpid(), signal.SIGTERM)).start()
            for step in range(began, UPDATES):
                called(batch(rank // topology.n_same_data, step)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.02 if signalled else 0.0)
                if session.should_stop:
                    break
            state = everything(model, optimizer)
            session.close()
            return Run(began, state, session.stats(), session.step), lines

    return run_ranks(topology.n_ranks, run)


@pytest.mark.parametrize("name", ["ddp split", "fsdp", "ddp split, 2 hosts"])
@pytest.mark.parametrize("everybody", [False, True], ids=["one", "all"])
def test_a_signal_stops_all_ranks_behind_one_step_which_the_tier_has(name, everybody, pools, tier):
    seed = 7
    print(f"seed {seed}")
    chance, n_ranks = random.Random(seed), TOPOLOGIES[name].n_ranks
    signalled = {rank: chance.uniform(0.1, 0.5) for rank in (range(n_ranks) if everybody else [n_ranks - 1])}
    first = values(trained(name, pools, tier, signalled))
    stopped = {run.common for run, _ in first}
    assert len(stopped) == 1, "all ranks stop behind the same step"
    (step,) = stopped
    assert 0 < step < UPDATES
    until(lambda: drains_have_ended(pools))
    assert steps_in(tier)[-1] == step
    runs = [run for run, _ in values(trained(name, pools, tier, {}))]
    assert {run.began for run in runs} == {step}
    assert is_equal(runs, plain(name, UPDATES))


def test_ranks_save_the_step_at_which_they_stop_whatever_the_interval(pools):
    runs = [run for run, _ in values(trained("fsdp", pools, None, {1: 0.3}, interval=50))]
    (step,) = {run.common for run in runs}
    assert 0 < step < UPDATES
    resumed = [run for run, _ in values(trained("fsdp", pools, None, {}, interval=50))]
    assert {run.began for run in resumed} == {step}
    assert is_equal(resumed, plain("fsdp", UPDATES))


def test_a_rank_without_preemption_is_named_and_nobody_hangs(pools):
    def run(rank: int) -> list[str]:
        with log_lines() as lines:
            model, optimizer = build(TOPOLOGIES["fsdp"])
            session = lightck.attach(model, pools, optimizer=optimizer, timeout=60)
            if rank == 0:
                lightck.preemption(session, grace=0.5)
            for step in range(20):
                model(batch(rank, step)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 5 and rank == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                assert not session.should_stop
            session.close()
        return [line for line in lines if "did not answer" in line]

    first, second = values(run_ranks(2, run))
    assert len(first) == 1
    assert "ranks 1 did not answer" in first[0]
    assert not second


def test_ranks_that_were_not_attached_together_are_refused(pools, tmp_path):
    def run(rank: int) -> None:
        model, optimizer = build(TOPOLOGIES["ddp"])
        session = lightck.attach(model, tmp_path / f"{rank}.pool", optimizer=optimizer, group=False)
        lightck.preemption(session)

    ended = run_ranks(2, run)
    assert all(isinstance(one.error, UnsupportedError) and "attached together" in str(one.error) for one in ended)
