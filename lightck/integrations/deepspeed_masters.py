"""The optimizer inside ZeRO, as an optimizer of the model's parameters.

    the optimizer inside ZeRO                        what lightck follows
    a flat tensor for a group of parameters   <---   a tensor for each parameter: a view of its range
    state of the flat tensor (exp_avg, ...)   <---   state of each parameter: views of the same ranges
    one step count for a flat tensor          --->   a step count for each parameter: a copy
    options of each group (lr, ...)           <-->   the same options

``PartitionedOptimizer.view`` is an optimizer of the same class, which never makes an update itself: ``step_with`` runs
the step of DeepSpeed between its step hooks, which are those that lightck installs.

Invariant: after each step, and after ``take_over``, each tensor of the view shares its memory with the flat tensor that
DeepSpeed uses now, and its options are those of the optimizer inside ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lightck.errors import UnsupportedError
from lightck.integrations.deepspeed_partitions import Fragment, Partition

ELEMENT_WISE = ("Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""torch's optimizers that compute each element of a parameter from that element, its gradient and its state."""


class SharedOptions(dict[str, Any]):
    """A parameter group of the optimizer inside ZeRO, which writes its options into the group of the view too.
    (Schedulers write into this one.)"""

    def __init__(self, group: dict[str, Any], other: dict[str, Any]) -> None:
        super().__init__(group)
        self.other = other

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key != "params":
            self.other[key] = value

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        if key != "params":
            self.other.pop(key, None)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, others: Any) -> SharedOptions:  # type: ignore[override, misc]
        self.update(others)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key != "params":
            self.other.pop(key, None)
        return super().pop(key, *default)

    def __reduce__(self) -> Any:
        """A copy, or a pickle, is a plain dict."""
        return dict, (dict(self),)


class PartitionedOptimizer:
    """The optimizer inside ZeRO (``inner``), and the view of it that lightck follows."""

    def __init__(self, inner: torch.optim.Optimizer, partitions: tuple[Partition, ...], *, is_alone: bool) -> None:
        """``is_alone``: whether there is a single rank, which holds each parameter whole."""
        self.inner, self._partitions, self._is_alone = inner, partitions, is_alone
        self.tensors: dict[int, torch.Tensor] = {}
        """id of a parameter of the model -> its tensor in the view."""
        self._linked: dict[tuple[int, str], torch.Tensor] = {}
        """(number of a partition, key of state) -> the flat state tensor with which the state of ``view`` shares memory
        at present."""
        for partition in partitions:
            for fragment in partition.fragments:
                self.tensors[id(fragment.param)] = fragment.of(partition.master, is_alone=is_alone).requires_grad_()
        self.view = self._view()
        self._share_options()
        self._link()

    def _view(self) -> torch.optim.Optimizer:
        groups = []
        for number, group in enumerate(self.inner.param_groups):
            fragments = [
                one for partition in self._partitions if partition.group == number for one in partition.fragments
            ]
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**options, "params": [self.tensors[id(one.param)] for one in fragments]})
        make: Any = type(self.inner)
        view: torch.optim.Optimizer = make(groups)
        view.defaults = dict(self.inner.defaults)
        # ``session/shared_state.py`` warns of state tensors that share memory, but not with this attribute:
        # ``take_over`` puts the restored tensors into one flat tensor again.
        setattr(view, "joins_restored_state", True)  # noqa: B010 - mypy knows no such attribute
        return view

    def step_with(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs ``step``, the step of DeepSpeed, between the step hooks of the view."""

        def update(view: torch.optim.Optimizer) -> Any:
            result = step()
            self._share_options()
            self._link()
            return result

        hooked = torch.optim.Optimizer.profile_hook_step(update)
        return lambda closure=None: hooked(self.view)

    def take_over(self) -> None:
        """Give the optimizer inside ZeRO the state and the options that were restored into the view."""
        for group, shared in zip(self.view.param_groups, self.inner.param_groups, strict=True):
            shared.update({key: value for key, value in group.items() if key != "params"})
        for partition in self._partitions:
            self.inner.state.pop(partition.master, None)
            state = self._flat_state(partition)
            if state:
                self.inner.state[partition.master] = state
        self._linked.clear()
        self._link()

    # -- options -------------------------------------------------------------------------------------------

    def _share_options(self) -> None:
        """Let the groups of both have the same options. (``load_state_dict`` makes new groups.)"""
        groups = self.inner.param_groups
        for number, (group, other) in enumerate(zip(groups, self.view.param_groups, strict=True)):
            if not isinstance(group, SharedOptions) or group.other is not other:
                other.update({key: value for key, value in group.items() if key not in ("params", "param_names")})
                groups[number] = SharedOptions(group, other)

    # -- state ---------------------------------------------------------------------------------------------

    def _link(self) -> None:
        """Let the view have the present state of the optimizer inside ZeRO."""
        for number, partition in enumerate(self._partitions):
            for key, value in (self.inner.state.get(partition.master) or {}).items():
                if isinstance(value, torch.Tensor) and value.shape == partition.master.shape:
                    if self._linked.get((number, key)) is not value:
                        self._linked[number, key] = value
                        for one, state in self._states(partition):
                            state[key] = one.of(value, is_alone=self._is_alone)
                elif isinstance(value, torch.Tensor):
                    states = [state for _, state in self._states(partition)]
                    for state in states:
                        if key not in state:
                            state[key] = torch.empty_like(value)
                    torch._foreach_copy_([state[key] for state in states], [value] * len(states))
                else:
                    for _, state in self._states(partition):
                        state[key] = value

    def _states(self, partition: Partition) -> Iterable[tuple[Fragment, dict[str, Any]]]:
        return [(one, self.view.state[self.tensors[id(one.param)]]) for one in partition.fragments]

    def _flat_state(self, partition: Partition) -> dict[str, Any]:
        """Return the state of a flat tensor, joined from the states of the parameters that lie in it."""
        states = [(one, self.view.state.get(self.tensors[id(one.param)]) or {}) for one in partition.fragments]
        found: dict[str, Any] = {}
        for key in states[0][1] if states else {}:
            values = []
            for one, state in states:
                if key not in state:
                    raise _no_common_state(states[0][0].name, one.name, key)
                values.append(state[key])
            first = values[0]
            if isinstance(first, torch.Tensor) and first.ndim:
                flat = torch.zeros_like(partition.master, dtype=first.dtype, requires_grad=False)
                for (one, _), value in zip(states, values, strict=True):
                    one.of(flat, is_alone=self._is_alone).copy_(value)
                found[key] = flat
                continue
            for (one, _), value in zip(states, values, strict=True):
                if not _is_same(first, value):
                    raise _no_common_state(states[0][0].name, one.name, key)
            found[key] = first.clone() if isinstance(first, torch.Tensor) else first
        for one, state in states:
            if state.keys() != found.keys():
                raise _no_common_state(states[0][0].name, one.name, next(iter(state.keys() ^ found.keys())))
        return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)


def _no_common_state(first: str, other: str, key: str) -> UnsupportedError:
    return UnsupportedError(
        f"The parameters {first!r} and {other!r} have different state {key!r} in the checkpoint, and ZeRO keeps a "
        "single value for all parameters of a partition. (One of them had no gradient in some steps of the run that "
        "saved it.) Go on with the kind of run that saved the checkpoint, or load the weights alone: "
        "lightck.recover(path, model)."
    )
