"""A training under DeepSpeed that is killed and started again ends as if nothing had happened, and what it has saved is
read by other worlds and without DeepSpeed."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import run_ranks, values
from toys import same

import lightck
from lightck.errors import AmbiguousError, NoCheckpointError, PoolNotFoundError, SessionError, UnsupportedError

pytestmark = pytest.mark.frameworks
os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed")

import lightck.integrations.deepspeed as integration  # noqa: E402
from integrations.deepspeed_trainings import (  # noqa: E402
    BF16,
    PROGRAMS,
    Model,
    Program,
    ended,
    engine_of,
    masters,
    optimizer_of,
    run,
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_deepspeed.py"
IN_CI = ("ZeRO-2 in bf16, accumulation, workers, clipping", "ZeRO-3, subgroups, accumulation, workers")
TWO, THREE = "ZeRO-2, round robin, aligned", "ZeRO-3 in bf16, persistent parameters"


def programs() -> list[Any]:
    return [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in PROGRAMS]


def difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """What differs on some rank, warnings too. Of the losses, those that both runs have computed."""
    assert len(one) == len(other)
    found = []
    for rank, (mine, others) in enumerate(zip(one, other, strict=True)):
        left = mine.keys() - {"events", "losses"}
        found += [f"{rank}: {k}" for k in sorted(left) if not same(mine[k], others[k])]
        common = mine["losses"].keys() & others["losses"].keys()
        found += [f"{rank}: loss {k}" for k in sorted(common) if mine["losses"][k] != others["losses"][k]]
    return found


def pools_of(name: str, folder: Path) -> Path:
    """A directory, or the pool's file if there is one rank."""
    folder.mkdir(exist_ok=True)
    return folder / ("run.pool" if PROGRAMS[name].ranks == 1 else "pools")


# -- killed and started again ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", programs())
def test_a_killed_training_ends_like_one_that_was_not(name, folder):
    expected = ended(name, None)
    assert difference(ended(name, pools_of(name, folder / "whole")), expected) == []
    pools, chosen = pools_of(name, folder), random.Random(name)
    n_kills = 2 if name in IN_CI else 8
    kills = [chosen.randint(2, 2 * expected[0]["events"] // (n_kills + 3)) for _ in range(n_kills)]
    print("kills at the events", kills)
    steps = [0]
    for kill_at in kills:
        kill_rank = chosen.randrange(PROGRAMS[name].ranks)
        found = run(name, pools, kill_at, kill_rank)
        assert found[kill_rank].is_killed, [one.text for one in found]  # others may have lost their connection before
        with suppress(NoCheckpointError, PoolNotFoundError):
            steps.append(lightck.recover(pools).step)
    print("steps after the kills", steps)
    assert steps == sorted(steps)
    assert max(steps) > 0
    resumed = ended(name, pools)
    assert difference(resumed, expected) == []
    assert all(one["losses"] for one in resumed)


@pytest.mark.long
def test_the_example_goes_on_after_a_kill(folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]

    def example(*arguments: str) -> set[str]:
        done = subprocess.run(
            [*torchrun, "--epochs", "2", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        # Not by lines: the ranks may print into one.
        return set(re.findall(r"rank \d ended at step \d+ with loss -?0x1\.[0-9a-f]+p[+-]\d+", done.stdout))

    expected = example("--pools", "whole")
    assert len(expected) == 2
    assert example("--crash-at", "9") == set()
    assert lightck.recover(folder / "pools").step in (7, 8, 9)
    assert example() == expected


# -- read by others ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Any:
    """Program -> the directory of its pools, DeepSpeed's own checkpoint, and what is left on rank 0."""
    folder, found = tmp_path_factory.mktemp("deepspeed"), {}

    def of(name: str) -> tuple[Path, Path, dict[str, Any]]:
        if name not in found:
            place = folder / str(len(found))
            place.mkdir()
            left = ended(name, place / "pools", place / "deepspeed")[0]
            found[name] = place / "pools", place / "deepspeed", left
        return found[name]

    return of


@pytest.mark.parametrize("name", [TWO, THREE])
def test_a_process_without_deepspeed_reads_the_whole_tensors(name, trained):
    pools, _, left = trained(name)
    checkpoint = lightck.recover(pools)
    assert checkpoint.step == left["counters"][0]
    for key, expected in left["masters"].items():
        param, _, kind = key.partition("/")
        found = checkpoint.tensor(f"optimizer/{param}/{kind}" if kind else f"model/{param}")
        assert same(found, expected), key
    names = {name for name in left["masters"] if "/" not in name}
    assert {*names, "frozen.weight", "tied.weight", *left["buffers"]} == set(checkpoint.model)
    for name, buffer in left["buffers"].items():
        assert same(checkpoint.model[name], buffer), name


@pytest.mark.parametrize("name", [TWO, THREE])
def test_a_plain_model_and_optimizer_are_filled(name, trained):
    pools, _, left = trained(name)
    program = PROGRAMS[name]
    model = Model()
    if program.dtype == BF16:  # ZeRO has master weights of trained parameters only
        model.frozen.to(BF16)
        model.norm.mean = model.norm.mean.to(left["buffers"]["norm.mean"].dtype)  # bf16 in early releases
    optimizer = optimizer_of(program, model)
    assert lightck.recover(pools, model, optimizer).step == left["counters"][0]
    named = dict(model.named_parameters())
    for key, expected in left["masters"].items():
        param, _, kind = key.partition("/")
        found = optimizer.state[named[param]][kind] if kind else named[param].detach()
        assert same(found, expected), key
    assert optimizer.param_groups[0]["lr"] == left["options"][0]["lr"]


def test_a_plain_training_goes_on_from_the_pools(trained, folder):
    """Alone, without DeepSpeed, and without what its engine counted."""
    pools, _, left = trained(TWO)
    shutil.copytree(pools, folder / "pools")

    def body(rank: int) -> None:
        model = Model()
        optimizer = optimizer_of(PROGRAMS[TWO], model)
        options: dict[str, Any] = {"optimizer": optimizer, "state": {"deepspeed": None}, "resume": True}
        with lightck.attach(model, folder / "pools", **options) as session:
            named = dict(model.named_parameters())
            assert session.step == left["counters"][0]
            for key, expected in left["masters"].items():
                param, _, kind = key.partition("/")
                assert same(optimizer.state[named[param]][kind] if kind else named[param].detach(), expected), key
            model(torch.ones(4, 6)).sum().backward()
            optimizer.step()

    values(run_ranks(1, body, has_group=False))
    assert lightck.recover(folder / "pools").step == left["counters"][0] + 1


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [n for n in PROGRAMS if PROGRAMS[n].stage and n != TWO and PROGRAMS[n].optimizer == "AdamW"]
)
def test_the_whole_tensors_are_those_of_the_universal_checkpoint(name, trained):
    """TWO is left out: the tool of DeepSpeed does not know ``round_robin_gradients``."""
    from ranks import zero

    pools, saved, _ = trained(name)
    values(run_ranks(1, lambda rank: zero.convert(saved), has_group=False))
    checkpoint, compared = lightck.recover(pools), 0
    for folder in sorted((saved / "universal" / "zero").iterdir()):
        for kind in zero.KINDS:
            if not (folder / f"{kind}.pt").exists():
                continue
            value = torch.load(folder / f"{kind}.pt", weights_only=False)
            whole = (value["param"] if isinstance(value, dict) else value).flatten()
            key = f"optimizer/{folder.name}/{kind}"
            tensor = checkpoint.model[folder.name] if kind == "fp32" else checkpoint.tensor(key)
            if folder.name == "tied.weight":  # for a second name the tool takes the parameter of the forward
                tensor = tensor.to(PROGRAMS[name].dtype)
            # The tool makes fp32 of everything, also of buffers and of frozen parameters.
            assert same(tensor.flatten().to(whole.dtype), whole), key
            compared += 1
    assert compared >= 3 * len([p for p in Model().parameters() if p.requires_grad])


def _moved(pools: Path, program: Program, ranks: int) -> list[Any]:
    """Attach another world to the pools, make a step, and return what it had at the beginning."""

    def body(rank: int) -> Any:
        engine = engine_of(program, seed=5)
        session = integration.attach(engine, pools)
        began = {"step": session.step, "masters": masters(engine), "exact": session.recovered.exact}
        batch = torch.ones(4, 6, dtype=program.dtype) * (1 + rank)
        engine.backward(engine(batch).float().sum())
        engine.step()
        session.close()
        return {**began, "ends": masters(engine), "steps": engine.global_steps}

    return values(run_ranks(ranks, body))


@pytest.mark.parametrize(
    ("name", "stage", "ranks"),
    [
        (TWO, 2, 1),
        pytest.param(TWO, 2, 3, marks=pytest.mark.long),
        pytest.param(TWO, 3, 2, marks=pytest.mark.long),
        (THREE, 1, 3),
        pytest.param(THREE, 3, 1, marks=pytest.mark.long),
        pytest.param(THREE, 3, 3, marks=pytest.mark.long),
        pytest.param(THREE, 0, 2, marks=pytest.mark.long),
    ],
)
def test_another_world_or_stage_goes_on(name, stage, ranks, trained, folder):
    pools, _, left = trained(name)
    shutil.copytree(pools, folder / "pools")
    program = Program(stage, PROGRAMS[name].dtype, scheduler=PROGRAMS[name].scheduler)
    moved = _moved(folder / "pools", program, ranks)
    for one in moved:
        assert one["step"] == left["counters"][0]
        assert same(one["masters"], left["masters"])
        assert not one["exact"] or ranks == 2
        assert one["steps"] == one["step"] + 1
        assert not same(one["ends"], one["masters"])
    assert lightck.recover(folder / "pools").step == moved[0]["steps"]


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(program: Program, match: str, kind: type[Exception] = UnsupportedError, **others: Any) -> None:
    """Attaching an engine of this program, alone, raises an error, and makes no pool."""

    def body(rank: int) -> None:
        engine = engine_of(program, **others)
        with pytest.raises(kind, match=match):
            integration.attach(engine, "/nonexistent/pool")

    values(run_ranks(1, body))


@pytest.mark.parametrize(
    ("zero", "config", "match"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, {"zero_force_ds_cpu_optimizer": False}, "offload_optimizer cannot"),
        ({}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast cannot be used"),
    ],
)
def test_what_cannot_be_resumed_exactly_is_named(zero, config, match):
    refused(Program(2, zero=zero, config=config), match)


def test_each_refused_configuration_is_one_of_the_engine(folder, monkeypatch):
    """With an engine that says of itself that it is configured so."""

    def body(rank: int) -> None:
        engine = engine_of(Program(1))
        for name in integration._REFUSED:
            with monkeypatch.context() as patch:
                now = getattr(engine, name)
                assert not (now() if callable(now) else now), name
                patch.setitem(engine.__dict__, name, (lambda: True) if callable(now) else True)
                with pytest.raises(UnsupportedError, match=rf"{name.removesuffix('_enabled')} cannot be used"):
                    integration.attach(engine, folder / "run.pool")
        with monkeypatch.context() as patch:
            patch.setitem(engine.__dict__, "mpu", object())
            with pytest.raises(UnsupportedError, match="model parallel unit"):
                integration.attach(engine, folder / "run.pool")

    values(run_ranks(1, body))
    assert not list(folder.iterdir())


def test_optimizers_that_are_not_element_wise_are_refused():
    refused(Program(1, optimizer="Adagrad"), "optimizer Adagrad inside DeepSpeed")


@pytest.mark.parametrize("stage", [0, 2])
def test_weights_that_the_masters_do_not_have_are_refused(stage, folder):
    def body(rank: int) -> None:
        engine = engine_of(Program(stage, BF16))
        with torch.no_grad():
            engine.module.out.bias += 1
        with pytest.raises(UnsupportedError, match=r"'out\.bias' holds other values"):
            integration.attach(engine, folder / "run.pool")

    values(run_ranks(1, body))
    assert not list(folder.iterdir())


def test_wrong_arguments_are_named(folder, monkeypatch):
    def body(rank: int) -> None:
        with pytest.raises(TypeError, match="engine is a Linear"):
            integration.attach(torch.nn.Linear(1, 1), folder / "run.pool")
        engine = engine_of(Program(2))
        for name in ("optimizer", "layout"):
            with pytest.raises(TypeError, match=f"{name}="):
                integration.attach(engine, folder / "run.pool", **{name: None})
        with pytest.raises(UnsupportedError, match="strategy="):
            integration.attach(engine, folder / "run.pool", strategy=lightck.Gradients())
        with monkeypatch.context() as patch:
            patch.setattr(integration.deepspeed, "__version__", "1.0.0")
            with pytest.raises(UnsupportedError, match=r"deepspeed 1.0.0 is not supported"):
                integration.attach(engine, folder / "run.pool")
        with monkeypatch.context() as patch:
            patch.delattr(type(engine.optimizer), "update_lp_params")
            with pytest.raises(UnsupportedError, match="has no update_lp_params"):
                integration.attach(engine, folder / "run.pool")
        integration.attach(engine, folder / "run.pool").close()
        with pytest.raises(SessionError, match="attached to a pool already"):
            integration.attach(engine, folder / "run.pool")

    values(run_ranks(1, body))


def test_schedulers_of_the_script_are_found(folder):
    """Those that the engine does not step, too; two are an error that names them."""

    def body(rank: int) -> list[str]:
        engine = engine_of(Program(2, scheduler="cosine"))
        inner = engine.optimizer.optimizer
        other = torch.optim.lr_scheduler.StepLR(inner, 1)
        with pytest.raises(AmbiguousError, match="2 live schedulers"):
            integration.attach(engine, folder / "run.pool")
        with integration.attach(engine, folder / "run.pool", state={"other": other}) as session:
            session.flush()
        return sorted(lightck.recover(folder / "run.pool").state)

    assert values(run_ranks(1, body)) == [["deepspeed", "other", "scheduler"]]


def test_without_deepspeed_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.delitem(sys.modules, "lightck.integrations.deepspeed")
    with pytest.raises(ImportError, match=r"pip install 'lightck\[deepspeed\]'"):
        __import__("lightck.integrations.deepspeed")
