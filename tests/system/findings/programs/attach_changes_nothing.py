"""One training for every optimizer: with ``attach`` it is, to the bit, what it is without."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from state.optimizers import lookalikes as wild
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import Run, program
from .plain import mlp

Make = Callable[[nn.Module], Any]


class Rectified(wild.Simple):
    """As the published RAdam: each group has a buffer, which all of them got from the same defaults."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr, buffer=[[None, None] for _ in range(10)])

    def update(self, p: Any, group: dict[str, Any], state: dict[Any, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        slot = group["buffer"][state["step"] % 10]
        if slot[0] != state["step"]:
            slot[:] = state["step"], 1.0 / (1 + float(p.grad.norm()))
        p.sub_(p.grad, alpha=group["lr"] * slot[1])


class Counters(wild.Simple):
    """An option that is a dict, and one that is a list."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr, counts={"updates": 0, "seen": torch.zeros(2)}, history=[])

    def update(self, p: Any, group: dict[str, Any], state: dict[Any, Any]) -> None:
        group["counts"]["updates"] += 1
        group["counts"]["seen"] += p.grad.mean()
        group["history"].append(float(p.grad.norm()))
        scale = 1 + len(group["history"]) % 5 + float(group["counts"]["seen"].sum())
        p.sub_(p.grad, alpha=group["lr"] / scale / group["counts"]["updates"] ** 0.5)


class CountsOnTheClass(wild.Simple):
    """Every instance has a number, and an update counts for the class."""

    made = 0
    updates = 0
    shared: ClassVar[dict[str, float]] = {}

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr)
        type(self).made += 1
        self.number = self.made

    def update(self, p: Any, group: dict[str, Any], state: dict[Any, Any]) -> None:
        cls = type(self)
        cls.updates += 1
        cls.shared["norm"] = cls.shared.get("norm", 0.0) + float(p.grad.norm())
        p.sub_(p.grad, alpha=group["lr"] * cls.made / (cls.updates**0.5 + cls.shared["norm"]))


class HasSideEffects(wild.Simple):
    """Its constructor draws from a generator of its own and registers a hook for all optimizers."""

    draws = random.Random(5)

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr)
        self.scale = self.draws.random()
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self.decay())

    def decay(self) -> None:
        self.scale *= 0.9

    def update(self, p: Any, group: dict[str, Any], state: dict[Any, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] * (self.scale + self.draws.random()))


def over_a_list() -> type[Optimizer]:
    steps: list[float] = []

    class Closed(wild.Simple):
        """Its ``step`` closes over a list."""

        def update(self, p: Any, group: dict[str, Any], state: dict[Any, Any]) -> None:
            steps.append(float(p.grad.norm()))
            p.sub_(p.grad, alpha=group["lr"] / len(steps) ** 0.5)

    return Closed


class OfTorch(torch.optim.AdamW):
    """A class of torch's with a counter that lasts."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        type(self).steps += 1
        for group in self.param_groups:
            group["lr"] = 0.01 / type(self).steps
        return super().step(closure)


def patched(model: nn.Module) -> Any:
    """A library put something around a method of torch's class."""
    kind = type("Adam", (torch.optim.Adam,), {"__module__": "torch.optim.adam"})
    plain, calls = torch.optim.Adam.step, []

    def step(self: Any, closure: Any = None) -> Any:
        calls.append(1)
        self.param_groups[0]["lr"] = 0.02 / len(calls)
        return plain(self, closure)

    step.__name__, kind.step = "step", step
    return kind(model.parameters(), lr=0.02)


def grouped(kind: type[Optimizer], **options: Any) -> Make:
    def make(model: nn.Module) -> Any:
        first, *others = model.parameters()
        return kind([{"params": [first], "lr": 0.01, "note": ["mine", {}]}, {"params": others}], lr=0.02, **options)

    return make


def of_torch() -> Iterator[tuple[str, Make]]:
    for name, kind in vars(torch.optim).items():
        if not isinstance(kind, type) or not issubclass(kind, Optimizer) or name in ("Optimizer", "SparseAdam"):
            continue
        accepted = inspect.signature(kind.__init__).parameters
        for how in ("foreach", "fused"):
            if how in accepted:
                yield f"{name}-{how}", grouped(kind, **{how: True})
        if name == "Muon":
            yield (
                name,
                lambda model: [
                    torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]),
                    torch.optim.SGD([p for p in model.parameters() if p.dim() == 1], lr=0.1, momentum=0.9),
                ],
            )
        elif name == "LBFGS":
            yield name, lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3)
        else:
            yield name, grouped(kind)


ALL: dict[str, Make] = {
    **dict(of_torch()),
    **{
        kind.__name__: grouped(kind)
        for kind in (
            wild.Lion,
            wild.Factored,
            wild.Soap,
            wild.Sophia,
            wild.EightBit,
            wild.Odd,
            wild.Late,
            wild.Wider,
            wild.NotADict,
            wild.Overriding,
            Rectified,
            Counters,
            CountsOnTheClass,
            HasSideEffects,
            OfTorch,
            over_a_list(),
        )
    },
    "Global": lambda model: wild.Global(model.parameters()),
    "ScheduleFree": lambda model: wild.ScheduleFree(model.parameters()),
    "Sam": lambda model: wild.Sam(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9),
    "Lookahead": lambda model: wild.Lookahead(Rectified(model.parameters())),
    "Accelerated": lambda model: wild.Accelerated(Counters(model.parameters())),
    "Patched": patched,
}


def train(run: Run, make: Make) -> None:
    run.seed()
    model = mlp()
    made = make(model)
    optimizers = made if isinstance(made, list) else [made]
    session = run.attach(model, optimizer=optimizers)
    while session.step < 6:
        x = torch.randn(6, 8)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.mse_loss(model(x), torch.zeros(6, 4))
            loss.backward()
            return loss

        if isinstance(made, wild.ScheduleFree):
            made.train()
        if isinstance(made, (torch.optim.LBFGS, wild.Sam)):
            closure()
            loss = made.step(closure)
        else:
            loss = closure()
            for optimizer in optimizers:
                optimizer.step()
        run.updated(loss)
    inner = [getattr(one, "optimizer", one) for one in optimizers]
    run.finished(model, inner)


for _name, _make in ALL.items():
    program(name=f"attach-{_name}")(lambda run, make=_make: train(run, make))
