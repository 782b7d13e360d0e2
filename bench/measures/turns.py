"""A training in a process of its own, which takes turns with others: its windows of steps, its memory, its recovery.

Every step of a window is saved (with an interval: stored or saved), and nothing is in flight when a window ends, so
the windows of the other trainings are not disturbed. The first step after the start is no part of a window: a
checkpoint is made at the beginning of the step after it. So the windows of ``n`` steps save the steps 1 to n, n + 1 to
2 n, and so on.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench.measures.copies import memcpy_cpu_seconds
from bench.measures.memory import Samples
from bench.measures.savers import FULL, LIGHTCK, NOTHING, Saver, make
from bench.measures.training import Training
from bench.running.machine import bytes_below, cpu_seconds, written_bytes
from bench.workloads import gpt2_of, state_tensors
from lightck.errors import BenchError
from lightck.pool.gradient_reader import checkpoint_of, committed
from lightck.pool.reader import open_pool

RECOVERIES = 3


@dataclass(frozen=True, slots=True)
class Spec:
    """What a training is, and how it is saved. ``rival``: options of a rival's class. ``slots``: of lightck's pool;
    None: as by default."""

    layers: int
    size: str
    folder: str
    saver: str = NOTHING
    strategy: str = FULL
    interval: int = 1
    rival: dict[str, Any] | None = None
    slots: int | None = None

    def training(self) -> Training:
        return Training(gpt2_of(self.layers, self.size))

    def make(self) -> Saver:
        return make(self.saver, strategy=self.strategy, rival=self.rival, slots=self.slots)


class Trained:
    """The training, in its process."""

    def __init__(self, spec: Spec) -> None:
        torch.set_num_threads(torch.get_num_threads())  # the process was forked: OpenMP has no threads here
        self._spec = spec
        self._training, self._saver, self._samples = spec.training(), spec.make(), Samples()
        # torch calls hooks in the order of registration: this one before the saver's hooks, the other one after them.
        self._is_sampling = False
        self._training.optimizer.register_step_pre_hook(lambda *_: self._sample("before update"))
        os.makedirs(spec.folder, exist_ok=True)
        self._saver.start(self._training, spec.folder, spec.interval)
        self._training.model.register_forward_pre_hook(lambda *_: self._sample("forward begins"))
        self._training.iterate()

    def window(self, steps: int) -> dict[str, Any]:
        """Make so many steps; their figures, and totals of the window: seconds, CPU of the process, bytes."""
        before, cpu, written, began = self._saver.costs(), cpu_seconds(), written_bytes(), time.perf_counter()
        seconds, stalls, each_written = [], [], []
        for number in range(steps):
            costs, at = self._saver.costs(), time.perf_counter()
            self._saver.step_begins(self._training.step)
            self._training.iterate()
            if number == steps - 1:
                self._saver.window_ends(True)
            now = self._saver.costs()
            seconds.append(time.perf_counter() - at)
            stalls.append(now.stall_seconds - costs.stall_seconds)
            each_written.append(now.written_bytes - costs.written_bytes)
        after, whole = self._saver.costs(), time.perf_counter() - began
        is_ours = self._spec.saver == LIGHTCK
        return {
            "seconds": whole,
            "cpu": cpu_seconds() - cpu,
            "own_cpu": after.own_cpu_seconds - before.own_cpu_seconds,
            "bytes": after.written_bytes - before.written_bytes if is_ours else written_bytes() - written,
            "step_seconds": seconds,
            "step_stalls": stalls,
            "step_bytes": each_written,
            "is_settled": self._saver.is_settled,
        }

    def memory(self, steps: int) -> dict[str, float]:
        """Private memory at three moments of a step: the largest of so many steps, in bytes."""
        self._is_sampling = True
        for _ in range(steps):
            self._saver.step_begins(self._training.step)
            self._training.iterate()
            self._sample("settled")
        self._saver.window_ends(True)
        self._is_sampling = False
        return self._samples.largest()

    def _sample(self, moment: str) -> None:
        if self._is_sampling:
            self._samples.take(moment)

    def memcpy(self, folder: str) -> float:
        """CPU seconds of one memcpy of the state."""
        return median(memcpy_cpu_seconds(self._training.tensors(), folder))

    def finish(self, steps: int) -> dict[str, Any]:
        """Make so many steps more, so that full states lie behind; save the last one, and compare what loads with the
        live state."""
        training = self._training
        for _ in range(steps):
            self._saver.step_begins(training.step)
            training.iterate()
        self._saver.finish(training.step)
        facts = {"files_bytes": bytes_below(self._spec.folder), **self._saver.facts()}
        live = [(name, tensor.clone()) for name, tensor in state_tensors(training.model, training.optimizer)]
        training.scramble()
        step = self._saver.load(training, self._spec.folder)
        if step != training.step:
            raise BenchError(
                f"{self._spec.saver} loads step {step} and not {training.step}, the last one that it was given. The "
                "row is invalid: this is a bug of the saver or of the bench."
            )
        loaded = dict(state_tensors(training.model, training.optimizer))
        return facts | compared(live, loaded, {name for name, _ in training.model.named_parameters()})

    def remove(self) -> None:
        shutil.rmtree(self._spec.folder)


def compared(
    live: list[tuple[str, torch.Tensor]], loaded: dict[str, torch.Tensor], parameters: Collection[str]
) -> dict[str, Any]:
    """Whether the loaded state has the bits of the live one, the number of tensors that differ, and by how much
    parameters do."""
    differing = {name: tensor for name, tensor in live if not same_bits(tensor, loaded[name])}
    most = [difference(tensor, loaded[name]) for name, tensor in differing.items() if name in parameters]
    return {
        "exact": not differing,
        "tensors": len(live),
        "differing": len(differing),
        "max_difference": max((absolute for absolute, _ in most), default=0.0),
        "max_relative_difference": max((relative for _, relative in most), default=0.0),
    }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes; -0.0 and 0.0 do not."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def difference(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """The largest absolute difference of two tensors, and its ratio to the largest absolute value of the first."""
    most = float((one.double() - other.double()).abs().max())
    return most, most / max(float(one.double().abs().max()), torch.finfo(torch.float64).tiny)


class Recovered:
    """A recovery, in a process that has not trained."""

    def __init__(self, spec: Spec) -> None:
        torch.set_num_threads(torch.get_num_threads())
        self._spec, self._training = spec, spec.training()

    def measure(self) -> dict[str, Any]:
        """The median seconds of a load into live objects, the seconds of one update, and how many updates a recovery
        of lightck makes again, on average over the bytes of the state."""
        self._training.iterate()  # now the optimizer has state
        for p in self._training.model.parameters():
            p.grad = torch.zeros_like(p)
        self._training.optimizer.step()
        began = time.perf_counter()
        self._training.optimizer.step()
        update = time.perf_counter() - began
        self._training.optimizer.zero_grad()
        seconds = []
        for _ in range(RECOVERIES + 1):  # the first reads the pages of the files into the page table
            saver, began = self._spec.make(), time.perf_counter()
            saver.load(self._training, self._spec.folder)
            seconds.append(time.perf_counter() - began)
        found = {"recovery": median(seconds[1:]), "update": update}
        replayed = saver.facts().get("replayed", 0) if self._spec.saver != LIGHTCK else self._replayed()
        return found | {"replayed": float(replayed)}

    def _replayed(self) -> float:
        with closing(open_pool(os.path.join(self._spec.folder, "bench.pool"), gradients=True)) as reader:
            if not reader.superblock.has_gradients:
                return 0.0
            checkpoint = checkpoint_of(reader, committed(reader)[0])
            bases = list(checkpoint.bases())
            again = sum((checkpoint.step - base.step) * base.entry.nbytes for base in bases)
            return again / sum(base.entry.nbytes for base in bases)
