"""A device for tests, made of CPU tensors: what is sent from it arrives late, in the order in which it was sent.

What is sent beside the computation is read when it arrives, so a gate that opens too early is seen in the bytes; what
is sent in order has the bytes of the call. Host memory is full of 0xAB at first: what is read too early is seen too.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import pytest
import torch

from lightck import split
from lightck.capture import buffers, lanes, watch
from lightck.capture.lanes import Arrival, Lane, Pair, raw

Copies = list[tuple[torch.Tensor, Callable[[], torch.Tensor]]]


class SlowLane:
    """Of a device whose copies take up to ``seconds``, drawn from ``seed``."""

    def __init__(self, seed: int, seconds: float = 0.01) -> None:
        self._random = random.Random(seed)
        self._seconds = seconds
        self._stream: SimpleQueue[tuple[Copies, threading.Event]] = SimpleQueue()
        self._runs_in = 0
        self.sent = 0
        self.fails: Exception | None = None
        """What sending in order raises."""
        self.fails_beside: Exception | None = None
        """What sending beside the computation raises."""
        self.fails_once: Exception | None = None
        self.before_send: Callable[[], None] | None = None

    def _run(self) -> None:
        stream = self._stream
        while True:
            copies, arrived = stream.get()
            for target, source in copies:
                time.sleep(self._random.uniform(0, self._seconds / len(copies)))
                with torch.no_grad():
                    target.copy_(source())
            arrived.set()

    def mark(self) -> Arrival:
        return _Waited(threading.Event(), is_set=True)

    def send(self, pairs: Sequence[Pair], after: Arrival) -> Arrival:
        if self.before_send is not None:
            self.before_send()
        once, self.fails_once = self.fails_once, None
        if self.fails_beside is not None or once is not None:
            raise self.fails_beside or once
        after.synchronize()
        return self._send([(target, partial(raw, tensor)) for target, tensor in pairs])

    def send_in_order(self, pairs: Sequence[Pair]) -> Arrival:
        if self.fails is not None:
            raise self.fails
        held = [(target, raw(tensor).clone()) for target, tensor in pairs]
        return self._send([(target, raw(tensor).clone) for target, tensor in held])

    def _send(self, copies: Copies) -> Arrival:
        if self._runs_in != os.getpid():  # a forked child has no threads of its parent's
            self._runs_in, self._stream = os.getpid(), SimpleQueue()
            threading.Thread(target=self._run, daemon=True).start()
        self.sent += len(copies)
        arrived = threading.Event()
        self._stream.put((copies, arrived))
        return _Waited(arrived)

    def read(self, tensor: torch.Tensor, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
        return raw(tensor)[start : None if nbytes is None else start + nbytes].clone()

    def enter(self) -> None: ...

    def note_update(self) -> None: ...

    def join_update(self) -> None: ...

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)


class _Waited:
    def __init__(self, event: threading.Event, *, is_set: bool = False) -> None:
        self._event = event
        if is_set:
            event.set()

    def synchronize(self) -> None:
        assert self._event.wait(60), "nothing arrived"


def install(patch: pytest.MonkeyPatch, lane_of: Callable[[torch.Tensor], Lane | None]) -> None:
    """Tensors are on devices, as this says."""
    for module in (lanes, split, watch, buffers):
        patch.setattr(module, "lane_of", lane_of)
