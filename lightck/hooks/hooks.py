"""The hooks by which a training tells us where it is: forward of the root, step of each optimizer.

Installs and removes them, and translates torch's calls into the step events of ``events.py``. It decides nothing.
Inside a graph that torch.compile traces the hooks are empty, so they neither break the graph nor run when it does; the
session notices that they do not fire.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightck.events import StepListener
from lightck.hooks.calls import ModuleHook, closure_of, is_called_by, weakly
from lightck.hooks.copies import CleanCopies
from lightck.hooks.layerwise import layerwise_of
from lightck.state.nest import has_hooks, places

_DUMMY_STEP = "_init_optim_state"
"""torch.distributed.checkpoint.state_dict makes optimizer state by a step that changes nothing."""


class Hooks:
    """All hooks of one session."""

    def __init__(self, events: StepListener, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._events = events
        self._optimizers: list[Optimizer] = []
        self._roots: list[int] = []
        """For each optimizer the position of the one whose step is its update: a wrapper and what it wraps are one."""
        self._in_closure = 0
        self._stepping: dict[int, FrameType] = {}
        """Optimizer -> the frame of torch's hook wrapper around its running ``step``."""
        self._counted: FrameType | None = None
        """That of the step whose update was counted, and whose other post hooks run."""
        self._handles: list[Any] = [
            model.register_forward_pre_hook(ModuleHook(self._forward_pre, with_inputs=True), with_kwargs=True),
            model.register_forward_hook(ModuleHook(self._forward_post)),
            CleanCopies(model),
            register_optimizer_step_pre_hook(weakly(self._any_step_pre)),
            register_optimizer_step_post_hook(weakly(self._any_step_post)),
        ]
        self.add(optimizers)

    def add(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow these too: an optimizer, or a wrapper with what it wraps."""
        self._roots.extend(len(self._optimizers) + place.root for place in places(optimizers))
        self._optimizers.extend(optimizers)
        for optimizer in filter(has_hooks, optimizers):
            self._handles.append(optimizer.register_step_pre_hook(self._step_pre))
            self._handles.append(optimizer.register_step_post_hook(self._step_post))
            _put_first(optimizer, self._handles[-1].id)
        for layers in filter(None, map(layerwise_of, optimizers)):
            self._handles.append(layers.tell(self))

    @property
    def handles(self) -> list[Any]:
        """torch's handles of all hooks, now and later: ``remove`` takes them out without needing this object."""
        return self._handles

    def follow(self, optimizer: Any) -> bool:
        """Whether this one's steps are seen."""
        return any(o is optimizer for o in self._optimizers)

    def forget(self) -> None:
        """Let go of the optimizers, after ``remove``."""
        self._optimizers.clear()
        self._stepping.clear()
        self._counted = None

    def _index(self, optimizer: Optimizer) -> int:
        """Which update its step belongs to."""
        return next(root for o, root in zip(self._optimizers, self._roots, strict=True) if o is optimizer)

    # -- layers (a layer-wise update) --------------------------------------------------------------------

    def layers_begin(self, optimizer: Optimizer) -> None:
        self._events.layers_begin(self._index(optimizer))

    def layer_updated(self, name: str, begin: int, tensors: Sequence[torch.Tensor]) -> None:
        self._events.layer_updated(name, begin, tensors)

    def layers_forgotten(self, optimizer: Optimizer) -> None:
        self._events.layers_forgotten(self._index(optimizer))

    # -- forward -----------------------------------------------------------------------------------------

    def _forward_pre(self, module: nn.Module, *inputs: Any) -> None:
        if module.training and torch.is_grad_enabled() and not self._in_closure:
            self._stepping.clear()  # a step that raised left its frame, and with it all that its caller held
            self._counted = None
            self._events.before_forward(inputs)
            self._events.forward_begins()

    def _forward_post(self, module: nn.Module) -> None:
        if module.training and torch.is_grad_enabled():
            self._events.forward_ended()

    # -- step --------------------------------------------------------------------------------------------

    def _any_step_pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.follow(optimizer):
            self._events.unknown_optimizer(optimizer)

    def _step_pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _is_dummy(kwargs):
            self._events.gate()
            return None
        index, wrapper = self._index(optimizer), sys._getframe(1)
        if self._is_inside(index, wrapper):
            return None
        self._stepping[index] = wrapper
        closure, put_back = closure_of(args, kwargs)
        self._events.before_step(index, self._optimizers[index] is not optimizer, has_gradients=closure is None)
        if closure is None:
            self._events.gate()
            return None
        waits = type(optimizer).__module__.startswith("torch.optim.")
        if not waits:
            self._events.gate()
        return put_back(self._wrapped(closure, gate_after_first=waits))

    def _is_inside(self, index: int, frame: FrameType | None) -> bool:
        """Whether this ``step`` is called by the optimizer's own ``step`` (a subclass whose ``step`` ends in
        ``super().step()`` has hooks around both) or by that of a wrapper around it. A frame that is left over from a
        step that raised is no caller."""
        outer = self._stepping.get(index)
        while outer is not None and frame is not None:
            if frame is outer:
                return True
            frame = frame.f_back
        return False

    def _wrapped(self, closure: Callable[..., Any], gate_after_first: bool) -> Callable[..., Any]:
        """The user's closure; torch.optim updates nothing before its first call has returned."""
        waiting = gate_after_first

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal waiting
            self._in_closure += 1
            try:
                result = closure(*args, **kwargs)
            finally:
                self._in_closure -= 1
            if waiting:
                waiting = False
                self._events.gate()
            return result

        return wrapped

    def _step_post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_dummy(kwargs):
            return
        index, wrapper = self._index(optimizer), sys._getframe(1)
        if self._stepping.get(index, wrapper) is not wrapper:
            return
        self._stepping.pop(index, None)
        if _changed_nothing(optimizer):
            self._events.skipped_step(index)
        else:
            self._events.after_step(index)
            if len(optimizer._optimizer_step_post_hooks) > 1:
                self._counted = wrapper

    def _any_step_post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Behind the user's own post hooks, which may draw random numbers and write buffers: as part of the update."""
        if self._counted is not None and self._counted is sys._getframe(2):
            self._counted = None
            self._events.after_step_hooks()


def remove(handles: list[Any]) -> None:
    """Take hooks out. Handles hold nothing alive, so this also works when the session is being collected."""
    for handle in handles:
        handle.remove()
    handles.clear()


def _put_first(optimizer: Optimizer, hook: int) -> None:
    """Before the user's post hooks: one that raises must not hide that an update was made."""
    hooks = optimizer._optimizer_step_post_hooks
    if isinstance(hooks, OrderedDict) and hook in hooks:
        hooks.move_to_end(hook, last=False)


def _changed_nothing(optimizer: Optimizer) -> bool:
    """A fused optimizer under GradScaler is stepped even where it found inf, and then changes nothing."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.item())


def _is_dummy(kwargs: Any) -> bool:
    if "closure" not in kwargs or kwargs["closure"] is not None:
        return False
    return is_called_by(lambda frame: frame.f_code.co_name == _DUMMY_STEP)
