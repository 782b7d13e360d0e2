"""Every system call on lightck's path fails, at every place of a pool's life: once, or from there on.

The places are counted in a life without a fault, so trial k is the same in every run. What may come of a fault: an
error of lightck's own that leaves nothing behind, a failure in the background that is raised at the next step and at
close, or nothing at all. Afterwards, with the fault gone, what was acknowledged is there to the bit and the training
goes on.
"""

from __future__ import annotations

import errno
import os
import random
import signal
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from crash import interpose
from crash.campaign import Campaign, Order, Tally
from crash.stage import Stage, clear, staged

_DISK = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR)
_WRITE = (*_DISK, interpose.SHORT)
_MEMORY = (errno.ENOMEM,)
ERRORS: dict[str, tuple[int, ...]] = {
    "open": (errno.EMFILE, errno.EIO, errno.ENOSPC, errno.ENOMEM, errno.EINTR),
    "posix_fallocate": (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EINTR),
    "fallocate": _DISK,
    "ftruncate": _DISK,
    "mmap": (errno.ENOMEM, errno.EIO),
    "read": (errno.EIO, errno.EINTR, interpose.SHORT),
    "pread": (errno.EIO, errno.ENOMEM, errno.EINTR, interpose.SHORT),
    "write": _WRITE,
    "pwrite": _WRITE,
    "fsync": _DISK,
    "fdatasync": _DISK,
    "msync": (errno.EIO, errno.ENOMEM),
    "rename": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM),
    "link": (errno.EIO, errno.ENOSPC, errno.EPERM),
    "unlink": (errno.EIO, errno.ENOMEM),
    "mkdir": (errno.EIO, errno.ENOSPC),
    "stat": (errno.EIO, errno.ENOMEM),
    "fstat": (errno.EIO, errno.ENOMEM),
    "fchmod": (errno.EIO, errno.ENOSPC),
    "statfs": (errno.EIO, errno.ENOMEM),
    "fstatvfs": (errno.EIO,),
    "fcntl": (errno.ENOLCK, errno.EMFILE, errno.ENOMEM, errno.EINTR),
    "madvise": (errno.ENOMEM, errno.EINVAL, errno.EIO),
    "pthread_create": (errno.EAGAIN,),
    "malloc": _MEMORY,
    "calloc": _MEMORY,
    "realloc": _MEMORY,
}
MEDIA = ("memory", "disk")
"""How tmpfs is taken: for what it is, or for a disk, where every commit waits for fdatasync."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One place and what happens there."""

    medium: str
    call: str
    nth: int
    error: int
    times: int

    def __str__(self) -> str:
        often = "once" if self.times == 1 else "from there on"
        return f"{self.medium}, {self.call} number {self.nth} fails with {interpose.name_of(self.error)} {often}"


def run(order: Order, stage: Stage | None = None) -> Tally:
    tally = Tally()
    with staged(stage, interposed=True) as stage:
        faults = _in_turns(_faults(stage, order, tally), random.Random(order.seed))
        for trial in order.trials:
            _trial(stage, order, tally, trial, faults[trial % len(faults)])
    return tally


def _faults(stage: Stage, order: Order, tally: Tally) -> list[Fault]:
    """Every fault that there is, from lives without one."""
    found = []
    for medium in MEDIA:
        folder = os.path.join(order.folder, "life")
        ending = stage.play("crash.campaigns.syscalls:counted", folder, order.backend, medium)
        clear(folder)
        if ending.trouble() or ending.result["broken"]:
            tally.found(-1, f"without a fault, {medium}: {ending.trouble() or ending.result['broken']}")
            continue
        for call, n in ending.result["counts"].items():
            for nth in range(1, n + 1):
                for error in ERRORS[call]:
                    # A call that is interrupted for ever, or never gives all, is none that a system makes.
                    often = (1,) if error in (errno.EINTR, interpose.SHORT) else (1, interpose.EVER)
                    found += [Fault(medium, call, nth, error, times) for times in often]
    tally.counts["places and errors"] = len(found)
    return found


def _in_turns(faults: list[Fault], rng: random.Random) -> list[Fault]:
    """In random order, the calls taking turns: a few trials have something of each."""
    rng.shuffle(faults)
    seen: Counter[tuple[str, str]] = Counter()
    turns: list[tuple[int, int]] = []
    for fault in faults:
        seen[fault.medium, fault.call] += 1
        turns.append((seen[fault.medium, fault.call], len(turns)))
    return [faults[at] for _, at in sorted(turns)]


def _trial(stage: Stage, order: Order, tally: Tally, trial: int, fault: Fault) -> None:
    folder = os.path.join(order.folder, f"trial-{trial}")
    ending = stage.play("crash.campaigns.syscalls:struck", folder, order.backend, asdict(fault))
    tally.counts["faults"] += 1
    if fault.call == "msync" and ending.status == -signal.SIGABRT:
        tally.counts["ended by libpmemobj, which cannot go on without msync"] += 1
        ending = stage.play("crash.campaigns.syscalls:survived", folder, order.backend)
    clear(folder)
    trouble = ending.trouble()
    if trouble is not None:
        tally.found(trial, f"{fault}: {trouble}")
        return
    result = ending.result
    for reason in sorted(set(result["broken"])):
        tally.found(trial, f"{fault}: {reason} [errors: {sorted(set(result['errors']))}]")
    tally.counts["calls that failed"] += result["failed"]
    tally.counts["told" if result["errors"] else "went on without harm"] += 1
    tally.counts["older or nothing acknowledged" if result["lost"] else "all steps exact"] += 1


# -- scenes, in a child of the stage ---------------------------------------------------------------------------------


def counted(folder: str, backend: str, medium: str) -> dict[str, Any]:
    """A life without a fault."""
    from crash.life import Life

    _take_for(medium)
    life = Life(folder, backend)
    with interpose.watching(folder):
        life.live()
    counts = interpose.counts()
    life.aftermath()
    return {"counts": counts, "broken": life.broken + life.errors + life.litter}


def struck(folder: str, backend: str, fault: dict[str, Any]) -> dict[str, Any]:
    """A life with this fault, and what is left of it."""
    from crash.life import LAST, Life

    plan = Fault(**fault)
    _take_for(plan.medium)
    life = Life(folder, backend)
    with interpose.watching(folder):
        interpose.arm(plan.call, plan.nth, plan.times, plan.error)
        life.live()
    failed = interpose.failed()
    lost = life.acknowledged < LAST
    if plan.error == interpose.SHORT and (lost or life.errors):
        life.broken.append("a call that gave less than it was asked for, which is no failure, was taken for one")
    life.aftermath()
    if plan.call != "unlink":  # then there was no way to remove them
        life.broken += [f"left in the folder: {name}" for name in life.litter]
    return {"broken": life.broken, "errors": life.errors, "failed": failed, "lost": lost}


def survived(folder: str, backend: str) -> dict[str, Any]:
    """What a process that is gone has left in this folder."""
    from crash.life import LAST, Life

    life = Life(folder, backend)
    lost = life.acknowledged < LAST
    life.aftermath()
    return {"broken": life.broken, "errors": [], "failed": 1, "lost": lost}


def _take_for(medium: str) -> None:
    from lightck.pool.storage import durability

    if medium == "disk":
        durability._MEMORY.clear()  # tmpfs is then a file system of which nothing is known


CAMPAIGN = Campaign(
    name="syscalls",
    summary="every system call on the path fails, once or from there on: exact, or an error of lightck's own",
    small=60,
    long=4000,
    run=run,
)
