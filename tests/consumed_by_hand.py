"""Trainings of a few tensors without a model, and what each of their updates consumed: what the capture will do.

The gradients are drawn from the number of the step, so every run has the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightck.restore.unit_replay import Base
from lightck.state.consumed_update import ConsumedGroup, ConsumedStep, ConsumedUpdate, Gradient, SparseGradient
from lightck.state.implementation_choice import chosen_implementations
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.unit_update import Unit

SHAPES = ((149, 233), (37,), (5, 7, 11), (1,))
"""The first is large enough for two threads, and odd, so that the vectors of both threads have a rest."""
Parameters = dict[str, torch.Tensor]
Gradients = Callable[[Parameters, int], dict[str, torch.Tensor | None]]


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Parameters:
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn(shape, generator=generator, dtype=wide(dtype)) for shape in shapes)
    return {f"p{i}": torch.nn.Parameter(one.to(dtype)) for i, one in enumerate(drawn)}


def wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else torch.float32


def gradients(ps: Parameters, step: int) -> dict[str, torch.Tensor | None]:
    """The gradients of one step. Every parameter has none in one of four steps; one has its first in the second."""
    generator = torch.Generator().manual_seed(1000 + step)
    drawn = {
        n: (torch.randn(p.shape, generator=generator, dtype=wide(p.dtype)) * 0.1).to(p.dtype) for n, p in ps.items()
    }
    return {name: None if (i + step) % 4 == 3 else g for i, (name, g) in enumerate(drawn.items())}


def all_gradients(ps: Parameters, step: int) -> dict[str, torch.Tensor | None]:
    """As ``gradients``, and every parameter has one in the first step."""
    return (
        gradients(ps, step)
        if step > 1
        else {n: g for k in (1, 2) for n, g in gradients(ps, k).items() if g is not None}
    )


def as_consumed(gradient: torch.Tensor | None) -> Gradient:
    if gradient is None or not gradient.is_sparse:
        return gradient
    return SparseGradient(gradient._indices(), gradient._values(), tuple(gradient.shape), gradient.is_coalesced())


def consumed(optimizer: Optimizer, names: dict[int, str], index: int = 0) -> ConsumedStep:
    """What the next ``step`` of the optimizer will consume."""
    groups, found = [], {}
    for group in optimizer.param_groups:
        inside = tuple(names[id(p)] for p in group["params"])
        found.update((names[id(p)], as_consumed(p.grad)) for p in group["params"])
        options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        how, exceptions = chosen_implementations(type(optimizer), group, inside, optimizer.state)
        groups.append(ConsumedGroup(inside, options, how, exceptions))
    scale, inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return ConsumedStep(index, type(optimizer).__name__, tuple(groups), found, scale, inf)


class Run:
    """A training: ``steps`` updates of one optimizer, each with another learning rate, with a copy of every state."""

    def __init__(
        self,
        make: Callable[[list[torch.Tensor]], Optimizer],
        ps: Parameters,
        *,
        steps: int = 5,
        threads: int = 2,
        draw: Gradients = gradients,
        before_step: Callable[[Optimizer], object] = lambda optimizer: None,
    ) -> None:
        self.parameters, self.optimizer = ps, make(list(ps.values()))
        self.names = {id(p): name for name, p in ps.items()}
        self.states = [self._copy()]
        self.updates: list[ConsumedUpdate] = []
        lr = self.optimizer.param_groups[0]["lr"]
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for step in range(1, steps + 1):
                self._step(step, lr, threads, draw, before_step)
        finally:
            torch.set_num_threads(before)

    def _step(
        self, step: int, lr: Any, threads: int, draw: Gradients, before_step: Callable[[Optimizer], object]
    ) -> None:
        for name, gradient in draw(self.parameters, step).items():
            self.parameters[name].grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = lr / step
        before_step(self.optimizer)
        record = consumed(self.optimizer, self.names)
        # The training may write to a gradient in the step, so the record has copies.
        self.updates.append(ConsumedUpdate(step, (copied(record),), threads))
        self.optimizer.step()
        self.states.append(self._copy())

    def _copy(self) -> dict[str, tuple[torch.Tensor, dict[Any, Any]]]:
        state = self.optimizer.state
        return {
            name: (p.detach().clone(), copy.deepcopy(dict(state[p])) if p in state else {})
            for name, p in self.parameters.items()
        }

    def bases(self, oldest: int = 0) -> list[Base]:
        """Copies of the units, each at another step: ``oldest``, the next two, and again."""
        return [self.base(name, oldest + i % 3) for i, name in enumerate(self.parameters)]

    def base(self, name: str, step: int) -> Base:
        parameter, state = self.states[step][name]
        return Base(Unit(name, parameter.clone(), {0: copy.deepcopy(state)}), step)

    @property
    def partial(self) -> dict[int, PartialOptimizer]:
        return {0: PartialOptimizer.of(self.optimizer)}


def copied(record: ConsumedStep) -> ConsumedStep:
    found = {name: g.clone() if isinstance(g, torch.Tensor) else g for name, g in record.gradients.items()}
    return ConsumedStep(record.optimizer, record.class_name, record.groups, found, record.grad_scale, record.found_inf)
