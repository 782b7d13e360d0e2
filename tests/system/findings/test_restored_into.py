"""What a checkpoint is restored into, or said to be: under inference mode, a tree without end, a name for two tensors,
a value that names one large tensor again and again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import everything, net, same, train

import lightck
from lightck.errors import CorruptPoolError, StateValueError
from lightck.state import values

# -- B11: inference mode ---------------------------------------------------------------------------------------------


def saved(pool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A training of two steps, and two more without lightck."""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    with lightck.attach(model, pool, optimizer=opt):
        train(model, opt, 2)
    train(model, opt, 2, start=2)
    return model, opt


def by_attach(pool, model, opt):
    lightck.attach(model, pool, optimizer=opt, resume=True).close()


def by_recover(pool, model, opt):
    lightck.recover(pool, model, opt)


def by_restore(pool, model, opt):
    lightck.recover(pool).restore(model, opt)


def by_state_dict(pool, model, opt):
    checkpoint = lightck.recover(pool)
    model.load_state_dict(checkpoint.model)
    opt.load_state_dict(checkpoint.optimizer)


@pytest.mark.parametrize("restore", [by_attach, by_recover, by_restore, by_state_dict])
def test_a_restore_under_inference_mode_can_be_trained_on(pool, restore):
    wanted = everything(*saved(pool))
    model = net(seed=3)
    opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    with torch.inference_mode():
        restore(pool, model, opt)
        assert torch.is_inference_mode_enabled()
    train(model, opt, 2, start=2)
    assert same(everything(model, opt), wanted)


def test_a_first_attach_under_inference_mode_saves(pool):
    model = net()
    opt = torch.optim.AdamW(model.parameters())
    with torch.inference_mode():
        session = lightck.attach(model, pool, optimizer=opt)
    train(model, opt, 2)
    session.close()
    assert lightck.recover(pool).step == 2


# -- C4: a tree without end ------------------------------------------------------------------------------------------


def test_a_module_within_itself_is_refused_by_name(pool):
    model = net()
    model[0].parent = model
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StateValueError, match=r"'0\.parent' \(Sequential\) contains itself"):
        lightck.attach(model, pool, optimizer=opt)
    assert not pool.exists()
    model = net()
    model[0].me = model[0]
    with pytest.raises(StateValueError, match=r"'0\.me' \(Linear\) contains itself"):
        lightck.attach(model, pool, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_module_within_itself_that_comes_later_is_refused_too(pool):
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    session = lightck.attach(model, pool, optimizer=opt)
    train(model, opt, 2)
    model[0].parent = model
    with pytest.raises(StateValueError, match="contains itself"):
        train(model, opt, 2, start=2)
    session.abandon()
    assert lightck.recover(pool).step >= 1


# -- B9: one name for two tensors ------------------------------------------------------------------------------------


class DataParallel(nn.Module):
    """Named as torch's wrapper, with a weight of its own beside ``module.weight``."""

    def __init__(self, module: nn.Module, *, clashes: bool = True) -> None:
        super().__init__()
        self.module = module
        self.register_parameter("weight" if clashes else "scale", nn.Parameter(torch.ones(3, 400)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) @ next(iter(self._parameters.values())).t()


class Tower(nn.Module):
    """Wrappers in a wrapper: the one inside has no clash."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DataParallel(nn.DataParallel(nn.Linear(4, 400)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@pytest.mark.parametrize("build", [lambda: DataParallel(nn.Linear(4, 400)), Tower])
def test_a_wrapper_with_a_parameter_of_that_name_resumes(pool, build):
    model = build()
    opt = torch.optim.AdamW(model.parameters())
    with lightck.attach(model, pool, optimizer=opt):
        train(model, opt, 2)
    names = {name for name in lightck.recover(pool).model if name.endswith("weight")}
    dot = "" if isinstance(model, DataParallel) else "net."
    assert names == {f"{dot}weight", f"{dot}module.weight"}
    other = build()
    restored = torch.optim.AdamW(other.parameters())
    with lightck.attach(other, pool, optimizer=restored, resume=True) as session:
        assert session.step == 2
        assert same(everything(other, restored), everything(model, opt))


def test_a_wrapper_without_a_clash_has_no_part_in_names(pool):
    model = DataParallel(nn.Linear(4, 400), clashes=False)
    opt = torch.optim.AdamW(model.parameters())
    with lightck.attach(model, pool, optimizer=opt):
        train(model, opt, 1)
    assert set(lightck.recover(pool).model) == {"scale", "weight", "bias"}


# -- C1: a value that names one large tensor again and again ---------------------------------------------------------


def test_a_value_that_names_a_large_tensor_twice_is_damaged():
    held = {}
    packed = values.pack([torch.ones(2000)], path="state/x", large=held.__setitem__)
    (name,) = held
    assert packed[:1] == b"\x91"
    hostile = b"\xdd" + (3000).to_bytes(4, "big") + packed[1:] * 3000
    reads = []
    with pytest.raises(CorruptPoolError, match=f"names the large tensor '{name}' twice"):
        values.unpack(hostile, tensor=lambda name: reads.append(name) or held[name])
    assert len(reads) == 1


def test_a_tensor_that_lies_at_two_places_is_stored_and_comes_back_at_both(pool):
    class Twice:
        def __init__(self) -> None:
            self.state = {"a": torch.zeros(2000), "b": {"c": torch.zeros(2000)}, "b/c": torch.zeros(2000)}

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    shared, model = torch.rand(2000), net()
    one = Twice()
    one.state = {"a": shared, "b": {"c": shared}, "b/c": shared + 1}
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, pool, optimizer=opt, state={"it": one}):
        train(model, opt, 1)
    other = Twice()
    lightck.recover(pool, net(), state={"it": other})
    assert same(other.state, one.state)
