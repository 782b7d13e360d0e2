"""``Gradients`` in a group of ranks, with parts of parameters whose elements an optimizer couples: Muon, or
a class of the user's own. Their units are whole in each checkpoint; all others are made again from gradients.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ranked
import torch
from ranked import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lightck
from lightck.cli import main
from lightck.cli.base import OK
from lightck.cli.verify import pool_facts
from lightck.errors import UnsupportedError
from lightck.layout import Layout, Shard
from lightck.pool.format.gradients import CHAIN_COMMITTED
from lightck.pool.gradient_reader import GradientCheckpoint, checkpoint_of, committed
from lightck.pool.reader import open_pool
from lightck.session.whole_units import WholeUnits

from .trainings import Run, batch, is_equal

N = 4
STRATEGY = lightck.Gradients(base_every=N)
UPDATES = 14


class Net(nn.Module):
    """Muon updates the matrix in the middle, AdamW the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 600), nn.Linear(6, 1)
        self.middle = nn.Linear(600, 6, bias=False)
        self.table = nn.Parameter(torch.rand(1500))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.middle(torch.tanh(self.first(x)))) * self.table.mean()


Optimizers = Callable[[Any], Sequence[torch.optim.Optimizer]]


def muon_and_adamw(model: Any) -> list[torch.optim.Optimizer]:
    rest = [p for name, p in model.named_parameters() if name != "middle.weight"]
    return [torch.optim.Muon([model.middle.weight], lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def fsdp(model: Any) -> None:
    fully_shard(model.first)
    fully_shard(model.middle)
    fully_shard(model)


@dataclass(frozen=True)
class Training:
    n_ranks: int = 2
    shard: Callable[[Any], None] = fsdp
    optimizers: Optimizers = muon_and_adamw
    n_same_data: int = 1
    model: Callable[[], nn.Module] = Net
    rules: tuple[tuple[str, Any], ...] = ()
    """Of ``layout=``."""

    def built(self) -> tuple[Any, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        model = self.model()
        self.shard(model)
        return model, list(self.optimizers(model))

    def body(
        self,
        pools: Path | None,
        updates: int = UPDATES,
        kill: int | None = None,
        on_step: Callable[[int, Any, Any], Any] = lambda step, session, model: None,
        **options: Any,
    ) -> Callable[[int], Run]:
        """``kill``: rank 1 dies in the iteration after this step."""

        def run(rank: int) -> Run:
            model, optimizers = self.built()
            torch.manual_seed(100 + rank)
            session = None
            if pools is not None:
                given = {"strategy": STRATEGY, "resume": True, "timeout": 60} | options
                if self.rules:
                    given["layout"] = Layout(dict(self.rules), rank, self.n_ranks)
                session = lightck.attach(model, pools, optimizer=optimizers, **given)
            began = 0 if session is None else session.step
            on_step(began, session, model)
            for step in range(began, updates):
                model(batch(rank // self.n_same_data, step)).pow(2).mean().backward()
                if kill == step and rank == 1:
                    ranked.die()
                for optimizer in optimizers:
                    optimizer.step()
                on_step(step + 1, session, model)
                for optimizer in optimizers:
                    optimizer.zero_grad()
            state = [tensor for one in optimizers for tensor in ranked.everything(model, one)]
            if session is None:
                return Run(began, state)
            session.close()
            return Run(began, state, session.stats(), session.common)

        return run

    def run(self, pools: Path | None, *given: Any, **more: Any) -> list[Run]:
        return ranked.values(run_ranks(self.n_ranks, self.body(pools, *given, **more)))

    def killed(self, pools: Path, step: int, **more: Any) -> None:
        ended = run_ranks(self.n_ranks, self.body(pools, kill=step, **more))
        assert ended[1].is_killed, ended


FSDP = Training()


@cache
def reference(training: Training = FSDP, updates: int = UPDATES) -> list[Run]:
    """What the ranks end with that never imported lightck."""
    return training.run(None, updates)


@contextmanager
def newest(pool: Path) -> Iterator[GradientCheckpoint]:
    """The newest checkpoint in a pool, as it lies there."""
    with closing(open_pool(str(pool), gradients=True)) as reader:
        yield checkpoint_of(reader, committed(reader)[0])


def middle(entries: Iterable[Any]) -> set[str]:
    """The names of the tensors that belong to the matrix in the middle."""
    return {one.name for one in entries if "middle" in one.name}


WHOLE = {"model/middle.weight", "optimizer/middle.weight/momentum_buffer"}

# -- killed and resumed ------------------------------------------------------------------------------------------------


def test_killed_ranks_with_muon_and_adamw_end_with_the_same_bits(
    pools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FSDP.killed(pools, 11)
    pool = pools / "rank-00000-of-00002.pool"
    with newest(pool) as checkpoint:
        assert middle(one.entry for one in checkpoint.in_record.values()) == WHOLE
        assert middle(checkpoint.reader.entries) == WHOLE
        assert "gradient/first.weight" in checkpoint.in_record
        assert checkpoint.oldest_base_step < checkpoint.step
    assert main(["verify", "--replay", str(pools)], standalone_mode=False) == OK
    assert main(["inspect", str(pool)], standalone_mode=False) == OK
    assert "Besides these, each checkpoint holds 1 unit (14.4 kB) whole." in capsys.readouterr().out
    runs = FSDP.run(pools)
    assert {run.began for run in runs} in ({10}, {11})
    assert is_equal(runs, reference())


@pytest.mark.long
def test_without_that_the_checkpoints_of_three_updates_would_be_lost(
    pools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the gradient of Muon's matrix were recorded, only a checkpoint for which no update of it is made again could
    be recovered: that of step 8, of which its last base is."""
    monkeypatch.setattr(WholeUnits, "of", lambda *_: frozenset())
    FSDP.killed(pools, 11)
    assert {run.began for run in FSDP.run(pools, 11)} == {8}


@pytest.mark.long
def test_a_pool_that_moves_to_a_new_file_keeps_the_units_whole(pools: Path) -> None:
    """An object grows, so the pool gets a new file with a copy of the newest common checkpoint."""

    def grown(step: int, session: Any, model: Any) -> None:
        values[0] = torch.full((1 << 20 if step >= 6 else 10,), float(step))

    values = [torch.zeros(10)]
    holder = Held(values)
    FSDP.killed(pools, 9, on_step=grown, state={"held": holder})
    with newest(pools / "rank-00001-of-00002.pool") as checkpoint:
        assert middle(checkpoint.reader.entries) == WHOLE
        assert max(one.nbytes for one in checkpoint.reader.entries) == 4 << 20  # the new file
    runs = FSDP.run(pools, on_step=grown, state={"held": holder})
    assert {run.began for run in runs} in ({8}, {9})
    assert is_equal(runs, reference())


class Held:
    """An object in ``state=`` with one tensor."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.values[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values[0] = state["value"]


@pytest.mark.long
def test_a_record_that_is_no_checkpoint_does_not_hold_them(pools: Path) -> None:
    more = {"strategy": lightck.Gradients(base_every=6), "interval": 3}
    FSDP.killed(pools, 11, **more)
    with newest(pools / "rank-00000-of-00002.pool") as checkpoint:
        assert middle(one.entry for one in checkpoint.in_record.values()) == WHOLE
        between = [one for one in checkpoint.part.chain if not one.flags & CHAIN_COMMITTED]
        assert between
        for entry in between:
            held = [one.entry for one in checkpoint_of(checkpoint.reader, entry).in_record.values()]
            assert {one.role for one in held} == {"gradient"}
            assert not middle(held)
    runs = FSDP.run(pools, **more)
    assert {run.began for run in runs} in ({6}, {9})
    assert is_equal(runs, reference())


@pytest.mark.long
def test_with_all_checks_killed_ranks_end_with_the_same_bits(
    pools: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTCK_CHECK", "1")
    FSDP.killed(pools, 9)
    runs = FSDP.run(pools)
    assert {run.began for run in runs} in ({8}, {9})
    assert is_equal(runs, reference())
    assert "not trusted" not in capfd.readouterr().err


def tensor_parallel(model: Any) -> None:
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"first": ColwiseParallel(), "middle": RowwiseParallel()})


def muon_for_matrices(model: Any) -> list[torch.optim.Optimizer]:
    """Muon also updates a matrix that each rank holds whole."""
    of_muon = [model.first.weight, model.middle.weight, model.last.weight]
    rest = [p for p in model.parameters() if all(p is not one for one in of_muon)]
    return [torch.optim.Muon(of_muon, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


@pytest.mark.long
def test_what_a_rank_holds_whole_stays_with_gradients(pools: Path) -> None:
    training = replace(FSDP, shard=tensor_parallel, optimizers=muon_for_matrices, n_same_data=2)
    training.killed(pools, 9)
    with newest(pools / "rank-00000-of-00002.pool") as checkpoint:
        held = {one.entry.name for one in checkpoint.units_without_home() if one.entry.role == "param"}
        assert held == {"model/first.weight", "model/middle.weight"}
        assert "gradient/last.weight" in checkpoint.in_record
        assert checkpoint.oldest_base_step < checkpoint.step
    runs = training.run(pools)
    assert runs[0].began >= 7
    assert is_equal(runs, reference(training))


def alone(model: Any) -> None:
    """Each rank computes with what it holds."""


class PartOfNet(Net):
    """Has a half of the matrix in the middle, as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.last = nn.Linear(600, 3, bias=False), nn.Linear(3, 1)


PARTS = Training(shard=alone, model=PartOfNet, rules=((r"middle\.weight", Shard(0)),))


@pytest.mark.long
def test_plain_tensors_stay_with_gradients_also_if_a_layout_calls_them_parts(pools: Path) -> None:
    """Muon computes with the part alone, and asks no other rank."""
    PARTS.killed(pools, 13)
    with newest(pools / "rank-00001-of-00002.pool") as checkpoint:
        assert "gradient/middle.weight" in checkpoint.in_record
        assert checkpoint.units_without_home() == []
        assert next(one.step for one in checkpoint.bases() if "middle" in one.entry.name) < checkpoint.step
    runs = PARTS.run(pools)
    assert runs[0].began >= 11
    assert is_equal(runs, reference(PARTS))


@pytest.mark.long
def test_a_write_between_updates_does_not_make_a_checkpoint_full(pools: Path) -> None:
    def written(step: int, session: Any, model: Any) -> None:
        with torch.no_grad():
            model.middle.weight.clamp_(-0.5, 0.5)

    FSDP.killed(pools, 9, on_step=written)
    with newest(pools / "rank-00000-of-00002.pool") as checkpoint:
        assert checkpoint.oldest_base_step < checkpoint.step
    assert is_equal(FSDP.run(pools, on_step=written), FSDP.run(None, on_step=written))


# -- another optimizer while training runs -----------------------------------------------------------------------------


@pytest.mark.long
def test_a_parameter_that_goes_over_to_muon_is_whole_from_then_on(pools: Path) -> None:
    """Its pool has homes for it, so the pool moves to a new file."""

    def moving(model: Any) -> list[torch.optim.Optimizer]:
        optimizers[:] = muon_and_adamw(model)
        return optimizers

    def moved(step: int, session: Any, model: Any) -> None:
        if step == 6:
            muon, adamw = optimizers
            kept = [p for p in adamw.param_groups[0]["params"] if p is not model.first.weight]
            adamw.param_groups[0]["params"] = kept
            del adamw.state[model.first.weight]
            muon.add_param_group({"params": [model.first.weight]})

    optimizers: list[torch.optim.Optimizer] = []
    runs = replace(FSDP, optimizers=moving).run(pools, 11, on_step=moved)
    with newest(pools / "rank-00000-of-00002.pool") as checkpoint:
        assert "model/first.weight" in {one.entry.name for one in checkpoint.units_without_home()}
        assert checkpoint.oldest_base_step < checkpoint.step == 11
    recovered = lightck.recover(pools)
    at = [name for name, _ in Net().named_parameters()].index("first.weight")
    assert torch.equal(recovered.model["first.weight"], torch.cat([run.state[at] for run in runs]))


# -- other worlds ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The pools of two ranks that stored gradients, and of two that stored whole states, of the same training."""
    folder = tmp_path_factory.mktemp("saved")
    FSDP.run(folder / "gradients", 11)
    FSDP.run(folder / "whole", 11, strategy=None)
    return folder / "gradients", folder / "whole"


@pytest.mark.long
def test_one_process_loads_what_two_ranks_have_stored(saved: tuple[Path, Path]) -> None:
    gradients, whole = map(lightck.recover, saved)
    assert gradients.step == whole.step == 11
    assert all(torch.equal(gradients.model[name], whole.model[name]) for name in whole.model)


@pytest.mark.long
def test_three_ranks_go_on_from_what_two_have_stored(saved: tuple[Path, Path], pools: Path) -> None:
    three = replace(FSDP, n_ranks=3)
    shutil.copytree(saved[0], pools / "gradients")
    shutil.copytree(saved[1], pools / "whole")
    runs = three.run(pools / "gradients")
    assert [run.began for run in runs] == [11] * 3
    assert is_equal(runs, three.run(pools / "whole", strategy=None))


@pytest.mark.long
def test_both_hold_the_same_tensors(saved: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    main(["diff", *map(str, saved)], standalone_mode=False)
    assert "0 of 46 tensors" in capsys.readouterr().out


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_if_such_a_unit_is_damaged_the_checkpoint_before_is_recovered(saved: tuple[Path, Path], pools: Path) -> None:
    shutil.copytree(saved[0], pools)
    path = pools / "rank-00001-of-00002.pool"
    with newest(path) as checkpoint:
        offset = next(one.offset for one in checkpoint.units_without_home() if one.entry.role == "param")
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    assert "block 0 of 'model/middle.weight'" in str(pool_facts(str(path), None, True, replays=True))
    runs = FSDP.run(pools)
    assert [run.began for run in runs] == [10, 10]
    assert is_equal(runs, reference())


# -- what is refused ---------------------------------------------------------------------------------------------------


def muon_for_most(model: Any) -> list[torch.optim.Optimizer]:
    of_muon = [model.first.weight, model.middle.weight]
    rest = [model.first.bias, model.last.bias]
    return [torch.optim.Muon(of_muon, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def test_a_training_of_which_most_is_whole_is_refused(pools: Path) -> None:
    """Muon has 5400 elements and AdamW 601, so a checkpoint would hold nearly as much as an update changes."""
    training = replace(FSDP, optimizers=muon_for_most)
    for ended in run_ranks(2, training.body(pools)):
        assert isinstance(ended.error, UnsupportedError)
        assert "are whole in each checkpoint" in str(ended.error)
        assert "changes 1.11 bytes" in str(ended.error)


class OwnSGD(torch.optim.SGD):
    pass


def test_a_class_of_ones_own_is_refused_where_a_layout_calls_plain_tensors_parts(pools: Path) -> None:
    training = replace(PARTS, optimizers=lambda model: [OwnSGD(model.parameters(), lr=0.01, momentum=0.9)])
    strategy = lightck.Gradients(base_every=N, own_optimizers=True)
    for ended in run_ranks(2, training.body(pools, strategy=strategy)):
        assert isinstance(ended.error, UnsupportedError)
        assert "may need the parts of other ranks" in str(ended.error)
