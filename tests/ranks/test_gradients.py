"""``Gradients`` in a group of ranks: each rank makes its own updates again, and all of them come back to one step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import ranked
import torch
from ranked import run_ranks
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import lightck
from lightck.cli import main
from lightck.cli.base import OK
from lightck.cli.verify import pool_facts
from lightck.errors import NoSpaceError, RankError, UnsupportedError
from lightck.pool.reader import open_pool
from lightck.state.fingerprint import fingerprint

from .trainings import TOPOLOGIES, Run, Topology, body, build, ddp_first, is_equal, wrapper_of

N = 4
STRATEGY = {"strategy": lightck.Gradients(base_every=N)}
UPDATES = 14


@cache
def reference(name: str, updates: int = UPDATES) -> list[Run]:
    """What the ranks end with that never imported lightck."""
    return ranked.values(run_ranks(TOPOLOGIES[name].n_ranks, body(TOPOLOGIES[name], None, updates)))


def train(name: str, pools: Path, updates: int = UPDATES, **more: Any) -> list[Run]:
    return ranked.values(run_ranks(TOPOLOGIES[name].n_ranks, body(TOPOLOGIES[name], pools, updates, **STRATEGY | more)))


def killed(name: str, pools: Path, step: int, **more: Any) -> None:
    """Train until rank 1 dies in the iteration after a step."""
    topology = TOPOLOGIES[name]
    ended = run_ranks(topology.n_ranks, body(topology, pools, UPDATES, kill=(1, step), **STRATEGY | more))
    assert ended[1].is_killed


@pytest.mark.parametrize(
    "name",
    ["ddp", "fsdp", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp 3", "tp", "hsdp", "tp x fsdp"))],
)
def test_killed_ranks_end_with_the_same_bits(name: str, pool: Path) -> None:
    killed(name, pool.parent / "pools", 9)
    runs = train(name, pool.parent / "pools")
    assert {run.began for run in runs} <= {7, 8, 9}
    assert len({run.began for run in runs}) == 1
    assert is_equal(runs, reference(name))


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp, 2 hosts", "hsdp, 2 hosts"])
def test_killed_ranks_on_several_hosts_do_too(name: str, pool: Path) -> None:
    killed(name, pool.parent / "pools", 9)
    runs = train(name, pool.parent / "pools")
    assert runs[0].began > 0
    assert is_equal(runs, reference(name))


class Writes:
    """A rank that writes to a parameter between updates, without changing a bit: its next checkpoint is full."""

    def __init__(self, rank: int, steps: tuple[int, ...]) -> None:
        self.rank, self.steps = rank, steps

    def before(self, rank: int) -> None:
        if rank == self.rank:
            step, steps = 0, self.steps

            def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
                nonlocal step
                step += 1
                if step in steps:
                    with torch.no_grad():
                        optimizer.param_groups[0]["params"][0].add_(0.0)

            register_optimizer_step_post_hook(after)


@pytest.mark.parametrize("steps", [(7,), (6, 7, 8)])
def test_a_rank_whose_checkpoint_must_be_full_waits_for_the_others_and_goes_on(
    steps: tuple[int, ...], pool: Path
) -> None:
    """Both of its homes hold what other ranks may still need, until they have committed."""
    writes = Writes(1, steps)
    killed("ddp", pool.parent / "pools", 9, before=writes.before)
    runs = train("ddp", pool.parent / "pools")
    assert is_equal(runs, reference("ddp"))


# -- another number of ranks -------------------------------------------------------------------------------------------


def state_after(topology: Topology, pools: Path, **options: Any) -> list[Run]:
    """What each rank of a world holds right after it was loaded from these pools."""

    def run(rank: int) -> Run:
        model, optimizer = build(topology)
        session = lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60, **options)
        began = session.step
        session.close()
        return Run(began, ranked.everything(model, optimizer))

    return ranked.values(run_ranks(topology.n_ranks, run))


@pytest.fixture
def saved(pool: Path) -> tuple[Path, Path]:
    """The pools of two FSDP2 ranks that stored gradients, and of two that stored whole states, of the same training."""
    train("fsdp", pool.parent / "gradients", 11)
    train("fsdp", pool.parent / "whole", 11, strategy=None)
    return pool.parent / "gradients", pool.parent / "whole"


def test_one_process_loads_what_two_ranks_have_stored(saved: tuple[Path, Path]) -> None:
    gradients, whole = map(lightck.recover, saved)
    assert gradients.step == whole.step == 11
    assert gradients.model.keys() == whole.model.keys()
    assert all(torch.equal(gradients.model[name], whole.model[name]) for name in whole.model)
    plain = replace(TOPOLOGIES["fsdp"], n_ranks=1, shard=lambda model: None)
    live, optimizer = build(plain)
    other, other_optimizer = build(plain)
    lightck.recover(saved[0], live, optimizer)
    lightck.recover(saved[1], other, other_optimizer)
    assert all(map(torch.equal, ranked.everything(live, optimizer), ranked.everything(other, other_optimizer)))


@pytest.mark.parametrize("strategy", [STRATEGY["strategy"], None], ids=["gradients", "whole"])
def test_three_ranks_load_what_two_have_stored(strategy: Any, saved: tuple[Path, Path]) -> None:
    """The new world may store whole states, or gradients again."""
    three = replace(TOPOLOGIES["fsdp"], n_ranks=3)
    found = state_after(three, saved[0], strategy=strategy)
    expected = state_after(three, saved[1])
    assert [run.began for run in found] == [11] * 3
    assert is_equal(found, expected)
    runs = ranked.values(run_ranks(3, body(three, saved[0], 16, strategy=strategy)))
    assert is_equal(runs, ranked.values(run_ranks(3, body(three, saved[1], 16))))


def test_a_replay_under_other_conditions_is_said_of_the_whole_state_too(
    saved: tuple[Path, Path], pool: Path, monkeypatch: Any
) -> None:
    assert lightck.recover(saved[0]).exact
    now = fingerprint()
    monkeypatch.setattr("lightck.restore.gradient_state.fingerprint", lambda: now | {"torch": "1.0"})
    found = lightck.recover(saved[0])
    assert not found.exact
    assert "in the part of rank 1, updates were replayed under other conditions" in found.reason
    assert main(["reshard", str(saved[0]), str(pool.parent / "new"), "--world", "3"], standalone_mode=False) == OK
    monkeypatch.undo()
    again = lightck.recover(pool.parent / "new")
    assert not again.exact
    assert "in the part of rank 1, updates were replayed under other conditions" in again.reason


def test_tools_read_the_pools_of_a_group(saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    facts = [pool_facts(str(path), None, True, replays=True) for path in sorted(saved[0].glob("*.pool"))]
    assert [one["ok"] for one in facts] == [True, True]
    assert main(["verify", "--replay", str(saved[0])], standalone_mode=False) == OK
    assert "step 11 is intact on all ranks" in capsys.readouterr().out
    assert main(["inspect", str(saved[0])], standalone_mode=False) == OK
    assert "11*, step 10*" in capsys.readouterr().out
    main(["diff", str(saved[0]), str(saved[1])], standalone_mode=False)
    assert "0 of 42 tensors" in capsys.readouterr().out


def test_single_tensors_are_not_loaded_lazily(saved: tuple[Path, Path]) -> None:
    with pytest.raises(UnsupportedError, match="Leave out lazy=True"):
        lightck.recover(saved[0], lazy=True)


# -- a lost pool -------------------------------------------------------------------------------------------------------


def test_a_rank_whose_pool_is_lost_takes_that_of_another(pool: Path) -> None:
    pools, plain = pool.parent / "pools", replace(TOPOLOGIES["ddp"], model=TOPOLOGIES["fsdp"].model)
    ranked.values(run_ranks(2, body(plain, pools, 9, **STRATEGY)))
    (pools / "rank-00001-of-00002.pool").unlink()
    runs = ranked.values(run_ranks(2, body(plain, pools, UPDATES, **STRATEGY)))
    assert [run.began for run in runs] == [9, 9]
    assert is_equal(runs, ranked.values(run_ranks(2, body(plain, None, UPDATES))))


def test_ranks_with_different_states_cannot_replace_each_other(pool: Path) -> None:
    pools, plain = pool.parent / "pools", replace(TOPOLOGIES["ddp 4"], n_ranks=3, wrap=lambda model: model)
    ranked.values(run_ranks(3, body(plain, pools, 9, **STRATEGY)))
    (pools / "rank-00001-of-00003.pool").unlink()
    ended = run_ranks(3, body(plain, pools, UPDATES, **STRATEGY))
    assert all(isinstance(one.error, RankError) for one in ended)
    assert "have different states" in str(ended[0].error)


# -- bad input ---------------------------------------------------------------------------------------------------------


def errors_of(pools: Path, **options: Any) -> list[Any]:
    topology = TOPOLOGIES["ddp"]
    return [one.error for one in run_ranks(2, body(topology, pools, 3, **STRATEGY | options))]


def test_replicas_are_refused(pool: Path) -> None:
    for error in errors_of(pool.parent / "pools", replicas=2):
        assert isinstance(error, UnsupportedError)
        assert "replicas=" in str(error)


def test_too_few_records_for_a_group_are_refused(pool: Path) -> None:
    """A single process needs one less."""
    for error in errors_of(pool.parent / "pools", strategy=lightck.Gradients(base_every=4, log_records=4)):
        assert isinstance(error, ValueError)
        assert "Use at least 5" in str(error)


def test_without_room_no_base_every_is_advised_that_a_group_cannot_have(pool: Path, monkeypatch: Any) -> None:
    """In a group ``base_every`` is at least twice the interval."""

    def no_space(*_: object, **__: object) -> None:
        raise NoSpaceError("The folder has no room.")

    monkeypatch.setattr("lightck.pipeline.current_pool.create", no_space)
    for base_every, advice in ((8, "No base_every makes it fit"), (10, "With Gradients(base_every=9) it fits")):
        strategy = lightck.Gradients(base_every=base_every)
        for error in errors_of(pool.parent / "pools", strategy=strategy, interval=4):
            assert advice in str(error)


@pytest.mark.parametrize("first", [None, STRATEGY["strategy"]], ids=["whole", "gradients"])
def test_pools_of_another_strategy_are_refused(first: Any, pool: Path) -> None:
    ranked.values(run_ranks(2, body(TOPOLOGIES["ddp"], pool.parent / "pools", 3, strategy=first)))
    other = STRATEGY["strategy"] if first is None else None
    for error in errors_of(pool.parent / "pools", strategy=other):
        assert "gradient records" in str(error)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_restore_makes_all_take_an_older_checkpoint(pool: Path) -> None:
    """Rank 1 finds its newest record damaged."""
    pools = pool.parent / "pools"
    train("ddp", pools, 9)
    path = pools / "rank-00001-of-00002.pool"
    reader = open_pool(str(path), gradients=True)
    newest = max(reader.commit_log().records.values(), key=lambda one: one.generation)
    offset = reader.superblock.slots[newest.slot][0] + next(
        entry.offset for entry in reader.entries if entry.role == "gradient" and entry.nbytes
    )
    reader.close()
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    runs = train("ddp", pools)
    assert [run.began for run in runs] == [8, 8]
    assert is_equal(runs, reference("ddp"))


# -- optimizers of sharded parameters ----------------------------------------------------------------------------------

CLASSES = {
    "adam foreach": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "sgd nesterov foreach": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "asgd": torch.optim.ASGD,
}


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSES)
def test_updates_of_shards_are_made_again_with_the_same_bits(name: str, pool: Path) -> None:
    """DTensors take another way through torch than plain tensors, which the replay updates."""
    topology = replace(TOPOLOGIES["fsdp"], optimizer=CLASSES[name])
    run_ranks(2, body(topology, pool.parent / "pools", 11, kill=(1, 8), **STRATEGY))
    runs = ranked.values(run_ranks(2, body(topology, pool.parent / "pools", 11, **STRATEGY)))
    assert runs[0].began == 8
    assert is_equal(runs, ranked.values(run_ranks(2, body(topology, None, 11))))


class OwnSGD(torch.optim.SGD):
    pass


@pytest.mark.parametrize("kind", [partial(OwnSGD, momentum=0.9), torch.optim.Muon], ids=["own", "muon"])
def test_classes_that_may_need_the_parts_of_other_ranks_are_refused(kind: Any, pool: Path) -> None:
    topology = replace(TOPOLOGIES["fsdp"], model=TwoMatrices, optimizer=partial(kind, lr=0.01))
    strategy = lightck.Gradients(base_every=4, own_optimizers=True)
    for ended in run_ranks(2, body(topology, pool.parent / "pools", 3, strategy=strategy)):
        assert isinstance(ended.error, UnsupportedError)
        assert "may need the parts of other ranks" in str(ended.error)


class TwoMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8, bias=False), nn.Linear(8, 1, bias=False)


def test_a_number_that_each_rank_would_choose_is_refused(pool: Path) -> None:
    for error in errors_of(pool.parent / "pools", strategy=lightck.Gradients(base_every="auto")):
        assert isinstance(error, UnsupportedError)
        assert "each rank would choose a number of its own" in str(error)


# -- with the rest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_with_an_interval_killed_ranks_end_with_the_same_bits(name: str, pool: Path) -> None:
    more = {"strategy": lightck.Gradients(base_every=6), "interval": 3}
    killed(name, pool.parent / "pools", 11, **more)
    runs = train(name, pool.parent / "pools", **more)
    assert {run.began for run in runs} in ({6}, {9})
    assert is_equal(runs, reference(name))


@pytest.mark.parametrize("name", ["fsdp", pytest.param("ddp", marks=pytest.mark.long)])
def test_with_all_checks_killed_ranks_end_with_the_same_bits(
    name: str, pool: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each unit that is due is made again from its base, also that of a shard."""
    monkeypatch.setenv("LIGHTCK_CHECK", "1")
    killed(name, pool.parent / "pools", 9)
    runs = train(name, pool.parent / "pools")
    assert runs[0].began == 9
    assert is_equal(runs, reference(name))
    assert "not trusted" not in capfd.readouterr().err


@pytest.mark.parametrize("interval", [0, 7])
def test_an_interval_for_which_the_homes_are_too_few_is_refused(interval: int, pool: Path) -> None:
    for error in errors_of(pool.parent / "pools", interval=interval):
        assert isinstance(error, ValueError)


@pytest.mark.parametrize("feedback", [False, pytest.param(True, marks=pytest.mark.long)])
def test_killed_ranks_that_compress_gradients_end_with_the_same_bits(feedback: bool, pool: Path) -> None:
    """As the same ranks that were not killed."""
    topk = lightck.TopK(0.1, error_feedback=True, residual="step") if feedback else lightck.TopK(0.1)
    more = {"strategy": lightck.Gradients(base_every=4, compress=topk)}
    topology = replace(TOPOLOGIES["ddp"], shard=ddp_first, wrap=wrapper_of)
    run_ranks(2, body(topology, pool.parent / "pools", UPDATES, kill=(1, 9), **more))
    runs = ranked.values(run_ranks(2, body(topology, pool.parent / "pools", UPDATES, **more)))
    assert runs[0].began == 9
    assert is_equal(runs, ranked.values(run_ranks(2, body(topology, pool.parent / "whole", UPDATES, **more))))
