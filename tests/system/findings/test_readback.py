"""What is restored is read again: objects in ``state`` and optimizers that took none of it, or something else."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim import lr_scheduler as lrs
from toys import net, train

import lightck
from lightck.errors import DriftError


class Meter:
    """Sums and counts, as a training keeps them."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class AverageMeter(Meter):
    """The same under another name."""


class Other(Meter):
    def __init__(self) -> None:
        self.best = 0.0


def moved(obj: Any) -> Any:
    """As a training leaves it: nothing is as it was built."""
    if isinstance(obj, Meter):
        obj.__dict__.update(sum=1.5, count=3)
    return obj


def saved_with(pool: Path, obj: Any, *, make: Callable[[Any], Any] = torch.optim.AdamW) -> None:
    model = net()
    with lightck.attach(model, pool, optimizer=(opt := make(model.parameters())), state={"it": obj}):
        train(model, opt, 2)


def resumed_with(pool: Path, obj: Any, *, make: Callable[[Any], Any] = torch.optim.AdamW) -> None:
    model = net(seed=3)
    with lightck.attach(model, pool, optimizer=make(model.parameters()), state={"it": obj}, resume=True) as session:
        assert session.step == 2


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "lightck" and r.levelname == "WARNING"]


# -- classes ---------------------------------------------------------------------------------------------------------


def test_an_object_of_another_class_is_drift(pool):
    saved_with(pool, moved(Meter()))
    with pytest.raises(DriftError, match=r"state 'it' is AverageMeter now, and was saved from Meter"):
        resumed_with(pool, AverageMeter())
    model = net(seed=3)
    before = model[0].weight.detach().clone()
    with pytest.raises(DriftError, match="Meter"):
        lightck.recover(pool, model, state={"it": Other()})
    assert torch.equal(model[0].weight, before), "nothing may change before all is checked"


def test_without_strict_a_renamed_class_is_taken_and_another_one_is_not(pool):
    saved_with(pool, moved(Meter()))
    model, renamed = net(seed=3), AverageMeter()
    opt = torch.optim.AdamW(model.parameters())
    checkpoint = lightck.recover(pool, model, opt, state={"it": renamed}, strict=False)
    assert "saved from Meter" in str(checkpoint.drift)
    assert (renamed.sum, renamed.count) == (1.5, 3)
    with lightck.attach(model, pool, optimizer=opt, state={"it": renamed}) as session:
        assert session.step == 2  # and continues from it
        train(model, opt, 1, start=2)

    other = Other()
    checkpoint = lightck.recover(pool, net(seed=3), state={"it": other}, strict=False)
    assert "saved from AverageMeter" in str(checkpoint.drift)
    assert other.__dict__ == {"best": 0.0}


def test_a_class_that_only_moved_to_another_module_is_the_same(pool, caplog):
    saved_with(pool, moved(Meter()))
    resumed_with(pool, type("Meter", (Meter,), {"__module__": "elsewhere"})())
    assert warnings(caplog) == []


def test_a_lazy_module_is_what_it_becomes(pool, caplog):
    lazy = nn.LazyLinear(3)
    lazy(torch.ones(1, 2))
    saved_with(pool, lazy)
    fresh = nn.LazyLinear(3)
    lightck.recover(pool, net(), state={"it": fresh})
    assert torch.equal(fresh.weight, lazy.weight)
    assert warnings(caplog) == []


# -- what load_state_dict does with it -------------------------------------------------------------------------------


class Deaf(Meter):
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class DeafAverage(Deaf):
    """Its state is a large tensor."""

    def __init__(self) -> None:
        self.average = torch.zeros(4000)


class Forgets(Meter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum = state["sum"]


class Drops(Meter):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__ = {"sum": state["sum"]}


class Halves(Meter):
    """Keeps in bfloat16 what was saved in float32."""

    def __init__(self) -> None:
        self.average = torch.zeros(4000)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"].bfloat16()


@pytest.mark.parametrize("kind", [Deaf, DeafAverage])
def test_an_object_that_took_nothing_is_an_error(pool, kind):
    obj = kind()
    obj.__dict__.update(sum=1.5, average=torch.arange(4000.0)) if kind is DeafAverage else moved(obj)
    saved_with(pool, obj)
    with pytest.raises(DriftError, match=rf"state\['it'\] took nothing.*did not change the {kind.__name__}"):
        resumed_with(pool, kind())


@pytest.mark.parametrize(("kind", "where"), [(Forgets, "in count"), (Drops, "in count"), (Halves, "in average")])
def test_an_object_that_took_something_else_is_named(pool, caplog, kind, where):
    obj = kind()
    if kind is Halves:
        obj.average = torch.rand(4000)
    else:
        moved(obj)
    saved_with(pool, obj)
    resumed_with(pool, kind())
    (said,) = warnings(caplog)
    assert said.startswith("lightck: state['it'] differs in ")
    assert where in said


class Normalises(Meter):
    """All that is no difference: order, added keys, containers and numbers of other types, a wider dtype, a clock."""

    def __init__(self) -> None:
        self.values: Any = {
            "pair": (1, 2),
            "queue": deque([1.0, 2.0]),
            "number": np.float32(0.5),
            "nan": float("nan"),
            "mean": torch.zeros(2, dtype=torch.bfloat16),
            "zero": torch.tensor(2.0),
            "none": None,
            "kinds": defaultdict(None, a=[1]),
            "set": {1, 2},
            "array": np.arange(3),
        }

    def state_dict(self) -> dict[str, Any]:
        return {**self.values, "seconds": time.monotonic(), "clock": {"at": [time.monotonic()]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = OrderedDict(reversed(state.items()))
        state.update(pair=list(state["pair"]), queue=list(state["queue"]), number=0.5, mean=state["mean"].float())
        state.update(zero=2, kinds=dict(state["kinds"]), added=1, array=state["array"].astype(np.int64))
        self.values = {key: value for key, value in state.items() if key not in ("seconds", "clock")}


def test_what_is_no_difference_is_not_warned_about(pool, caplog):
    obj = Normalises()
    obj.values["mean"] += 1
    saved_with(pool, obj)
    resumed_with(pool, Normalises())
    assert warnings(caplog) == []


def optimizer() -> Any:
    return torch.optim.SGD(net().parameters(), lr=0.1)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 3]),
    "ConstantLR": lrs.ConstantLR,
    "LinearLR": lrs.LinearLR,
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lrs.PolynomialLR,
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)]),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], [1]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_no_scheduler_of_torch_is_an_alarm(pool, caplog, name):
    make = SCHEDULERS[name]
    scheduler = make(optimizer())
    for _ in range(3):
        scheduler.optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    saved_with(pool, scheduler)
    resumed_with(pool, make(optimizer()))
    assert warnings(caplog) == []


def averaged() -> Any:
    ema = torch.optim.swa_utils.AveragedModel(net(), use_buffers=True)
    ema.update_parameters(net(seed=5))
    return ema


def metric() -> Any:
    found = torchmetrics.MeanMetric()
    found.persistent(True)
    found.update(torch.tensor([1.0, 3.0]))
    return found


def scaler() -> Any:
    found = torch.amp.GradScaler("cpu", init_scale=8.0)
    found.scale(torch.ones(1))
    return found


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "averaged": (averaged, lambda: torch.optim.swa_utils.AveragedModel(net(), use_buffers=True)),
    "metric": (metric, lambda: (found := torchmetrics.MeanMetric(), found.persistent(True))[0]),
    "scaler": (scaler, lambda: torch.amp.GradScaler("cpu")),
    "module": (lambda: nn.BatchNorm1d(3), lambda: nn.BatchNorm1d(3)),
    "optimizer": (optimizer, optimizer),
    "compiled": (lambda: torch.compile(nn.Linear(2, 2)), lambda: torch.compile(nn.Linear(2, 2))),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_no_usual_object_is_an_alarm(pool, caplog, name):
    made, fresh = OBJECTS[name]
    saved_with(pool, made())
    resumed_with(pool, fresh())
    assert warnings(caplog) == []


def test_the_read_back_draws_no_random_numbers(pool):
    class Draws(Meter):
        def state_dict(self) -> dict[str, Any]:
            torch.rand(1)
            return {"sum": self.sum}

    saved_with(pool, moved(Draws()))
    model = net()
    before = torch.get_rng_state()
    lightck.recover(pool, model, state={"it": Draws()})
    assert torch.equal(torch.get_rng_state(), before)


# -- optimizers ------------------------------------------------------------------------------------------------------


class Property(torch.optim.SGD):
    """``state`` is made anew at each look."""

    def __init__(self, params: Any) -> None:
        self.moments: dict[Any, torch.Tensor] = {}
        super().__init__(params, lr=0.1)

    @property
    def state(self) -> Any:
        return defaultdict(dict, {p: {"moment": moment} for p, moment in self.moments.items()})

    @state.setter
    def state(self, value: Any) -> None: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.moments.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=0.1)


class Filled(Property):
    """The same, but what it gives out is there from the start, and is filled in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.moments = {p: torch.zeros_like(p) for group in self.param_groups for p in group["params"]}


class Counting(Filled):
    """And a number beside it, which is lost."""

    @property
    def state(self) -> Any:
        return {p: {"moment": moment, "count": float(moment.sum())} for p, moment in self.moments.items()}

    @state.setter
    def state(self, value: Any) -> None: ...


class Through(Property):
    """A new object at each look, which writes through."""

    class View(defaultdict):
        def __init__(self, moments: Any) -> None:
            super().__init__(dict, {p: {"moment": moment} for p, moment in moments.items()})
            self.moments = moments

        def __setitem__(self, p: Any, state: Any) -> None:
            self.moments[p] = state["moment"].clone()

    @property
    def state(self) -> Any:
        return self.View(self.moments)

    @state.setter
    def state(self, value: Any) -> None: ...


def test_an_optimizer_that_keeps_nothing_of_its_state_is_an_error(pool):
    saved_with(pool, moved(Meter()), make=Property)
    with pytest.raises(DriftError, match=r"Property keeps nothing of the state.*the state of 0\.weight"):
        resumed_with(pool, Meter(), make=Property)


@pytest.mark.parametrize("kind", [Filled, Through])
def test_an_optimizer_whose_state_gets_there_is_no_alarm(pool, caplog, kind):
    saved_with(pool, moved(Meter()), make=kind)
    want = lightck.recover(pool).optimizer["state"]
    model = net(seed=3)
    opt = kind(model.parameters())
    lightck.recover(pool, model, opt)
    for i, p in enumerate(model.parameters()):
        assert torch.equal(opt.state[p]["moment"], want[i]["moment"])
    assert warnings(caplog) == []


def test_an_optimizer_that_keeps_some_of_it_is_named(pool, caplog):
    class Stubborn(torch.optim.SGD):
        """Takes the options that it was built with."""

        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr, momentum=0.9)
            self.param_groups[0] = _Fixed(self.param_groups[0])

    class _Fixed(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            if key != "lr":
                super().__setitem__(key, value)

    saved_with(pool, moved(Meter()), make=Stubborn)
    resumed_with(pool, Meter(), make=lambda params: Stubborn(params, lr=0.5))
    assert any(
        "Stubborn changed or dropped part of what was restored into it: lr of group 0" in said
        for said in warnings(caplog)
    )
