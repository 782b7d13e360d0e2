"""A pool, or a directory of pools, behind torch's ``StorageReader``: any placement loads it, with equal bits."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranked import run_ranks, values
from ranks.test_recover import train as train_ranks
from ranks.test_recover import whole
from ranks.trainings import TOPOLOGIES, build
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from toys import adam, damage, everything, net, pool_with, same, train

import lightck
from lightck.errors import RankError
from lightck.integrations.dcp import PoolReader

pytestmark = pytest.mark.frameworks


def load(
    reader: PoolReader, model: Any, optimizer: Any, *, flatten: bool = False, keys: Any = None, planner: Any = None
) -> int:
    """Load as torch's tutorial does. Returns the step."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model_key, optimizer_key = keys or ("model", "optimizer")
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    value = {model_key: model_state, optimizer_key: optimizer_state, "step": 0}
    dcp.load(value, storage_reader=reader, planner=planner)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=value[model_key],
        optim_state_dict=value[optimizer_key],
        options=options,
    )
    return value["step"]


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("make", [adam, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
def test_a_single_process_loads_a_pool_and_goes_on_with_the_same_bits(make, flatten, pool):
    model = net()
    optimizer = make(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 3)
    other = net(seed=9)
    optimizer_of_other = make(other)
    with PoolReader(pool, flatten_optimizer_state_dict=flatten) as reader:
        assert load(reader, other, optimizer_of_other, flatten=flatten) == 3
        assert reader.step == 3
    assert same(everything(other, optimizer_of_other), everything(model, optimizer))
    train(model, optimizer, 2, start=3)
    train(other, optimizer_of_other, 2, start=3)
    assert same(other.state_dict(), model.state_dict())


def two(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(model[0].parameters(), lr=0.5, momentum=0.9),
        torch.optim.Adam(model[2].parameters(), lr=0.5),
    ]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda model: [torch.optim.Adam(model.parameters(), lr=0.5)],
        lambda model: [torch.optim.SGD(model.parameters(), lr=0.5)],
        lambda model: [torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))],
        two,
    ],
    ids=["Adam", "SGD without state", "lr as a tensor", "two optimizers"],
)
def test_a_learning_rate_that_the_training_has_changed_is_loaded(make, partial, pool):
    model = net()
    optimizers = make(model)
    with lightck.attach(model, pool, optimizer=optimizers):
        for number, optimizer in enumerate(optimizers):
            lr = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = (lr * 0 if isinstance(lr, torch.Tensor) else 0) + 0.125 / (1 + number)
        for _ in range(2):
            model(torch.ones(3, 4)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    other = net(seed=9)
    optimizers_of_other = make(other)
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    load(PoolReader(pool), other, optimizers_of_other, planner=planner)
    assert [float(one.param_groups[0]["lr"]) for one in optimizers_of_other] == [0.125, 0.0625][: len(optimizers)]
    assert same(everything(other, *optimizers_of_other), everything(model, *optimizers))


class WithExtraState(torch.nn.Linear):
    """A layer whose ``get_extra_state`` returns what the test has put into ``extra``."""

    def __init__(self, extra: Any) -> None:
        super().__init__(4, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


LARGE = torch.arange(300_000.0)
"""A tensor that the pool holds by itself, and not among the small values."""
EXTRA_STATES: dict[str, tuple[Any, Any]] = {
    "a number": (3, 0),
    "a tensor": (torch.tensor([3]), torch.tensor([0])),
    "a large tensor": (LARGE, torch.zeros(300_000)),
    "a dict": ({"count": 3, "seen": {"mean": torch.ones(2)}}, {"count": 0, "seen": {"mean": torch.zeros(2)}}),
    "lists": (
        {"plain": [1, 2], "tensors": [torch.ones(2), 5], "nested": [[LARGE]]},
        {"plain": [0, 0], "tensors": [torch.zeros(2), 0], "nested": [[LARGE * 0]]},
    ),
    "a tuple with tensors": ((1, LARGE, {"mean": torch.ones(2)}), None),
}


@pytest.mark.parametrize("kind", EXTRA_STATES)
def test_extra_state_of_modules_is_loaded_as_from_an_export(kind, pool, tmp_path):
    saved, fresh = EXTRA_STATES[kind]
    model = torch.nn.Sequential(WithExtraState(saved))
    with lightck.attach(model, pool, optimizer=(optimizer := adam(model))):
        train(model, optimizer, 2)
    lightck.export_checkpoint(lightck.recover(pool), tmp_path / "out", format="dcp", what="all")
    with PoolReader(pool) as reader:
        of_reader = reader.read_metadata().state_dict_metadata
        of_export = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
        assert {key: type(one) for key, one in of_reader.items()} == {key: type(one) for key, one in of_export.items()}
        other = torch.nn.Sequential(WithExtraState(copy.deepcopy(fresh)))
        assert load(reader, other, adam(other)) == 2
    assert same(other[0].extra, saved)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize(("saved", "loads"), [("fsdp 3", "fsdp"), ("ddp", "tp"), ("tp", "fsdp 3"), ("fsdp", "ddp")])
def test_any_number_of_ranks_loads_the_pools_of_any_other(folder, saved, loads):
    pools = folder / "pools"
    model, optimizer = train_ranks(saved, pools, 2)

    def body(rank: int) -> Any:
        live, live_optimizer = build(TOPOLOGIES[loads])
        with PoolReader(pools) as reader:
            step = load(reader, live, live_optimizer)
        names = {p: name for name, p in live.named_parameters()}
        states = {f"{names[p]}/{k}": whole(v) for p, held in live_optimizer.state.items() for k, v in held.items()}
        return step, {name: whole(v) for name, v in live.state_dict().items()}, states

    for step, tensors, states in values(run_ranks(TOPOLOGIES[loads].n_ranks, body)):
        assert step == 2
        assert same(tensors, model)
        assert same(states, optimizer)


def test_other_keys_and_no_key_at_all(pool):
    model, _ = pool_with(pool)
    other = net(seed=9)
    assert (
        load(PoolReader(pool, model_key="app", optimizer_key="optim"), other, adam(other), keys=("app", "optim")) == 3
    )
    assert same(other.state_dict(), model.state_dict())
    bare = net(seed=8).state_dict()
    dcp.load(bare, storage_reader=PoolReader(pool, model_key=""))
    assert same(bare, model.state_dict())


def test_everything_is_loaded_without_a_state_dict(pool):
    """As ``torch.distributed.checkpoint.format_utils`` does."""
    model, optimizer = pool_with(pool)
    found: dict[str, Any] = {}
    _load_state_dict(found, storage_reader=PoolReader(pool), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert same(found["model"], dict(model.state_dict()))
    assert same(found["optimizer"]["state"]["0.weight"], optimizer.state[model[0].weight])
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.05


def test_another_dtype_is_converted(pool):
    model, _ = pool_with(pool)
    found = {"model": {name: torch.zeros_like(t, dtype=torch.float64) for name, t in model.state_dict().items()}}
    dcp.load(found, storage_reader=PoolReader(pool))
    assert same(found["model"], {name: t.double() for name, t in model.state_dict().items()})


def test_an_older_step_and_another_pool(pool, folder):
    pool_with(pool, steps=4)
    found = {"step": 0}
    dcp.load(found, storage_reader=PoolReader(pool, step=3))
    assert found["step"] == 3
    pool_with(folder / "other.pool", steps=2)
    dcp.load(found, checkpoint_id=str(folder / "other.pool"), storage_reader=PoolReader(pool))
    assert found["step"] == 2


def test_a_pool_with_gradient_records(pool):
    model, optimizer = pool_with(pool, steps=9, strategy=lightck.Gradients(base_every=3))
    other = net(seed=9)
    optimizer_of_other = adam(other)
    assert load(PoolReader(pool), other, optimizer_of_other) == 9
    assert same(everything(other, optimizer_of_other), everything(model, optimizer))


# -- errors ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fails(kind: type[BaseException], text: str) -> Any:
    """torch puts the error of a rank into a ``CheckpointException``."""
    with pytest.raises((kind, CheckpointException)) as raised:
        yield
    error = raised.value
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    assert isinstance(error, kind)
    assert text in str(error)


def test_what_is_not_in_the_pool_is_named(pool):
    pool_with(pool)
    with fails(RuntimeError, "Missing key"):
        dcp.load({"model": {"2.more": torch.ones(2)}}, storage_reader=PoolReader(pool))
    with fails(ValueError, "Size mismatch"):
        dcp.load({"model": {"2.bias": torch.ones(3)}}, storage_reader=PoolReader(pool))
    with fails(AssertionError, "There is no pool at"):  # torch's, with the message of lightck
        dcp.load({"step": 0}, storage_reader=PoolReader(pool.with_name("missing.pool")))
    with fails(AssertionError, "step 7"):
        dcp.load({"step": 0}, storage_reader=PoolReader(pool, step=7))


def test_a_damaged_tensor_is_an_error_and_the_others_can_be_loaded(pool):
    model, _ = pool_with(pool)
    damage(pool, "model/0.weight")
    with fails(lightck.errors.CorruptPoolError, "model/0.weight"):
        dcp.load({"model": dict(net().state_dict())}, storage_reader=PoolReader(pool))
    found = {"model": {"2.weight": torch.zeros(2, 8)}}
    dcp.load(found, storage_reader=PoolReader(pool))
    assert same(found["model"]["2.weight"], model[2].weight.detach())


def test_ranks_that_open_different_steps_are_an_error(folder):
    for rank, steps in enumerate((3, 4)):
        pool_with(folder / f"{rank}.pool", steps=steps)

    def body(rank: int) -> str:
        with fails(RankError, "steps 3, 4"):
            dcp.load({"step": 0}, storage_reader=PoolReader(folder / f"{rank}.pool"))
        return "failed"

    assert set(values(run_ranks(2, body))) == {"failed"}


def test_whether_a_path_can_be_read(pool, tmp_path: Path):
    assert not PoolReader.validate_checkpoint_id(pool)
    pool_with(pool)
    assert PoolReader.validate_checkpoint_id(pool)
    (tmp_path / "file").write_bytes(b"no pool")
    assert not PoolReader.validate_checkpoint_id(tmp_path / "file")
