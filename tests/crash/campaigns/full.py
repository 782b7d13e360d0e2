"""Limits of the system that are real: a full file system, a read-only one, and what a process may not exceed.

A small tmpfs, mounted in a namespace of the trial's own, is as full as it gets wherever in a pool's life it happens: at
the creation, at a new layout, at an export. Beside it RLIMIT_FSIZE, RLIMIT_NOFILE and RLIMIT_AS. An error of lightck's
own is right; a signal never is; and once there is room the pool goes on, exact.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from crash.campaign import Campaign, Order, Tally
from crash.stage import Stage, clear, staged

if TYPE_CHECKING:
    from crash.life import Life

_HERE = "crash.campaigns.full"
KINDS = ("tmpfs", "tmpfs", "tmpfs", "file size", "file size", "descriptors", "memory", "read-only", "folder")
_CLONE_NEWNS, _MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x20000, 1, 32, 0x4000, 1 << 18
_NOBODY = 65534


def run(order: Order, stage: Stage | None = None) -> Tally:
    return play(order, stage)


def play(order: Order, stage: Stage | None, base_every: int = 0) -> Tally:
    """Run the trials of an order. ``base_every``: of ``Gradients``; 0: each checkpoint holds the whole state."""
    tally = Tally()
    with staged(stage) as stage:
        folder = os.path.join(order.folder, "life")
        ending = stage.play(f"{_HERE}:measured", folder, order.backend, base_every)
        clear(folder)
        if ending.trouble():
            tally.found(-1, f"without a limit: {ending.trouble()}")
            return tally
        for trial in order.trials:
            _trial(stage, order, tally, trial, ending.result, base_every)
    return tally


def _trial(stage: Stage, order: Order, tally: Tally, trial: int, needed: int, base_every: int) -> None:
    rng = order.rng(trial)
    kind = KINDS[trial % len(KINDS)]
    amount = {
        "tmpfs": int(needed * 2.5 ** rng.uniform(-3, 1.3)),
        "file size": int(needed * rng.uniform(0, 1.1)),
        "descriptors": rng.randrange(16),
        "memory": int(2 ** rng.uniform(16, 28)),
    }.get(kind, 0)
    folder = os.path.join(order.folder, f"trial-{trial}")
    ending = stage.play(f"{_HERE}:limited", folder, order.backend, kind, amount, base_every)
    clear(folder)
    tally.counts[f"limits: {kind}"] += 1
    if ending.trouble():
        tally.found(trial, f"{kind} {amount}: {ending.trouble()}")
        return
    result = ending.result
    tally.counts["reported" if result["errors"] else "there was room"] += 1
    for reason in sorted(set(result["broken"])):
        tally.found(trial, f"{kind} {amount}: {reason} [errors: {sorted(set(result['errors']))}]")


# -- scenes ----------------------------------------------------------------------------------------------------------


def measured(folder: str, backend: str, base_every: int) -> int:
    """How large the pool becomes."""
    from crash.life import Life

    life = Life(folder, backend, base_every)
    life.live()
    if life.broken or life.errors:
        raise AssertionError(life.broken + life.errors)
    return os.path.getsize(life.pool)


def limited(folder: str, backend: str, kind: str, amount: int, base_every: int) -> dict[str, Any]:
    """A life under this limit, and what becomes of it once it is gone."""
    from crash.life import Life

    os.makedirs(folder)
    if kind in ("read-only", "folder"):
        return _read_only(folder, backend, kind, base_every)
    life = Life(folder, backend, base_every)
    with _LIMITS[kind](folder, amount):
        if kind == "memory":
            _live_in_need(life)
        else:
            life.live()
    gone = list(life.errors)
    life.broken += [f"space ran out in mid-training: {error}" for error in gone if os.strerror(errno.EIO) in error]
    life.aftermath()
    life.broken += [f"left in the folder: {name}" for name in life.litter]
    return {"broken": life.broken, "errors": gone}


def _live_in_need(life: Life) -> None:
    """The interpreter and torch have errors of their own for that, here and inside of what lightck calls."""
    try:
        life.live()
    except (MemoryError, RuntimeError) as err:
        life.errors.append(repr(err))
    reported = [reason for reason in life.broken if reason.startswith(("MemoryError", "RuntimeError"))]
    life.errors += reported
    life.broken = [reason for reason in life.broken if reason not in reported]


@contextmanager
def _soft_limit(what: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@contextmanager
def _tmpfs(folder: str, nbytes: int) -> Iterator[None]:
    """In a namespace of this process's own, so it is gone with the process. Made large at the end of the block."""
    mount(folder, f"size={nbytes},nr_inodes=40")
    yield
    mount(folder, "size=1g", _MS_REMOUNT)


def _descriptors(folder: str, spare: int) -> Any:
    del folder
    return _soft_limit(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) - 1 + spare)


def _memory(folder: str, spare: int) -> Any:
    del folder
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    return _soft_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + spare)


_LIMITS: dict[str, Callable[[str, int], Any]] = {
    "tmpfs": _tmpfs,
    "file size": lambda _, nbytes: _soft_limit(resource.RLIMIT_FSIZE, nbytes),
    "descriptors": _descriptors,
    "memory": _memory,
}


def mount(folder: str, options: str, flags: int = 0) -> None:
    """A tmpfs that only this process sees."""
    libc = ctypes.CDLL(None, use_errno=True)

    def do(status: int, what: str) -> None:
        if status != 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")

    if not flags & _MS_REMOUNT:
        do(libc.unshare(_CLONE_NEWNS), "a namespace of mounts (root is needed)")
        do(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "private mounts")
    do(libc.mount(b"none", folder.encode(), b"tmpfs", ctypes.c_ulong(flags), options.encode()), "mounting tmpfs")


def _read_only(folder: str, backend: str, kind: str, base_every: int) -> dict[str, Any]:
    """Without a pool there, and with one: it can be read, and nothing more."""
    import lightck
    from crash.life import LAST, Life, Training
    from lightck.errors import LightckError, PoolError

    broken, errors = [], []
    if kind == "read-only":
        mount(folder, "size=1g")
    life = Life(folder, backend, base_every)
    life.live()
    broken += life.broken + life.errors
    _make_unwritable(folder, kind)
    for name in ("run.pool", "new.pool"):
        training = Training()
        try:
            lightck.attach(
                training.model,
                os.path.join(folder, name),
                optimizer=training.optimizer,
                resume=True,
                state={"box": training.box},
                backend=backend,
                **life.saving,
            ).close()
            if kind == "read-only" or name == "new.pool":  # a pool that is there needs no room in its folder
                broken.append(f"{name} was opened for writing")
        except PoolError as err:
            errors.append(f"{type(err).__name__}: {err}")
        except LightckError as err:
            broken.append(f"{name}: {type(err).__name__}: {err}")
    training = Training(seed=1)
    step = lightck.recover(life.pool, training.model, optimizer=training.optimizer, state={"box": training.box}).step
    if step != LAST or training.digest() != life.truth_at(LAST):
        broken.append(f"recovery gave step {step}, or other bytes")
    return {"broken": broken, "errors": errors}


def _make_unwritable(folder: str, kind: str) -> None:
    if kind == "read-only":
        mount(folder, "size=1g", _MS_REMOUNT | _MS_RDONLY)
        return
    os.chmod(os.path.dirname(folder), 0o711)
    for name in (*os.listdir(folder), "."):
        os.chown(os.path.join(folder, name), _NOBODY, _NOBODY)
    os.chmod(folder, 0o500)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


CAMPAIGN = Campaign(
    name="full",
    summary="full and read-only file systems, limits of files, descriptors and memory: an error of lightck's own",
    small=18,
    long=400,
    run=run,
)
