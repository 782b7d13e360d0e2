"""The torch hooks of a session: on the root module's forward and on each optimizer's ``step``.

``Hooks`` installs and removes them, and translates torch's calls into the step events of ``events.py``. Inside a graph
that torch.compile traces the hooks do nothing: they neither break the graph nor run with it. The session detects that
they do not fire.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightck.events import StepListener
from lightck.hooks import own_hooks
from lightck.hooks.hook_cost import counted, seconds_per_hook
from lightck.hooks.layerwise import layerwise_of
from lightck.state.optimizer_wrappers import has_hooks, wrapper_roles
from lightck.stats import Meter

_INIT_STEP = "_init_optim_state"
"""The function of torch.distributed.checkpoint.state_dict that creates optimizer state by a step without effect."""

_STEP_FRAME = 2
"""The frame of torch's wrapper function around ``step``, counted upwards from a ``counted`` hook. Frame 1 is the
function that ``counted`` puts around the hook."""


class Hooks:
    """All hooks of one session."""

    def __init__(self, events: StepListener, model: nn.Module, optimizers: Sequence[Optimizer], meter: Meter) -> None:
        """``meter``: counts what the hooks cost."""
        self._events = events
        self.meter, self.seconds_per_hook = meter, seconds_per_hook()
        self._optimizers: list[Optimizer] = []
        self._roots: dict[int, int] = {}
        """id of an optimizer -> the index of the optimizer whose step is its update: a wrapper and the optimizers in
        it share one index. The ids stay valid, because ``_optimizers`` keeps each of them alive."""
        self._in_closure = 0
        self._stepping: dict[int, FrameType] = {}
        """Optimizer index -> the frame of torch's wrapper function around its running ``step``."""
        self._updated_frame: FrameType | None = None
        """The frame of the ``step`` whose update was reported, while the user's post-step hooks run."""
        before_any, after_any = self._hooks_of_any_step()
        self.handles: list[own_hooks.Handle] = [
            model.register_forward_pre_hook(own_hooks.ModuleHook(self._forward_pre), with_kwargs=True),
            model.register_forward_hook(own_hooks.ModuleHook(self._forward_post)),
            own_hooks.HookFreeCopies(model),
            register_optimizer_step_pre_hook(before_any),
            register_optimizer_step_post_hook(after_any),
        ]
        """Handles of all hooks, also of those added later: ``own_hooks.remove`` removes them without this object."""
        self.add(optimizers)

    def add(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow these optimizers too: one optimizer, or a wrapper with the optimizers inside it."""
        for optimizer, wrapper_role in zip(optimizers, wrapper_roles(optimizers), strict=True):
            self._roots[id(optimizer)] = len(self._optimizers) + wrapper_role.root
        self._optimizers.extend(optimizers)
        for optimizer in filter(has_hooks, optimizers):
            post = optimizer.register_step_post_hook(self._step_post)
            self.handles += optimizer.register_step_pre_hook(self._step_pre), post
            # This hook runs before the user's post hooks: if one of those raises, the update is reported already.
            own_hooks.move_to_end(optimizer._optimizer_step_post_hooks, post, last=False)
        for optimizer in optimizers:
            layers = layerwise_of(optimizer)
            if layers is not None:
                self.handles.append(layers.add_listener(self._events, self._index(optimizer)))

    def follows(self, optimizer: object) -> bool:
        """Whether this optimizer is followed."""
        return id(optimizer) in self._roots

    def forget(self) -> None:
        """Drop the references to optimizers and frames, after the hooks were removed."""
        self._optimizers.clear()
        self._roots.clear()
        self._stepping.clear()
        self._updated_frame = None

    @property
    def is_in_step(self) -> bool:
        """Whether a followed optimizer is inside its ``step``, or the last ``step`` raised an exception."""
        return bool(self._stepping)

    def _index(self, optimizer: Optimizer) -> int:
        """The index of the optimizer whose step is the update."""
        return self._roots[id(optimizer)]

    # -- forward -----------------------------------------------------------------------------------------

    @counted
    def _forward_pre(self, module: nn.Module, *inputs: object) -> None:
        if module.training and torch.is_grad_enabled() and not self._in_closure:
            self._stepping.clear()  # a step that raised left its frame here, which keeps its callers' variables alive
            self._updated_frame = None
            self._events.before_forward(inputs)
            self._events.forward_begins()

    @counted
    def _forward_post(self, module: nn.Module, *_: object) -> None:
        if module.training and torch.is_grad_enabled():
            self._events.forward_ended()

    # -- step --------------------------------------------------------------------------------------------

    @counted
    def _unknown_step(self, optimizer: Optimizer) -> None:
        self._events.unknown_optimizer(optimizer)

    @counted
    def _step_pre(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> own_hooks.Call | None:
        if _is_init_step(kwargs):
            self._events.gate()  # this step is no update, but it writes to the parameters, which copies may still read
            return None
        index, frame = self._index(optimizer), sys._getframe(_STEP_FRAME)
        if self._is_inside(index, frame):
            return None
        self._stepping[index] = frame
        try:
            return self._prepare_step(index, optimizer, args, kwargs)
        except BaseException:
            del self._stepping[index]  # the step does not run
            raise

    def _prepare_step(
        self, index: int, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> own_hooks.Call | None:
        closure = own_hooks.closure_of(args, kwargs)
        self._events.before_step(index, self._optimizers[index] is not optimizer, has_gradients=closure is None)
        if closure is None:
            self._events.gate()
            return None
        is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
        if not is_of_torch:
            self._events.gate()
        return own_hooks.with_closure(args, kwargs, self._wrapped(closure, gate_after_first=is_of_torch))

    def _is_inside(self, index: int, frame: FrameType | None) -> bool:
        """Whether this ``step`` runs inside the ``step`` of the same optimizer (a subclass whose ``step`` calls
        ``super().step()`` has hooks around both) or of a wrapper around it. The left-over frame of a step that raised
        is not among the callers."""
        outer = self._stepping.get(index)
        while outer is not None and frame is not None:
            if frame is outer:
                return True
            frame = frame.f_back
        return False

    def _wrapped(self, closure: own_hooks.Closure, gate_after_first: bool) -> own_hooks.Closure:
        """The user's closure. ``gate_after_first``: pass the gate after the first call, because torch.optim updates
        nothing before it has returned."""
        waiting = gate_after_first

        def wrapped(*args: object, **kwargs: object) -> object:
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

    @counted
    def _step_post(self, optimizer: Optimizer, _: object, kwargs: dict[str, object]) -> None:
        if _is_init_step(kwargs):
            return
        index, frame = self._index(optimizer), sys._getframe(_STEP_FRAME)
        if self._stepping.get(index, frame) is not frame:
            return  # this step is inside another one, which reports the update
        self._stepping.pop(index, None)
        if _changed_nothing(optimizer):
            self._events.skipped_step(index)
        else:
            self._events.after_step(index)
            if len(optimizer._optimizer_step_post_hooks) > 1:
                self._updated_frame = frame

    @counted
    def _step_hooks_ended(self) -> None:
        """The user's own post hooks have run too, which belong to the update: they may draw random numbers and write
        buffers."""
        self._updated_frame = None
        self._events.after_step_hooks()

    def _hooks_of_any_step(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """The hooks before and after the ``step`` of every optimizer in the process. They mostly do nothing, so they
        are plain functions. They refer weakly to this object, because torch's registries are global."""
        ref = weakref.ref(self)

        def before(optimizer: Optimizer, *_: object) -> None:
            hooks = ref()
            if hooks is not None and not hooks.follows(optimizer):
                hooks._unknown_step(optimizer)
            elif hooks is not None:
                hooks.meter.count_hook(hooks.seconds_per_hook)

        def after(*_: object) -> None:
            hooks = ref()
            frame = None if hooks is None else hooks._updated_frame
            if hooks is not None and frame is not None and frame is sys._getframe(_STEP_FRAME - 1):
                hooks._step_hooks_ended()
            elif hooks is not None:
                hooks.meter.count_hook(hooks.seconds_per_hook)

        return before, after


def _changed_nothing(optimizer: Optimizer) -> bool:
    """Whether this is a fused optimizer that found an infinity: GradScaler steps it anyway, and it changes nothing."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.item())


def _is_init_step(kwargs: dict[str, object]) -> bool:
    """Whether ``_INIT_STEP`` makes this step. It passes ``closure=None``. The call stack is searched only for such
    steps, because the search is slow."""
    if "closure" not in kwargs or kwargs["closure"] is not None:
        return False
    return own_hooks.is_called_by(lambda frame: frame.f_code.co_name == _INIT_STEP)
