"""Small trainings, crashes and damage, from which the tests of the public API are built.

A *crash* is either a copy of the pool's file, taken in mid-training (on tmpfs, a kill leaves exactly the file), or a
forked child that dies. Neither needs a new interpreter.
"""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightck
from lightck._native import lib
from lightck.pool.engine import COPIED
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.pool.storage import extents
from lightck.pool.storage.backends import backend_for
from lightck.pool.storage.extents import Extents

BIG = 3000
"""Rows that make a tensor too large to be copied at the boundary itself."""


def net(width: int = 8, seed: int = 0, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width, bias=bias), nn.Tanh(), nn.Linear(width, 2, bias=bias))


def adam(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def batch(number: int, rows: int = 3) -> torch.Tensor:
    """The batch of one iteration: the same in every run, and nothing is drawn from the global generators."""
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1000 + number))


def forward(model: nn.Module, number: int = 0) -> torch.Tensor:
    return model(batch(number)).square().sum()


def train(model: nn.Module, optimizer: Any, steps: int, start: int = 0) -> None:
    """Make ``steps`` plain iterations. The last update is made and not closed."""
    for number in range(start, start + steps):
        optimizer.zero_grad()
        forward(model, number).backward()
        optimizer.step()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def everything(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """A deep copy of model and optimizers, for ``same``."""
    return copy.deepcopy({"model": weights(model), "optimizers": [o.state_dict() for o in optimizers]})


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal in type, dtype and bits."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        return one.numel() == 0 or bool((_bits(one) == _bits(other)).all())
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8)


def is_step(checkpoint: lightck.Checkpoint, seen: dict[str, Any]) -> bool:
    """Whether a loaded checkpoint holds what ``everything`` returned, for a model and one optimizer."""
    optimizers = [checkpoint.optimizer] if isinstance(checkpoint.optimizer, dict) else checkpoint.optimizer or []
    return same(dict(checkpoint.model), seen["model"]) and same(optimizers, seen["optimizers"])


def pool_with(path: Path, steps: int = 3, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Create a closed pool that holds ``steps`` and ``steps - 1`` of a small training."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, path, optimizer=optimizer, **options):
        train(model, optimizer, steps)
    return model, optimizer


# -- crashes ---------------------------------------------------------------------------------------------------------


def crashed(pool: Path, name: str = "crashed.pool") -> Path:
    """Copy what a kill at this moment would leave of the pool, into the same folder."""
    image = pool.with_name(name)
    shutil.copyfile(pool, image)
    image.chmod(0o600)
    return image


def in_child(work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` in a forked child; raise its exception, if it has one."""
    result, status = _fork(work)
    assert status == 0, f"the child ended with status {status}"
    kind, value = result
    if kind == "error":
        raise AssertionError(f"in the child:\n{value}")
    return value


def on_small_tmpfs(nbytes: int, work: Any) -> Any:
    """``work(folder)`` in a child that has a tmpfs of its own, invisible to everybody else."""

    def run() -> Any:
        libc = ctypes.CDLL(None, use_errno=True)
        clone_newns, ms_rec, ms_private = 0x00020000, 0x4000, 1 << 18
        if libc.unshare(clone_newns) != 0 or libc.mount(b"none", b"/", None, ms_rec | ms_private, None) != 0:
            return "not permitted"
        where = Path("/mnt")
        if libc.mount(b"tmpfs", b"/mnt", b"tmpfs", 0, f"size={nbytes},mode=700".encode()) != 0:
            return "not permitted"
        return work(where)

    answer = in_child(run)
    if answer == "not permitted":
        pytest.skip("mounting a tmpfs in a namespace is not permitted here")
    return answer


@contextmanager
def running_child(work: Callable[[], Any]) -> Iterator[int]:
    """Run ``work`` in a forked child during the block; raise its exception, if it has one, at the end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os.write(write, traceback.format_exc()[-4000:].encode())
        os._exit(0)
    os.close(write)
    try:
        yield pid
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        with os.fdopen(read, "rb") as source:
            error = source.read().decode()
        _, status = os.waitpid(pid, 0)
    assert (error, status) == ("", 0), f"in the child:\n{error}"


def killed_child(work: Callable[[], Any]) -> None:
    """Run ``work`` in a forked child that must die of SIGKILL."""
    result, status = _fork(work)
    assert os.WIFSIGNALED(status), f"the child was to be killed; it gave {result}"
    assert os.WTERMSIG(status) == signal.SIGKILL


def kill_at(site: str, nth: int = 1) -> None:
    """Let this process, a child, die at the nth passing of this kill site from now on."""
    assert lib.lck_kill(site.encode(), nth) == lib.LCK_OK


def _fork(work: Callable[[], Any]) -> tuple[Any, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            result = ("value", work())
        except BaseException:
            result = ("error", traceback.format_exc())
        with os.fdopen(write, "wb") as out:
            out.write(pickle.dumps(result))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as source:
        data = source.read()
    _, status = os.waitpid(pid, 0)
    return (pickle.loads(data) if data else None), status


@contextmanager
def child_that_holds(work: Callable[[], Any]) -> Iterator[Any]:
    """Run ``work`` in a forked child, which keeps the result alive until the block is left."""
    ready_read, ready_write = os.pipe()
    end_read, end_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end_write)
        try:
            kept = work()
            os.write(ready_write, b"1")
            os.read(end_read, 1)
            del kept
        except BaseException:
            os.write(ready_write, traceback.format_exc()[-900:].encode())
        os._exit(0)
    os.close(ready_write)
    os.close(end_read)
    try:
        answer = os.read(ready_read, 1000)
        assert answer == b"1", answer.decode()
        yield pid
    finally:
        os.close(end_write)
        os.close(ready_read)
        os.waitpid(pid, 0)


def alive() -> set[str]:
    """Return every thread and every open descriptor of this process."""
    return {f"{kind}/{name}" for kind in ("task", "fd") for name in os.listdir(f"/proc/self/{kind}")}


def left_since(before: set[str], seconds: float = 10.0) -> set[str]:
    """Return what is alive now and was not ``before``, after waiting: a joined thread is listed until the kernel has
    removed it."""
    deadline = time.monotonic() + seconds
    while (left := alive() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def settled(session: lightck.Session, step: int, seconds: float = 20.0) -> None:
    """Wait until this step is committed in the background."""
    deadline = time.monotonic() + seconds
    while session.committed != step:
        assert time.monotonic() < deadline, f"step {step} was not committed, {session.committed} was"
        time.sleep(0.0005)


def copied(session: lightck.Session, seconds: float = 60.0) -> None:
    """Wait until the copies of the only checkpoint under way are done, without helping."""
    (checkpoint,) = session._pipeline._in_flight
    deadline = time.monotonic() + seconds
    while checkpoint.pending.job.info().state < COPIED:
        assert time.monotonic() < deadline, f"the copies of step {checkpoint.step} are not done"
        time.sleep(0.001)


# -- damage ----------------------------------------------------------------------------------------------------------


def checkpoints(pool: Path) -> list[StoredCheckpoint]:
    """Return all checkpoints whose manifest is valid, newest first."""
    reader = open_pool(str(pool))
    try:
        return [v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint)]
    finally:
        reader.close()


def places(pool: Path | str) -> Extents:
    """Return where the pool's bytes lie in its file, for any backend."""
    container = backend_for(str(pool)).open(str(pool), write=False)
    container.close()
    return container.extents


def content(pool: Path | str) -> bytes:
    """Return the pool's bytes, without those of its container."""
    with open(pool, "rb") as f:
        return b"".join(os.pread(f.fileno(), n, at) for at, n in places(pool))


def poke(pool: Path | str, offset: int, data: bytes) -> None:
    """Write to a place in the pool, unknown to lightck."""
    with open(pool, "r+b") as f:
        for at, n in extents.runs(places(pool), offset, len(data)):
            os.pwrite(f.fileno(), data[:n], at)
            data = data[n:]


def flip(pool: Path, offset: int, mask: int = 0x40) -> None:
    """Flip bits of one byte of the pool."""
    with open(pool, "rb") as f:
        byte = extents.read(f.fileno(), places(pool), offset, 1)[0]
    poke(pool, offset, bytes([byte ^ mask]))


def is_pmdk(pool: Path | str) -> bool:
    """Whether a PMDK pool lies there, or would be created there."""
    return backend_for(str(pool)).name == "pmdk"


def damage(pool: Path, name: str, steps: Sequence[int] | None = None, at: int = 0) -> None:
    """Flip a bit of one tensor's payload, in the checkpoints of these steps (all of them by default)."""
    for checkpoint in checkpoints(pool):
        if steps is None or checkpoint.step in steps:
            slot_offset, _ = checkpoint.reader.superblock.slots[checkpoint.record.slot]
            flip(pool, slot_offset + checkpoint.entries[name].offset + at)
