"""Small trainings through the public API, to be recorded: a model of few tensors, a step, and what a restart makes.

Everything in them is deterministic, down to the bytes in the pool where the recorder gives the files their identities.
"""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

import lightck
from crash.oracle import truth
from crash.recording import Recorder, Recording
from lightck.pool.format.structures import MIB
from lightck.pool.storage import backends
from lightck.pool.storage.pmdk import PmdkBackend

Pair: TypeAlias = "tuple[nn.Module, torch.optim.Optimizer]"


def build(width: int = 3, frozen: bool = False) -> Pair:
    """A model of few tensors, so that a recovery is quick, with momentum as optimizer state."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1, bias=False))
    for p in model[0].parameters():
        p.requires_grad_(not frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(torch.tensor([[1.0, number], [0.5, -1.0]])).square().sum().backward()
    optimizer.step()


def train(
    recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0, **state: Any
) -> None:
    for number in range(start, start + steps):
        one_step(model, optimizer, number)
        recorder.note(model, optimizer, **state)


class Average:
    """An object in ``state`` with one large tensor, which may grow."""

    def __init__(self, numel: int) -> None:
        self.values = torch.arange(float(numel))

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


@dataclass(frozen=True, slots=True)
class Workload:
    """``run`` trains under a recorder; ``build`` makes what a restart would make, and ``options`` are those of its
    attach."""

    run: Callable[[Recorder], None]
    build: Callable[[], Pair] = build
    state: Callable[[], dict[str, Any]] = dict
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: Callable[[Recorder], dict[str, Any]] = lambda recorder: {}
    """What the session itself adds to ``state``, as it is after a step."""

    def goes_on(self, recorder: Recorder) -> None:
        """Resume from an image and make two more steps; what then is in the pool must be the last one."""
        (model, optimizer), state = self.build(), self.state()
        with recorder.attach(model, optimizer, state=state, resume=True, **self.options) as session:
            start = session.step
            for number in (start, start + 1):
                one_step(model, optimizer, number)
                recorder.note(model, optimizer, **state, **self.beside(recorder))
        (again, optimizer_again), state_again = self.build(), self.state()
        assert lightck.recover(recorder.path, again, optimizer_again, state_again).step == start + 2
        assert truth(again, optimizer_again, **state_again) == truth(model, optimizer, **state), "other values"


def record(workload: Workload, path: Path) -> Recording:
    recorder = Recorder(str(path))
    with recorder:
        workload.run(recorder)
    return recorder.finish()


@contextmanager
def small_heap() -> Iterator[None]:
    """``attach`` looks for optimizers among all live objects: inside, what lives now is no candidate, and an attach
    costs milliseconds."""
    gc.collect()
    gc.freeze()
    try:
        with patch.object(gc, "get_freeze_count", lambda: 0):
            yield
    finally:
        gc.unfreeze()


@contextmanager
def alone(backend: str) -> Iterator[None]:
    """One thread, pools of this kind (PMDK's with several arenas each), and no advice to users on the screen."""
    threads, log = torch.get_num_threads(), logging.getLogger("lightck")
    level = log.level
    pmdk = {"pmdk": PmdkBackend(arena_nbytes=2 * MIB)}
    environment = {backends.BACKEND_VARIABLE: backend, "PMEM_IS_PMEM_FORCE": "1"}
    torch.set_num_threads(1)
    log.setLevel(logging.CRITICAL)
    try:
        with patch.dict(backends.BACKENDS, pmdk), patch.dict(os.environ, environment):
            yield
    finally:
        log.setLevel(level)
        torch.set_num_threads(threads)
