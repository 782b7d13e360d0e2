"""A training whose every byte is known: each tensor is a function of the seed, its name and the step.

It goes through the public API and a real optimizer (SGD with momentum 1 on integers that floats hold exactly, with
gradients chosen so that the wanted values come out), so its pools have all that pools have: parameters that rest, that
wake, buffers that grow or come later, large tensors that are copied in the background, pins.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from topk_by_hand import TopKByHand
from torch import nn

import lightck
from crash.victims import Tell
from lightck.pool.gradient_log import records_min
from lightck.strategy.gradients import Gradients
from lightck.strategy.topk import TopK

_WIDTH = 1 << 20
"""Values are integers below a few times this: float32 holds them, their sums and differences exactly."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a training is made of. Sizes are in elements of 4 bytes."""

    seed: int
    interval: int
    trained: tuple[int, ...]
    frozen: tuple[int, ...]
    sleeper: int
    """Of a parameter that has no gradient before step ``wakes``."""
    wakes: int
    grows_every: int
    """Steps between two changes of a buffer's size; it grows by ``grows_by`` from nothing and then starts anew."""
    grows_by: int
    late: int
    """Step of which on there is one buffer more."""
    pins_every: int
    """Steps between pins, each held for half as many; 0: none."""
    flush_every: int
    closes: str
    """``forward`` or ``end_step``: what closes a checkpoint."""
    think: float
    """Seconds that a forward takes at most."""
    strategy: Gradients | None = None
    """None: each checkpoint holds the whole state."""

    @property
    def is_large(self) -> bool:
        return sum(self.trained) > 50_000


def draw(rng: random.Random) -> Plan:
    is_large = rng.random() < 0.4
    sizes = [rng.randint(1, 300_000 if is_large else 3_000) for _ in range(rng.randint(1, 4))]
    if is_large:
        sizes[0] = rng.randint(100_000, 600_000)
    return Plan(
        seed=rng.randrange(1 << 30),
        interval=rng.choice((1, 1, 1, 2)),
        trained=tuple(sizes),
        frozen=tuple(rng.randint(1, 60_000 if is_large else 2_000) for _ in range(rng.randint(0, 2))),
        sleeper=rng.randint(1, 20_000),
        wakes=rng.randint(2, 40),
        grows_every=rng.randint(1, 6),
        grows_by=rng.choice((0, 10, 2_000, 30_000)),
        late=rng.randint(2, 60),
        pins_every=rng.choice((0, 0, 7, 12)),
        flush_every=rng.choice((0, 3, 8)),
        closes=rng.choice(("forward", "end_step")),
        think=rng.choice((0.0, 0.0, 0.001)),
    )


def draw_gradients(rng: random.Random) -> Plan:
    """A training that is saved by ``Gradients``, now and then with compressed gradients and error feedback."""
    plan, base_every, interval = draw(rng), rng.randint(2, 5), rng.choice((1, 1, 2, 3))
    compress = None
    if rng.random() < 0.3:  # what such a training holds has to be computed step by step
        compress = rng.choice((TopK(0.3), *2 * (TopK(0.02, error_feedback=True, residual="step"),)))
        sizes = tuple(rng.randint(2_000, 6_000) for _ in plan.trained)
        plan = replace(plan, trained=sizes, sleeper=rng.randint(2_000, 4_000))
    n_records = rng.choice((None, None, records_min(base_every, interval)))
    strategy = Gradients(base_every, n_records, compress=compress)
    return replace(plan, interval=interval, pins_every=0, strategy=strategy)


# -- what each step holds --------------------------------------------------------------------------------------------


def _term(plan: Plan, name: str, step: int) -> int:
    return zlib.crc32(f"{plan.seed} {name} {step}".encode()) % _WIDTH


def _at(plan: Plan, name: str, elements: int, step: int) -> torch.Tensor:
    """Differs at every step in each element, and from element to element."""
    return torch.arange(elements).mul_(40503).remainder_(_WIDTH).add_(_term(plan, name, step)).float()


def _trained(plan: Plan) -> dict[str, int]:
    """Name -> elements of the parameters of the optimizer, in its order."""
    return {**{f"p{i}": n for i, n in enumerate(plan.trained)}, "sleeper": plan.sleeper}


def _updated_at(plan: Plan, name: str, step: int) -> int:
    """The last step up to this one that wrote this parameter; 0: none."""
    return 0 if name == "sleeper" and step < plan.wakes else step


def _momentum(plan: Plan, name: str, step: int) -> int:
    before, now = (_updated_at(plan, name, s) for s in (step - 1, step))
    return _term(plan, name, before) - _term(plan, name, now) if now else 0


def _grown(plan: Plan, step: int) -> torch.Tensor:
    return _at(plan, "grown", 1 + step // plan.grows_every % 20 * plan.grows_by, step)


def _late(plan: Plan, step: int) -> torch.Tensor | None:
    return _at(plan, "late", 700, step) if step >= plan.late else None


class Known(nn.Module):
    """The model of a plan as it is built, before the first step."""

    late: torch.Tensor | None

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        for name, elements in _trained(plan).items():
            self.register_parameter(name, nn.Parameter(_at(plan, name, elements, 0)))
        for i, elements in enumerate(plan.frozen):
            frozen = nn.Parameter(_at(plan, f"frozen{i}", elements, 0), requires_grad=False)
            self.register_parameter(f"frozen{i}", frozen)
        self.register_buffer("grown", _grown(plan, 0))
        self.register_buffer("late", None)

    def forward(self, step: int) -> torch.Tensor:
        """The forward of the iteration that ends with this step: it writes the buffers, as BatchNorm does."""
        self.grown = _grown(self.plan, step)
        self.late = _late(self.plan, step)
        if self.plan.think:
            time.sleep(self.plan.think * _term(self.plan, "think", step) / _WIDTH)
        return torch.zeros(())

    def make_gradients(self, step: int) -> None:
        for name, p in self.named_parameters():
            if not p.requires_grad or not _updated_at(self.plan, name, step):
                continue
            now, before = _momentum(self.plan, name, step), _momentum(self.plan, name, step - 1)
            p.grad = torch.full_like(p, now - before)


def build(plan: Plan) -> tuple[Known, torch.optim.Optimizer]:
    model = Known(plan)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(trained, lr=1.0, momentum=1.0)


def expected(plan: Plan, step: int) -> dict[str, torch.Tensor]:
    """Everything that the checkpoint of this step holds: by name, momentum buffers by their parameter's number."""
    late = _late(plan, step)
    others = {f"frozen{i}": _at(plan, f"frozen{i}", n, 0) for i, n in enumerate(plan.frozen)}
    others |= {"grown": _grown(plan, step)} | ({} if late is None else {"late": late})
    if plan.strategy is not None and plan.strategy.compress is not None:
        return others | _Compressed.of(plan).at(step)
    held = {name: _at(plan, name, n, _updated_at(plan, name, step)) for name, n in _trained(plan).items()}
    for number, (name, n) in enumerate(_trained(plan).items()):
        if _updated_at(plan, name, step):
            held[f"momentum {number}"] = torch.full((n,), float(_momentum(plan, name, step)))
    return held | others


class _Compressed:
    """What updates with compressed gradients make of the parameters: computed from the first step on, without
    lightck."""

    _last: _Compressed | None = None

    def __init__(self, plan: Plan) -> None:
        self._plan, self._step = plan, 0
        self._model, self._optimizer = build(plan)
        assert plan.strategy is not None
        assert plan.strategy.compress is not None
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._compress = TopKByHand(trained, plan.strategy.compress)

    @classmethod
    def of(cls, plan: Plan) -> _Compressed:
        if cls._last is None or cls._last._plan != plan:
            cls._last = cls(plan)
        return cls._last

    def at(self, step: int) -> dict[str, torch.Tensor]:
        if step < self._step:
            self.__init__(self._plan)  # type: ignore[misc]
        for number in range(self._step + 1, step + 1):
            self._model.make_gradients(number)
            self._compress()
            self._optimizer.step()
        self._step = step
        names = list(_trained(self._plan))
        parameters = dict(self._model.named_parameters())
        held = {name: parameters[name].detach().clone() for name in names}
        for number, name in enumerate(names):
            if self._optimizer.state.get(parameters[name]):
                held[f"momentum {number}"] = self._optimizer.state[parameters[name]]["momentum_buffer"].clone()
        return held


def difference(plan: Plan, step: int, model: Any, optimizer: Any) -> str | None:
    """How two state_dicts differ from what this step holds, to the bit; None where they do not."""
    found = dict(model)
    for number, state in optimizer["state"].items():
        found |= {f"momentum {number}": state["momentum_buffer"]}
    held = expected(plan, step)
    if found.keys() != held.keys():
        return f"step {step} holds {sorted(found.keys() ^ held.keys())} or does not"
    for name, tensor in held.items():
        here = found[name]
        if here.shape != tensor.shape or here.dtype != tensor.dtype:
            return f"{name} of step {step} has another size or dtype"
        if not torch.equal(here.detach().view(torch.int32), tensor.view(torch.int32)):
            wrong = here.detach() != tensor
            return f"{name} of step {step} differs in {int(wrong.sum())} of {tensor.numel()} values"
    return None


def is_whole(plan: Plan, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the live parameters and their state are those after this step; the next forward may have begun."""
    held, found = expected(plan, step), dict(model.state_dict())
    found |= {f"momentum {i}": s["momentum_buffer"] for i, s in optimizer.state_dict()["state"].items()}
    return all(torch.equal(found[name], held[name]) for name in held.keys() - {"grown", "late"})


# -- the training ----------------------------------------------------------------------------------------------------


Aside: TypeAlias = Callable[[int, lightck.Session, Known, torch.optim.Optimizer], None]


def train(
    plan: Plan, path: str, tell: Tell, *, steps: int, slots: int, backend: str, aside: Aside | None = None
) -> None:
    """Continue from what the pool holds, for ``steps`` updates, and close. Tells all that it does; ``aside`` is called
    after each update. ``slots``: not of a pool with gradient records.

    Raises ``AssertionError`` where what was restored is not what its step holds."""
    model, optimizer = build(plan)
    tell("attaches", slots)
    saving: dict[str, Any] = {"slots": slots} if plan.strategy is None else {"strategy": plan.strategy}
    session = lightck.attach(
        model, path, optimizer=optimizer, interval=plan.interval, resume=True, backend=backend, **saving
    )
    tell("attached", session.step)
    wrong = difference(plan, session.step, model.state_dict(), optimizer.state_dict())
    assert wrong is None, f"restored: {wrong}"
    pin: lightck.Pin | None = None
    for step in range(session.step + 1, session.step + steps + 1):
        tell("begins", step)
        model(step)
        model.make_gradients(step)
        optimizer.step()
        tell("finished", step)
        if aside is not None:
            aside(step, session, model, optimizer)
        if plan.closes == "end_step":
            session.end_step()
        pin = _hold(plan, session, pin, step, tell)
        if plan.flush_every and step % plan.flush_every == 0:
            session.flush()
            tell("committed", step)
        elif session.committed is not None:
            tell("committed", session.committed)
    session.close()
    tell("closed", step)


def _hold(plan: Plan, session: lightck.Session, pin: lightck.Pin | None, step: int, tell: Tell) -> lightck.Pin | None:
    """Pin now and then, and let go half-way."""
    if not plan.pins_every:
        return None
    if pin is not None and step % plan.pins_every == plan.pins_every // 2:
        tell("lets go", pin.step)
        pin.release()
        return None
    if pin is None and step % plan.pins_every == 0:
        pin = session.pin()
        tell("holds", pin.step)
    return pin
