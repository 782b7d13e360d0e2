"""The communication hook that gives a layer-wise update the reduced gradients of DistributedDataParallel.

DistributedDataParallel packs gradients into buckets, reduces each bucket with the other ranks as soon as it is full,
and writes the results into ``p.grad`` at the end of the backward pass. This hook starts the reductions as before, and
queues each bucket with its future. What follows runs on the thread of ``backward()``:

    the first bucket's hook     queues ``_update`` among the callbacks that autograd calls when all gradients are
                                computed. torch queues its own callback, which writes ``p.grad``, after the last bucket.
    ``_update``                 waits for one bucket after the other, lends each parameter its reduced gradient as
                                ``p.grad``, and reports it. So a layer is updated while later buckets are on the wire.
    ``rebind_gradients``        comes after torch's callback: ``p.grad`` is now what ``step()`` will see.

Invariant: no layer is updated while the backward pass still computes, because it could need the old parameters. The
gradient that a layer's update uses has the bits that torch writes into ``p.grad`` afterwards.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightck.errors import UnsupportedError
from lightck.events import ReducedBucket
from lightck.hooks.comm_hooks import OwnCommHook, averaged, name_of, owner_of, register, registered_hooks
from lightck.hooks.own_hooks import call_after_backward, is_in_nested_backward
from lightck.state.device_transfers import is_dense_tensor

CommHook = Callable[[Any, Any], Any]
"""A communication hook as ``DistributedDataParallel.register_comm_hook`` takes it: (state, bucket) -> future."""


class GradientReceiver(Protocol):
    """Who updates layers with reduced gradients."""

    @property
    def is_accumulating(self) -> bool:
        """Whether this backward pass updates no layer."""

    def has_computed(self, param: torch.Tensor) -> bool:
        """Whether this rank has computed a gradient of the parameter since the last ``step()``. If not, ``p.grad`` may
        stay None although the bucket has zeros (``find_unused_parameters``)."""

    def gradient_arrived(self, param: torch.Tensor) -> None:
        """``param.grad`` is the reduced gradient."""

    def buckets_reduced(self, buckets: Sequence[ReducedBucket]) -> None:
        """As ``StepListener.buckets_reduced``."""

    def rebind_gradients(self) -> None:
        """torch has written the reduced gradients into ``p.grad``: treat these as the gradients that were used."""


@dataclass(slots=True)
class _Bucket:
    """A bucket that is being reduced. params: in the order of their gradients in the bucket. begin, end: as in
    ``ReducedBucket``; end is 0 until the reduction has ended."""

    params: Sequence[torch.Tensor]
    future: Any
    begin: int
    nbytes: int
    end: int = 0

    def __post_init__(self) -> None:
        self.future.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        self.end = time.monotonic_ns()

    def as_reduced(self) -> ReducedBucket:
        """Call after ``gradients``. (The future may call ``_ended`` a moment after it lets its waiter go on.)"""
        return ReducedBucket(self.begin, self.end or time.monotonic_ns(), self.nbytes)

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Wait until the bucket is reduced, and yield each parameter with a view of its gradient, in the memory that
        the hook returned. The views are those that torch makes (``Reducer::initialize_bucket_views``)."""
        reduced, begin = self.future.wait(), 0
        for param in self.params:
            if is_dense_tensor(param):
                yield param, reduced.as_strided(param.size(), param.stride(), begin)
            else:
                yield param, reduced.narrow(0, begin, param.numel()).view(param.size())
            begin += param.numel()


class ReducedBuckets(OwnCommHook):
    """The hook of one DistributedDataParallel. Without receivers it only reduces: torch cannot unregister a hook."""

    def __init__(self, ddp: Any, hook: CommHook | None, state: object) -> None:
        """Use ``register``."""
        self._ddp = weakref.ref(ddp)
        self._group = ddp.process_group
        self._hook_of_user, self._state = hook, state
        self._receivers: list[weakref.ref[GradientReceiver]] = []
        """One for each optimizer whose layers are updated."""
        self._buckets: list[_Bucket] = []
        """The buckets of this backward pass, in the order in which their reductions began."""
        self._is_queued = False
        """Whether autograd will call ``_update`` at the end of this backward pass."""

    @classmethod
    def register(cls, ddp: Any, hook: CommHook | None, state: object) -> ReducedBuckets:
        """Register the hook, or return the one that an earlier call has registered. ``hook``, ``state``: the user's
        communication hook, which reduces; None: reduce as DistributedDataParallel does without a hook. Raises
        ``UnsupportedError`` if another hook is registered."""
        for function in registered_hooks(ddp):
            known = owner_of(function)
            if not isinstance(known, ReducedBuckets):
                raise _taken(name_of(function))
            if known._hook_of_user is not hook or known._state is not state:
                raise UnsupportedError(
                    "lightck.layerwise() was called for this DistributedDataParallel with another comm_hook= or "
                    "comm_state= before, and torch cannot replace a communication hook. Make the "
                    "DistributedDataParallel anew, or pass the same ones."
                )
            return known
        made = cls(ddp, hook, state)
        register(ddp, made._hook, _taken)
        return made

    @property
    def ddp(self) -> object:
        """The DistributedDataParallel; None if it is gone."""
        return self._ddp()

    def add(self, receiver: GradientReceiver) -> None:
        """Report to this object too from now on. Only a weak reference to it is kept."""
        self._receivers.append(weakref.ref(receiver))

    def remove(self, receiver: GradientReceiver) -> None:
        """Report to this object no more. Without any, the hook only reduces."""
        self._receivers = [one for one in self._receivers if one() not in (None, receiver)]

    def _live_receivers(self) -> list[GradientReceiver]:
        found = [receiver for one in self._receivers if (receiver := one()) is not None]
        return [receiver for receiver in found if not receiver.is_accumulating]

    # torch compares the annotations of a hook with its own types, so these must be no strings.
    def _hook(self, _, bucket):  # type: ignore[no-untyped-def]
        if not self._live_receivers():
            return self._reduce(bucket)
        self._refuse_join()
        if bucket.index() == 0:  # a backward pass begins; an earlier one that raised may have left buckets
            self._buckets, self._is_queued = [], False
        if not self._is_queued and not is_in_nested_backward():
            call_after_backward(self._update)
            self._is_queued = True
        begin = time.monotonic_ns()
        future = self._reduce(bucket)
        params = bucket.parameters()
        # A sparse gradient has no view in the bucket, and a complex one lies there as real numbers. step() updates
        # their parameters.
        if bucket.buffer().layout is torch.strided and not any(map(torch.is_complex, params)):
            self._buckets.append(_Bucket(params, future, begin, bucket.buffer().nbytes))
        return future

    def _reduce(self, bucket: Any) -> Any:
        """Begin to reduce a bucket, and return the future of the reduced one."""
        if self._hook_of_user is not None:
            return self._hook_of_user(self._state, bucket)
        return averaged(bucket, self._group)

    def _update(self) -> None:
        """Report the gradients of all buckets. Called when this backward pass has computed all gradients."""
        buckets, self._buckets, self._is_queued = self._buckets, [], False
        receivers = self._live_receivers()
        for receiver in receivers:
            call_after_backward(receiver.rebind_gradients)
        own: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        try:
            for bucket in buckets:
                for param, gradient in bucket.gradients():
                    for receiver in receivers:
                        if receiver.has_computed(param):
                            own.append((param, param.grad))
                            param.grad = gradient
                            receiver.gradient_arrived(param)
            if receivers:
                receivers[0].buckets_reduced([bucket.as_reduced() for bucket in buckets])
        finally:
            for param, grad in reversed(own):  # torch expects in ``p.grad`` what was there before
                param.grad = grad

    def _refuse_join(self) -> None:
        ddp = self._ddp()
        if ddp is not None and getattr(ddp, "_join_config", None) is not None and ddp._join_config.enable:
            raise UnsupportedError(
                "DistributedDataParallel.join() is in effect: ranks that have no more batches reduce buckets without a "
                "backward(), so their layers would not be updated. Give all ranks the same number of batches, or leave "
                "out lightck.layerwise()."
            )


def _taken(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"The communication hook {name} is registered on DistributedDataParallel, and lightck.layerwise() needs this "
        "place: torch allows one hook. Leave out register_comm_hook(), and pass the hook to layerwise: "
        "lightck.layerwise(ddp, optimizer, comm_hook=hook, comm_state=state)."
    )
