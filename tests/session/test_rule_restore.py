"""Rule 9: a restore writes values in place with their own dtype, device and layout, after everything was checked."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from toys import adam, everything, forward, is_step, net, pool_with, same, train

import lightck
from lightck.errors import DriftError, PoolIOError
from lightck.pool.reader import PoolReader


class Master(torch.optim.Optimizer):
    """SGD with fp32 momentum and master weights for bf16 parameters."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["master"] = p.detach().float().clone()
                        state["momentum"] = torch.zeros_like(state["master"])
                    state["momentum"].mul_(0.9).add_(p.grad.float())
                    state["master"].sub_(state["momentum"], alpha=group["lr"])
                    p.copy_(state["master"])


def test_fp32_state_of_bf16_parameters_is_not_cast(pool):
    model = net().bfloat16()
    optimizer = Master(model.parameters())

    def learn(model: nn.Module, optimizer: Any, start: int, steps: int) -> None:
        for number in range(start, start + steps):
            optimizer.zero_grad()
            model(torch.full((2, 4), number + 0.1).bfloat16()).sum().backward()
            optimizer.step()

    with lightck.attach(model, pool, optimizer=optimizer):
        learn(model, optimizer, 0, 3)
    seen = everything(model, optimizer)
    assert seen["optimizers"][0]["state"][0]["master"].dtype == torch.float32

    for prepared in (False, True):  # without state of its own, and with some
        other = net(seed=5).bfloat16()
        other_optimizer = Master(other.parameters())
        if prepared:
            learn(other, other_optimizer, 7, 1)
        lightck.recover(pool, other, other_optimizer)
        assert same(everything(other, other_optimizer), seen)
        learn(other, other_optimizer, 3, 2)
    learn(model, optimizer, 3, 2)
    assert same(everything(other, other_optimizer), everything(model, optimizer))


def addresses(model: nn.Module, optimizer: Any) -> dict[Any, int]:
    found = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    for i, p in enumerate(model.parameters()):
        found |= {(i, key): value.data_ptr() for key, value in optimizer.state[p].items()}
    return found


def test_restore_is_in_place(pool):
    pool_with(pool)
    model = net(seed=1)
    optimizer = adam(model)
    train(model, optimizer, 1)
    parameters = list(model.parameters())
    before = addresses(model, optimizer)
    lightck.recover(pool, model, optimizer)
    assert addresses(model, optimizer) == before
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(p.requires_grad and p.is_leaf for p in parameters)


def convolution(layout: torch.memory_format, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 2)).to(memory_format=layout)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def learn_images(model: nn.Module, optimizer: Any, start: int, steps: int) -> None:
    for number in range(start, start + steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(number))).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("saved", [torch.channels_last, torch.contiguous_format], ids=["last", "plain"])
@pytest.mark.parametrize("live", [torch.channels_last, torch.contiguous_format], ids=["last", "plain"])
def test_restore_keeps_the_memory_format_of_the_live_tensor(pool, saved, live):
    model, optimizer = convolution(saved)
    with lightck.attach(model, pool, optimizer=optimizer):
        learn_images(model, optimizer, 0, 3)
    other, other_optimizer = convolution(live, seed=9)
    learn_images(other, other_optimizer, 0, 1)
    strides = other[0].weight.stride()
    lightck.recover(pool, other, other_optimizer)
    assert other[0].weight.stride() == strides
    assert other_optimizer.state[other[0].weight]["exp_avg"].stride() == strides
    assert same(everything(other, other_optimizer), everything(model, optimizer))


def test_new_state_and_loaded_tensors_have_the_saved_memory_format(pool):
    model, optimizer = convolution(torch.channels_last)
    with lightck.attach(model, pool, optimizer=optimizer):
        learn_images(model, optimizer, 0, 2)
    strides = model[0].weight.stride()
    other, other_optimizer = convolution(torch.channels_last, seed=9)
    lightck.recover(pool, other, other_optimizer)
    assert other_optimizer.state[other[0].weight]["exp_avg_sq"].stride() == strides
    checkpoint = lightck.recover(pool)
    assert checkpoint.model["0.weight"].stride() == strides
    assert checkpoint.optimizer["state"][0]["exp_avg"].stride() == strides


def test_every_kind_of_tensor_survives(pool):
    model = net()
    kinds = {
        "half": torch.rand(5).half(),
        "double": torch.rand(5).double(),
        "flags": torch.tensor([True, False]),
        "complex": torch.rand(3, dtype=torch.complex64),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "float8": torch.rand(6).to(torch.float8_e4m3fn),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "view": torch.arange(12.0).reshape(3, 4).T,
        "strided": torch.arange(12.0)[::2],
        "conj": torch.rand(3, dtype=torch.complex64).conj(),
        "big": torch.rand(3000, 3),
        "big view": torch.rand(3000, 3).T,
        "big strided": torch.rand(6000, 3)[::2],
    }
    for name, tensor in kinds.items():
        model.register_buffer(f"a_{name}".replace(" ", "_"), tensor)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
    seen = everything(model, optimizer)
    assert is_step(lightck.recover(pool), seen)
    other = net(seed=4)
    for name, tensor in kinds.items():
        other.register_buffer(f"a_{name}".replace(" ", "_"), torch.zeros_like(tensor).clone())
    other_optimizer = adam(other)
    lightck.recover(pool, other, other_optimizer)
    assert same(everything(other, other_optimizer), seen)


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wte = nn.Embedding(1200, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1200, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_tied_weights_are_saved_once_and_restored_tied(pool):
    model = Tied()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
    checkpoint = lightck.recover(pool)
    assert checkpoint.model["head.weight"] is checkpoint.model["wte.weight"]
    assert is_step(checkpoint, everything(model, optimizer))
    other = Tied(seed=3)
    other.load_state_dict(checkpoint.model)
    assert other.head.weight is other.wte.weight
    again = Tied(seed=4)
    with lightck.attach(again, pool, optimizer=adam(again), resume=True):
        assert same(dict(again.state_dict()), dict(model.state_dict()))


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.seen = {"tokens": 0, "table": torch.zeros(3000)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_extra_state_of_modules_is_saved(pool):
    model = Extra()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
        model.seen["tokens"] = 1 << 70
        model.seen["table"] += 1
    other = Extra()
    checkpoint = lightck.recover(pool, other)
    assert other.seen["tokens"] == 1 << 70
    assert same(other.seen["table"], torch.ones(3000))
    loaded = Extra()
    loaded.load_state_dict(lightck.recover(pool).model)
    assert loaded.seen["tokens"] == 1 << 70
    assert checkpoint.step == 2


def test_nothing_changes_where_the_check_fails(pool):
    pool_with(pool)
    model = net(seed=1)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 7.0}])
    train(model, optimizer, 1)
    before, rng = everything(model, optimizer), torch.get_rng_state()
    for call in (
        lambda: lightck.recover(pool, model, optimizer),
        lambda: lightck.attach(model, pool, optimizer=optimizer, resume=True),
        lambda: lightck.recover(pool).restore(model, optimizer),
    ):
        with pytest.raises(DriftError):
            call()
        assert same(everything(model, optimizer), before)
        assert same(torch.get_rng_state(), rng)


def test_optimizer_options_and_state_are_matched_by_name(pool):
    model = net()
    optimizer = torch.optim.AdamW(
        [{"params": list(model.parameters())[:2], "lr": 0.5}, {"params": list(model.parameters())[2:]}]
    )
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
        optimizer.param_groups[1]["weight_decay"] = 0.25
    other = net(seed=2)
    reordered = list(other.parameters())
    other_optimizer = torch.optim.AdamW([{"params": reordered[1::-1]}, {"params": reordered[:1:-1]}])
    lightck.recover(pool, other, other_optimizer)
    assert [g["lr"] for g in other_optimizer.param_groups] == [0.5, 0.001]
    assert other_optimizer.param_groups[1]["weight_decay"] == 0.25
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same(p, q)
        assert same(optimizer.state[p]["exp_avg"], other_optimizer.state[q]["exp_avg"])


def test_learning_rate_that_is_a_tensor_stays_the_same_tensor(pool):
    def build(seed: int) -> tuple[nn.Module, Any]:
        model = net(seed=seed)
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05), foreach=False, capturable=False)

    model, optimizer = build(0)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
        optimizer.param_groups[0]["lr"].fill_(0.25)
    other, other_optimizer = build(1)
    lr = other_optimizer.param_groups[0]["lr"]
    lightck.recover(pool, other, other_optimizer)
    assert other_optimizer.param_groups[0]["lr"] is lr
    assert lr == 0.25


def test_objects_in_state_are_restored_before_the_optimizer(pool):
    """A scheduler's load_state_dict may write to the groups; the optimizer's own options come last."""

    class Meddler:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            called.append(state)
            self.optimizer.param_groups[0]["lr"] = 99.0

    called = []
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, state={"meddler": Meddler(optimizer)}):
        train(model, optimizer, 1)
    lightck.recover(pool, model, optimizer, {"meddler": Meddler(optimizer)})
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert called == [{}]


def test_fresh_optimizer_loses_the_state_that_the_checkpoint_lacks(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        session.flush()  # checkpoint 0: no optimizer state yet
    train(model, optimizer, 2)
    lightck.recover(pool, model, optimizer)
    assert not optimizer.state
    assert forward(model).item() == forward(net()).item()


@pytest.mark.parametrize("backend", ["file", "pmdk"])
def test_a_resume_whose_nth_read_fails_closes_the_pool(backend, pool, monkeypatch, request):
    if backend == "pmdk":
        request.getfixturevalue("pmdk")
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, backend=backend):
        train(model, optimizer, 2)
    read, reads, fails_at = PoolReader.read, 0, 0

    def failing(self: PoolReader, offset: int, nbytes: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads == fails_at:
            raise PoolIOError("a read failed. It was asked to. Ask no more.")
        return read(self, offset, nbytes)

    monkeypatch.setattr(PoolReader, "read", failing)
    session = None
    while session is None:
        reads, fails_at = 0, fails_at + 1
        other = net(seed=5)
        try:
            session = lightck.attach(other, pool, optimizer=adam(other), resume=True, backend=backend)
        except PoolIOError:
            assert is_closed(pool), f"read number {fails_at} failed, and the pool is still open"
    assert session.step == 2
    session.close()
    assert fails_at > 5


def is_closed(pool: Any) -> bool:
    return not any(os.path.realpath(f"/proc/self/fd/{fd}") == str(pool) for fd in os.listdir("/proc/self/fd"))
