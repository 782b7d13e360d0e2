"""One update of the copies of one unit, with what the training's update of the unit consumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lightck.errors import ReplayError
from lightck.hooks.captured_update import CapturedStep, HeldGradient
from lightck.session.replica_worker import ReplicaGroup
from lightck.state.consumed_update import ConsumedGroup, ConsumedStep, Gradient
from lightck.state.device_transfers import StreamPoint
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.unit_replicas import UnitReplica, dense_on_host
from lightck.state.unit_update import SLICE_NUMEL, is_independent_of_threads, update_unit


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of one optimizer. tensors: of the gradient, or their copies; none if the unit had no gradient."""

    step: CapturedStep
    group_index: int
    gradient: HeldGradient | None
    tensors: tuple[torch.Tensor, ...]
    optimizer: PartialOptimizer


class ReplicaUpdate:
    """The update. ``failure``: after ``run``, why it could not be made; "" if it was."""

    group: ReplicaGroup
    """Learns that the update was made. Set before ``run``."""

    def __init__(self, replica: UnitReplica, threads: int, arrivals: Sequence[StreamPoint]) -> None:
        """``threads``: the number of intra-op threads that made the update of the training. ``arrivals``: one for
        each device, which says when its gradients are there."""
        self.replica, self.failure = replica, ""
        self._threads, self._arrivals = threads, arrivals
        self._steps: list[_Step] = []

    def add(
        self,
        step: CapturedStep,
        group_index: int,
        gradient: HeldGradient | None,
        tensors: tuple[torch.Tensor, ...],
        optimizer: PartialOptimizer,
    ) -> None:
        """Add a step of one optimizer, after those that were added before."""
        self._steps.append(_Step(step, group_index, gradient, tensors, optimizer))

    @property
    def has_steps(self) -> bool:
        return bool(self._steps)

    @property
    def gradients(self) -> list[HeldGradient]:
        return [one.gradient for one in self._steps if one.gradient is not None]

    @property
    def may_run_on_thread(self) -> bool:
        """Whether another thread, with one intra-op thread, gives the same bits; also True for a unit on a device,
        whose bits the host cannot repeat on any thread. False for a class that is none of ``torch.optim``."""
        return all(
            one.optimizer.is_torch
            and (
                self.replica.is_on_device
                or is_independent_of_threads(
                    self.replica.unit,
                    one.optimizer,
                    None if one.gradient is None or one.gradient.is_sparse else one.tensors[0],
                )
            )
            for one in self._steps
        )

    def run(self) -> None:
        """Make the update. This raises nothing."""
        try:
            for arrival in self._arrivals:
                arrival.synchronize()
            for one in self._steps:
                self._make(one)
            self.replica.refuse_replaced()
        except Exception as err:  # the code of the optimizer's class may raise anything
            self.failure = str(err) if isinstance(err, ReplayError) else f"{type(err).__name__}: {err}"
        finally:
            self.group.unit_updated()

    def _make(self, one: _Step) -> None:
        step, name = one.step, self.replica.name
        gradient: Gradient = None
        if one.gradient is not None:
            gradient = one.gradient.as_copied(tuple(map(_on_host, one.tensors)))
        groups = tuple(map(_group_on_host, step.groups)) if self.replica.is_on_device else step.groups
        consumed = ConsumedStep(
            step.optimizer,
            step.class_name,
            groups,
            {name: gradient},
            None if step.grad_scale is None else step.grad_scale.cpu(),
            None if step.found_inf is None else step.found_inf.cpu(),
        )
        threads = 1 if self.replica.is_on_device else self._threads
        update_unit(
            self.replica.unit, consumed, one.group_index, one.optimizer, threads=threads, slice_numel=SLICE_NUMEL
        )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.is_cpu else dense_on_host(tensor)


def _group_on_host(group: ConsumedGroup) -> ConsumedGroup:
    options: Mapping[str, object] = {
        key: option.cpu() if isinstance(option, torch.Tensor) else option for key, option in group.options.items()
    }
    return replace(group, options=options)
