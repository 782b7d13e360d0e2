"""Which code updates each parameter of a group: the for-loop, foreach or fused implementation of ``torch.optim``; and
whether it changes the gradients.

If the options ``foreach`` and ``fused`` are None, torch chooses at each step, by the parameters that have a gradient
then. If one parameter were updated alone, torch could choose other code than in the training, which computes other
bits. So the choice is made here, before the update, from the whole group. Source: ``_default_to_fused_or_foreach`` and
the functional form of each optimizer in torch 2.13; the tests compare with the code that torch really calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from lightck.state.consumed_update import Implementation

_Bucket = list[tuple[str, torch.Tensor]]


def chosen_implementations(
    kind: type, group: Mapping[str, Any], names: Sequence[str], state: Mapping[torch.Tensor, Any]
) -> tuple[Implementation, dict[str, Implementation]]:
    """Return the implementation that updates the parameters of a group, and name -> implementation for the parameters
    that another one updates. To be called when the gradients are final, before the update.

    kind: the class of the optimizer. group: one of its ``param_groups``. names: the names of the group's parameters, in
    the same order. state: the optimizer's state.
    """
    chosen = _chosen(kind, group)
    if chosen is not Implementation.FOREACH:
        return chosen, {}
    others: dict[str, Implementation] = {}
    for bucket in _buckets(names, group["params"]):
        if issubclass(kind, torch.optim.Adagrad) and any(p.grad is not None and p.grad.is_sparse for _, p in bucket):
            others.update((name, Implementation.FOR_LOOP) for name, _ in bucket)
        elif issubclass(kind, torch.optim.SGD) and group["momentum"] != 0:
            has_momentum = [state.get(p, {}).get("momentum_buffer") is not None for _, p in bucket]
            if any(has_momentum) and not all(has_momentum):
                others.update((name, Implementation.FOREACH_BESIDE_NEW) for name, _ in bucket)
    return chosen, others


def _chosen(kind: type, group: Mapping[str, Any]) -> Implementation:
    is_sgd = issubclass(kind, torch.optim.SGD)  # SGD looks at foreach first, the other classes at fused
    if group.get("fused") and not (is_sgd and group.get("foreach")):
        return Implementation.FUSED
    if group.get("foreach"):
        return Implementation.FOREACH
    is_torchs_choice = "foreach" in group and group["foreach"] is None and group.get("fused") is None
    if not is_torchs_choice or issubclass(kind, torch.optim.Adafactor):  # Adafactor takes the for-loop by default
        return Implementation.FOR_LOOP
    if (
        issubclass(kind, torch.optim.Adam)
        and isinstance(group.get("lr"), torch.Tensor)
        and not group.get("capturable", False)
    ):
        return Implementation.FOR_LOOP
    updated = [p for p in group["params"] if p.grad is not None]
    choose: Any = torch_optimizer._default_to_fused_or_foreach
    # SGD does not pass ``differentiable`` on to this choice.
    _, is_foreach = choose(updated, bool(group.get("differentiable")) and not is_sgd, use_fused=False)
    return Implementation.FOREACH if is_foreach else Implementation.FOR_LOOP


def writes_gradients(kind: type, options: Mapping[str, Any], implementation: Implementation, has_scale: bool) -> bool:
    """Whether an update by a class of ``torch.optim`` changes the gradients of a group. ``options``: of the group.
    ``has_scale``: whether a GradScaler gave the optimizer a scale (``grad_scale``), by which a fused kernel divides the
    gradients in place. No answer for any other class: only comparing the gradients shows what its ``step`` does."""
    if implementation is Implementation.FUSED:
        return has_scale
    if not issubclass(kind, torch.optim.SGD):
        return False
    decay = options.get("weight_decay")
    if isinstance(decay, torch.Tensor) and decay.requires_grad:
        return True  # torch adds the decay to the gradient in place
    # With foreach and nesterov, the momentum is added in place to the gradient, or to its sum with the decay.
    is_foreach = implementation in (Implementation.FOREACH, Implementation.FOREACH_BESIDE_NEW)
    return is_foreach and bool(options.get("nesterov")) and not decay and not options.get("maximize")


def _buckets(names: Sequence[str], parameters: Sequence[torch.Tensor]) -> Iterator[_Bucket]:
    """Yield the parameters with gradients that one foreach call updates together: those of a device and a dtype."""
    found: dict[tuple[torch.device, torch.dtype], _Bucket] = {}
    for name, p in zip(names, parameters, strict=True):
        if p.grad is not None:
            found.setdefault((p.device, p.dtype), []).append((name, p))
    yield from found.values()
