"""Optimizers whose updates cannot be made again one parameter at a time are refused, and the others are not."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import lookalikes as wild
import pytest
import torch
from consumed_by_hand import Run, parameters
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from toys import same

from lightck.errors import ReplayError, UnsupportedError
from lightck.restore.replay import replay
from lightck.state.replayable import refuse_low_ratio, refuse_unreplayable
from lightck.state.torch_classes import TORCH_CLASSES


def tensors(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((4, 6), (6, 4))]


class Plain(torch.optim.Optimizer):
    """SGD by hand; subclasses change one thing."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    def scale(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        scale = self.scale()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p.sub_(state["average"], alpha=scale * group["lr"])


class Counting(Plain):
    """Counts in its options, as ScheduleFree does: they are recorded for each update."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] += 1

    def scale(self) -> float:
        return 1.0 / (1 + self.param_groups[0]["k"])


class DecaysAll(Plain):
    """Changes parameters without a gradient too."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)


class Clipped(Plain):
    """Clips the norm of all gradients together."""

    def scale(self) -> float:
        found = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        return min(1.0, 20.0 / float(torch.stack(found).norm())) if found else 1.0


class Noisy(Plain):
    def scale(self) -> float:
        return float(torch.rand(()))


class CountingItself(Plain):
    count = 0

    def scale(self) -> float:
        self.count += 1
        return 1.0


class CountingInAnObject(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.notes = type("Notes", (), {})()
        self.notes.n = 0

    def scale(self) -> float:
        self.notes.n += 1
        return 1.0


class WithParameters(Plain):
    """Keeps its parameters in a list beside its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.every = {"all": [p for group in self.param_groups for p in group["params"]]}

    def scale(self) -> float:
        return float(self.every["all"][0].norm())


class WithAverage(Plain):
    """Keeps a tensor of state in an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.norms = [torch.zeros(3)]

    def scale(self) -> float:
        return float(self.norms[0].add_(1.0).sum())


class WithTable(Plain):
    """Keeps a constant tensor in an attribute."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.table = {"signed": torch.linspace(1, 2, 3)}

    def scale(self) -> float:
        return float(self.table["signed"][1])


class WithModel(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.teacher = nn.Linear(2, 2)


class Around(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)


class NeedsClosure(Plain):
    def step(self, closure: Any = None) -> None:
        closure()


class KeepsShared(Plain):
    def scale(self) -> float:
        self.state["all"] = {"n": 1}
        return 1.0


class Tuned(torch.optim.AdamW):
    """A subclass of torch's that changes the gradient of each parameter for itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sub_(p.grad.mean())
        return super().step(closure)


class ReadsAttributes(Plain):
    """Leaves frozen parameters alone, and takes the rate of a parameter from its attribute."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and p.grad is not None:
                    p.data.sub_(p.grad, alpha=p.rate)


class CouplesTrained(Clipped):
    def step(self, closure: Any = None) -> None:
        if all(p.requires_grad for group in self.param_groups for p in group["params"]):
            super().step()


class SubclassOfAdagrad(torch.optim.Adagrad):
    """Its state is made by the constructor."""


BAD = [
    (lambda ps: torch.optim.LBFGS(ps), "several gradients in a step"),
    (lambda ps: torch.optim.Adam(ps, differentiable=True), "differentiable=True"),
    (CouplesTrained, "differently if others are"),
    (Clipped, "differently if others are updated with it"),
    (Noisy, "draws random numbers"),
    (CountingItself, "changes its attribute 'count'"),
    (CountingInAnObject, "changes its attribute 'notes'"),
    (WithParameters, "attribute 'every' holds parameters, or a module"),
    (WithModel, "attribute 'teacher' holds parameters, or a module"),
    (WithAverage, "changes its attribute 'norms'"),
    (Around, "contains another optimizer"),
    (NeedsClosure, "a trial step failed"),
    (KeepsShared, "not the state of one parameter"),
]


@pytest.mark.parametrize(("make", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_what_cannot_be_made_again_is_refused(make, reason):
    with pytest.raises(UnsupportedError, match=reason) as caught:
        refuse_unreplayable(make(tensors()))
    assert "FullState()" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sgd_with_momentum_is_refused_below_float32(dtype):
    with pytest.raises(UnsupportedError, match=r"fused SGD with momentum computes other bits .*FullState\(\)"):
        refuse_unreplayable(torch.optim.SGD(tensors(dtype), lr=0.1, momentum=0.9, fused=True))
    refuse_unreplayable(torch.optim.SGD(tensors(dtype), lr=0.1, fused=True))
    refuse_unreplayable(torch.optim.SGD(tensors(), lr=0.1, momentum=0.9, fused=True))


def test_a_step_that_a_graph_may_make_is_refused():
    on_device = [torch.zeros(3, device="meta", requires_grad=True)]
    with pytest.raises(UnsupportedError, match=r"CUDA graph.*FullState\(\)"):
        refuse_unreplayable(torch.optim.Adam(on_device, capturable=True))


def test_denormal_numbers_that_some_threads_flush_to_zero_are_refused():
    """It holds for the threads of torch that begin later only."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        with pytest.raises(UnsupportedError, match=r"set_flush_denormal\(True\) holds for some.*FullState\(\)"):
            refuse_unreplayable(torch.optim.AdamW(tensors()))
        with pytest.raises(ReplayError, match=r"Call torch.set_flush_denormal\(False\)"):
            replay([], [], {}, 0)
    finally:
        torch.set_flush_denormal(False)
    refuse_unreplayable(torch.optim.AdamW(tensors()))


@pytest.mark.parametrize("name", sorted(set(TORCH_CLASSES) - {"LBFGS", "SparseAdam"}))
def test_classes_of_torch_are_accepted(name):
    refuse_unreplayable(TORCH_CLASSES[name](tensors(), lr=0.1))


@pytest.mark.parametrize("kind", [Plain, Counting, DecaysAll, Tuned, WithTable, SubclassOfAdagrad])
@pytest.mark.parametrize("has_state", [False, True])
def test_other_classes_that_update_each_parameter_for_itself_are_accepted(kind, has_state):
    ps = tensors()
    optimizer = kind([{"params": ps[:1]}, {"params": ps[1:], "lr": 0.2}])
    if has_state:
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.step()
    refuse_unreplayable(optimizer)


@pytest.mark.parametrize("kind", [Tuned, Clipped, Noisy])
def test_a_trial_changes_nothing(kind):
    ps = tensors()
    optimizer = kind(ps)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    called: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("own"))
    hook = register_optimizer_step_pre_hook(lambda *_: called.append("global"))
    before = copy.deepcopy((optimizer.state_dict(), [p.detach() for p in ps], [p.grad for p in ps]))
    drawn = torch.get_rng_state()
    try:
        if kind is Tuned:
            refuse_unreplayable(optimizer)
        else:
            with pytest.raises(UnsupportedError):
                refuse_unreplayable(optimizer)
    finally:
        hook.remove()
    assert same((optimizer.state_dict(), [p.detach() for p in ps], [p.grad for p in ps]), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert called == []


LOOKALIKES = [
    kind
    for kind in vars(wild).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and "lr" in inspect.signature(kind).parameters
]


@pytest.mark.parametrize(
    "kind", [*LOOKALIKES, Plain, Counting, DecaysAll, Tuned, WithTable], ids=lambda it: it.__name__
)
def test_what_is_accepted_is_replayed_with_the_same_bits(kind):
    def make(ps: Any) -> torch.optim.Optimizer:
        return kind([{"params": ps[:1], "lr": 0.01}, {"params": ps[1:]}], lr=0.02)

    ps = parameters(shapes=((17, 9), (9,), (3, 2, 2), (1,)))
    try:
        refuse_unreplayable(make(list(ps.values())))
    except UnsupportedError:
        assert kind.__name__ in {"EightBit", "Global", "NotADict", "Overriding", "ScheduleFree", "Simple"}
        return
    run = Run(make, ps)
    bases = run.bases()
    replay(bases, run.updates, run.partial, 5)
    for base in bases:
        assert same((base.unit.parameter, dict(base.unit.states[0])), run.states[5][base.unit.name])


def test_attributes_of_parameters_are_those_of_the_training():
    ps = tensors()
    for p in ps:
        p.rate = 0.1
    refuse_unreplayable(ReadsAttributes(ps))
    with pytest.raises(UnsupportedError, match="has no attribute 'rate'"):
        refuse_unreplayable(ReadsAttributes(tensors()))


def state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.dim())


@pytest.mark.parametrize(
    ("make", "ratio"),
    [(torch.optim.AdamW, 3.0), (lambda ps: torch.optim.SGD(ps, momentum=0.9), 2.0), (torch.optim.SGD, None)],
    ids=["AdamW", "SGD with momentum", "SGD"],
)
def test_an_optimizer_for_which_gradients_save_nothing_is_refused(make, ratio):
    ps = tensors()
    optimizer = make(ps)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    gradient_nbytes = sum(p.nbytes for p in ps)
    changed_nbytes = gradient_nbytes + state_nbytes(optimizer)
    if ratio is None:
        with pytest.raises(UnsupportedError, match=r"1.00 bytes for each byte of gradients.*FullState\(\)"):
            refuse_low_ratio(changed_nbytes, gradient_nbytes)
    else:
        assert refuse_low_ratio(changed_nbytes, gradient_nbytes) == ratio
