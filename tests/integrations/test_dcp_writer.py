"""``torch.distributed.checkpoint.save`` into a pool, in one process: what is saved comes back with the same keys and
bits, again and again in the same pool; what cannot be saved is an error that leaves the checkpoint before."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.calls import call
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils._pytree import tree_map_only
from toys import adam, damage, everything, in_child, net, on_small_tmpfs, pool_with, same, train

import lightck
from lightck.errors import (
    CheckpointExistsError,
    CorruptPoolError,
    DriftError,
    NoSpaceError,
    NotAPoolError,
    PoolLockedError,
    PoolNotFoundError,
    PoolTruncatedError,
    StateValueError,
)
from lightck.integrations.dcp import PoolReader, PoolWriter
from lightck.pool.storage.lock import PoolLock

from .dcp_saves import BytesPlanner, fails, loaded, loads_everything, saved

pytestmark = pytest.mark.frameworks


def mixed(seed: int = 0) -> dict[str, Any]:
    """Tensors of many kinds, nested, and values that are no tensors."""
    drawn = torch.Generator().manual_seed(seed)
    matrix = torch.randn(6, 5, generator=drawn)
    return {
        "model": {"a.weight": matrix, "scalar": torch.tensor(float(seed)), "empty": torch.empty(0, 3)},
        "views": {"turned": matrix.t(), "strided": matrix[::2, 1:4], "expanded": torch.ones(1, 4).expand(3, 4)},
        "kinds": {
            "bfloat16": matrix.bfloat16(),
            "bool": matrix > 0,
            "int64": torch.arange(7) * 2**40 + seed,
            "complex": torch.complex(matrix, matrix),
            "uint8": torch.arange(9, dtype=torch.uint8),
        },
        "list": [torch.full((2,), float(seed)), {"deep": torch.ones(3, dtype=torch.float64)}],
        "plain": {"lr": 0.1 + seed, "names": ["x", "y"], "nothing": None, "blob": b"\0\1\2" * seed},
        "step": 1000 + seed,
    }


def test_a_module_comes_back_with_the_same_bits(pool):
    model = net(seed=3)
    saved(model.state_dict(), pool)
    other = net(seed=4).state_dict()
    assert not same(other, dict(model.state_dict()))
    dcp.load(other, storage_reader=PoolReader(pool))
    assert same(dict(other), dict(model.state_dict()))


def test_a_training_goes_on_with_the_same_bits(pool):
    model = net()
    optimizer = adam(model)
    train(model, optimizer, 3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    saved({"model": model_state, "optimizer": optimizer_state, "step": 3}, pool)
    other = net(seed=9)
    optimizer_of_other = adam(other)
    assert loaded(PoolReader(pool), other, optimizer_of_other) == 3
    assert same(everything(other, optimizer_of_other), everything(model, optimizer))
    train(model, optimizer, 2, start=3)
    train(other, optimizer_of_other, 2, start=3)
    assert same(other.state_dict(), model.state_dict())


def test_everything_comes_back_under_the_keys_that_were_saved(pool):
    saved(mixed(3), pool)
    assert same(loads_everything(PoolReader(pool)), mixed(3))
    into = tree_map_only(torch.Tensor, torch.clone, mixed(4))  # none of them shares memory with another one
    dcp.load(into, storage_reader=PoolReader(pool))
    assert same(into, mixed(3))


def test_a_lazily_conjugated_tensor_comes_back_as_its_values(pool):
    value = torch.complex(torch.ones(3), torch.arange(3.0)).conj()
    assert value.is_conj()
    saved({"w": value, "negative": value.imag}, pool)
    found = loads_everything(PoolReader(pool))
    assert same(found, {"w": value.resolve_conj(), "negative": value.resolve_conj().imag.contiguous()})


def test_a_state_that_is_not_flattened_comes_back_too(pool):
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"w": torch.arange(4.0), "nested": {"x": 1}}, storage_writer=PoolWriter(pool), planner=planner)
    found = {"w": torch.zeros(4), "nested": None}
    dcp.load(found, storage_reader=PoolReader(pool), planner=DefaultLoadPlanner(False, False))
    assert same(found, {"w": torch.arange(4.0), "nested": {"x": 1}})


def test_objects_with_a_state_dict_are_saved_and_loaded(pool):
    model, optimizer = net(), None
    optimizer = adam(model)
    train(model, optimizer, 2)
    other = net(seed=5)
    optimizer_of_other = adam(other)
    train(other, optimizer_of_other, 1)
    saved({"model": model, "optimizer": optimizer}, pool)
    dcp.load({"model": other, "optimizer": optimizer_of_other}, storage_reader=PoolReader(pool))
    assert same(everything(other, optimizer_of_other), everything(model, optimizer))


# -- bytes -------------------------------------------------------------------------------------------------------------

UNPICKLED: list[str] = []


def unpickled(name: str) -> str:
    UNPICKLED.append(name)
    return name


class Trap:
    """Says when it is unpickled."""

    def __reduce__(self) -> Any:
        return unpickled, ("trap",)


def test_objects_are_never_unpickled_by_lightck(pool, tmp_path: Path):
    UNPICKLED.clear()
    saved({"trap": Trap(), "w": torch.ones(2)}, pool)
    saved({"trap": Trap(), "w": torch.ones(2)}, pool)
    lightck.recover(pool)
    for command in (["inspect", pool], ["verify", pool], ["export", pool, tmp_path / "out.safetensors"]):
        assert call(*command).exit_code == 0
    reader = PoolReader(pool)
    reader.read_metadata()
    assert UNPICKLED == []
    dcp.load(found := {"trap": None, "w": torch.zeros(2)}, storage_reader=reader)
    assert UNPICKLED == ["trap"]  # by torch
    assert found["trap"] == "trap"


def test_bytes_come_back_as_the_same_bytes(pool):
    planner = BytesPlanner()
    dcp.save(mixed(2), storage_writer=PoolWriter(pool), planner=planner)
    assert len(planner.given) > 3
    checkpoint = lightck.recover(pool)
    assert {key: checkpoint.tensor(f"bytes/{key}").numpy().tobytes() for key in planner.given} == planner.given


def test_bytes_of_any_length_come_back(pool):
    for length in (0, 1, 70_000, 5, 3_000_000, 3_000_001, 0):
        data = random.Random(length).randbytes(length)
        saved({"blob": data, "w": torch.ones(3)}, pool)
        assert loads_everything(PoolReader(pool))["blob"] == data


# -- again and again ---------------------------------------------------------------------------------------------------


def test_each_save_becomes_the_newest_and_the_one_before_stays(pool):
    for number in range(1, 6):
        saved(mixed(number), pool)
        assert same(loads_everything(PoolReader(pool)), mixed(number))
    assert same(loads_everything(PoolReader(pool, step=4)), mixed(4))
    assert lightck.recover(pool).step == 5


def test_a_smaller_step_than_that_in_the_pool_is_named(pool, caplog):
    for step in (30, 31):
        dcp.save(mixed(), storage_writer=PoolWriter(pool, step=step))
    assert "whose newest checkpoint" not in caplog.text
    dcp.save(mixed(), storage_writer=PoolWriter(pool, step=1))
    assert f"step 1 is saved into {str(pool)!r}, whose newest checkpoint has step 31" in caplog.text
    assert lightck.recover(pool).step == 1


def test_one_writer_saves_again_and_again_and_follows_its_step(pool):
    writer = PoolWriter(pool, step=100)
    for step in (100, 250, 40):  # also back: the last save is the newest
        writer.step = step
        dcp.save(mixed(step), storage_writer=writer)
        with PoolReader(pool) as reader:
            assert same(loads_everything(reader), mixed(step))
            assert reader.step == step
    writer.step = None
    dcp.save(mixed(1), storage_writer=writer)
    assert lightck.recover(pool).step == 41
    dcp.save(mixed(2), storage_writer=writer, checkpoint_id=pool.with_name("other.pool"))
    assert lightck.recover(pool.with_name("other.pool")).step == 1


def test_other_keys_shapes_and_dtypes_are_saved_into_the_same_pool(pool):
    first = {"a": torch.ones(4), "b": torch.arange(9.0), "c": {"d": 1}}
    states = [
        first,
        {**first, "more": torch.full((5,), 2.0)},  # finds room in the pool
        {"a": torch.ones(2, 2, dtype=torch.float64), "b": 3},  # fewer, another dtype, no tensor any more
        {"a": torch.randn(1500, 1000), "b": torch.zeros(1)},  # finds none: the pool moves to a new file
        {"a": torch.randn(3), "b": torch.zeros(0)},
        first,
    ]
    for state in states:
        saved(state, pool)
        assert same(loads_everything(PoolReader(pool)), state)
    assert os.listdir(pool.parent) == sorted(["run.pool", "run.pool.lock"])


def test_a_plan_that_torch_has_cached_is_written(pool):
    for number in range(3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = "test"
        dcp.save({"w": torch.full((4,), float(number))}, storage_writer=PoolWriter(pool), planner=planner)
        assert same(loads_everything(PoolReader(pool))["w"], torch.full((4,), float(number)))
    assert lightck.recover(pool).step == 3


def test_async_save_saves_what_was_there_when_it_was_called(pool):
    weights, writer = torch.zeros(1000), PoolWriter(pool)
    for number in range(4):
        weights.fill_(number)
        future = dcp.async_save({"w": weights, "number": number}, storage_writer=writer)
        weights.fill_(-1.0)
        future.result()
        assert same(loads_everything(PoolReader(pool)), {"w": torch.full((1000,), float(number)), "number": number})


# -- what else reads it ------------------------------------------------------------------------------------------------


def test_the_commands_and_recover_read_it(pool, tmp_path: Path):
    state = {"w": torch.arange(6.0).reshape(2, 3), "inner": {"b": torch.ones(2)}, "n": 3}
    saved(state, pool, step=7)
    checkpoint = lightck.recover(pool)
    assert checkpoint.step == 7
    assert same(dict(checkpoint.model), {"w": state["w"], "inner.b": state["inner"]["b"]})
    shown = call("inspect", pool).stdout
    assert "step 7" in shown
    assert "PoolWriter made this pool: load it with PoolReader" in shown
    assert "resumes" not in shown
    assert "random" not in shown
    assert call("verify", pool).exit_code == 0
    assert call("export", pool, tmp_path / "out.safetensors").exit_code == 0
    import safetensors.torch

    assert same(safetensors.torch.load_file(tmp_path / "out.safetensors"), dict(checkpoint.model))


def test_a_damaged_tensor_is_found_and_the_checkpoint_before_is_read(pool):
    for number in (1, 2):
        saved({"w": torch.full((4,), float(number))}, pool)
    damage(pool, "model/w", [2])
    assert call("verify", pool).exit_code != 0
    assert same(dict(lightck.recover(pool).model), {"w": torch.full((4,), 1.0)})


def test_attach_refuses_to_go_on_from_it(pool):
    model = net()
    saved({"model": model.state_dict()}, pool)
    with pytest.raises(CheckpointExistsError):
        lightck.attach(model, pool, optimizer=adam(model))
    with pytest.raises(DriftError):
        lightck.attach(model, pool, optimizer=adam(model), resume=True)
    assert same(dict(lightck.recover(pool).model), {f"model.{name}": t for name, t in model.state_dict().items()})


def test_an_object_of_a_training_may_have_the_name_that_a_save_uses(pool):
    model, _ = pool_with(pool, state={"dcp": nn.Linear(1, 1)})
    found = {"model": net(seed=7).state_dict()}
    dcp.load(found, storage_reader=PoolReader(pool))
    assert same(dict(found["model"]), dict(model.state_dict()))


@pytest.mark.long
def test_async_save_in_a_process_of_its_own(folder):
    """torch sends the writer to that process, which it starts anew; so this is a program of its own."""
    program = folder / "program.py"
    program.write_text(
        """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from lightck.integrations.dcp import PoolWriter

if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29713", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    writer = PoolWriter("run.pool")
    for number in range(3):
        state = {"w": torch.full((100,), float(number)), "n": number}
        dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    dist.destroy_process_group()
"""
    )
    done = subprocess.run([sys.executable, program], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = loads_everything(PoolReader(folder / "run.pool"))
    assert same(found, {"w": torch.full((100,), 2.0), "n": 2})
    assert lightck.recover(folder / "run.pool").step == 3


# -- errors ------------------------------------------------------------------------------------------------------------


def test_what_is_not_in_the_pool_is_named(pool):
    saved({"w": torch.ones(2), "n": 1}, pool)
    with fails(RuntimeError, "missing"):
        dcp.load({"missing": torch.ones(2)}, storage_reader=PoolReader(pool))
    with fails(ValueError, "Size mismatch"):
        dcp.load({"w": torch.ones(3)}, storage_reader=PoolReader(pool))
    partly = {"w": torch.zeros(2), "missing": torch.full((2,), 5.0)}
    dcp.load(partly, storage_reader=PoolReader(pool), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same(partly, {"w": torch.ones(2), "missing": torch.full((2,), 5.0)})
    alone = {"n": 0}
    dcp.load(alone, storage_reader=PoolReader(pool))
    assert alone == {"n": 1}


def test_the_pool_of_a_training_is_not_overwritten_unasked(pool):
    model, _ = pool_with(pool)
    with fails(CheckpointExistsError, "overwrite=True"):
        saved({"w": torch.ones(2)}, pool)
    assert same(dict(lightck.recover(pool).model), dict(model.state_dict()))
    writer = PoolWriter(pool, overwrite=True)
    for number in (1, 2):
        dcp.save({"w": torch.full((2,), float(number))}, storage_writer=writer)
    assert same(dict(lightck.recover(pool, step=1).model), {"w": torch.ones(2)})  # it is discarded only once
    assert lightck.recover(pool).step == 2


def test_a_file_that_is_no_pool_is_never_overwritten(tmp_path: Path):
    (tmp_path / "notes").write_text("mine")
    for overwrite in (False, True):
        with fails(NotAPoolError, "not a lightck pool"):
            dcp.save({"w": torch.ones(2)}, storage_writer=PoolWriter(tmp_path / "notes", overwrite=overwrite))
    assert (tmp_path / "notes").read_text() == "mine"
    with fails(PoolNotFoundError, "folder"):
        dcp.save({"w": torch.ones(2)}, storage_writer=PoolWriter(tmp_path / "missing" / "run.pool"))


def test_a_damaged_pool_is_an_error_and_can_be_discarded(pool):
    saved({"w": torch.ones(2)}, pool)
    os.truncate(pool, pool.stat().st_size - 4096)
    with fails(PoolTruncatedError, "truncated"):
        saved({"w": torch.zeros(2)}, pool)
    with fails(AssertionError, "truncated"):  # torch's, with the message of lightck
        loads_everything(PoolReader(pool))
    saved({"w": torch.zeros(2)}, pool, overwrite=True)
    assert same(loads_everything(PoolReader(pool)), {"w": torch.zeros(2)})


def test_a_damaged_checkpoint_that_cannot_move_to_a_new_file_is_an_error_with_a_cure_that_works(pool):
    saved({"w": torch.ones(4)}, pool)
    damage(pool, "model/w")
    before, larger = pool.read_bytes(), {"w": torch.ones(4), "more": torch.randn(1500, 1000)}
    with fails(CorruptPoolError, "Nothing was changed. Save to another path, or pass overwrite=True"):
        saved(larger, pool)
    assert pool.read_bytes() == before
    saved(larger, pool, overwrite=True)
    assert same(loads_everything(PoolReader(pool)), larger)


def test_a_second_writer_is_refused_while_the_first_one_writes(pool):
    saved({"w": torch.ones(2)}, pool)
    lock = PoolLock(str(pool))
    try:
        for text in ("A pool has one writer", "async_save: for its future"):
            with fails(PoolLockedError, text):
                saved({"w": torch.zeros(2)}, pool)
    finally:
        lock.release()
    in_child(lambda: saved({"w": torch.full((2,), 3.0)}, pool))  # one after the other
    saved({"w": torch.full((2,), 4.0)}, pool)
    assert same(dict(lightck.recover(pool).model), {"w": torch.full((2,), 4.0)})
    assert same(dict(lightck.recover(pool, step=2).model), {"w": torch.full((2,), 3.0)})


def test_a_save_into_which_another_one_comes_is_refused(pool):
    """Between what this save has found and its write, another process saves: neither save is lost."""
    saved({"w": torch.ones(2)}, pool)

    class Slow(DefaultSavePlanner):
        def finish_plan(self, plan: Any) -> Any:
            in_child(lambda: saved({"w": torch.full((2,), 2.0)}, pool))
            return super().finish_plan(plan)

    with fails(PoolLockedError, "since this save began"):
        dcp.save({"w": torch.full((2,), 3.0)}, storage_writer=PoolWriter(pool), planner=Slow())
    assert same(dict(lightck.recover(pool).model), {"w": torch.full((2,), 2.0)})


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }.items(),
)
def test_a_tensor_that_no_pool_can_hold_is_named_and_the_checkpoint_before_stays(pool, name, value):
    saved({"w": torch.ones(2)}, pool)
    with fails(StateValueError, name):
        saved({"w": torch.zeros(2), name: value}, pool)
    assert same(loads_everything(PoolReader(pool)), {"w": torch.ones(2)})
    saved({"w": torch.zeros(2)}, pool)
    assert same(loads_everything(PoolReader(pool)), {"w": torch.zeros(2)})


@pytest.mark.parametrize("key", ["k" * 5000, "a\0b"])
def test_a_key_that_no_pool_can_hold_is_named_in_a_new_pool_too(pool, key):
    with fails(StateValueError, "Use shorter keys without NUL"):
        saved({"good": torch.ones(2), key: torch.ones(2)}, pool)
    assert not pool.exists()


def test_a_planner_that_fails_in_the_middle_leaves_the_checkpoint_before(pool):
    saved({"a": torch.ones(2), "b": torch.ones(2)}, pool)

    class Failing(DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            if item.index.fqn == "b":
                raise OSError("no luck")
            return super().resolve_data(item)

    class Lying(DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            return super().resolve_data(item).double()

    for planner, kind, text in ((Failing(), OSError, "no luck"), (Lying(), StateValueError, "torch.float64")):
        with fails(kind, text):
            dcp.save({"a": torch.zeros(2), "b": torch.zeros(2)}, storage_writer=PoolWriter(pool), planner=planner)
        assert same(loads_everything(PoolReader(pool)), {"a": torch.ones(2), "b": torch.ones(2)})
    saved({"a": torch.zeros(2), "b": torch.zeros(2)}, pool)
    assert lightck.recover(pool).step == 2


def test_a_full_medium_is_an_error_and_the_checkpoint_before_stays():
    def work(folder: Path) -> Any:
        saved({"w": torch.ones(100)}, folder / "run.pool")
        with fails(NoSpaceError, "run.pool"):
            saved({"w": torch.ones(3_000_000)}, folder / "run.pool")
        assert sorted(os.listdir(folder)) == ["run.pool", "run.pool.lock"]
        saved({"w": torch.zeros(100)}, folder / "run.pool")
        return lightck.recover(folder / "run.pool").step, loads_everything(PoolReader(folder / "run.pool", step=1))

    step, first = on_small_tmpfs(16 << 20, work)
    assert step == 2
    assert same(first, {"w": torch.ones(100)})


@pytest.mark.parametrize(
    ("step", "kind"), [("1", TypeError), (True, TypeError), (-1, ValueError), (1 << 70, ValueError)]
)
def test_a_step_that_is_none_is_refused(pool, step, kind):
    with fails(kind, "step="):
        dcp.save({"w": torch.ones(2)}, storage_writer=PoolWriter(pool, step=step))
    assert not pool.exists()
    with pytest.raises(TypeError, match="overwrite"):
        PoolWriter(pool, overwrite="no")


def test_whether_a_path_can_be_written(pool, tmp_path: Path):
    assert PoolWriter.validate_checkpoint_id(pool)
    saved({"w": torch.ones(2)}, pool)
    assert PoolWriter.validate_checkpoint_id(pool)
    assert not PoolWriter.validate_checkpoint_id(pool.with_name("missing") / "run.pool")
    (tmp_path / "file").write_bytes(b"no pool")
    assert not PoolWriter.validate_checkpoint_id(tmp_path / "file")
    pool_with(pool.with_name("training.pool"))
    assert not PoolWriter.validate_checkpoint_id(pool.with_name("training.pool"))


def test_a_writer_can_be_sent_to_another_process(pool):
    import pickle

    writer = pickle.loads(pickle.dumps(PoolWriter(pool, step=3)))
    dcp.save({"m": nn.Linear(2, 2).state_dict()}, storage_writer=writer)
    writer = pickle.loads(pickle.dumps(writer))
    dcp.save({"m": nn.Linear(2, 2).state_dict()}, storage_writer=writer)
    assert lightck.recover(pool).step == 3
