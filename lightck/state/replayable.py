"""Which optimizers' updates can be made again, one parameter at a time, with the same bits.

An exact class of ``torch.optim`` is known. Any other class is probed on trial tensors: three steps over all parameters
are compared with the same steps of one parameter at a time. Whatever fails is refused by an error that names
``FullState()``, the strategy for which it does not matter how an update is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightck.errors import UnsupportedError
from lightck.state import rng
from lightck.state.fingerprint import flushes_denormals
from lightck.state.optimizer_wrappers import inner_of, refuse_unsupported, tensors_in
from lightck.state.partial_optimizer import PartialOptimizer, without_global_hooks
from lightck.state.torch_classes import irreproducible_reason

MIN_RATIO = 1.5
"""The smallest ratio of the bytes that an update changes to the bytes that it consumes. If the ratio is smaller,
storing gradients in place of the state saves too little."""
_PRIMES = (3, 5, 7, 2, 11, 13)
"""Sizes of a trial tensor of n dimensions: the first n."""
_STEPS = 3
_ATTRIBUTE_DEPTH = 4
"""Levels of containers in an attribute that are searched."""
_NO_EQ: object = object.__eq__
"""The ``__eq__`` of a class that defines none: it compares identities only."""
_SCALES = (1.0, 30.0, 0.1)
"""Magnitudes of the trial tensors' gradients at each step. A class that clips by the norm of all gradients then clips
in at least one of the steps, so the probe detects it."""


def refuse_unreplayable(optimizer: Optimizer) -> None:
    """Raise ``UnsupportedError`` if updates of this optimizer cannot be made again, one parameter at a time, with the
    same bits. The optimizer is not changed, and no step of it is made."""
    refuse_unsupported(optimizer)
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _refused(name, "it computes several gradients in a step, and couples all parameters")
    for group in optimizer.param_groups:
        _refuse_group(type(optimizer), group)
    if flushes_denormals() and any(p.is_cpu for group in optimizer.param_groups for p in group["params"]):
        raise _refused(name, "torch.set_flush_denormal(True) holds for some of torch's threads, and not for all")
    if inner_of(optimizer):
        raise _refused(name, "it contains another optimizer")
    if PartialOptimizer.of(optimizer).is_torch:
        return
    reached = _attribute_with_state(optimizer)
    if reached is not None:
        raise _refused(name, f"its attribute {reached!r} holds parameters, or a module")
    _Probe(optimizer).run()


def refuse_low_ratio(changed_nbytes: int, gradient_nbytes: int, whole_nbytes: int = 0) -> float:
    """Return the bytes that updates change, divided by the bytes that each checkpoint stores for that: gradients, and
    the units that are whole in each checkpoint (``session/whole_units.py``).

    changed_nbytes: without those units. whole_nbytes: of those units.

    Raises:
        UnsupportedError: the ratio is below ``MIN_RATIO``.
    """
    if gradient_nbytes + whole_nbytes == 0:
        return float("inf")  # nothing is consumed
    ratio = (changed_nbytes + whole_nbytes) / (gradient_nbytes + whole_nbytes)
    if ratio < MIN_RATIO and whole_nbytes:
        raise UnsupportedError(
            f"An update of this training changes {ratio:.2f} bytes for each byte that a checkpoint would hold: "
            f"{gradient_nbytes} bytes of gradients, and {whole_nbytes} bytes of parameters and optimizer state that "
            "are whole in each checkpoint, because their updates cannot be made again. Below "
            f"{MIN_RATIO} it saves too little to store gradients instead. Use strategy=lightck.FullState()."
        )
    if ratio < MIN_RATIO:
        raise UnsupportedError(
            f"An update of this training changes {ratio:.2f} bytes for each byte of gradients. Below {MIN_RATIO} it "
            "saves too little to store gradients instead. Use strategy=lightck.FullState()."
        )
    return ratio


def _refuse_group(kind: type[Optimizer], group: Mapping[str, Any]) -> None:
    if group.get("differentiable"):
        raise _refused(kind.__name__, "differentiable=True lets autograd follow the update")
    if group.get("capturable") and any(not p.is_cpu for p in group["params"]):
        raise _refused(kind.__name__, "with capturable=True a CUDA graph may make its steps, which calls no hook")
    for dtype in {p.dtype for p in group["params"]}:
        reason = irreproducible_reason(kind, group, bool(group.get("fused")), dtype)
        if reason is not None:
            raise _refused(kind.__name__, reason)


def _refused(name: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"The updates of {name} cannot be made again from gradients with the same bits: {reason}. Use "
        "strategy=lightck.FullState()."
    )


def _attribute_with_state(optimizer: Optimizer) -> str | None:
    """Return the name of an attribute through which a step reaches tensors of the training, or None. (The object that
    makes a step on chosen tensors has the same attributes, so its step would read or change those tensors.) Other
    tensors are constants, or the probe finds that a step changes them."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, value in PartialOptimizer.of(optimizer).attributes.items():
        if key != "defaults" and (
            isinstance(value, nn.Module)
            or any(id(t) in parameters or t.requires_grad for t in tensors_in(value, _ATTRIBUTE_DEPTH))
        ):
            return key
    return None


class _Probe:
    """Makes three steps on trial tensors, for all of them at once and for each of them separately, and compares the
    results."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._generator = torch.Generator().manual_seed(20)
        self._groups = [self._trial_tensors(group) for group in optimizer.param_groups]

    def run(self) -> None:
        """Raise ``UnsupportedError`` with the reason if a class fails."""
        try:
            with rng.preserved(), without_global_hooks():
                self._run()
        except UnsupportedError:
            raise
        except Exception as error:
            reason = f"a trial step failed ({type(error).__name__}: {error})"
            raise _refused(self._name, reason) from error

    def _trial_tensors(self, group: Mapping[str, Any]) -> list[tuple[torch.Tensor, dict[Any, Any]]]:
        """Return three trial tensors, with state, for each kind of parameter of the group."""
        found = []
        kinds = {
            (p.dim(), p.dtype, p.device, p.requires_grad, bool(self._optimizer.state.get(p))): p
            for p in group["params"]
        }
        for (dims, dtype, device, *_), p in kinds.items():
            if dims > len(_PRIMES):
                reason = f"a parameter has {dims} dimensions, and an optimizer is tried out on at most {len(_PRIMES)}"
                raise _refused(self._name, reason)
            for _ in range(3):
                tensor = torch.randn(_PRIMES[:dims], generator=self._generator).to(dtype=dtype, device=device)
                vars(tensor).update(vars(p))
                tensor.requires_grad_(p.requires_grad)
                found.append((tensor, self._trial_state(p, tensor)))
        return found

    def _trial_state(self, parameter: torch.Tensor, trial_tensor: torch.Tensor) -> dict[Any, Any]:
        """Return the state of a parameter, if it has some already, in the size of its trial tensor."""
        state = {}
        for key, value in self._optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.numel():
                first = value.detach().flatten()[0]
                state[key] = first.expand(trial_tensor.shape).clone()
            elif isinstance(value, torch.Tensor) and value.numel() > 1:
                raise _refused(self._name, f"its state {key!r} has another shape than its parameter")
            else:
                state[key] = deepcopy(value)
        return state

    def _run(self) -> None:
        for_all = PartialOptimizer(type(self._optimizer), self._attributes())
        together = [pair for group in self._groups for pair in group]
        separate = [(deepcopy(p), deepcopy(state)) for p, state in together]
        options = [_options(group) for group in self._optimizer.param_groups]
        for step in range(_STEPS):
            gradients = [self._gradient(p, step, number) for number, (p, _) in enumerate(together)]
            for (p, _), gradient in zip(together, gradients, strict=True):
                p.grad = None if gradient is None else gradient.clone()
            groups = [(o, [p for p, _ in group]) for o, group in zip(deepcopy(options), self._groups, strict=True)]
            before = rng.capture().packed()
            made_by = for_all.step(groups, dict(together), is_shielded=False)
            if rng.capture().packed() != before:
                raise _refused(self._name, "its step draws random numbers")
            self._refuse_changed_attributes(made_by)
            self._step_separately(separate, gradients, options)
            self._compare(together, separate)
            options = [_options(group) for group in made_by.param_groups]

    def _step_separately(
        self,
        separate: list[tuple[torch.Tensor, dict[Any, Any]]],
        gradients: list[torch.Tensor | None],
        options: list[dict[str, Any]],
    ) -> None:
        """Make the same step for each trial tensor separately, the last one first."""
        group_of = [g for g, group in enumerate(self._groups) for _ in group]
        for number in reversed(range(len(separate))):
            (p, state), gradient = separate[number], gradients[number]
            p.grad = None if gradient is None else gradient.clone()
            groups = [(o, [p] if g == group_of[number] else []) for g, o in enumerate(deepcopy(options))]
            PartialOptimizer(type(self._optimizer), self._attributes()).step(groups, {p: state})

    def _gradient(self, p: torch.Tensor, step: int, number: int) -> torch.Tensor | None:
        """Return a gradient for trial tensor ``number``, or None: every trial tensor lacks it in one of three steps."""
        if (step + number) % 3 == 2:
            return None
        drawn = torch.randn(p.shape, generator=self._generator) * _SCALES[step]
        return drawn.to(dtype=p.dtype, device=p.device)

    def _attributes(self) -> dict[str, Any]:
        return deepcopy(PartialOptimizer.of(self._optimizer).attributes)

    def _refuse_changed_attributes(self, made_by: Optimizer) -> None:
        before, after = self._attributes(), PartialOptimizer.of(made_by).attributes
        changed = [key for key in {**before, **after} if not _is_same(before.get(key), after.get(key))]
        if changed:
            raise _refused(self._name, f"its step changes its attribute {changed[0]!r}")

    def _compare(
        self, together: list[tuple[torch.Tensor, dict[Any, Any]]], separate: list[tuple[torch.Tensor, dict[Any, Any]]]
    ) -> None:
        for (p, state), (other, other_state) in zip(together, separate, strict=True):
            if not _is_same(p, other) or not _is_same(state, other_state):
                raise _refused(self._name, "it updates a parameter differently if others are updated with it")


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: deepcopy(value) for key, value in group.items() if key != "params"}


def _is_same(one: Any, other: Any, depth: int = 6) -> bool:
    """Whether two values are equal, tensors in their bits. Objects that cannot be compared are equal if their
    attributes are, down to ``depth`` levels."""
    if one is other or depth == 0:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes_of(one), _bytes_of(other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(value, other[key], depth - 1) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_is_same(*pair, depth - 1) for pair in zip(one, other, strict=True))
    if getattr(type(one), "__eq__", None) is _NO_EQ:
        return _is_same(getattr(one, "__dict__", None), getattr(other, "__dict__", None), depth - 1)
    return bool(one == other)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
