"""What an update consumed, as plain data: gradients by parameter name, options by value, scale, and order of steps.

The real optimizer, run again on this data and on the state before the update, gives the same bits. A gradient is held
by reference until its bytes are copied. Everything else is a value, which no later step of the training changes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch

from lightck.state.implementations import Implementation
from lightck.state.options_watch import is_immutable


class GradientClass(Enum):
    """Who else writes into the memory of a gradient. It decides when the gradient must be copied."""

    UNOBSERVED = "unobserved"
    """Its parameter had no gradient before."""
    OWNED = "owned"
    """Each backward pass makes a new tensor, with memory of its own, and nothing writes into the old one."""
    VIEW = "view"
    """It shares memory with other tensors, as in the buckets of DistributedDataParallel. The next backward pass may
    write into it."""
    RECYCLED = "recycled"
    """It is zeroed in place for the next update (``zero_grad(set_to_none=False)``), or written by something else."""
    WRITTEN_BY_STEP = "written by step"
    """The update itself changes it."""

    @property
    def deadline(self) -> Deadline:
        if self is GradientClass.OWNED:
            return Deadline.GATE
        return Deadline.BACKWARD if self is GradientClass.VIEW else Deadline.NOW


class Deadline(Enum):
    """When the copy of a gradient must have ended."""

    NOW = "now"
    """Before the update begins."""
    BACKWARD = "backward"
    """Before the next backward pass begins."""
    GATE = "gate"
    """Before the next update begins."""


class CopyResult(Enum):
    """What became of the copy of a gradient."""

    HELD = "held"
    """It is not copied yet, or its copy is not validated: the tensors are held."""
    VALIDATED = "validated"
    """The copy holds what the update consumed."""
    OVERWRITTEN = "overwritten"
    """The gradient was written before its copy ended, so the copy is not trusted."""
    NOT_COPIED = "not copied"
    """No copy was made in time, or none is needed."""


@dataclass(slots=True, eq=False)
class ConsumedGradient:
    """The gradient of one parameter, as an update consumed it.

    name: of the parameter. tensors: a dense gradient as one tensor; of a sparse one the indices (int64,
    ``(n_sparse_dims, n_values)``) and the values; of a DTensor the local tensor. Empty as soon as ``result`` is not
    ``HELD``. strides: of a dense gradient, in elements; below float32 they decide bits. sparse_shape, is_coalesced: of
    a sparse gradient; an optimizer gives other bits for the coalesced one.
    """

    name: str
    kind: GradientClass
    tensors: tuple[torch.Tensor, ...]
    strides: tuple[int, ...] = ()
    sparse_shape: tuple[int, ...] | None = None
    is_coalesced: bool = False
    result: CopyResult = CopyResult.HELD

    @property
    def is_sparse(self) -> bool:
        return self.sparse_shape is not None


@dataclass(frozen=True, slots=True)
class ConsumedGroup:
    """One group of an optimizer. parameters: the names of its parameters, in order, also of those without a gradient.
    options: every option but ``params``, by value."""

    parameters: tuple[str, ...]
    options: dict[str, object]
    implementation: Implementation


@dataclass(frozen=True, slots=True)
class ConsumedStep:
    """What one ``step`` of one optimizer consumed.

    optimizer: number of the optimizer, as in step events. gradients: by name, for every parameter of ``groups``; None
    if it had no gradient, which is not the same as a gradient of zeros. grad_scale, found_inf: what a GradScaler gave a
    fused optimizer, copied.
    """

    optimizer: int
    class_name: str
    groups: tuple[ConsumedGroup, ...]
    gradients: dict[str, ConsumedGradient | None]
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def present_gradients(self) -> Iterator[ConsumedGradient]:
        """Yield the gradients, without those that are absent."""
        return (gradient for gradient in self.gradients.values() if gradient is not None)


@dataclass(frozen=True, slots=True)
class ConsumedUpdate:
    """What one update consumed: the steps of all optimizers, in the order in which they ran.

    step: the number of the update. optimizer_steps: in the order in which they ran. threads: the number of intra-op
    threads of the thread that made the update. reasons: why this data is not all that the update consumed; empty if it
    is.
    """

    step: int
    optimizer_steps: tuple[ConsumedStep, ...]
    threads: int
    reasons: tuple[str, ...] = field(default=())

    def gradients(self) -> Iterator[ConsumedGradient]:
        """Yield all gradients, step by step. A parameter occurs twice if it was updated twice."""
        for step in self.optimizer_steps:
            yield from step.present_gradients()

    @property
    def is_complete(self) -> bool:
        """Whether this is all that the update consumed, and each gradient has a valid copy."""
        return not self.reasons and all(one.result is CopyResult.VALIDATED for one in self.gradients())


def options_by_value(group: dict[str, object]) -> dict[str, object]:
    """Return every option of a group but ``params``, so that no later change of the group changes the result."""
    return {key: _by_value(value) for key, value in group.items() if key != "params"}


def _by_value(value: object) -> object:
    if is_immutable(value):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)  # torch treats lr with a gradient apart
    if type(value) is list:
        return [_by_value(each) for each in value]
    if type(value) is dict:
        return {key: _by_value(each) for key, each in value.items()}
    return copy.deepcopy(value)
