"""Parameters of which each rank has values of its own: kept in the same world, averaged for any other."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from ranked import die, log_lines, run_ranks, values
from torch import nn

import lightck
from lightck.cli import main
from lightck.errors import LayoutError, RankError
from lightck.layout import Average, Fused, Layout, Replicated, Rule, Shard

from .tensor_parallel import local_tensors

RULES: dict[str, Rule] = {"norm.*": Average(), "up": Shard(0)}
STATE = ("", "exp_avg", "exp_avg_sq")
AVERAGED = ("norm.weight", "norm.bias")


class Net(nn.Module):
    """The norm gets another gradient on each tensor parallel rank, as under sequence parallelism without an
    all-reduce."""

    def __init__(self, tp: int, rank: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(5).to(dtype)
        self.up = nn.Parameter(torch.randn(12, 5).chunk(tp)[rank].clone())
        self.same = nn.Parameter(torch.randn(3))
        with torch.no_grad():
            self.norm.weight.copy_(torch.randn(5) + rank)

    def update(self, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + rank)
        grad = torch.randn(5, generator=generator).to(self.norm.weight.dtype)
        self.norm.weight.grad, self.norm.bias.grad = (grad * n for n in (1, 3))
        self.up.grad, self.same.grad = torch.full_like(self.up, step + 1.0), torch.full_like(self.same, step + 1.0)
        optimizer.step()


def train(
    pools: Path,
    tp: int,
    dp: int,
    steps: int,
    *,
    seed: int = 0,
    kill: int | None = None,
    rules: dict[str, Rule] = RULES,
    dtype: torch.dtype = torch.float32,
) -> Any:
    def run(rank: int) -> Any:
        model = Net(tp, rank % tp, seed, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        layout = Layout(rules, rank % tp, tp)
        given = {"optimizer": optimizer, "layout": layout, "resume": True, "timeout": 60}
        with log_lines() as lines, lightck.attach(model, pools, **given) as session:
            began, first = session.step, local_tensors(model, optimizer)
            for step in range(began, steps):
                if kill == step and rank == 0:
                    die()
                model.update(optimizer, rank % tp, step)
                session.end_step()
            found = session.recovered
        reason = None if found is None else (found.exact, found.reason)
        return began, first, local_tensors(model, optimizer), reason, lines

    return run_ranks(tp * dp, run)


def mean_by_hand(of_places: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for one in of_places:
        total = total + one
    return total / len(of_places)


def test_killed_ranks_keep_their_own_values(pools):
    assert train(pools, 2, 1, 8, kill=4)[0].is_killed
    resumed = values(train(pools, 2, 1, 8, seed=1))
    never_killed = values(train(pools.with_name("other"), 2, 1, 8))
    for one, other in zip(resumed, never_killed, strict=True):
        assert one[0] in (3, 4)
        assert one[3] == (True, "")
        assert all(torch.equal(value, other[2][key]) for key, value in one[2].items())
    assert not torch.equal(resumed[0][2]["norm.weight", ""], resumed[1][2]["norm.weight", ""])


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (3, 1), (4, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("old", [(2, 1), (2, 2)])
def test_another_world_gets_the_mean(pools, old, tp, dp):
    saved = values(train(pools, *old, 3))
    moved = values(train(pools, tp, dp, 3, seed=1))
    if (tp, dp) == old:
        assert all(one[3] == (True, "") for one in moved)
        return
    for _, first, _, (exact, reason), _ in moved:
        assert not exact
        assert "norm.weight, norm.bias or their optimizer state differed" in reason
        assert "the mean over the ranks is taken" in reason
        for key in STATE:
            for name in AVERAGED:
                places = [one[2][name, key] for one in saved[:2]]
                assert torch.equal(first[name, key], mean_by_hand(places))
                assert not torch.equal(first[name, key], places[0]), "the first rank's values, as of a replica"
            assert torch.equal(first["same", key], saved[0][2]["same", key])
        assert torch.equal(first["norm.weight", "step"], torch.tensor(3.0))
    whole = torch.cat([one[2]["up", "exp_avg"] for one in saved[:2]])
    assert torch.equal(torch.cat([one[1]["up", "exp_avg"] for one in moved[:tp]]), whole)
    assert any("the mean over the ranks is taken" in line for line in moved[0][4])
    again = values(train(pools, tp, dp, 4, seed=2))  # the pools of the new world, which hold what was loaded
    said = "norm.weight, norm.bias or their optimizer state differed"
    assert all(one[0] == 3 and not one[3][0] and said in one[3][1] for one in again)
    assert all(one[3] == (True, "") for one in values(train(pools, tp, dp, 4, seed=2)))


def test_as_many_ranks_at_the_same_places_keep_their_own_values(pools):
    """Another tensor moves between them, so the checkpoint is loaded as that of other ranks (so it is on other
    hosts)."""
    saved = values(train(pools, 2, 1, 3))
    moved = values(train(pools, 2, 1, 3, seed=1, rules={"norm.*": Average(), "up": Fused(0, (6, 6))}))
    for one, other in zip(saved, moved, strict=True):
        assert not other[3][0]
        assert "up" in other[3][1]
        assert "mean" not in other[3][1]
        for name in AVERAGED:
            assert all(torch.equal(one[2][name, key], other[1][name, key]) for key in STATE)


def test_half_precision_is_averaged_in_float32(pools):
    saved = values(train(pools, 3, 1, 2, dtype=torch.bfloat16))
    for name in AVERAGED:
        for key in STATE:
            expected = mean_by_hand([one[2][name, key].float() for one in saved]).to(torch.bfloat16)
            stored = f"optimizer/{name}/{key}" if key else f"model/{name}"
            assert torch.equal(lightck.recover(pools).tensor(stored), expected)


def test_what_reads_a_directory_reads_the_mean(pools, tmp_path, caplog):
    saved = values(train(pools, 2, 1, 3))
    expected = mean_by_hand([one[2]["norm.weight", ""] for one in saved])
    with caplog.at_level(logging.WARNING, "lightck"):
        whole = lightck.recover(pools)
    assert "norm.weight, norm.bias or their optimizer state differed" in caplog.text
    assert "the mean over the ranks is taken" in caplog.text
    assert "should not differ" not in caplog.text
    assert torch.equal(whole.model["norm.weight"], expected)
    with lightck.recover(pools, lazy=True) as lazy:
        assert torch.equal(lazy.read("model/norm.weight", (1,), (3,)), expected[1:4])
    run = CliRunner().invoke
    assert run(main, ["verify", str(pools)]).exit_code == 0
    shown = run(main, ["inspect", "--pieces", str(pools)])
    assert re.search(r"norm\.weight +5 +ranks 0, 1: their mean", shown.output), shown.output
    assert run(main, ["reshard", str(pools), str(tmp_path / "new"), "--world", "3"]).exit_code == 0
    assert torch.equal(lightck.recover(tmp_path / "new").model["norm.weight"], expected)
    assert run(main, ["export", str(pools), str(tmp_path / "it.pt"), "--format", "torch"]).exit_code == 0
    found = torch.load(tmp_path / "it.pt", weights_only=True)
    assert torch.equal(found.get("model", found)["norm.weight"], expected)


def test_ranks_at_one_place_that_differ_are_named(pools):
    """A mean would hide it: data parallel ranks must hold the same."""

    def run(rank: int) -> None:
        model = Net(2, rank % 2, 0)
        with torch.no_grad():
            model.norm.bias[0] += rank // 2
        optimizer = torch.optim.AdamW(model.parameters())
        layout = Layout(RULES, rank % 2, 2)
        lightck.attach(model, pools, optimizer=optimizer, layout=layout, timeout=60).close()

    values(run_ranks(4, run))
    for one in train(pools, 2, 1, 1):
        assert isinstance(one.error, RankError)
        assert "different" in str(one.error)
        assert "norm.bias" in str(one.error)


def test_without_the_rule_ranks_that_differ_are_refused_in_another_world(pools):
    rules: dict[str, Rule] = {"up": Shard(0), "norm.*": Replicated()}
    values(train(pools, 2, 1, 2, rules=rules))
    for one in train(pools, 1, 1, 2, rules=rules):
        assert isinstance(one.error, RankError)
        assert "norm.weight" in str(one.error)
    # The same ranks go on with the rule, and from then on another world can load them.
    values(train(pools, 2, 1, 3))
    assert values(train(pools, 1, 1, 3))[0][0] == 3


def test_a_place_without_a_pool_is_named(pools):
    values(train(pools, 2, 1, 2, rules={"norm.*": Average(), "same": Replicated(), "up": Shard(0)}))
    (pools / "rank-00001-of-00002.pool").unlink()
    with pytest.raises(RankError, match="rank 1"):
        lightck.recover(pools)


def test_a_mean_of_whole_tensors_alone_also_needs_each_place(pools):
    """No part is missing; but half of the mean is."""

    def run(rank: int) -> None:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, rank)
        optimizer = torch.optim.SGD(model.parameters())
        layout = Layout({"weight|bias": Average()}, rank, 2)
        lightck.attach(model, pools, optimizer=optimizer, layout=layout, timeout=60).close()

    values(run_ranks(2, run))
    assert (lightck.recover(pools).model["weight"] == 0.5).all()
    (pools / "rank-00001-of-00002.pool").unlink()
    with pytest.raises(RankError, match=r"is the mean of 2 tensors, and no pool holds the values of place 1"):
        lightck.recover(pools)


def test_integers_have_no_mean(pools):
    def run(rank: int) -> str:
        model = nn.BatchNorm1d(3)
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises((LayoutError, RankError)) as caught:
            layout = Layout({"num_batches_tracked": Average()}, rank, 2)
            lightck.attach(model, pools, optimizer=optimizer, layout=layout, timeout=60)
        return str(caught.value)

    assert all("num_batches_tracked" in text and "Average()" in text for text in values(run_ranks(2, run)))
