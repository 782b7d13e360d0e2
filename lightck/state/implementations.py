"""How torch runs the update of a group of an optimizer: as a for-loop, with foreach or with a fused kernel. The
implementation decides the bits of the result.

``implementation_of`` repeats the choice that torch's classes make inside ``step``, and asks the same function of torch
about the tensors. ``writes_gradients`` names the updates that change the gradients themselves. A test runs each class
and option, and compares both with what torch does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import torch
from torch.optim.optimizer import Optimizer, _default_to_fused_or_foreach


class Implementation(Enum):
    """How the update of a group runs."""

    FOR_LOOP = "for-loop"
    FOREACH = "foreach"
    FUSED = "fused"
    OWN = "own"
    """The optimizer is of no class of torch.optim, and its ``step`` may do anything."""


_LOOP_BY_DEFAULT = (torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam, torch.optim.LBFGS)
"""Classes of torch.optim that never choose foreach by themselves."""
_LOOP_FOR_TENSOR_LR = (torch.optim.Adam,)
"""Classes that do not choose foreach if the learning rate is a tensor and the group is not capturable. (AdamW is a
subclass of Adam.)"""


def implementation_of(
    optimizer: Optimizer, group: Mapping[str, object], params: Sequence[torch.Tensor]
) -> Implementation:
    """Return how ``optimizer.step`` will update a group. ``params``: the parameters of the group that have a
    gradient."""
    if not _is_of_torch(optimizer):
        return Implementation.OWN
    fused, foreach = group.get("fused"), group.get("foreach")
    if fused is None and foreach is None:
        return _default_implementation(optimizer, group, params)
    is_sgd = isinstance(optimizer, torch.optim.SGD)  # SGD looks at foreach first, the other classes at fused
    if fused and not (is_sgd and foreach):
        return Implementation.FUSED
    return Implementation.FOREACH if foreach else Implementation.FOR_LOOP


def _is_of_torch(optimizer: Optimizer) -> bool:
    # Adafactor and Muon say that their module is "torch.optim", the others that it is "torch.optim.adam" and so on.
    return any(
        f"{one.__module__}.".startswith("torch.optim.") for one in type(optimizer).__mro__ if one is not Optimizer
    )


def _default_implementation(
    optimizer: Optimizer, group: Mapping[str, object], params: Sequence[torch.Tensor]
) -> Implementation:
    if isinstance(optimizer, _LOOP_BY_DEFAULT):
        return Implementation.FOR_LOOP
    # SGD does not pass ``differentiable`` on to this choice.
    differentiable = bool(group.get("differentiable")) and not isinstance(optimizer, torch.optim.SGD)
    _, foreach = _default_to_fused_or_foreach(list(params), differentiable, use_fused=False)
    if foreach and isinstance(optimizer, _LOOP_FOR_TENSOR_LR):
        foreach = bool(group.get("capturable")) or not isinstance(group.get("lr"), torch.Tensor)
    return Implementation.FOREACH if foreach else Implementation.FOR_LOOP


def writes_gradients(
    optimizer: Optimizer, group: Mapping[str, object], implementation: Implementation, has_scale: bool
) -> bool:
    """Whether ``optimizer.step`` is known to change the gradients of a group. ``has_scale``: whether a GradScaler gave
    the optimizer a scale (``grad_scale``), by which a fused kernel divides the gradients in place.

    False for a class that is not known: then only comparing the gradients shows what its ``step`` does.
    """
    if implementation is Implementation.FUSED:
        return has_scale
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    decay = group.get("weight_decay")
    if isinstance(decay, torch.Tensor) and decay.requires_grad:
        return True  # torch adds the decay to the gradient in place
    # With foreach and nesterov, the momentum is added in place to the gradient, or to its sum with the decay.
    in_place = implementation is Implementation.FOREACH and bool(group.get("nesterov"))
    return in_place and not decay and not group.get("maximize")
