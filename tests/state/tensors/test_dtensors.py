"""DTensors on a mesh of one rank (FSDP2, tensor parallel): saved, watched and restored as plain tensors are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightck
from lightck.errors import DriftError, StateValueError, UnsupportedError
from lightck.state.blocks import FULLY_COMPARED_FIRST
from lightck.state.local_tensors import local_of

UPDATES, KILLS = 7, (2, 5)
WIDTH = 600
"""Makes tensors that are copied in the background."""


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Has a parameter and a buffer at the root, so that FSDP's root group is not empty."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.first = nn.Linear(4, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.drop(torch.tanh(self.first(x * self.scale))))


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def sharded(seed: int) -> nn.Module:
    model = plain(seed)
    fully_shard(model.first)
    return fully_shard(model)


def parallel(seed: int) -> nn.Module:
    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    return parallelize_module(plain(seed), init_device_mesh("cpu", (1,)), plan)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "plain loop": lambda p: torch.optim.Adamax(p, lr=1e-2, foreach=False),
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["plain loop"](model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, after: Callable[[], object] = int) -> None:
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def saved_by(build: Callable[[int], nn.Module], pool: Path, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train a model for some steps, each of them saved, and return it with its optimizer."""
    model = build(0)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, range(steps))
    return model, optimizer


def local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    states = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return list(map(local, (*model.parameters(), *model.buffers(), *states)))


def is_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("ends_step", [False, True], ids=["", "end_step"])
@pytest.mark.parametrize("evaluates", [False, True], ids=["", "evaluates"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fsdp2_goes_on_bit_identically(pool, kind, evaluates, ends_step):
    def evaluate(model: nn.Module) -> None:
        if evaluates:  # a forward without a backward leaves the root's parameters unsharded
            with torch.no_grad():
                model.eval()(torch.ones(2, 4))
            model.train()

    model = sharded(0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, range(UPDATES), lambda: evaluate(model))
    expected = everything(model, optimizer)

    start = 0
    for seed, end in enumerate((*KILLS, UPDATES)):
        model = sharded(seed)
        optimizer = OPTIMIZERS[kind](model.parameters())
        session = lightck.attach(model, pool, optimizer=optimizer, resume=True)
        assert session.step == start
        train(
            model,
            optimizer,
            range(start, end),
            lambda: (evaluate(model), session.end_step() if ends_step else None),  # noqa: B023 - called in this turn
        )
        session.flush()
        assert (session.stats().skipped, session.stats().recopied) == (0, 0)
        start = session.committed
        session.abandon() if end < UPDATES else session.close()
    assert is_equal(everything(model, optimizer), expected)


def test_tensor_parallel_goes_on_bit_identically(pool):
    model = parallel(0)
    optimizer = adam(model)
    train(model, optimizer, range(UPDATES))
    expected = everything(model, optimizer)
    start = 0
    for seed, end in enumerate((*KILLS, UPDATES)):
        model = parallel(seed)
        optimizer = adam(model)
        with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
            assert session.step == start
            train(model, optimizer, range(start, end))
        start = end
    assert is_equal(everything(model, optimizer), expected)


@pytest.mark.parametrize("build", [sharded, parallel])
def test_nothing_writes_before_the_gate(pool, monkeypatch, build):
    monkeypatch.setenv("LIGHTCK_CHECK", "1")
    model = build(0)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, range(UPDATES))
        session.flush()
        assert session.stats().checkpoints >= UPDATES
        assert session.stats().skipped == 0


@pytest.mark.parametrize("build", [sharded, parallel])
def test_state_is_born_a_dtensor_of_its_parameter(pool, build):
    model, optimizer = saved_by(build, pool, 2)
    again = build(1)
    restored = adam(again)
    lightck.recover(pool, again, restored)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert optimizer.state[p].keys() == restored.state[q].keys()
        for key, value in optimizer.state[p].items():
            other = restored.state[q][key]
            assert type(other) is type(value)
            if isinstance(value, DTensor):
                assert (other.placements, other.shape, other.stride()) == (
                    value.placements,
                    value.shape,
                    value.stride(),
                )
                assert other.device_mesh == q.device_mesh


def test_a_step_count_of_a_parameter_without_dimensions_stays_a_plain_tensor(pool):
    def made(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        mesh = init_device_mesh("cpu", (1,))
        model.gain = nn.Parameter(distribute_tensor(torch.tensor(value), mesh, [Replicate()]))
        return model, torch.optim.NAdam(model.parameters())

    model, optimizer = made(1.0)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        model.gain.square().backward()
        optimizer.step()
        session.end_step()
    again, restored = made(2.0)
    lightck.recover(pool, again, restored)
    before, after = optimizer.state[model.gain], restored.state[again.gain]
    assert {key: type(value) for key, value in after.items()} == {key: type(value) for key, value in before.items()}
    assert is_equal(everything(again, restored), everything(model, optimizer))


@pytest.mark.parametrize(("saved", "live"), [(sharded, plain), (plain, sharded), (parallel, sharded)])
def test_a_pool_does_not_know_how_its_tensors_were_held(pool, saved, live):
    model, optimizer = saved_by(saved, pool, 3)
    other = live(1)
    restored = adam(other)
    assert lightck.recover(pool, other, restored).step == 3
    assert is_equal(everything(other, restored), everything(model, optimizer))


def test_frozen_parameters_are_left_out_until_an_update_changes_them(pool):
    model = sharded(0)
    model.first.weight.requires_grad_(False)
    optimizer = OPTIMIZERS["fused"](model.parameters())
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, range(6))
        session.flush()
        assert session.stats().left_out
        model.first.weight.requires_grad_(True)
        train(model, optimizer, range(6, 9))
    assert torch.equal(lightck.recover(pool).model["first.weight"], everything(model, optimizer)[1])


def scale(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


@pytest.mark.parametrize("build", [sharded, parallel])
@pytest.mark.parametrize("writes_local", [False, True], ids=["DTensor", "local tensor"])
def test_a_write_between_the_boundary_and_the_gate_is_found(pool, build, writes_local):
    """A write to a DTensor moves its version counter, and not that of its local tensor."""
    model = build(0)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, range(FULLY_COMPARED_FIRST + 1), session.end_step)
        weight = model.first.weight
        assert isinstance(weight, DTensor)
        scale(weight.to_local() if writes_local else weight)
        train(model, optimizer, range(UPDATES, UPDATES + 1), session.end_step)
        session.flush()
        assert session.stats().skipped == 1
        expected = everything(model, optimizer)[1]
    assert torch.equal(lightck.recover(pool).model["first.weight"], expected)


@pytest.mark.parametrize("writes_local", [False, True], ids=["DTensor", "local tensor"])
def test_a_frozen_parameter_that_is_written_is_in_the_next_checkpoint(pool, writes_local):
    model = sharded(0)
    model.first.weight.requires_grad_(False)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, range(6), session.end_step)
        assert session.stats().left_out
        model.reshard()
        model.first.reshard()
        scale(local_of(model.first.weight) if writes_local else model.first.weight)
        train(model, optimizer, range(6, 7), session.end_step)
        session.flush()
        assert not session.stats().left_out
    assert torch.equal(lightck.recover(pool).model["first.weight"], local(model.first.weight))


def test_a_parameter_that_is_replaced_is_saved(pool):
    model = parallel(0)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, range(2))
        session.flush()
        mesh = model.first.weight.device_mesh
        model.first.weight = nn.Parameter(distribute_tensor(torch.full((WIDTH, 4), 0.5), mesh, [Shard(0)]))
        train(model, optimizer, range(2, 3))
        session.flush()
        assert torch.equal(lightck.recover(pool).model["first.weight"], torch.full((WIDTH, 4), 0.5))
        with torch.no_grad():
            model.first.weight.fill_(0.25)
        train(model, optimizer, range(3, 4))
    assert torch.equal(lightck.recover(pool).model["first.weight"], torch.full((WIDTH, 4), 0.25))


# -- refused by name ---------------------------------------------------------------------------------------------------


def test_an_optimizer_that_was_made_before_the_model_was_sharded_is_refused(pool):
    model = plain(0)
    optimizer = adam(model)
    fully_shard(model)
    with pytest.raises(UnsupportedError, match=r"made before the parameters of the model became DTensors.*after that"):
        lightck.attach(model, pool, optimizer=optimizer)
    assert not pool.exists()


def test_an_optimizer_of_another_model_beside_a_sharded_one_is_followed(pool):
    model, critic = sharded(0), nn.Linear(3, 1)
    optimizers = [adam(model), torch.optim.SGD(critic.parameters(), lr=0.1)]
    with lightck.attach(model, pool, optimizer=optimizers):
        for step in range(2):
            critic(torch.ones(2, 3)).sum().backward()
            optimizers[1].step()
            train(model, optimizers[0], range(step, step + 1))
    assert lightck.recover(pool).step == 2


def test_a_layer_wise_update_of_dtensors_without_fully_shard_is_refused():
    model = parallel(0)
    with pytest.raises(UnsupportedError, match=r"DTensors.*Leave out lightck\.layerwise"):
        lightck.layerwise(model, adam(model))


def test_a_pool_of_another_shape_is_drift(pool):
    saved_by(sharded, pool, 1)
    other = fully_shard(nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(DriftError):
        lightck.recover(pool, other, adam(other))


class Own(torch.optim.Optimizer):
    """An optimizer that keeps what ``kept`` makes of a parameter, and updates nothing."""

    def __init__(self, params, kept: Callable[[DTensor], torch.Tensor]) -> None:
        super().__init__(params, {})
        self._kept = kept

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["kept"] = self._kept(p)


@pytest.mark.parametrize(
    "kept",
    [
        lambda p: p.to_local().clone(),
        lambda p: distribute_tensor(torch.zeros(3), p.device_mesh, [Shard(0)]),
        lambda p: distribute_tensor(torch.zeros(p.shape), p.device_mesh, [Replicate()]),
    ],
    ids=["local", "other shape", "other placements"],
)
def test_state_that_a_restore_would_not_make_as_it_is_is_refused(pool, kept):
    model = sharded(0)
    optimizer = Own(model.parameters(), kept)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        with pytest.raises(UnsupportedError, match=r"The state 'optimizer/.*/kept' .*could not be restored as it is"):
            train(model, optimizer, range(2), session.end_step)
        session.abandon()


def test_a_model_that_is_unsharded_during_an_update_gets_a_warning(pool, caplog):
    model = sharded(0)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, range(2))
        assert not caplog.messages
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                model(torch.ones(2, 4))  # leaves the root unsharded, with the values from before the update
            before = model.scale.clone()
            optimizer.step()
            assert torch.equal(model.scale, before)
    assert sum("was unsharded while its optimizer updated it" in one for one in caplog.messages) == 1


@pytest.mark.parametrize("build", [sharded, parallel])
@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen later", "trained later"])
def test_requires_grad_is_restored(pool, build, is_trained):
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build(seed)
        model.first.requires_grad_(not is_trained)
        return model, adam(model)

    model, optimizer = made(0)
    train(model, optimizer, range(3))
    model.first.requires_grad_(is_trained)
    train(model, optimizer, range(3, UPDATES))
    expected = everything(model, optimizer)

    model, optimizer = made(0)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, range(3))
        model.first.requires_grad_(is_trained)
        train(model, optimizer, range(3, 5))
    model, optimizer = made(1)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True):
        assert [p.requires_grad for p in model.first.parameters()] == [is_trained] * 2
        train(model, optimizer, range(5, UPDATES))
    assert is_equal(everything(model, optimizer), expected)


@pytest.mark.parametrize(("saved", "live"), [(sharded, plain), (plain, sharded), (parallel, plain)])
def test_a_plain_model_goes_on_where_a_sharded_one_ended(pool, caplog, saved, live):
    model, optimizer = saved_by(saved, pool, 3)
    other = live(1)
    restored = adam(other)
    with lightck.attach(other, pool, optimizer=restored, resume=True) as session:
        assert all(p.requires_grad for p in other.parameters())
        train(other, restored, range(session.step, UPDATES))
    train(model, optimizer, range(3, UPDATES))
    assert "requires_grad" not in caplog.text


@pytest.mark.parametrize("restores", ["attach", "attach without optimizer", "recover"])
@pytest.mark.parametrize("kind", ["", "tied", "ignored"])
def test_a_model_that_is_unsharded_is_resharded_and_restored(pool, kind, restores):
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = plain(seed)
        if kind == "tied":
            model.other = nn.Linear(4, WIDTH)
            model.other.weight = model.first.weight
        fully_shard(model, ignored_params={model.scale} if kind == "ignored" else None)
        return model, adam(model)

    model, optimizer = made(0)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, range(3))
    expected = [local(p) for p in model.parameters()]
    model, optimizer = made(1)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert not isinstance(model.first.weight, DTensor), "it is unsharded"
    if restores == "recover":
        lightck.recover(pool, model, optimizer)
    else:
        given = {"optimizer": optimizer} if restores == "attach" else {}
        lightck.attach(model, pool, resume=True, **given).close()
    assert is_equal([local(p) for p in model.parameters()], expected)
    assert optimizer.state[model.last.weight]["step"] == 3


@pytest.mark.parametrize("is_unsharded", [False, True])
def test_a_model_that_is_sharded_after_attach_is_refused(pool, is_unsharded):
    model = plain(0)
    with lightck.attach(model, pool, optimizer=[]) as session:
        fully_shard(model)
        for _ in range(2):
            if is_unsharded:
                model.unshard()
            with pytest.raises(UnsupportedError, match=r"fully_shard was called on the model after lightck\.attach"):
                session.end_step()
        session.abandon()


def test_state_that_two_keys_share_is_shared_again(pool):
    model = parallel(0)
    optimizer = Own(model.parameters(), torch.zeros_like)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, range(1))
        for p in model.parameters():
            optimizer.state[p]["same"] = optimizer.state[p]["kept"]
        session.end_step()
    other = parallel(1)
    restored = Own(other.parameters(), torch.zeros_like)
    lightck.recover(pool, other, restored)
    for p in other.parameters():
        assert restored.state[p]["same"] is restored.state[p]["kept"]


def test_a_tensor_of_another_rank_is_refused(pool, tmp_path):
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = nn.Module()
    mesh = DeviceMesh("cpu", [2], _init_backend=False, _rank=0)
    model.weight = nn.Parameter(DTensor.from_local(torch.zeros(0), mesh, [Replicate()], shape=(4,), stride=(1,)))
    with pytest.raises(StateValueError, match="mesh of other ranks"):
        lightck.attach(model, pool, optimizer=[], group=False)


def test_a_buffer_that_was_added_later_is_refused(pool):
    model = parallel(0)
    model.register_buffer("table", None)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, range(2))
        model.table = distribute_tensor(torch.ones(3), model.first.weight.device_mesh, [Replicate()])
        with pytest.raises(UnsupportedError, match=r"The buffer 'model/table' is a DTensor that was added or resized"):
            train(model, optimizer, range(2, 4), session.end_step)
        session.abandon()


def test_a_dtensor_inside_state_is_refused(pool):
    class Box:
        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"average": distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)), [Replicate()])}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...

    model = parallel(0)
    optimizer = adam(model)
    with pytest.raises(StateValueError, match=r"state/box/average.*it is a DTensor, which is saved only as"):
        lightck.attach(model, pool, optimizer=optimizer, state={"box": Box()})
