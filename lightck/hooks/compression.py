"""Compresses gradients before an update consumes them: only the entries of largest magnitude stay.

In one process this happens in the last of all pre-step hooks, before anything is captured: after accumulation,
unscaling, clipping, and the hooks of the user. Under DistributedDataParallel the communication hook has done it in the
backward pass (``topk_all_reduce.py``).

With error feedback, what was left out of a gradient (the *residual*) is added to the next gradient of the parameter. So
the residuals are state of the training: ``Residuals`` is saved as the objects in ``state=`` are. Invariant: residuals
change only inside ``step()``, like all state that is saved. So the residuals that the communication hook computes in
the backward pass are *pending* until ``step()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from lightck.errors import UnsupportedError
from lightck.events import StepListener
from lightck.state.device_transfers import is_dense_tensor
from lightck.state.selection import is_selectable, keep_largest

Kept = Callable[[int], int]
"""From the number of entries of a gradient to the number of those that are kept."""
RESIDUALS_WITH_BASES = "residuals_of_bases"
"""Key in the state of ``Residuals``, if they are saved with the bases of their parameters. In the pool large ones then
lie with the bases (``pool.format.layout.RESIDUAL_PREFIX``)."""
RESIDUALS_EACH_STEP = "residuals"
"""Key in the state of ``Residuals``, if they are saved at each step."""


class Residuals:
    """What was left out of the gradients: name of a parameter -> tensor."""

    def __init__(self, key: str) -> None:
        """``key``: ``RESIDUALS_WITH_BASES`` or ``RESIDUALS_EACH_STEP``."""
        self._key = key
        self._tensors: dict[str, torch.Tensor] = {}
        self._pending: dict[str, torch.Tensor] = {}

    def allocate(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Make a residual of zeros for each of these parameters, so that a pool has room for it from the start."""
        for name, p in parameters.items():
            if p.requires_grad and is_selectable(p.detach()):
                self._tensors[name] = torch.zeros_like(p.detach(), memory_format=torch.contiguous_format)

    def of(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return the residual of a parameter, which fits its gradient."""
        found = self._tensors.get(name)
        if found is not None and found.shape != gradient.shape:
            raise UnsupportedError(
                f"The gradient of {name!r} has the shape {list(gradient.shape)} now, and its residual (error feedback "
                f"of TopK) {list(found.shape)}. A parameter of another size needs a new training: attach to another "
                "pool."
            )
        if found is None or (found.dtype, found.device) != (gradient.dtype, gradient.device):
            zeros = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
            found = self._tensors[name] = zeros if found is None else zeros.copy_(found)
        return found

    def pending(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return the residual that a parameter has in the backward pass, to be changed in place. It takes
        effect at the next ``take_pending``."""
        found = self._pending.get(name)
        if found is None:
            found = self._pending[name] = self.of(name, gradient).clone()
        return found

    def take_pending(self, names: Iterable[str]) -> None:
        """An update of these parameters begins: their pending residuals take effect now."""
        for name in names:
            pending = self._pending.pop(name, None)
            if pending is not None:
                self.of(name, pending).copy_(pending)

    def state_dict(self) -> dict[str, Any]:
        return {self._key: dict(self._tensors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved residuals. They may be of a run that saved them at other moments."""
        for key in (RESIDUALS_WITH_BASES, RESIDUALS_EACH_STEP):
            for name, tensor in state.get(key, {}).items():
                known = self._tensors.get(name)
                taken = tensor.detach().clone(memory_format=torch.contiguous_format)
                self._tensors[name] = taken if known is None else taken.to(known.device)
        self._pending.clear()

    def forget(self) -> None:
        """Drop all references to tensors."""
        self._tensors.clear()
        self._pending.clear()


NamesOf = Callable[[Optimizer], Sequence[Sequence[str]]]
"""Returns, for each group of an optimizer, the names of its parameters."""


class PendingResiduals(StepListener):
    """Under DistributedDataParallel: the residuals of a backward pass take effect when an update consumes it."""

    def __init__(self, names_of: NamesOf, residuals: Residuals) -> None:
        self._names_of, self._residuals = names_of, residuals

    def gradients_final(self, index: int, optimizer: Optimizer) -> None:
        for names in self._names_of(optimizer):
            self._residuals.take_pending(names)


class GradientCompression(StepListener):
    """Compresses the gradients of one session's optimizers. It must receive ``gradients_final`` before the listener
    that captures them."""

    def __init__(self, kept: Kept, names_of: NamesOf, residuals: Residuals | None) -> None:
        """``residuals``: None: no error feedback."""
        self._kept, self._names_of, self._residuals = kept, names_of, residuals

    def gradients_final(self, index: int, optimizer: Optimizer) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, torch.Tensor) and bool(found_inf.item()):
            return  # the step will change nothing
        if self._residuals is not None and getattr(optimizer, "grad_scale", None) is not None:
            raise UnsupportedError(
                "TopK(error_feedback=True) cannot be used here: a GradScaler lets the fused optimizer unscale the "
                "gradients inside step(), so a residual would have the scale of an earlier step. Call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        names = self._names_of(optimizer) if self._residuals is not None else None
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None and is_selectable(p.grad):
                    residual = None
                    if not is_dense_tensor(p.grad):  # an expanded tensor cannot be written in place
                        p.grad = p.grad.detach().clone(memory_format=torch.contiguous_format)
                    if self._residuals is not None and names is not None:
                        residual = self._residuals.of(names[g][i], p.grad)
                    keep_largest(p.grad, self._kept(p.grad.numel()), residual)
