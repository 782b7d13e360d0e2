"""A step on chosen tensors computes what the class computes, and the user's optimizer does not notice it."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from toys import same

from lightck.errors import UnsupportedError
from lightck.state.partial_optimizer import PartialOptimizer


def two_parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (3, 5)]


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    return optimizer


def options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def step_alone(partial: PartialOptimizer, optimizer: torch.optim.Optimizer, p: torch.Tensor) -> None:
    alias = p.detach()
    alias.grad = torch.full_like(p, 0.25)
    partial.step([(options_of(optimizer), [alias])], {alias: optimizer.state[p]})


class Chained(torch.optim.AdamW):
    """Its step calls torch's, which runs the global hooks too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad += torch.randn(p.shape) + random.random() + np.random.rand()
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Chained])
def test_only_the_chosen_parameter_and_its_state_change(kind):
    one, other = two_parameters()
    optimizer = stepped(kind([one, other], lr=0.1))
    group, gradient, kept = optimizer.param_groups[0], one.grad, copy.deepcopy((other, optimizer.state[other]))
    attributes, options = dict(vars(optimizer)), dict(group)
    expected = copy.deepcopy(optimizer)
    mine = expected.param_groups[0]["params"][0]
    mine.grad, expected.param_groups[0]["params"][1].grad = torch.full_like(one, 0.25), None
    expected.step()

    step_alone(PartialOptimizer.of(optimizer), optimizer, one)

    assert same(one.detach(), mine.detach())
    assert same(dict(optimizer.state[one]), dict(expected.state[mine]))
    assert same((other.detach(), optimizer.state[other]), (kept[0].detach(), kept[1]))
    assert vars(optimizer) == attributes
    assert optimizer.param_groups[0] is group
    assert {key: value for key, value in group.items() if value is not options[key]} == {}
    assert one.grad is gradient
    assert same(gradient, torch.full_like(one, 0.5).detach())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Chained])
def test_no_hook_and_no_scheduler_is_called(kind):
    one, other = two_parameters()
    optimizer = stepped(kind([one, other], lr=0.1))
    scheduler = StepLR(optimizer, 1)  # replaces optimizer.step
    called: list[str] = []
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: called.append("pre")),
        optimizer.register_step_post_hook(lambda *_: called.append("post")),
        register_optimizer_step_pre_hook(lambda *_: called.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: called.append("global post")),
    ]
    optimizer.step = lambda *_: called.append("step")
    try:
        step_alone(PartialOptimizer.of(optimizer), optimizer, one)
        assert called == []
        stepped(kind([other], lr=0.1))
        assert set(called) == {"global pre", "global post"}, "the global hooks are there again"
    finally:
        for hook in hooks:
            hook.remove()
    assert scheduler.last_epoch == 0


def test_random_states_are_put_back():
    one, other = two_parameters()
    optimizer = stepped(Noisy([one, other], lr=0.1, momentum=0.9))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    step_alone(PartialOptimizer.of(optimizer), optimizer, one)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2][1])


def test_a_state_that_the_step_creates_comes_into_the_dict_of_the_caller():
    class Lazy(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p not in self.state:  # an empty dict would be taken for a state
                    self.state[p] = {"count": 0}
                self.state[p] = {"count": self.state[p]["count"] + 1}

    one, _ = two_parameters()
    partial, state = PartialOptimizer.of(Lazy([one])), {}
    for _ in range(2):
        partial.step([({"lr": 0.1}, [one])], {one: state})
    assert state == {"count": 2}


def test_state_that_belongs_to_no_parameter_is_refused():
    class Shared(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state["count"] = {"n": 1}
            return super().step(closure)

    one, _ = two_parameters()
    with pytest.raises(UnsupportedError, match=r"not the state of one parameter .*FullState\(\)"):
        PartialOptimizer.of(Shared([one], lr=0.1)).step([({**Shared([one]).defaults}, [one])], {one: {}})


def test_a_class_of_torch_needs_no_optimizer():
    one, other = two_parameters()
    optimizer = stepped(torch.optim.AdamW([one, other], lr=0.1, fused=True))
    twin = copy.deepcopy(optimizer)
    step_alone(PartialOptimizer.of(optimizer), optimizer, one)
    step_alone(PartialOptimizer.of_class("AdamW"), twin, twin.param_groups[0]["params"][0])
    assert same(one.detach(), twin.param_groups[0]["params"][0].detach())


@pytest.mark.parametrize("name", ["Chained", "os.system", "", "Optimizer"])
def test_no_other_class_is_found_by_its_name(name):
    with pytest.raises(UnsupportedError, match="as torch ships it"):
        PartialOptimizer.of_class(name)


def test_a_patched_class_of_torch_is_no_class_of_torch(monkeypatch):
    plain = torch.optim.Adamax.step
    monkeypatch.setattr(torch.optim.Adamax, "step", lambda self, closure=None: plain(self, closure))
    assert not PartialOptimizer.of(torch.optim.Adamax(two_parameters())).is_torch
    with pytest.raises(UnsupportedError, match="as torch ships it"):
        PartialOptimizer.of_class("Adamax")
