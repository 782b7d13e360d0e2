"""Steps of an optimizer's class on chosen tensors only, without the user's optimizer noticing.

A step is made by a new object of the class (``__new__``, no constructor) with the attributes of the optimizer, and
with groups and state of its own. So it calls none of the optimizer's hooks, and not its instance's ``step``, which a
learning rate scheduler replaces. The dict of a parameter's state is the one that the caller passes. Nothing else is
shared.

For exact classes of ``torch.optim`` a step may be made in any thread: their undecorated ``step`` is called, which runs
no hooks, and they draw no random numbers. For other classes the global hooks are taken away during the step, and the
random states are put back, so no other optimizer may make a step at the same time.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from lightck.errors import UnsupportedError
from lightck.state import rng
from lightck.state.torch_classes import TORCH_CLASSES, foreign_code

_HOOKS = tuple(
    f"_optimizer_{which}_hooks"
    for which in (
        "step_pre",
        "step_post",
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    )
)
_OWN = frozenset({*_HOOKS, "step", "state", "param_groups", "grad_scale", "found_inf"})
"""Attributes that an object which makes a step does not take over from the optimizer."""

Groups = Sequence[tuple[Mapping[str, object], Sequence[torch.Tensor]]]
"""For each parameter group: its options, and the tensors to update."""


def recorded_name(kind: type[Optimizer]) -> str:
    """Return the name of an optimizer's class in a record of its updates. A class that is none of ``torch.optim``, and
    is called like one of them, gets a name that no class has, so that a replay does not take the one for the other."""
    name = kind.__name__
    is_torch = kind is TORCH_CLASSES.get(name) and foreign_code(kind) is None
    return f"{name} (not that of torch)" if name in TORCH_CLASSES and not is_torch else name


class PartialOptimizer:
    """Makes steps of an optimizer's class on chosen tensors.

    ``kind``: the class. ``is_torch``: whether it is exactly a class of ``torch.optim``, without foreign code.
    ``attributes``: those of the objects that make the steps.
    """

    def __init__(self, kind: type[Optimizer], attributes: Mapping[str, object]) -> None:
        """``of`` and ``of_class`` collect the attributes. Call the constructor only to pass other ones."""
        self.kind = kind
        self.is_torch = kind in TORCH_CLASSES.values() and foreign_code(kind) is None
        self.attributes = dict(attributes)

    @classmethod
    def of(cls, optimizer: Optimizer) -> PartialOptimizer:
        """Return one that makes the steps of this optimizer. It takes over the attributes of the optimizer as they are
        now, as references, without hooks, groups and state."""
        kept = {key: value for key, value in vars(optimizer).items() if key not in _OWN}
        return cls(type(optimizer), kept)

    @classmethod
    def of_class(cls, name: str) -> PartialOptimizer:
        """Return one for a class of ``torch.optim``, where no optimizer is at hand.

        Raises:
            UnsupportedError: there is no such class in ``torch.optim``, or its code was changed.
        """
        kind = TORCH_CLASSES.get(name)
        if kind is None or foreign_code(kind) is not None:
            raise UnsupportedError(
                f"The updates of this checkpoint were made by an optimizer of class {name}, which is not a class of "
                "torch.optim as torch ships it, so they cannot be made again without the optimizer itself. Create "
                "model and optimizer as in the training, and pass them: lightck.recover(path, model, optimizer). The "
                "checkpoint that this returns can be exported too."
            )
        return cls(kind, {"defaults": {"differentiable": False}})

    def step(
        self,
        groups: Groups,
        states: Mapping[torch.Tensor, dict[Any, Any]],
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        *,
        is_shielded: bool = True,
    ) -> Optimizer:
        """Make one step with the gradients that the tensors of ``groups`` have in ``.grad``. Return the object that
        made it.

        states: every tensor of ``groups`` -> the dict of its state, which is changed in place (empty: it has none yet).
        is_shielded: False only if the caller takes the global hooks away and puts the random states back itself.

        Raises:
            UnsupportedError: the class keeps state that belongs to no tensor.
        """
        stepper = self.kind.__new__(self.kind)
        attributes = vars(stepper)
        attributes.update(self.attributes)
        attributes.update((name, OrderedDict()) for name in _HOOKS)
        stepper.state = defaultdict(dict, {p: state for p, state in states.items() if state})
        stepper.param_groups = [{**options, "params": list(tensors)} for options, tensors in groups]
        if grad_scale is not None:
            attributes["grad_scale"] = grad_scale
        if found_inf is not None:
            attributes["found_inf"] = found_inf
        if self.is_torch:
            _undecorated_step(self.kind)(stepper)
        elif is_shielded:
            with rng.preserved(), without_global_hooks():
                self.kind.step(stepper)
        else:
            self.kind.step(stepper)
        self._hand_back(stepper.state, states)
        return stepper

    def _hand_back(self, found: Mapping[Any, Any], states: Mapping[torch.Tensor, dict[Any, Any]]) -> None:
        """Put what the step created or replaced into the dicts that the caller passed."""
        for key, value in found.items():
            known = states.get(key) if isinstance(key, torch.Tensor) else None
            if known is None or not isinstance(value, dict):
                raise UnsupportedError(
                    f"{self.kind.__name__} keeps state that is not the state of one parameter "
                    f"({type(key).__name__} as key), so single parameters cannot be updated. Use "
                    "strategy=lightck.FullState()."
                )
            if value is not known:  # it was made by the step
                known.clear()
                known.update(value)


def _undecorated_step(kind: type[Optimizer]) -> Any:
    """Return the class's ``step`` below torch's decorator that calls hooks and the profiler."""
    step: Any = kind.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Take torch's global optimizer hooks, which belong to the user, away during the block. (Each ``step`` in the chain
    of ``super().step()`` runs them.) Hooks that are registered in the block stay."""
    module = sys.modules[Optimizer.__module__]
    registries = [getattr(module, f"_global_optimizer_{when}_hooks", {}) for when in ("pre", "post")]
    held = [dict(registry) for registry in registries]
    try:
        for registry in registries:
            registry.clear()
        yield
    finally:
        for registry, hooks in zip(registries, held, strict=True):
            registered_since = dict(registry)
            registry.clear()
            registry.update(hooks | registered_since)
