"""Tensors that are not simply arrays of bytes are refused at attach: by name, with the reason and the cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from table import PLACES, Holder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from toys import adam, forward, net, train

import lightck
from lightck.errors import StateValueError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*prototype", "ignore:.*quantize")


def freed() -> torch.Tensor:
    tensor = torch.zeros(4000)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut() -> torch.Tensor:
    tensor = torch.zeros(4000)
    tensor.untyped_storage().resize_(15_000)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(4000)


def distributed() -> torch.Tensor:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        return DTensor.from_local(torch.zeros(4000), init_device_mesh("cpu", (2,)), [Replicate()])
    finally:
        dist.destroy_process_group()


def sparse(layout: torch.layout) -> Callable[[], torch.Tensor]:
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return lambda: torch.eye(80).to_sparse(layout=layout, **blocks)


KINDS: dict[str, tuple[Callable[[], torch.Tensor], str, str]] = {
    "coo": (sparse(torch.sparse_coo), "sparse_coo", "Make it dense"),
    "csr": (sparse(torch.sparse_csr), "sparse_csr", "Make it dense"),
    "csc": (sparse(torch.sparse_csc), "sparse_csc", "Make it dense"),
    "bsr": (sparse(torch.sparse_bsr), "sparse_bsr", "Make it dense"),
    "bsc": (sparse(torch.sparse_bsc), "sparse_bsc", "Make it dense"),
    "mkldnn": (lambda: torch.rand(70, 70).to_mkldnn(), "_mkldnn", "Make it dense"),
    "meta": (lambda: torch.empty(5000, device="meta"), "no bytes", "to_empty"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested", "Keep its parts"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "NestedTensor",
        "plain tensors",
    ),
    "per tensor": (lambda: torch.quantize_per_tensor(torch.rand(5000), 0.1, 0, torch.qint8), "scale", "int_repr"),
    "freed": (freed, "freed", "has its memory"),
    "cut": (cut, "smaller than its shape", "has its memory"),
    "fake": (fake, "FakeTensor", "plain tensors"),
    "wrapper": (lambda: TwoTensor(torch.ones(3000), torch.ones(3000)), "TwoTensor", "plain tensors"),
    "dtensor": (distributed, "DTensor", "one rank"),
}


@pytest.mark.parametrize("role", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_kind_is_refused_by_name(pool, kind, role):
    make, reason, cure = KINDS[kind]
    if role == "optimizer" and cure == "Make it dense":
        cure = "sparse=False"
    live = Holder(lambda r: {"odd": make()} if r == role else {})
    with pytest.raises((StateValueError, UnsupportedError)) as caught:
        lightck.attach(live.model, pool, optimizer=live.optimizer, state={"box": live.box})
    message = str(caught.value)
    assert PLACES[role] in message
    if role == "optimizer" and kind == "dtensor":
        assert "state of a plain parameter has to be a plain tensor" in message
    elif role != "state" or kind not in ("jagged", "fake", "wrapper", "dtensor"):
        assert reason in message
        assert cure in message
    else:
        assert ("it is a DTensor" if kind == "dtensor" else "subclass") in message
        assert "leave out this value" in message
    assert not pool.exists(), "nothing was made"


@pytest.mark.parametrize("lazy", ["parameter", "buffer"])
def test_lazy_module_is_refused_until_it_was_called(pool, lazy):
    model = nn.Sequential(nn.LazyLinear(3) if lazy == "parameter" else nn.LazyBatchNorm1d(affine=False), nn.Tanh())
    model.append(nn.Linear(3 if lazy == "parameter" else 4, 2))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(StateValueError, match=r"model/0\..*lazy.*Call the model once"):
        lightck.attach(model, pool, optimizer=optimizer)
    forward(model)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
    assert torch.equal(lightck.recover(pool).model["2.weight"], model[2].weight)


def test_tensor_that_turns_unstorable_is_named_and_the_last_checkpoint_stays(pool):
    model = net()
    model.register_buffer("table", torch.rand(80, 80))
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        dense, model.table = model.table, model.table.to_sparse()
        with pytest.raises(StateValueError, match=r"model/table.*sparse_coo"):
            train(model, optimizer, 1, start=2)
        assert lightck.recover(pool).step == 2
        model.table = dense
        train(model, optimizer, 1, start=3)
        session.flush()
    assert torch.equal(lightck.recover(pool).model["table"], dense)


class Hiding(nn.Module):
    """Keeps a tensor that only its own ``_save_to_state_dict`` writes, as packed quantized modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.scale: Any = torch.rand(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale


def test_state_outside_of_parameters_and_buffers_is_refused_by_module_and_name(pool):
    model = nn.Sequential(nn.Linear(4, 4), Hiding())
    with pytest.raises(StateValueError, match=r"module 1 \(Hiding\).*1\.scale.*get_extra_state"):
        lightck.attach(model, pool, optimizer=adam(model))
    del model[1].scale
    model[1].register_buffer("scale", torch.rand(2))
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
    assert torch.equal(lightck.recover(pool).model["1.scale"], model[1].scale)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_packed_quantized_module_is_refused(pool):
    model = net()
    model.register_module("packed", torch.ao.nn.quantized.Linear(4, 4))
    with pytest.raises(StateValueError, match="packed"):
        lightck.attach(model, pool, optimizer=adam(model))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("where", ["model", "part"])
def test_torchscript_is_refused_by_module(pool, where):
    scripted = torch.jit.script(nn.Linear(4, 2))
    model = scripted if where == "model" else nn.Sequential(nn.Linear(4, 4), scripted)
    name = "RecursiveScriptModule" if where == "model" else "1"
    with pytest.raises(StateValueError, match=rf"'?{name}'? is TorchScript.*torch\.compile"):
        lightck.attach(model, pool)
    assert not pool.exists()
