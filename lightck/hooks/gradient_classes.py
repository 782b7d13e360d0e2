"""Observes, for each parameter, who writes into the memory of its gradients.

A gradient is copied in the background only if nothing writes into it until the copy has ended. What a loop does with a
gradient shows at the next update: whether the parameter has another tensor as its gradient, and whether the memory of
this tensor belongs to it alone. So the first gradient of a parameter is of an unobserved class.

Whether a gradient is the same tensor as before is observed with weak references, which keep no memory. Its address
would prove nothing, because torch gives the memory of a released gradient to the next one. There is no weak reference
to a parameter: ``torch.utils.swap_tensors``, with which ``model.double()`` may convert a parameter in place, refuses a
tensor that has one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lightck.hooks.captured_update import GradientClass

_OWN_USES = 2
"""The use count of a storage that belongs to one tensor only: one use by the tensor, and one by the Python object
through which ``shares_memory`` reads the count."""


@dataclass(slots=True, eq=False)
class GradientHistory:
    """What was observed of the gradients of one parameter. kind: the class of the newest gradient."""

    newest: weakref.ref[torch.Tensor] | None
    """The newest gradient; None: it was held in its indexed form."""
    kind: GradientClass = GradientClass.UNOBSERVED
    n_validated: int = 0
    """How many copies of its gradients, after the first gradient, were right."""
    fixed: GradientClass | None = None
    """The class of all further gradients, once it was seen that something writes into them."""
    was_none: bool = False
    """Whether the parameter had no gradient when the first forward pass after the newest gradient had ended."""

    def fix(self, kind: GradientClass) -> None:
        """Give all further gradients of the parameter this class, whose copies must end before the update begins.
        ``WRITTEN_BY_STEP`` is not replaced by another class."""
        if self.fixed is not GradientClass.WRITTEN_BY_STEP:
            self.fixed = kind


class GradientHistories:
    """The histories of all parameters."""

    def __init__(self) -> None:
        self._histories: dict[int, GradientHistory] = {}
        """id of a parameter -> its history. ``parameters_are`` drops it when another parameter gets the id."""
        self._indexed: dict[int, GradientHistory] = {}
        """As ``_histories``, for gradients that are held in their indexed form."""
        self._may_reuse_memory: list[tuple[torch.Tensor, GradientHistory]] = []
        """Parameters whose next gradient may lie in the memory of the newest one, with their histories; until the first
        forward pass after an update has ended."""
        self._ids: dict[int, list[int]] = {}
        """Index of an optimizer -> ids of its parameters at its last update."""
        self.has_recycled = False
        """Whether a gradient was ever found to be recycled."""

    def observe(
        self, param: torch.Tensor, grad: torch.Tensor, local: torch.Tensor, *, is_written: bool, has_forward: bool
    ) -> GradientHistory:
        """Return the history of a parameter, with the class of its gradient.

        grad: ``param.grad``. local: the tensor with its bytes; another one only if ``grad`` is a DTensor. is_written:
        whether the update is known to change this gradient. has_forward: whether a forward pass was seen to end since
        the newest gradient: copies can be completed at its end, before the backward pass begins.
        """
        history = self._histories.get(id(param))
        if history is None:
            history = self._histories[id(param)] = GradientHistory(weakref.ref(grad))
            history.kind = GradientClass.WRITTEN_BY_STEP if is_written else GradientClass.UNOBSERVED
        else:
            is_same = history.newest is not None and history.newest() is grad
            history.newest = weakref.ref(grad)
            history.kind = self._class_of(history, is_same, local, is_written, has_forward)
        history.was_none = False
        if history.kind is not GradientClass.OWNED:
            self._may_reuse_memory.append((param, history))
        return history

    def _class_of(
        self, history: GradientHistory, is_same: bool, local: torch.Tensor, is_written: bool, has_forward: bool
    ) -> GradientClass:
        if is_written:
            return GradientClass.WRITTEN_BY_STEP
        if history.fixed is not None:
            return history.fixed
        if not is_same and not shares_memory(local):
            return GradientClass.OWNED
        if is_same and not history.was_none:
            history.fix(GradientClass.RECYCLED)
            self.has_recycled = True
            return GradientClass.RECYCLED
        return GradientClass.VIEW if has_forward else GradientClass.RECYCLED

    def of_indexed(self, param: torch.Tensor) -> GradientHistory:
        """Return the history of a parameter whose gradient is held in its indexed form, in memory of its own. What the
        loop does with the gradient itself is not observed then."""
        history = self._indexed.get(id(param))
        if history is None:
            history = self._indexed[id(param)] = GradientHistory(None, GradientClass.INDEXED)
        return history

    def parameters_are(self, index: int, parameters: Iterable[torch.Tensor]) -> None:
        """Drop the histories of parameters that an optimizer has got since its last update: their ids may be those of
        parameters that have gone. (One that takes the place of another one, with its id, between two updates goes on
        with its history. If its gradients are used in another way, the checks of their copies show it.)"""
        ids, before = list(map(id, parameters)), self._ids.get(index)
        if ids != before:
            self._ids[index] = ids
            for one in set(ids).difference(before or ()):
                self._histories.pop(one, None)
                self._indexed.pop(one, None)

    def begin_update(self) -> None:
        """The gradients that are observed from now on belong to another update."""
        self._may_reuse_memory.clear()

    def forward_ended(self) -> None:
        """Observe which gradients are set to None before the next backward pass. Only the first forward pass after an
        update says so, because with accumulation the next ones find the gradients of the first backward pass."""
        for param, history in self._may_reuse_memory:
            history.was_none = param.grad is None
        self._may_reuse_memory.clear()


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether the memory of a gradient may belong to other tensors too, or was not allocated by torch (numpy). A bucket
    of DistributedDataParallel with one parameter is as large as its gradient, so the size alone proves nothing. Of a
    sparse gradient the values count."""
    is_sparse = tensor.layout is not torch.strided
    values = tensor._values() if is_sparse else tensor
    storage = values.untyped_storage()
    return (
        storage.nbytes() != values.nbytes
        # ``_values()`` is another tensor with the same storage
        or torch._C._storage_Use_Count(storage._cdata) > _OWN_USES + is_sparse
        or not storage.resizable()
    )
