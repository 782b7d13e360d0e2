"""Measurements of this machine for ``lightck bench``: copies to a pool's medium, and a small training that is saved at
each step.

The kinds of copies, and the trainings, run in turn within one process, so that other load on the machine affects all of
them in the same way. The training without checkpoints runs twice. The difference between these two trainings is the
noise, which is reported beside the cost of saving.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn

import lightck
from lightck._native import check, ffi, lib
from lightck.cli.text import Facts
from lightck.errors import BenchError
from lightck.pool.engine import Medium
from lightck.pool.format.structures import BLOCK_MAX
from lightck.pool.storage import durability
from lightck.pool.storage.backends import BACKENDS

PLAIN, AGAIN, SAVED, TORCH_SAVE = "saves nothing", "saves nothing, again", "lightck", "torch.save"
TRAININGS = (PLAIN, AGAIN, SAVED, TORCH_SAVE)
ROOM_NBYTES = 192 << 20
"""The free bytes that the measurement needs: first for the copies, then for the pool and two files of torch.save."""
_COPY_NBYTES, _COPY_ROUNDS, _COPY_SECONDS = 64 << 20, 9, 10.0
"""The bytes of one copy, the number of rounds of copies that count, and the seconds after which no round begins."""
_WARM_UP, _COUNTED = (3, 40, 20.0), (5, 60, 40.0)
"""(smallest number of rounds of trainings, largest number, seconds after which no further round begins): for the
warm-up, and for the rounds that count."""
_CONTEXT, _WIDTH, _BATCH, _VALUES = 32, 1024, 1024, 256
"""The number of bytes from which the next byte is predicted, the width of the layers, the batch size, and the number of
values of a byte. They are chosen so that the step time per byte of state equals that of GPT-2 with a batch of 8 texts
of 128 tokens."""


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a step (0.03 is 3 %): the median, and the ends of the median's 95 % confidence interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of the measurement. Figures of a training are medians over rounds, with the training's name as key."""

    machine: Facts
    medium: Facts
    bytes_per_second: dict[str, float]
    """Kind of copy -> speed."""
    state_nbytes: int
    """Bytes of the tensors in a checkpoint of the training."""
    is_synced: bool
    """Whether torch.save is followed by fsync. This is so if a pool in this folder survives a crash of the OS, because
    then the file of torch.save must survive it too."""
    rounds: int
    """The number of rounds of trainings that count."""
    step_seconds: dict[str, float]
    """Seconds per step, the save included."""
    added: dict[str, Share]
    """By how much a step of this training is longer than a step of the training PLAIN, as a share of a step of
    PLAIN."""
    held_up_seconds: dict[str, float]
    """Seconds per step that the save takes on the training thread."""


def measure(folder: Path) -> Speed:
    """Measure on the medium of ``folder``, and return the result. All files are removed at the end."""
    found = durability.probe(str(folder))
    with TemporaryDirectory(prefix="lightck-bench-", dir=folder) as place:
        copies = _copies(place)
    with TemporaryDirectory(prefix="lightck-bench-", dir=folder) as place:
        rounds, state_nbytes = _trained(place, found.os)
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    return Speed(
        {"cores": cores, "threads": threads, "torch": torch.__version__},
        {name: getattr(found, name) for name in ("medium", "process", "os", "power", "media")},
        copies,
        state_nbytes,
        found.os,
        len(rounds.seconds[PLAIN]),
        {name: median(seconds) for name, seconds in rounds.seconds.items()},
        {name: rounds.added(name) for name in TRAININGS[1:]},
        {name: median(seconds) for name, seconds in rounds.held_up.items()},
    )


# -- copies ----------------------------------------------------------------------------------------------------------


def _copies(folder: str) -> dict[str, float]:
    """Return the bytes per second of each kind of copy, on one thread, into pages that are already allocated.

    The time of lightck's copy includes making the bytes durable, as before a commit. On a disk this takes most of the
    time.
    """
    backend, path = BACKENDS["file"], os.path.join(folder, "copies.pool")
    source = np.resize(np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8), _COPY_NBYTES)
    target, address = np.ones_like(source), source.ctypes.data
    container = backend.create(path, _COPY_NBYTES)
    medium = Medium(container.fd, container.extents, backend.probe(path).medium_kind)

    def as_a_checkpoint() -> None:
        crc = ffi.new("uint32_t *")
        for at in range(0, _COPY_NBYTES, BLOCK_MAX):
            check(lib.lck_m_copy(medium.handle, at, ffi.cast("void *", address + at), BLOCK_MAX, crc), "copying")
        medium.sync()

    try:
        return _timed(
            {
                "memcpy in memory": lambda: ctypes.memmove(target.ctypes.data, address, _COPY_NBYTES),
                "memcpy into a pool's file": lambda: ctypes.memmove(medium.address, address, _COPY_NBYTES),
                "lightck into it, with checksums": as_a_checkpoint,
            }
        )
    finally:
        medium.close()
        container.close()


def _timed(kinds: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Run all kinds of copies in rounds, and return the bytes per second of each kind (medians over rounds)."""
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    deadline = time.monotonic() + _COPY_SECONDS
    for number in range(1 + _COPY_ROUNDS):
        if number > 1 and time.monotonic() > deadline:
            break
        for name, copy in kinds.items():
            began = time.perf_counter()
            copy()
            taken[name].append(time.perf_counter() - began)
    # The first copy is left out, because it allocated the pages.
    return {name: _COPY_NBYTES / median(seconds[1:]) for name, seconds in taken.items()}


# -- a training ------------------------------------------------------------------------------------------------------


class _Training:
    """A training of a small network that predicts the next byte in the text of this file. All instances begin with the
    same weights and draw the same batches."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Embedding(_VALUES, 64),
            nn.Flatten(),
            nn.Linear(64 * _CONTEXT, _WIDTH),
            nn.ReLU(),
            nn.Linear(_WIDTH, _WIDTH),
            nn.ReLU(),
            nn.Linear(_WIDTH, _VALUES),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        text = torch.tensor(list(Path(__file__).read_bytes()))
        self._texts = text.unfold(0, _CONTEXT + 1, 1)
        self._draw = torch.Generator().manual_seed(1)

    def step(self) -> None:
        batch = self._texts[torch.randint(len(self._texts), (_BATCH,), generator=self._draw)]
        loss = nn.functional.cross_entropy(self.model(batch[:, :-1]), batch[:, -1])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, path: str, is_synced: bool) -> None:
        """Save model and optimizer in one call of torch.save, as PyTorch's tutorial does, but into a temporary file,
        which replaces ``path`` when it is complete. ``is_synced``: call fsync before the file replaces ``path``."""
        with open(path + ".new", "wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            if is_synced:
                os.fsync(file.fileno())
        os.replace(path + ".new", path)

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters and the tensors of the optimizer state."""
        return [
            *self.model.parameters(),
            *(v for p in self.model.parameters() for v in self.optimizer.state[p].values()),
        ]


class _Rounds:
    """Rounds of trainings: in a round every training makes one step, in random order. ``session`` saves the training
    SAVED; ``file`` is the file of torch.save for the training TORCH_SAVE."""

    def __init__(self, session: lightck.Session, trainings: dict[str, _Training], file: str, is_synced: bool) -> None:
        self._session, self._trainings, self._draw = session, trainings, random.Random(1)
        self._file, self._is_synced = file, is_synced
        self.seconds: dict[str, list[float]] = {name: [] for name in trainings}
        self.held_up: dict[str, list[float]] = {SAVED: [], TORCH_SAVE: []}

    def run(self) -> None:
        """Run warm-up rounds, until lightck has chosen a wait policy, and then the rounds that count."""
        self._rounds(*_WARM_UP, lambda: self._session.stats().wait_policy != "trial")
        for taken in (*self.seconds.values(), *self.held_up.values()):
            taken.clear()
        self._rounds(*_COUNTED, lambda: False)

    def _rounds(self, least: int, most: int, seconds: float, is_enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        for number in range(most):
            if number >= least and (is_enough() or time.monotonic() > deadline):
                break
            for name in self._draw.sample(TRAININGS, len(TRAININGS)):
                self._step(name)

    def _step(self, name: str) -> None:
        stalled, began = self._session.stats().stall_seconds, time.perf_counter()
        self._trainings[name].step()
        updated = time.perf_counter()
        if name == TORCH_SAVE:
            self._trainings[name].save(self._file, self._is_synced)
            self.held_up[name].append(time.perf_counter() - updated)
        self.seconds[name].append(time.perf_counter() - began)
        if name == SAVED:
            self.held_up[name].append(self._session.stats().stall_seconds - stalled)

    def added(self, name: str) -> Share:
        """Return by how much a step of the training ``name`` takes longer than a step of PLAIN, as a share of a step of
        PLAIN. Steps of the same round are compared, so that a slow change of the machine's speed has no effect.

        The 95 % confidence interval of the median comes from order statistics: the ranks n/2 - 0.98 sqrt(n) and
        n/2 + 0.98 sqrt(n) of the n shares.
        """
        plain = self.seconds[PLAIN]
        shares = sorted(taken / without - 1 for taken, without in zip(self.seconds[name], plain, strict=True))
        last, reach = len(shares) - 1, 0.98 * math.sqrt(len(shares))
        low, high = max(0, math.floor(last / 2 - reach)), min(last, math.ceil(last / 2 + reach))
        return Share(median(shares), shares[low], shares[high])


def _trained(folder: str, is_synced: bool) -> tuple[_Rounds, int]:
    """Run the rounds, and check that the checkpoint in the pool equals the training. Returns the rounds, and the bytes
    of the tensors in a checkpoint. Raises ``BenchError`` if the checkpoint differs."""
    trainings, pool = {name: _Training() for name in TRAININGS}, os.path.join(folder, "training.pool")
    saved, fresh = trainings[SAVED], _Training()
    with lightck.attach(saved.model, pool, optimizer=saved.optimizer) as session:
        rounds = _Rounds(session, trainings, os.path.join(folder, "checkpoint.pt"), is_synced)
        rounds.run()
    lightck.recover(pool, fresh.model, fresh.optimizer)
    expected, found = saved.tensors(), fresh.tensors()
    if len(expected) != len(found) or not all(map(torch.equal, expected, found)):
        raise BenchError(
            "The checkpoint that lightck saved differs from the training, so the times mean nothing. This is a bug in "
            "lightck, or a fault of this machine's memory. Please report this error, with the output of lightck doctor."
        )
    return rounds, sum(tensor.numel() * tensor.element_size() for tensor in expected)
