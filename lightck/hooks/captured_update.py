"""What an update consumed, as it is captured: a gradient is held by reference until its bytes are copied, and
everything else is a value, which no later step of the training changes.

When all gradients are copied, ``CapturedUpdate.consumed`` gives the plain data from which the update can be made again
(``state/consumed_update.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch

from lightck.state.consumed_update import ConsumedGroup, ConsumedStep, ConsumedUpdate, Gradient, SparseGradient
from lightck.state.indexed_gradient import IndexedGradient, dense_gradient


class GradientClass(Enum):
    """Who else writes into the memory of a gradient. It decides when the gradient must be copied."""

    UNOBSERVED = "unobserved"
    """It is the first gradient of its parameter, so nothing was observed yet."""
    OWNED = "owned"
    """Each backward pass makes a new tensor, with memory of its own, and nothing writes into the old one."""
    VIEW = "view"
    """It shares memory with other tensors, as in the buckets of DistributedDataParallel. The next backward pass may
    write into it."""
    RECYCLED = "recycled"
    """It is zeroed in place for the next update (``zero_grad(set_to_none=False)``), or written by something else."""
    WRITTEN_BY_STEP = "written by step"
    """The update itself changes it."""
    INDEXED = "indexed"
    """What is held is its indexed form, in memory of its own, which nothing else writes."""

    @property
    def deadline(self) -> Deadline:
        if self in (GradientClass.OWNED, GradientClass.INDEXED):
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
    """The copy holds what the update consumed, or the gradient itself still did when it was read (``was_read``)."""
    OVERWRITTEN = "overwritten"
    """The gradient was written before its copy ended, so the copy is not trusted."""
    NOT_COPIED = "not copied"
    """No copy was made in time, or none is needed."""


@dataclass(slots=True, eq=False)
class HeldGradient:
    """The gradient of one parameter, as an update consumed it.

    name: of the parameter. tensors: empty as soon as ``result`` is not ``HELD``; until then

        dense                   (the tensor,)
        sparse                  (indices, values); the indices are int64, ``(n_sparse_dims, n_values)``
        dense, indexed form     (indices, values) of the ``IndexedGradient``
        DTensor                 the same, of its local tensor

    strides: of a dense gradient, in elements; if its dtype is narrower than float32, the bits of the update depend on
    them. sparse_shape, is_coalesced: of a sparse gradient; an optimizer gives other bits for the coalesced one. shape:
    of the gradient, dense or sparse. n_used: ``IndexedGradient.n_used``; None: the gradient is not in its indexed form.
    """

    name: str
    kind: GradientClass
    tensors: tuple[torch.Tensor, ...]
    strides: tuple[int, ...] = ()
    sparse_shape: tuple[int, ...] | None = None
    is_coalesced: bool = False
    result: CopyResult = CopyResult.HELD
    shape: tuple[int, ...] = ()
    n_used: int | None = None

    @property
    def is_sparse(self) -> bool:
        return self.sparse_shape is not None

    def as_copied(self, copies: tuple[torch.Tensor, ...]) -> Gradient:
        """Return the gradient from copies of its tensors, whose elements lie in row-major order."""
        if self.sparse_shape is not None:
            indices, values = copies
            return SparseGradient(indices, values, self.sparse_shape, self.is_coalesced)
        if self.n_used is not None:
            indices, values = copies
            return dense_gradient(IndexedGradient(indices, values, self.n_used), self.shape, self.strides)
        (copied,) = copies
        if copied.stride() == self.strides:
            return copied
        return torch.empty_strided(copied.shape, self.strides, dtype=copied.dtype, device=copied.device).copy_(copied)


CopyOf = Callable[[HeldGradient], tuple[torch.Tensor, ...]]
"""Returns the copies of the tensors of a gradient."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """What one ``step`` of one optimizer consumed.

    optimizer: number of the optimizer, as in step events. gradients: by name, for every parameter of ``groups``; None
    if it had no gradient, which is not the same as a gradient of zeros. grad_scale, found_inf: what a GradScaler gave a
    fused optimizer, copied. left_out: the parameters whose gradients are not taken, and are None in ``gradients``,
    because their units lie whole in each checkpoint.
    """

    optimizer: int
    class_name: str
    groups: tuple[ConsumedGroup, ...]
    gradients: dict[str, HeldGradient | None]
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    left_out: frozenset[str] = frozenset()

    def present_gradients(self) -> Iterator[HeldGradient]:
        """Yield the gradients, without those that are absent."""
        return (gradient for gradient in self.gradients.values() if gradient is not None)

    def consumed(self, copy_of: CopyOf) -> ConsumedStep:
        """As ``CapturedUpdate.consumed``."""
        gradients = {name: None if one is None else one.as_copied(copy_of(one)) for name, one in self.gradients.items()}
        return ConsumedStep(self.optimizer, self.class_name, self.groups, gradients, self.grad_scale, self.found_inf)


@dataclass(frozen=True, slots=True)
class CapturedUpdate:
    """What one update consumed: the steps of all optimizers, in the order in which they ran.

    step: the number of the update. optimizer_steps: in the order in which they ran. threads: the number of intra-op
    threads of the thread that made the update. reasons: why this data is not all that the update consumed; empty if it
    is.
    """

    step: int
    optimizer_steps: tuple[CapturedStep, ...]
    threads: int
    reasons: tuple[str, ...] = field(default=())

    def gradients(self) -> Iterator[HeldGradient]:
        """Yield all gradients, step by step. A parameter occurs twice if it was updated twice."""
        for step in self.optimizer_steps:
            yield from step.present_gradients()

    @property
    def is_complete(self) -> bool:
        """Whether this is all that the update consumed, and each gradient has a valid copy."""
        return not self.reasons and all(one.result is CopyResult.VALIDATED for one in self.gradients())

    def consumed(self, copy_of: CopyOf) -> ConsumedUpdate:
        """Return the plain data of a complete update. ``copy_of``: returns the validated copies of a gradient."""
        assert self.is_complete, "the caller checks is_complete first"
        return ConsumedUpdate(self.step, tuple(one.consumed(copy_of) for one in self.optimizer_steps), self.threads)
