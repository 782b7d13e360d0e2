"""The torch hooks of a session: on the root module's forward and on each optimizer's ``step``.

``Hooks`` installs these hooks, and translates torch's calls into the step events of ``events.py``. Inside a graph that
torch.compile traces, the hooks of modules do nothing: they do not break the graph, and they do not run when the graph
runs. The session detects the missing events. The hooks of optimizers break the graph, and run.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pkgutil import iter_modules
from types import FrameType

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from lightck.events import StepListener
from lightck.hooks import own_hooks
from lightck.hooks.hook_cost import counted, seconds_per_hook
from lightck.hooks.layerwise import layerwise_of
from lightck.state.optimizer_wrappers import has_hooks, wrapper_roles
from lightck.stats import Meter

_INIT_STEP = "_init_optim_state"
"""The function of torch.distributed.checkpoint.state_dict that creates optimizer state. It calls ``step`` with zero
gradients and a learning rate of 0, so that no value changes."""

_STEP_FRAME = 2
"""Number of frames from a ``counted`` hook up to torch's wrapper function around ``step``. The frame between them is
the function that ``counted`` puts around the hook."""


_is_outside_graphs = False


def keep_out_of_graphs() -> None:
    """Let torch.compile break a graph at the hooks of an optimizer's ``step``, and call them, if it traces a function
    that calls ``step``. It can trace neither them nor what they call. (The hooks of modules are traced, so that a whole
    model stays one graph.)"""
    global _is_outside_graphs
    rules = sys.modules.get("torch._dynamo.trace_rules")  # an optimizer imports it
    if rules is None or _is_outside_graphs or not hasattr(rules, "add"):
        return
    folder = os.path.dirname(__file__)
    rooms = (each.name for each in iter_modules([os.path.dirname(folder)], "lightck."))
    own = (each.name for each in iter_modules([folder], "lightck.hooks."))
    for name in {*rooms, *own} - {"lightck.hooks", own_hooks.__name__, "lightck.__main__"}:
        rules.add(name)
    _is_outside_graphs = True


class Hooks:
    """All hooks of one session."""

    def __init__(self, events: StepListener, model: nn.Module, optimizers: Sequence[Optimizer], meter: Meter) -> None:
        """``events``: receives the step events. ``meter``: counts the time of the hooks."""
        keep_out_of_graphs()
        self._events = events
        self.meter, self.seconds_per_hook = meter, seconds_per_hook()
        self._optimizers: list[Optimizer] = []
        self._index_by_id: dict[int, int] = {}
        """id of an optimizer -> the index of the optimizer whose ``step`` makes its updates. A wrapper and the
        optimizers inside the wrapper share one index. The ids stay valid, because ``_optimizers`` keeps the optimizers
        alive."""
        self._in_closure = 0
        """Number of closures of ``step`` that are running now."""
        self._stepping: dict[int, FrameType] = {}
        """Optimizer index -> the frame of torch's wrapper function around its running ``step``."""
        self._reported_step_frame: FrameType | None = None
        """While the user's post-step hooks run: the frame of the ``step`` whose update was reported. Otherwise None."""
        self._reports_gradients = False
        self._last_hooks: dict[int, RemovableHandle] = {}
        """id of an optimizer -> the handle of its hook that reports ``gradients_final``."""
        before_any, after_any = self._hooks_of_any_step()
        self.handles: list[own_hooks.Handle] = [
            model.register_forward_pre_hook(own_hooks.ModuleHook(self._forward_pre), with_kwargs=True),
            model.register_forward_hook(own_hooks.ModuleHook(self._forward_post)),
            own_hooks.HookFreeCopies(model),
            register_optimizer_step_pre_hook(before_any),
            register_optimizer_step_post_hook(after_any),
        ]
        """Handles of all hooks, including those that ``add`` installs. ``own_hooks.remove(handles)`` removes the hooks
        and does not need this object."""
        self.add(optimizers)

    def add(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow more optimizers. A wrapper and the optimizers inside the wrapper must be passed in one call."""
        for optimizer, wrapper_role in zip(optimizers, wrapper_roles(optimizers), strict=True):
            self._index_by_id[id(optimizer)] = len(self._optimizers) + wrapper_role.root
        self._optimizers.extend(optimizers)
        for optimizer in filter(has_hooks, optimizers):
            post = optimizer.register_step_post_hook(self._step_post)
            self.handles += optimizer.register_step_pre_hook(self._step_pre), post
            # lightck's hook runs before the user's post hooks. So the update is reported even if a user's hook raises.
            own_hooks.move_to_end(optimizer._optimizer_step_post_hooks, post, last=False)
            if self._reports_gradients:
                self._add_last_hook(optimizer)
        for optimizer in optimizers:
            layers = layerwise_of(optimizer)
            if layers is not None:
                self.handles.append(layers.add_listener(self._events, self._index(optimizer)))

    def report_gradients(self) -> None:
        """Report ``gradients_final`` from now on, also for optimizers that are added later."""
        if not self._reports_gradients:
            self._reports_gradients = True
            for optimizer in filter(has_hooks, self._optimizers):
                self._add_last_hook(optimizer)

    def report_no_gradients(self) -> None:
        """Report ``gradients_final`` no more."""
        self._reports_gradients = False
        last = list(self._last_hooks.values())
        self._last_hooks.clear()
        self.handles[:] = [one for one in self.handles if one not in last]  # the session's finalizer has this list
        for handle in last:
            handle.remove()

    def _add_last_hook(self, optimizer: Optimizer) -> None:
        handle = optimizer.register_step_pre_hook(self._step_pre_last)
        self._last_hooks[id(optimizer)] = handle
        self.handles.append(handle)

    def follows(self, optimizer: object) -> bool:
        """Whether this optimizer is followed."""
        return id(optimizer) in self._index_by_id

    def forget(self) -> None:
        """Drop the references to optimizers and frames, after the hooks were removed."""
        self._optimizers.clear()
        self._index_by_id.clear()
        self._stepping.clear()
        self._last_hooks.clear()
        self._reported_step_frame = None

    @property
    def is_in_step(self) -> bool:
        """Whether a followed optimizer is inside its ``step``, or the last ``step`` raised an exception."""
        return bool(self._stepping)

    def _index(self, optimizer: Optimizer) -> int:
        """The index of the optimizer whose ``step`` makes the updates of this one."""
        return self._index_by_id[id(optimizer)]

    # -- forward -----------------------------------------------------------------------------------------

    @counted
    def _forward_pre(self, module: nn.Module, *inputs: object) -> None:
        if module.training and torch.is_grad_enabled() and not self._in_closure and _is_forward_of_loop():
            self._stepping.clear()  # if a step raised, its frame is still here, and would keep variables alive
            self._reported_step_frame = None
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
            self._events.gate()  # this step is no update, but it writes to parameters that copies may still read
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

    @counted
    def _step_pre_last(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> own_hooks.Call | None:
        """Report ``gradients_final`` for the outermost ``step``, which ``_step_pre`` has recorded. This hook runs after
        all other pre-step hooks, because they may change gradients and options."""
        index = self._index(optimizer)
        if self._stepping.get(index) is not sys._getframe(_STEP_FRAME):
            return None
        closure = own_hooks.closure_of(args, kwargs)
        if closure is None:
            self._events.gradients_final(index, optimizer)
            return None

        def reporting(*args: object, **kwargs: object) -> object:
            result = closure(*args, **kwargs)
            self._events.gradients_final(index, optimizer)
            return result

        return own_hooks.with_closure(args, kwargs, reporting)

    def _keep_last(self, optimizer: Optimizer) -> None:
        """Move the hook that reports ``gradients_final`` behind hooks that the user registered later. torch calls this
        before it iterates over the hooks of the optimizer."""
        handle = self._last_hooks.get(id(optimizer))
        if handle is not None and next(reversed(optimizer._optimizer_step_pre_hooks), None) != handle.id:
            own_hooks.move_to_end(optimizer._optimizer_step_pre_hooks, handle, last=True)

    def _is_inside(self, index: int, frame: FrameType | None) -> bool:
        """Whether this ``step`` runs inside the ``step`` of a wrapper, or inside another ``step`` of the same optimizer
        (if a subclass calls ``super().step()``, both have hooks). If an earlier ``step`` raised, its frame is still in
        ``_stepping``, but it is not among the callers of this ``step``."""
        outer = self._stepping.get(index)
        while outer is not None and frame is not None:
            if frame is outer:
                return True
            frame = frame.f_back
        return False

    def _wrapped(self, closure: own_hooks.Closure, gate_after_first: bool) -> own_hooks.Closure:
        """Return a function that calls the user's closure. ``gate_after_first``: whether the returned function passes
        the gate, once the closure has returned for the first time (an optimizer of torch.optim updates nothing before
        that). False: the gate was passed already."""
        must_pass_gate = gate_after_first

        def wrapped(*args: object, **kwargs: object) -> object:
            nonlocal must_pass_gate
            self._in_closure += 1
            try:
                result = closure(*args, **kwargs)
            finally:
                self._in_closure -= 1
            if must_pass_gate:
                must_pass_gate = False
                self._events.gate()
            return result

        return wrapped

    @counted
    def _step_post(self, optimizer: Optimizer, _: object, kwargs: dict[str, object]) -> None:
        if _is_init_step(kwargs):
            return
        index, frame = self._index(optimizer), sys._getframe(_STEP_FRAME)
        if self._stepping.get(index, frame) is not frame:
            return  # this step ran inside another step, and the hook of the outer step reports the update
        self._stepping.pop(index, None)
        if _changed_nothing(optimizer):
            self._events.skipped_step(index)
        else:
            self._events.after_step(index)
            if len(optimizer._optimizer_step_post_hooks) > 1:
                self._reported_step_frame = frame

    @counted
    def _step_hooks_ended(self) -> None:
        """Report that the user's own post-step hooks have returned. They are part of the update, because they may draw
        random numbers and write buffers."""
        self._reported_step_frame = None
        self._events.after_step_hooks()

    def _hooks_of_any_step(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the hooks that torch calls before and after the ``step`` of every optimizer in the process. Most of
        their calls do nothing. So ``counted`` does not measure them: such a call counts as ``seconds_per_hook``. The
        hooks have only a weak reference to this object, because torch's registries are global."""
        ref = weakref.ref(self)

        def before(optimizer: Optimizer, *_: object) -> None:
            hooks = ref()
            if hooks is not None and not hooks.follows(optimizer):
                hooks._unknown_step(optimizer)
            elif hooks is not None:
                hooks._keep_last(optimizer)
                hooks.meter.count_hook(hooks.seconds_per_hook)

        def after(*_: object) -> None:
            hooks = ref()
            frame = None if hooks is None else hooks._reported_step_frame
            # This function is not ``counted``, so torch's wrapper function is one frame nearer.
            if hooks is not None and frame is not None and frame is sys._getframe(_STEP_FRAME - 1):
                hooks._step_hooks_ended()
            elif hooks is not None:
                hooks.meter.count_hook(hooks.seconds_per_hook)

        return before, after


def _is_forward_of_loop() -> bool:
    """Whether this forward is one of the loop's own, at which a checkpoint can close. There are two other kinds:
    activation checkpointing repeats a forward inside the backward pass, after the first run has changed buffers; and
    torch.func.functional_call runs a forward with other tensors than the model's own."""
    return not (own_hooks.is_in_backward() or own_hooks.is_in_functional_call())


def _changed_nothing(optimizer: Optimizer) -> bool:
    """Whether the ``step`` that has just run changed nothing, because this fused optimizer found an infinity in its
    gradients. (GradScaler calls ``step`` of a fused optimizer even then.)"""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.item())


def _is_init_step(kwargs: dict[str, object]) -> bool:
    """Whether the function ``_INIT_STEP`` made this call of ``step``. That function passes ``closure=None``. The call
    stack is searched only if ``closure=None`` was passed, because the search is slow."""
    if "closure" not in kwargs or kwargs["closure"] is not None:
        return False
    return own_hooks.is_called_by(lambda frame: frame.f_code.co_name == _INIT_STEP)
