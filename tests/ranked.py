"""Real processes as the ranks of a group: forked from this one, so that torch is imported once, and joined by gloo.

A test gives each rank a body. As a launcher does, ``run_ranks`` ends all other ranks when one is killed.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS_MAX = 120.0
"""A test whose ranks take longer fails."""


@dataclass
class Ended:
    """How one rank ended. ``value``: what its body returned; ``error``: the exception that its body raised."""

    value: Any = None
    error: BaseException | None = None
    signal: int = 0
    """The signal that killed it; 0 if none did."""
    text: str = ""
    """The traceback of ``error``."""

    @property
    def is_killed(self) -> bool:
        return self.signal != 0


def run_ranks(
    n_ranks: int,
    body: Callable[[int], Any],
    *,
    ends_others_after: float = 0.0,
    has_group: bool = True,
    communication: str = "gloo",
    seconds_max: float = SECONDS_MAX,
) -> list[Ended]:
    """Run ``body(rank)`` in one process per rank, and return how each of them ended. ``ends_others_after``: when a rank
    is killed, kill the others after so many seconds, as a launcher does. ``has_group``: whether the ranks join a
    process group first, of this backend for ``communication``. ``seconds_max``: an error is raised if they take
    longer."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = {}
        for rank in range(n_ranks):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                _child(rank, n_ranks, body, write, Path(folder), communication if has_group else "")
            os.close(write)
            ranks[rank] = pid, read
        return _ended(ranks, ends_others_after, seconds_max)


def _child(rank: int, n_ranks: int, body: Callable[[int], Any], write: int, folder: Path, communication: str) -> None:
    ended = Ended()
    try:
        if communication:
            store = f"file://{folder}/store"
            dist.init_process_group(communication, init_method=store, rank=rank, world_size=n_ranks)
        ended.value = body(rank)
    except BaseException as err:
        ended.error, ended.text = err, traceback.format_exc()
    try:
        data = pickle.dumps(ended)
    except Exception:
        data = pickle.dumps(Ended(error=RuntimeError(ended.text or "its value cannot be pickled"), text=ended.text))
    with os.fdopen(write, "wb") as out:
        out.write(data)
    os._exit(0)  # no destructors: gloo's waits for other ranks, which may be gone


def _ended(ranks: dict[int, tuple[int, int]], ends_others_after: float, seconds_max: float) -> list[Ended]:
    data: dict[int, bytearray] = {rank: bytearray() for rank in ranks}
    ended = {}
    deadline = time.monotonic() + seconds_max
    first_death: float | None = None
    open_pipes = {read: rank for rank, (_, read) in ranks.items()}
    while open_pipes:
        for read in select.select(list(open_pipes), [], [], 0.01)[0]:
            rank = open_pipes[read]
            part = os.read(read, 1 << 20)
            data[rank] += part
            if part:
                continue
            del open_pipes[read]
            os.close(read)
            status = os.waitpid(ranks[rank][0], 0)[1]
            ended[rank] = Ended(signal=os.WTERMSIG(status)) if os.WIFSIGNALED(status) else pickle.loads(data[rank])
        is_late = time.monotonic() > deadline
        if first_death is None and any(one.is_killed for one in ended.values()):
            first_death = time.monotonic()
        if is_late or (first_death is not None and time.monotonic() >= first_death + ends_others_after):
            for read in list(open_pipes):
                os.kill(ranks[open_pipes[read]][0], signal.SIGKILL)
        if is_late:
            raise TimeoutError(f"ranks {sorted(open_pipes.values())} did not end within {seconds_max:g} seconds")
    return [ended[rank] for rank in sorted(ended)]


def values(ended: list[Ended]) -> list[Any]:
    """What the bodies returned; raises the first error of a rank."""
    for rank, one in enumerate(ended):
        if one.error is not None:
            raise AssertionError(f"rank {rank}: {one.text}") from one.error
        assert not one.is_killed, f"rank {rank} was killed by signal {one.signal}"
    return [one.value for one in ended]


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect the messages of lightck's logger, in this process."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightck")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def die() -> None:
    """Kill this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of the local bytes of parameters, buffers and optimizer state."""
    states = [
        value
        for group in optimizer.param_groups
        for p in group["params"]
        for _, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, torch.Tensor)
    ]
    tensors = (*model.parameters(), *model.buffers(), *states)
    return [getattr(t, "_local_tensor", t).detach().clone() for t in tensors]
