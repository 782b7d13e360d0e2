"""What one update consumed, as plain data: gradients by name, options by value, and what else decides its bits.

From these data the same update can be made again (``unit_update.py``), with the same bits as in the training. Nothing
here reads a live optimizer. Tensors are references: whoever holds such a record sees to it that nothing writes to them.
"""

from __future__ import annotations

import copy
import enum
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightck.state.options_watch import is_immutable


class Implementation(enum.Enum):
    """Which code of an optimizer of ``torch.optim`` computed the update of a parameter. The values are stored."""

    FOR_LOOP = "for-loop"
    FOREACH = "foreach"
    FOREACH_BESIDE_NEW = "foreach beside a tensor without momentum"
    """The foreach code of SGD while another tensor of the same dtype and device got its first momentum. Then torch
    updates the momentum of each tensor separately, which rounds differently in dtypes narrower than float32."""
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class SparseGradient:
    """A sparse gradient (COO). SGD computes other bits from a coalesced copy, so it is kept as it was.

    indices: int64, (sparse dimensions, n). values: (n, *dense sizes). size: the shape of the parameter.
    is_coalesced: whether the gradient said so.
    """

    indices: torch.Tensor
    values: torch.Tensor
    size: tuple[int, ...]
    is_coalesced: bool


Gradient = torch.Tensor | SparseGradient | None
"""None: the parameter had no gradient (this differs from a gradient of zeros), or its gradient is not recorded (see
``ConsumedStep``). A dense gradient keeps its strides, because the bits of the update depend on them if its dtype is
narrower than float32."""


class SlicedGradients(Mapping[str, Gradient]):
    """Gradients of which slices can be read: name of a parameter -> its gradient."""

    @abstractmethod
    def is_absent(self, name: str) -> bool:
        """Whether a parameter had no gradient, or one that is not recorded (see ``ConsumedStep``)."""

    @abstractmethod
    def layout(self, name: str) -> torch.Tensor | None:
        """Return a tensor on the meta device with the shape, the strides and the dtype of a dense gradient in the
        memory of the processor, if slices of it can be read; None otherwise."""

    @abstractmethod
    def read_slice(self, name: str, start: int, into: torch.Tensor) -> None:
        """Read elements of such a gradient, in the order of its memory, from element ``start`` on, as many as ``into``
        has. ``into``: one dimension, of the gradient's dtype."""


@dataclass(frozen=True, slots=True)
class ConsumedGroup:
    """One parameter group as a step found it.

    parameters: the names, in the order of the group. options: every option but ``params``, as a copy. implementation:
    which code updates the group. other_implementations: name -> implementation, for the parameters that another code
    updates.
    """

    parameters: tuple[str, ...]
    options: Mapping[str, object]
    implementation: Implementation
    other_implementations: Mapping[str, Implementation] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConsumedStep:
    """What one call of one optimizer's ``step`` consumed.

    optimizer: the index of the optimizer among those that the session follows (``optimizer_wrappers.py``). class_name:
    the name of its class. gradients: the name of every parameter of every group -> its gradient; None if it had none,
    or if its gradient is not recorded, because its unit lies whole in each checkpoint. (A missing name is an error, and
    means neither of these.) The mapping may read a gradient at each access. grad_scale, found_inf: the attributes
    that a GradScaler sets for a fused optimizer, or None.
    """

    optimizer: int
    class_name: str
    groups: tuple[ConsumedGroup, ...]
    gradients: Mapping[str, Gradient]
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ConsumedUpdate:
    """What one update consumed. It made the state of ``step`` from the state of ``step`` - 1.

    optimizer_steps: in the order in which they were made; an optimizer that made no step has none. threads: the number
    of intra-op threads (``torch.get_num_threads()``) of the thread that made the update.
    """

    step: int
    optimizer_steps: tuple[ConsumedStep, ...]
    threads: int


def options_by_value(group: Mapping[str, object]) -> dict[str, object]:
    """Return every option of a group but ``params``, so that no later change of the group changes the result."""
    return {key: _by_value(value) for key, value in group.items() if key != "params"}


def _by_value(value: object) -> object:
    if is_immutable(value):
        return value
    if isinstance(value, torch.Tensor):
        # SGD computes in another way if lr is a tensor with requires_grad, so the copy keeps this flag.
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is list:
        return [_by_value(each) for each in value]
    if type(value) is dict:
        return {key: _by_value(each) for key, each in value.items()}
    return copy.deepcopy(value)
