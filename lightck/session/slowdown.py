"""Measures how much slower torch's own operations become because lightck's code runs between them.

The processor's caches hold the instructions and data that were used last. While lightck saves a checkpoint, its
instructions and data replace those of torch, so the next operations of the loop take longer. A training cannot be timed
with and without lightck at the same time. So the slowdown is measured once in each process, with a small model: some
steps run alone, and others with the same amount of lightck's code between their parts as in a training. Only a short
step shows a difference. The slowdown of larger models is not larger, because it ends when torch's code is in the caches
again.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.optim import optimizer as torch_optimizer

from lightck.dataloader.batch import checksum_of
from lightck.following.first_batch import random_checksum
from lightck.pool.format.structures import NextBatch, pack_next_batch
from lightck.state import rng, values
from lightck.stats import Slowdown

_WIDTH, _LAYERS, _BATCH = 64, 3, 32
"""The small model: ``_LAYERS`` linear layers of ``_WIDTH`` x ``_WIDTH``, and its batch size."""
_NOTHING = 0.0, 0.0, 0.0
_HOOKS = 15e-6, 15e-6, 10e-6
_CHECKPOINT = 200e-6, 50e-6, 25e-6
"""Seconds of lightck's code before the forward, before the update and after it: of a step without lightck, of one that
saves nothing, and of one that saves a checkpoint. Measured in a training of the small model on an AMD EPYC."""
_STEPS, _ROUNDS = 12, 3
"""Steps of each kind in one round, and rounds."""
_UNTIMED = 2
"""How many steps of each kind are not timed, at the beginning of a round."""


def slowdown() -> Slowdown:
    """Return the slowdown of a step, in seconds. The first call that can measure it does so; until then the result is
    zeros. A measurement is not possible in these cases:

    - This machine has an accelerator. There the loop only starts operations, and mostly waits for the device.
    - Torch has global hooks. The measurement would run them.
    - The process has made no optimizer yet. The measurement makes one, which would load a large part of torch.
    - The system starts no thread for the measurement.
    """
    # A measured result is returned before the hooks are tested, because an open session has global hooks too.
    if _measured_slowdown.cache_info().currsize:
        return _measured_slowdown()
    has_hooks = (
        _has_any_global_hook()  # type: ignore[no-untyped-call]
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )
    has_made_optimizer = "torch._dynamo" in sys.modules  # the constructor of an optimizer imports this module
    # With an accelerator, a backward pass would also start threads of torch, after which a fork cannot train.
    is_measurable = has_made_optimizer and not has_hooks and not torch.accelerator.is_available()
    if not is_measurable:
        return Slowdown()
    try:
        return _measured_slowdown()
    except RuntimeError:  # no thread was started; other parts of attach that need one report the error
        return Slowdown()


@cache
def _measured_slowdown() -> Slowdown:
    """Measure on a new thread, so that modes of this thread (``inference_mode``, a default device) have no effect, and
    the measurement has no effect on them. It takes about 50 ms."""
    found: list[Slowdown] = []
    thread = threading.Thread(target=lambda: found.append(_measure()), name="lightck-slowdown", daemon=True)
    thread.start()
    thread.join()
    return found[0] if found else Slowdown()


def _measure() -> Slowdown:
    loop = _Loop()
    for _ in range(_STEPS):
        loop.step(_NOTHING)
    timed: dict[Sequence[float], list[float]] = {_NOTHING: [], _HOOKS: [], _CHECKPOINT: []}
    for _ in range(_ROUNDS):
        for lightck_seconds, seconds in timed.items():
            seconds += [loop.step(lightck_seconds) for _ in range(_STEPS)][_UNTIMED:]
    alone = median(timed[_NOTHING])
    return Slowdown(max(median(timed[_HOOKS]) - alone, 0.0), max(median(timed[_CHECKPOINT]) - alone, 0.0))


class _Loop:
    """A training of the small model. It draws no random numbers."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for _ in range(_LAYERS):
            linear = nn.Linear(_WIDTH, _WIDTH, device="meta", dtype=torch.float32).to_empty(device="cpu")
            for p in linear.parameters():
                nn.init.constant_(p, 1 / _WIDTH)
            layers += [linear, nn.ReLU()]
        self._model = nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6)
        self._inputs = torch.full((_BATCH, _WIDTH), 0.5, device="cpu", dtype=torch.float32)
        self._calls = _lightck_code(self._inputs)

    def step(self, lightck_seconds: Sequence[float]) -> float:
        """Make a step, and return the seconds of torch's part. ``lightck_seconds``: how long lightck's code runs before
        the forward, before the update and after it."""
        before, between, after = lightck_seconds
        self._run_lightck(before)
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(self._inputs).pow(2).mean().backward()
        seconds = time.perf_counter() - begin
        self._run_lightck(between)
        begin = time.perf_counter()
        self._optimizer.step()
        seconds += time.perf_counter() - begin
        self._run_lightck(after)
        return seconds

    def _run_lightck(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for call in self._calls:
                call()
                if time.perf_counter() >= end:
                    break


def _lightck_code(inputs: torch.Tensor) -> list[Callable[[], object]]:
    """Return functions that do what lightck does at a checkpoint: they read and pack states, and compute checksums."""
    state = {f"key{i}": [i, str(i), (0.1, i)] for i in range(12)}
    entries = [NextBatch(bytes(8), kind, 1) for kind in range(4)]
    return [
        lambda: rng.capture().packed(),
        lambda: checksum_of((inputs,)),
        lambda: values.pack(state, path=""),
        random_checksum,
        lambda: pack_next_batch(1, entries, bytes(16)),
    ]
