"""A simulated device for tests, made of CPU tensors: copies from it arrive late, on one of its two streams.

A copy in parallel with the computation reads its source only when it arrives, so a gate that opens too early changes
the bytes. A copy in the order of the computation, or on the device, has the bytes of the call, and arrives late too, on
the other stream. Memory of both sides is filled with a pattern at first, which shows reads that come too early.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import pytest
import torch

from lightck.pipeline import sources, write_table
from lightck.session import cross_check, replica_arguments, replica_updates, split, state_marks, strategy_choice
from lightck.state import buffers, device_transfers, unit_replicas
from lightck.state.device_transfers import DeviceTransfer, Pair, StreamPoint, bytes_of

Copies = list[tuple[torch.Tensor, Callable[[], torch.Tensor]]]


class _Stream:
    """Makes copies one after the other on a thread, each batch after an arrival on another stream."""

    def __init__(self, seed: int, seconds: float) -> None:
        self._random = random.Random(seed)
        self._seconds = seconds
        self._tasks: SimpleQueue[tuple[Copies, StreamPoint, threading.Event]] = SimpleQueue()
        self._runs_in = 0
        self._last, self.flows = threading.Event(), threading.Event()
        self._last.set()
        self.flows.set()
        self._pending: list[Copies] = []

    def writes_to(self, memory: torch.Tensor) -> bool:
        """Whether a copy into this memory is pending."""
        low, high = memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.element_size()
        return any(low <= target.data_ptr() < high for copies in list(self._pending) for target, _ in copies)

    @property
    def is_idle(self) -> bool:
        return self._last.is_set()

    def mark(self) -> StreamPoint:
        return _Waited(self._last)

    def send(self, copies: Copies, after: StreamPoint) -> StreamPoint:
        if self._runs_in != os.getpid():  # a forked child has no threads of its parent's
            self._runs_in, self._tasks, self._pending = os.getpid(), SimpleQueue(), []
            threading.Thread(target=self._run, daemon=True).start()
        arrived = self._last = threading.Event()
        self._pending.append(copies)
        self._tasks.put((copies, after, arrived))
        return _Waited(arrived)

    def _run(self) -> None:
        tasks = self._tasks
        while True:
            copies, after, arrived = tasks.get()
            after.synchronize()
            self.flows.wait(60)
            for target, source in copies:
                time.sleep(self._random.uniform(0, self._seconds / len(copies)))
                with torch.no_grad():
                    target.copy_(source())
            self._pending.pop(0)  # batches arrive in order
            arrived.set()


class SlowTransfer:
    """The transfer of a device whose copies take up to ``seconds``, drawn from ``seed``."""

    def __init__(self, seed: int, seconds: float = 0.01) -> None:
        self._computation, self._beside = _Stream(seed, seconds), _Stream(seed + 1000, seconds)
        self.flows_beside = self._beside.flows
        """While cleared, copies in parallel with the computation do not arrive."""
        self.sent = 0
        """Tensors that were sent to host memory."""
        self.fails: Exception | None = None
        """Error that a copy in the order of the computation raises."""
        self.fails_beside: Exception | None = None
        """Error that a copy in parallel with the computation raises."""
        self.fails_once: Exception | None = None
        self.before_send: Callable[[], None] | None = None
        self.events: list[str] = []
        """Calls about updates and memory, in their order."""
        self.captures = False
        """Whether work is captured for a graph."""
        self.room = 1 << 40
        """Bytes of device memory."""
        self.refuses: Exception | None = None
        """Error that registering memory raises."""
        self._memory = weakref.WeakValueDictionary[int, torch.Tensor]()
        """Memory that was allocated on the device, by its address."""
        self.registered: list[int] = []
        """Addresses of host memory that the device writes to directly."""

    @property
    def is_computing(self) -> bool:
        """Whether a copy in the order of the computation is pending."""
        return not self._computation.is_idle

    @property
    def is_sending(self) -> bool:
        """Whether a copy in parallel with the computation is pending."""
        return not self._beside.is_idle

    @property
    def is_idle(self) -> bool:
        return not (self.is_computing or self.is_sending)

    def mark(self) -> StreamPoint:
        return self._computation.mark()

    def send(self, pairs: Sequence[Pair], after: StreamPoint) -> StreamPoint:
        if self.before_send is not None:
            self.before_send()
        once, self.fails_once = self.fails_once, None
        if self.fails_beside is not None or once is not None:
            raise self.fails_beside or once
        self.sent += len(pairs)
        return self._beside.send([(target, partial(bytes_of, tensor)) for target, tensor in pairs], after)

    def send_in_order(self, pairs: Sequence[Pair]) -> StreamPoint:
        if self.fails is not None:
            raise self.fails
        self.sent += len(pairs)
        self.events.append("sent in order")
        return self._in_order(pairs)

    def _in_order(self, pairs: Sequence[Pair]) -> StreamPoint:
        return self._computation.send([(target, self._now_or_in_order(tensor)) for target, tensor in pairs], _NOTHING)

    def _now_or_in_order(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that reads the tensor. Memory of the device is changed only by copies of this stream, so it
        is read when the copy is made; other tensors, which the next line of a test may change, are read now."""
        if tensor.untyped_storage().data_ptr() in self._memory:
            return partial(bytes_of, tensor)
        return bytes_of(tensor).clone().clone

    def copy_on_device(self, pairs: Sequence[Pair]) -> None:
        if self.fails is not None:
            raise self.fails
        self._in_order(pairs)

    def read(self, tensor: torch.Tensor, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
        return bytes_of(tensor)[start : None if nbytes is None else start + nbytes].clone()

    def device_memory(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.room:
            raise RuntimeError("out of memory")
        memory = torch.full((nbytes,), 0xCD, dtype=torch.uint8, device="cpu")
        self._memory[memory.untyped_storage().data_ptr()] = memory
        return memory

    def free_nbytes(self) -> int:
        return self.room

    def register(self, memory: torch.Tensor) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.registered.append(memory.data_ptr())

    def unregister(self, memory: torch.Tensor) -> None:
        assert not any(stream.writes_to(memory) for stream in (self._computation, self._beside)), "a copy is pending"
        self.registered.remove(memory.data_ptr())

    def bind_thread(self) -> None: ...

    def add_update_stream(self) -> None:
        self.events.append("noted")

    def join_updates(self) -> None:
        self.events.append("joined")

    def is_capturing(self) -> bool:
        return self.captures

    def release_host_memory(self) -> None:
        self.events.append("given back")

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)


class _Waited:
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def synchronize(self) -> None:
        assert self._event.wait(60), "nothing arrived"


def _passed() -> StreamPoint:
    event = threading.Event()
    event.set()
    return _Waited(event)


_NOTHING = _passed()


_IMPORTED_LATE = state_marks, strategy_choice


def install(patch: pytest.MonkeyPatch, transfer_of: Callable[[torch.Tensor], DeviceTransfer | None]) -> None:
    """Replace ``transfer_of`` wherever a device is used. (A module that is imported for the first time meanwhile would
    keep the replacement. ``_IMPORTED_LATE`` are such.)"""
    of_replica = replica_arguments, replica_updates, unit_replicas
    for module in (device_transfers, write_table, sources, buffers, cross_check, split, *of_replica):
        patch.setattr(module, "transfer_of", transfer_of)
