"""A training whose updates are captured, with copies as late as allowed, and the oracle: an update that runs again.

Before each update, model and optimizers are copied. After it, the real optimizers step the copies with the gradients
and options that were captured. Parameters and state must have the bits of the live ones. The same update also runs with
gradients that were taken elsewhere, and must give other bits: then the loop shows where capture has to stand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from toys import everything, same

from lightck.events import ClosingEvent, SessionLock, StepEvents, StepListener
from lightck.hooks import own_hooks
from lightck.hooks.boundary import Boundary
from lightck.hooks.captured_update import CapturedStep, CapturedUpdate, HeldGradient
from lightck.hooks.consumed import ConsumedGradients, Indexing, never_indexed
from lightck.hooks.gradient_checksums import plain_tensor
from lightck.hooks.hooks import Hooks
from lightck.restore.replay import replay
from lightck.restore.unit_replay import Base
from lightck.state.blocks import checksums
from lightck.state.inventory import OptimizerView
from lightck.state.optimizer_wrappers import wrapper_roles
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.unit_update import Unit
from lightck.stats import Meter

BLOCK = 64
"""Bytes that one checksum covers: small gradients have several blocks."""
Tensors = tuple[torch.Tensor, ...]
GradientOf = Callable[[CapturedStep, str], torch.Tensor | None]


class Copies:
    """The test double of whoever copies gradients. Copies that may wait end at the next gate."""

    def __init__(self) -> None:
        self.capture: ConsumedGradients
        self.of: dict[HeldGradient, Tensors] = {}
        self.pending: list[HeldGradient] = []
        self.updates: list[CapturedUpdate] = []
        self.overwrites: list[tuple[str, str]] = []
        self.steps_discarded: list[CapturedStep] = []
        self.are_due: list[list[str]] = []
        """The names of each call of ``copies_due_now``."""
        self.copies_when_due = True
        self.on_update: Callable[[CapturedUpdate], None] = lambda update: None

    def copies_due_now(self, gradients: Sequence[HeldGradient]) -> None:
        self.are_due.append([gradient.name for gradient in gradients])
        if self.copies_when_due:
            self.copy(gradients)

    def consumed(self, update: CapturedUpdate) -> None:
        self.updates.append(update)
        self.pending += update.gradients()
        self.on_update(update)

    def overwritten(self, gradient: HeldGradient, reason: str) -> None:
        self.overwrites.append((gradient.name, reason))

    def discarded(self, step: CapturedStep) -> None:
        self.steps_discarded.append(step)

    def copy(self, gradients: Sequence[HeldGradient]) -> None:
        for gradient in gradients:
            if gradient.tensors:
                device = gradient.tensors[0].device  # released when the copies are reported
                copies = tuple(plain_tensor(tensor).detach().clone() for tensor in gradient.tensors)
                if self.capture.copied(gradient, [checksums(one, BLOCK) for one in copies]):
                    self.of[gradient] = tuple(one.to(device) for one in copies)

    def end(self) -> None:
        """End the copies that wait."""
        pending, self.pending = self.pending, []
        self.copy(pending)


class Captured(StepListener):
    """A training with hooks of lightck, and without a pool. ``model``: gets the hooks; ``module``: holds the
    parameters, and is copied for the oracle. ``hooks``, ``events``: those of a session, which counts the updates."""

    def __init__(
        self,
        model: nn.Module,
        *optimizers: torch.optim.Optimizer,
        module: nn.Module | None = None,
        hooks: Hooks | None = None,
        events: StepEvents | None = None,
        index: Indexing = never_indexed,
    ) -> None:
        self.model, self.optimizers = module or model, optimizers
        self.events = events or StepEvents(SessionLock())
        self.hooks = hooks or Hooks(self.events, model, optimizers, Meter())
        self._counts = hooks is None
        self.hooks.report_gradients()
        self.copies = Copies()
        self.capture = self.copies.capture = _Taking(self.copies, self._names_of, block=BLOCK, index=index)
        self.capture.training = self
        self.copies.on_update = self._update_made
        self.boundary = Boundary(sum(role.makes_updates for role in wrapper_roles(optimizers)))
        self._reported = 0
        self.before: list[Any] = []
        """Model and optimizers before each update."""
        self.live: list[Any] = []
        """Parameters and state after each update."""
        self.references: dict[HeldGradient, Tensors] = {}
        self.late: dict[HeldGradient, Tensors] = {}
        """What a copy at the next gate gives, whatever the class of the gradient."""
        self.exact: dict[HeldGradient, Tensors] = {}
        """Copies of all gradients at the moment of capture, before anything else can happen."""
        self.after_backward: list[dict[str, torch.Tensor]] = []
        self.events.add(self)
        self.events.add(self.capture)  # a new listener hears first

    def close(self) -> None:
        own_hooks.remove(self.hooks.handles)
        self.hooks.forget()

    def names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), name)
        return names

    def _names_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        return OptimizerView(0, optimizer, self.names(), wrapper_roles([optimizer])[0], 0).names

    # -- what a session does at these events -------------------------------------------------------------

    def gate(self) -> None:
        self.late |= {one: tuple(t.detach().clone() for t in of) for one, of in self.references.items()}
        self.references.clear()
        self.copies.end()

    def before_step(self, index: int, bypasses_wrapper: bool, has_gradients: bool) -> None:
        if self.boundary.closes_at(ClosingEvent.PRE_STEP):
            self.boundary.close(ClosingEvent.PRE_STEP)
        if len(self.before) == len(self.live):
            self.before.append(copy.deepcopy((self.model, self.optimizers)))

    def after_step(self, index: int) -> None:
        self.boundary.updated(index)
        if self._counts and self.boundary.step != self._reported:
            self._reported = self.boundary.step
            self.events.step_ended(self._reported)

    def skipped_step(self, index: int) -> None:
        del self.before[len(self.live) :]

    def _update_made(self, _: CapturedUpdate) -> None:
        self.live.append(everything(self.model, *self.optimizers))

    # -- the oracle --------------------------------------------------------------------------------------

    def take_after_backward(self) -> None:
        """Take the gradients where a hook after the backward pass would."""
        names = self.names()
        params = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        self.after_backward.append({names[id(p)]: p.grad.detach().clone() for p in params if p.grad is not None})

    def replayed(self, number: int, gradient_of: GradientOf) -> Any:
        """Return parameters and state after update ``number``, counted from 0, that runs again with other gradients."""
        model, optimizers = copy.deepcopy(self.before[number])
        for step in self.copies.updates[number].optimizer_steps:
            optimizer = optimizers[step.optimizer]
            for group, recorded in zip(optimizer.param_groups, step.groups, strict=True):
                group.update(copy.deepcopy(recorded.options))
                for name, p in zip(recorded.parameters, group["params"], strict=True):
                    p.grad = gradient_of(step, name)
            if step.found_inf is not None:
                optimizer.grad_scale, optimizer.found_inf = step.grad_scale, step.found_inf
            optimizer.step()
        return everything(model, *optimizers)

    def replayed_in_a_row(self) -> Any:
        """Return parameters and state after all updates, made again one parameter at a time, as a recovery does."""
        model, optimizers = copy.deepcopy(self.before[0])
        names = {id(p): name for name, p in model.named_parameters()}
        states: dict[int, dict[int, Any]] = {}
        parameters: dict[int, torch.Tensor] = {}
        for index, optimizer in enumerate(optimizers):
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                parameters[id(p)] = p
                states.setdefault(id(p), {})[index] = optimizer.state[p]
        updates = [update.consumed(self.copies.of.__getitem__) for update in self.copies.updates]
        begin = updates[0].step - 1
        bases = [Base(Unit(names[key], p, states[key]), begin) for key, p in parameters.items()]
        replay(bases, updates, {i: PartialOptimizer.of(one) for i, one in enumerate(optimizers)}, updates[-1].step)
        for optimizer, live in zip(optimizers, self.optimizers, strict=True):
            for p in [p for p, state in optimizer.state.items() if not state]:
                del optimizer.state[p]  # asked for above
            for group, now in zip(optimizer.param_groups, live.param_groups, strict=True):
                group.update(copy.deepcopy({key: value for key, value in now.items() if key != "params"}))
        return everything(model, *optimizers)

    def from_copies(self, step: CapturedStep, name: str) -> torch.Tensor | None:
        gradient = step.gradients.get(name)
        return None if gradient is None else gradient_from(gradient, self.copies.of[gradient])

    def from_late(self, step: CapturedStep, name: str) -> torch.Tensor | None:
        gradient = step.gradients.get(name)
        return None if gradient is None else gradient_from(gradient, self.late[gradient])

    def is_exact(self, number: int, gradient_of: GradientOf | None = None) -> bool:
        """Whether update ``number`` runs again with the same bits. By default with the copies."""
        return same(self.replayed(number, gradient_of or self.from_copies), self.live[number])

    def finish(self, *, is_replayed: bool = True) -> None:
        """End all copies, and compare all updates; also, unless ``is_replayed`` is False, as ``replay`` makes them."""
        self.gate()
        assert len(self.live) == len(self.before) == len(self.copies.updates)
        for number, update in enumerate(self.copies.updates):
            assert update.is_complete, (number, self.copies.overwrites, update.reasons)
            assert self.is_exact(number), f"update {number} runs again with other bits"
        if is_replayed:
            assert same(self.replayed_in_a_row(), everything(self.model, *self.optimizers)), "replay gives other bits"
        assert not self.capture.held_nbytes

    def elsewhere_differs(self, gradient_of: GradientOf, numbers: Sequence[int] | None = None) -> bool:
        """Whether some update gives other bits with gradients that were taken elsewhere."""
        chosen = range(len(self.live)) if numbers is None else numbers
        return any(not self.is_exact(number, gradient_of) for number in chosen)

    def of_backward(self, number: int) -> GradientOf:
        taken = self.after_backward[number]
        return lambda step, name: None if name not in taken else taken[name].clone()

    def backward_differs(self) -> bool:
        """Whether gradients from after the last backward pass give other bits in some update."""
        return any(not self.is_exact(number, self.of_backward(number)) for number in range(len(self.live)))


class _Taking(ConsumedGradients):
    """Copies every gradient at the moment of capture too, as the truth about what the update consumes."""

    training: Captured

    def _take(self, index: int, optimizer: torch.optim.Optimizer) -> Any:
        running = super()._take(index, optimizer)
        for gradient in running.step.present_gradients():
            self.training.references[gradient] = gradient.tensors
            self.training.exact[gradient] = tuple(tensor.detach().clone() for tensor in gradient.tensors)
        return running


def gradient_from(gradient: HeldGradient, tensors: Tensors) -> torch.Tensor:
    """Return a gradient as ``p.grad`` had it, from copies of its tensors."""
    if not gradient.is_sparse:
        made = torch.empty_strided(tensors[0].shape, gradient.strides, dtype=tensors[0].dtype, device=tensors[0].device)
        return made.copy_(tensors[0])
    indices, values = (tensor.clone() for tensor in tensors)
    return torch.sparse_coo_tensor(
        indices, values, gradient.sparse_shape, is_coalesced=gradient.is_coalesced, check_invariants=True
    )
