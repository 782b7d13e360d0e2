"""``pause_on_nonfinite=True`` in a group: every interleaving of small groups, and real ranks whose values break."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked import die, everything, log_lines, run_ranks, values
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toys import same

import lightck
from lightck.errors import RankError, SessionError, StateValueError, UnsupportedError
from ranks.pausing import STUCK, Pausing, explore

SAFE = [
    pytest.param(Pausing(2), 22_596, id="2 ranks"),
    pytest.param(Pausing(2, early_gate=True), 20_421, id="2 ranks, early gate"),
    pytest.param(Pausing(3, steps=6, pauses=2), 25_174, id="3 ranks"),
    pytest.param(Pausing(2, slots=4, steps=8, pauses=4), 112_388, id="4 slots", marks=pytest.mark.campaign),
    pytest.param(Pausing(2, steps=9, pauses=5), 225_472, id="2 ranks, 5 pauses", marks=pytest.mark.campaign),
    pytest.param(Pausing(3, pauses=4), 733_009, id="3 ranks, 4 pauses", marks=pytest.mark.campaign),
]
WRONG = [
    pytest.param(Pausing(2, gives_way=False), id="a rank waits for one that pauses"),
    pytest.param(Pausing(2, commits_within_boundary=False), id="commits late after a pause"),
    pytest.param(Pausing(2, knows_never_common=False), id="keeps what another rank never gets"),
]


@pytest.mark.parametrize(("model", "states"), SAFE)
def test_no_rank_is_stuck_and_nothing_common_is_lost(model: Pausing, states: int):
    assert explore(model) == (None, states)


@pytest.mark.parametrize("model", WRONG)
def test_each_part_of_the_rule_is_needed(model: Pausing):
    assert explore(model)[0] == STUCK


# -- real ranks --------------------------------------------------------------------------------------------------------

STEPS, BROKEN = 14, range(5, 9)
"""Steps of a training, and those at which one rank holds a value that is not finite."""


class Model(torch.nn.Module):
    """Each rank has statistics of its own, so one rank can be broken while the others are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        with torch.no_grad():
            self.average.lerp_(y.mean(0), 0.1)
        return y


def step(model: Model, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(100 * number + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(4, 6)).pow(2).mean().backward()
    for p in model.parameters():  # ranks wait for each other here
        dist.all_reduce(p.grad)
    optimizer.step()


def trained(folder: Path, rank: int, broken: dict[int, range], dies_at: int = 0) -> dict[str, Any]:
    """Train; rank *r* holds an infinite value after the steps ``broken[r]``. Returns what this rank has seen.
    ``dies_at``: rank 0 is killed after this step."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with log_lines() as lines:
        session = lightck.attach(model, folder, optimizer=optimizer, resume=True, pause_on_nonfinite=True, timeout=30)
        begin, reasons = session.step, []
        for number in range(begin, STEPS):
            step(model, optimizer, number)
            good = model.average[2].item()
            if number + 1 in broken.get(rank, ()):
                model.average[2] = float("inf")
            session.end_step()
            reasons.append(session.paused_reason)
            if rank == 0 and number + 1 == dies_at:
                die()
            if number + 1 == STEPS - 3:
                time.sleep(0.5)  # on a busy machine it takes longer than a step until others learn that a rank goes on
            if number + 1 in broken.get(rank, ()):
                model.average[2] = good
        committed, stats = session.committed, session.stats()
        session.close()
    return {
        "begin": begin,
        "reasons": reasons,
        "committed": committed,
        "skipped": stats.skipped,
        "waited": stats.rank_wait_seconds,
        "lines": lines,
        "model": everything(model, optimizer),
    }


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_the_others_give_up_too_and_all_go_on_when_values_are_finite_again(tmp_path, n_ranks):
    found = values(run_ranks(n_ranks, lambda rank: trained(tmp_path / "pools", rank, {1: BROKEN})))
    for rank, one in enumerate(found):
        assert one["waited"] < 20, "no rank waits for one that pauses"
        assert one["committed"] >= STEPS - 1
        assert one["reasons"][-1] is None
        assert one["skipped"] >= 1, f"rank {rank}"
    assert found[1]["reasons"][4:8] == ["'model/average' holds values that are not finite"] * 4
    other = next(reason for reason in found[0]["reasons"] if reason)
    assert other == "rank 1 commits nothing ('model/average' holds values that are not finite)"
    assert sum("commits no checkpoint for now" in line for line in found[0]["lines"]) == 1, "named once"
    assert lightck.recover(tmp_path / "pools").step == STEPS


def test_ranks_that_pause_in_turn(tmp_path):
    broken = {0: range(3, 6), 1: range(5, 8), 2: range(8, 10)}
    found = values(run_ranks(3, lambda rank: trained(tmp_path / "pools", rank, broken)))
    assert all(one["committed"] >= STEPS - 1 for one in found)
    assert lightck.recover(tmp_path / "pools").step == STEPS


def test_a_kill_while_a_rank_pauses_comes_back_to_the_last_good_checkpoint_of_all(tmp_path):
    pools = tmp_path / "pools"

    broken = {1: range(5, STEPS + 1)}
    assert any(one.is_killed for one in run_ranks(2, lambda rank: trained(pools, rank, broken, dies_at=10)))
    assert lightck.recover(pools).step == 4
    resumed = values(run_ranks(2, lambda rank: trained(pools, rank, {})))
    whole = values(run_ranks(2, lambda rank: trained(tmp_path / "whole", rank, {})))
    for one, other in zip(resumed, whole, strict=True):
        assert one["begin"] == 4
        assert same(one["model"], other["model"])


def preempted(folder: Path, rank: int) -> list[str]:
    """Train; rank 1 stays broken, and rank 0 gets a signal as soon as it knows. Returns the lines of the log."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with log_lines() as lines:
        session = lightck.attach(model, folder, optimizer=optimizer, pause_on_nonfinite=True, timeout=30)
        lightck.preemption(session, signals=(signal.SIGUSR1,), grace=8)
        number, is_signalled = 0, False
        while not session.should_stop:
            step(model, optimizer, number)
            number += 1
            if rank == 1 and number > 5:
                model.average[2] = float("inf")
            session.end_step()
            if rank == 0 and session.paused_reason and not is_signalled:
                is_signalled = True
                os.kill(os.getpid(), signal.SIGUSR1)
        session.close()
    return lines


def test_a_preempted_rank_names_the_one_that_pauses(tmp_path):
    ours, _ = values(run_ranks(2, lambda rank: preempted(tmp_path / "pools", rank)))
    (line,) = [each for each in ours if "session.should_stop is True now" in each]
    assert "(rank 1 commits nothing (" in line


def test_a_rank_that_ends_while_it_pauses_is_not_waited_for(tmp_path):
    """No collective holds the ranks together: rank 1 closes its session long before rank 0 needs another slot."""

    def body(rank: int) -> tuple[int, str]:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = lightck.attach(model, tmp_path / "pools", optimizer=optimizer, pause_on_nonfinite=True, timeout=20)
        for number in range(12):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).pow(2).mean().backward()
            optimizer.step()
            if rank == 1 and number + 1 >= 5:
                model.average[2] = float("inf")
            session.end_step()
            if rank == 0 and number == 3:
                time.sleep(2)
        with pytest.raises(SessionError, match="cannot be pinned, because it is not committed"):
            session.pin()
        waited = session.stats().rank_wait_seconds
        session.close()
        assert waited < 10
        return session.step, str(session.paused_reason)

    found = values(run_ranks(2, body))
    assert [step for step, _ in found] == [12, 12]
    assert found[0][1].startswith("rank 1 commits nothing")
    assert lightck.recover(tmp_path / "pools").step == 4


def test_a_rank_that_ends_while_another_one_pauses_is_not_waited_for_either(tmp_path):
    """Rank 0 gives its checkpoints up and ends, far ahead. The values of rank 1 are finite again later."""

    def body(rank: int) -> float:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = lightck.attach(model, tmp_path / "pools", optimizer=optimizer, pause_on_nonfinite=True, timeout=20)
        for number in range(16):
            optimizer.zero_grad()
            model(torch.ones(4, 6)).pow(2).mean().backward()
            optimizer.step()
            good = model.average[2].item()
            is_broken = rank == 1 and 5 <= number + 1 < 10
            if is_broken:
                model.average[2] = float("inf")
            session.end_step()
            if rank == 1 and number + 1 == 6:
                time.sleep(4)  # rank 0 ends meanwhile
            if is_broken:
                model.average[2] = good
        session.close()
        return session.stats().rank_wait_seconds

    assert max(values(run_ranks(2, body))) < 10
    assert lightck.recover(tmp_path / "pools").step == 4


def test_shards_that_break_on_one_rank(tmp_path):
    """The gather of the next step spreads the broken value: from then on no rank commits."""

    def sharded(rank: int) -> None:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session = lightck.attach(
            model, tmp_path / "pools", optimizer=optimizer, pause_on_nonfinite=True, timeout=30, resume=True
        )
        for number in range(9):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).pow(2).mean().backward()
            optimizer.step()
            if number + 1 == 5 and rank == 1:
                with torch.no_grad():
                    model[2].weight.to_local()[0] = float("nan")
            session.end_step()
        dist.barrier()
        die()

    run_ranks(2, sharded, ends_others_after=30)
    checkpoint = lightck.recover(tmp_path / "pools")
    assert checkpoint.step == 4
    assert all(bool(tensor.isfinite().all()) for tensor in checkpoint.model.values())


def test_a_training_that_begins_broken_is_refused(tmp_path):
    def attached(rank: int) -> None:
        model = Model()
        if rank == 1:
            model.average[2] = float("nan")
        optimizer = torch.optim.AdamW(model.parameters())
        lightck.attach(model, tmp_path / "pools", optimizer=optimizer, pause_on_nonfinite=True, timeout=30)

    found = run_ranks(2, attached)
    assert isinstance(found[1].error, StateValueError)
    assert "begins with values that are not finite" in str(found[1].error)
    assert isinstance(found[0].error, RankError)
    assert "Rank 1 (" in str(found[0].error)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"strategy": lightck.Gradients(base_every=4)},
            r"pause_on_nonfinite=True together with strategy=Gradients\(\)",
        ),
        ({"replicas": 2}, "pause_on_nonfinite=True together with replicas="),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(tmp_path, options, text):
    def attached(rank: int) -> None:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(UnsupportedError, match=text):
            lightck.attach(model, tmp_path / "pools", optimizer=optimizer, pause_on_nonfinite=True, **options)

    values(run_ranks(2, attached))
