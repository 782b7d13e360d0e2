"""From a saved state to the next step: a verified recovery against torch.load and load_state_dict, and one memcpy.

lightck reads on several threads, and the memcpy runs on one thread and, separately, on as many threads as lightck uses.
All load into the same live model, whose memory is allocated. *To the next step* adds the extra time of the first pass
over the state compared with the second, since a mapped file is read only then.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

import lightck
from bench.measures.copies import mapped, places, shared_out
from bench.measures.figures import spread
from bench.measures.training import Training, differing
from bench.workloads import workload
from lightck.errors import BenchError
from lightck.pool.storage.system import read_threads

_REST_SECONDS = 0.05


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    training = Training(workload(options["workload"], options["size"]), options.get("batch", 0))
    pool, file = os.path.join(folder, "bench.pool"), os.path.join(folder, "checkpoint.pt")
    with lightck.attach(training.model, pool, optimizer=training.optimizer, backend=options.get("backend", "file")):
        training.iterate()
        training.iterate()
    _saved(training, file)
    expected = training.digest()
    loads: dict[str, Callable[[], None]] = {
        "lightck": lambda: _recovered(training, pool),
        "torch.load": lambda: _loaded(training, file, mmap=False),
        "torch.load mmap": lambda: _loaded(training, file, mmap=True),
    }
    for name, load in loads.items():
        _check(training, expected, name, load)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loads}
    copies: dict[int, list[float]] = {1: [], read_threads(): []}
    for _ in range(options["rounds"]):
        for name, load in loads.items():
            times[name].append(_timed(training, load))
        _own_memory(training)
        for threads, seconds in copies.items():
            seconds.append(_memcpy(training, pool, threads))
    return _result(training, times, copies)


def _saved(training: Training, file: str) -> None:
    torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, file)


def _recovered(training: Training, pool: str) -> None:
    lightck.recover(pool, training.model, training.optimizer)


def _loaded(training: Training, file: str, mmap: bool) -> None:
    state = torch.load(file, weights_only=True, mmap=mmap)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])


def _check(training: Training, expected: dict[str, int], name: str, load: Callable[[], None]) -> None:
    _own_memory(training)
    training.scramble()
    load()
    wrong = differing(expected, training.digest())
    if wrong:
        raise BenchError(f"{name} does not load what was saved: {len(wrong)} tensors differ, {wrong[0]} is one.")


def _timed(training: Training, load: Callable[[], None]) -> tuple[float, float]:
    """Seconds of the load alone, and with the extra time of the first pass over the state."""
    _own_memory(training)
    _pass(training)
    _rest()
    began = time.perf_counter()
    load()
    seconds = time.perf_counter() - began
    first, second = _pass(training), _pass(training)
    return seconds, seconds + max(0.0, first - second)


def _rest() -> None:
    """Make the process as after a restart: OpenMP's threads have stopped spinning, and garbage is collected."""
    gc.collect()
    time.sleep(_REST_SECONDS)


@torch.no_grad()
def _pass(training: Training) -> float:
    """Read and write every tensor, as an update does, without changing a value."""
    began = time.perf_counter()
    for tensor in training.tensors():
        tensor.mul_(1)
    return time.perf_counter() - began


@torch.no_grad()
def _own_memory(training: Training) -> None:
    """Copy optimizer state that load_state_dict left in a mapped file into private memory, as in a training."""
    for state in training.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = value.clone()


def _memcpy(training: Training, pool: str, threads: int) -> float:
    """Seconds to copy as many bytes from the pool's allocated pages into the live tensors, on running threads; the
    second of two copies counts."""
    parts = shared_out(places(training.tensors()), threads)
    _rest()
    with open(pool, "rb") as file, ThreadPoolExecutor(threads) as workers:
        size = min(os.fstat(file.fileno()).st_size, training.nbytes)
        with mapped(file.fileno(), size, write=False) as source:
            return [_copied(workers, parts, source, size) for _ in range(2)][1]


def _copied(workers: ThreadPoolExecutor, parts: list[list[tuple[int, int, int]]], source: int, size: int) -> float:
    def copy(part: list[tuple[int, int, int]]) -> None:
        for target, nbytes, at in part:
            ctypes.memmove(target, source + min(at, size - nbytes), nbytes)

    began = time.perf_counter()
    if len(parts) == 1:
        copy(parts[0])
    else:
        list(workers.map(copy, parts))
    return time.perf_counter() - began


def _result(
    training: Training, times: dict[str, list[tuple[float, float]]], copies: dict[int, list[float]]
) -> dict[str, Any]:
    found: dict[str, Any] = {"nbytes": training.nbytes, "memcpy": asdict(spread(copies[1]))}
    for name, pairs in times.items():
        loads, with_pass = zip(*pairs, strict=True)
        found[name] = {"load": asdict(spread(loads)), "to_next_step": asdict(spread(with_pass))}
    ours = found["lightck"]["to_next_step"]["median"]
    load = found["lightck"]["load"]["median"]
    found["of_memcpy"] = median(copies[1]) / load
    threads = max(copies)
    found["memcpy_on_threads"] = {"threads": threads, **asdict(spread(copies[threads]))}
    found["of_memcpy_on_threads"] = median(copies[threads]) / load
    found["faster_than"] = {
        name: found[name]["to_next_step"]["median"] / ours for name in ("torch.load", "torch.load mmap")
    }
    return found
