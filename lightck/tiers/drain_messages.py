"""What a training and its drain say to each other, over a pair of connected sockets. Each message is one JSON text.

training -> drain    once a ``DrainSettings``; then
                     ``{"offer": generation, "tiers": [...]}``: this checkpoint is held for the drain, and is due
                     for the tiers with these numbers
                     ``{"first": [...]}``: the tiers with these numbers hold no checkpoint: send them the newest one as
                     soon as possible
                     ``{"metrics": {...}, "step": n}``: what the user logged
                     ``{"close": true}``: the training ends
                     ``{"persists": true}``: the training will end soon, and attempts go on after that
                     ``{"newest": true}``: send the newest checkpoint now
                     ``{"signal_grace": seconds}``: how long further signals are ignored after the first one
                     ``{"look": true}``: the folder from which this drain is fed has got a checkpoint
                     ``{"stale_up_to": step}``: checkpoints of this step and of earlier ones may hold old bytes
drain -> training    a ``DrainState``. It holds everything that the training must know, so that a message may be
                     left out if a later one follows
"""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lightck.tiers.decisions import KeepBest, Retention

if TYPE_CHECKING:
    from lightck.tiers.tier import Tier

DRAIN_MODULE = "lightck.tiers.drain_process"
"""The module that a drain runs, as its command line names it."""
PROCESS_NAME = "lightck-drain"
"""The name of a drain, as the kernel shows it."""
_SIGNALS = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "XCPU", "PWR")
ANNOUNCING_SIGNALS = tuple(signal.Signals[f"SIG{name}"] for name in _SIGNALS if hasattr(signal, f"SIG{name}"))
"""Signals with which a system announces to all processes of a job that it will end them. The first one does not end a
drain."""
MESSAGE_NBYTES_MAX = 1 << 17
"""No message is larger. A socket takes more than this in one piece by default."""
REPORTS_MAX, _REPORT_LENGTH_MAX = 8, 1000


@dataclass(frozen=True)
class TierSettings:
    """What a drain must know of one tier."""

    root: str
    every_seconds: float | None
    """None: the training offers checkpoints when they are due."""
    every_steps: int | None
    """None: a checkpoint is due by time."""
    keep_last: int | None
    keep_every: int | None
    keep_best: tuple[str, int, str] | None
    has_parent: bool
    """Whether the tier holds the checkpoint from which the training went on."""
    bytes_per_second: float | None = None
    """The largest rate; None: without a limit."""
    options: dict[str, str | int | bool] = field(default_factory=dict)
    """Of an object store. They may hold secrets: they go over the socket, and nowhere else."""
    compress: str | None = None
    reread_seconds: float | None = None
    """The time in which everything in the tier is read again; None: nothing is."""
    newest_step: int | None = None
    """The step of the newest checkpoint in the tier when the drain begins; None: there is none."""
    newest_age: float | None = None
    """How many seconds before that it was written; None: there is none."""

    @classmethod
    def of(cls, tier: Tier, *, has_parent: bool) -> TierSettings:
        return cls(
            tier.path,
            tier.every_seconds,
            tier.every_steps,
            tier.keep_last,
            tier.keep_every,
            tier.keep_best,
            has_parent,
            tier.bytes_per_second,
            dict(tier.options or {}),
            tier.compress,
            tier.reread_seconds,
        )

    @property
    def retention(self) -> Retention:
        best = None if self.keep_best is None else KeepBest(*self.keep_best)
        return Retention(keep_last=self.keep_last, keep_every=self.keep_every, keep_best=best)


@dataclass(frozen=True)
class Parent:
    """The checkpoint from which the training went on."""

    claim: str
    """Empty if the checkpoint names no claim."""
    step: int
    generation: int


@dataclass(frozen=True)
class DrainSettings:
    """What a drain must know before it begins."""

    pool: str
    claim: str
    written_by: str
    """This release of lightck."""
    parent: Parent | None
    tiers: tuple[TierSettings, ...]
    grace: float
    """How many seconds a checkpoint that was replaced stays readable."""
    rank: int = 0
    world_size: int = 1
    pools_of_ranks: tuple[str, ...] = ()
    """The pools of all ranks of the group, if they lie in one directory; else empty."""
    number: int = 0
    """The number of this drain among those of its training. Drain 0 also reads the pool again."""
    other_tiers: tuple[TierSettings, ...] = ()
    """The tiers of the training that its other drains serve."""
    fed_from: int | None = None
    """Number of the folder among ``other_tiers`` from which the only tier of this drain is fed (``feeding.py``)."""

    def packed(self) -> dict[str, Any]:
        # The paths of thousands of ranks differ at their ends only, and a message has room for these.
        prefix = os.path.commonprefix(self.pools_of_ranks)  # noqa: RUF071 (of the texts, as is meant here)
        pools = [prefix, *(each.removeprefix(prefix) for each in self.pools_of_ranks)]
        return {**asdict(self), "pools_of_ranks": pools}

    @classmethod
    def unpacked(cls, message: dict[str, Any]) -> DrainSettings:
        parent = None if message["parent"] is None else Parent(**message["parent"])
        both: dict[str, Any] = {
            key: tuple(
                TierSettings(**{**each, "keep_best": each["keep_best"] and tuple(each["keep_best"])})
                for each in message[key]
            )
            for key in ("tiers", "other_tiers")
        }
        prefix, *ends = message["pools_of_ranks"]
        pools = tuple(prefix + each for each in ends)
        return cls(**{**message, **both, "parent": parent, "pools_of_ranks": pools})


@dataclass
class Reread:
    """What a drain has read again in one place: in a tier, or in the pool."""

    rounds: int = 0
    """How often it has read everything."""
    nbytes: int = 0
    damaged: int = 0
    """Files of a tier, or checkpoints of the pool, that were found damaged."""
    mended: int = 0
    """How many of them were written anew."""


@dataclass
class TierState:
    """What a drain has done for one tier."""

    step: int | None = None
    """The step of the newest checkpoint that it has sent."""
    checkpoints: int = 0
    sent_nbytes: int = 0
    seconds: float = 0.0
    """How long the last checkpoint took."""
    sent_at: float | None = None
    """When the last one was sent: seconds of ``time.time``."""
    error: str | None = None
    """Why the last attempt failed; None after a success."""
    failing_since: float | None = None
    is_superseded: bool = False
    waiting: int = 0
    """How many checkpoints wait in a folder until they are sent to the tier."""
    reread: Reread = field(default_factory=Reread)


@dataclass
class DrainState:
    """The state of a drain."""

    is_busy: bool = True
    """Whether it holds, or is about to hold, a checkpoint."""
    answered: int = 0
    """The generation of the last offer whose checkpoint the drain holds now, or cannot take. The training need not hold
    this checkpoint any more."""
    is_done: bool = False
    """Whether it has done everything after ``close``."""
    fatal: str | None = None
    """Why the process ends although the training goes on."""
    progress: int = 0
    """Grows while a checkpoint is sent, so that whoever waits for a large one, a slow tier or a rate sees that it goes
    on. Reported every second at most."""
    tiers: list[TierState] = field(default_factory=list)
    pool: Reread = field(default_factory=Reread)
    reports: list[str] = field(default_factory=list)
    """The last ``REPORTS_MAX`` texts of which the training is to warn."""
    n_reports: int = 0
    """How many there were."""
    damaged_slots: list[tuple[str, int, int]] = field(default_factory=list)
    """The last ``REPORTS_MAX`` damaged checkpoints of the pool: its uuid (hexadecimal), slot and generation of each."""

    def report(self, text: str) -> None:
        """Add a text of which the training is to warn."""
        self.reports = [*self.reports, text[:_REPORT_LENGTH_MAX]][-REPORTS_MAX:]
        self.n_reports += 1

    def packed(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def unpacked(cls, message: dict[str, Any]) -> DrainState:
        tiers = [TierState(**{**each, "reread": Reread(**each["reread"])}) for each in message["tiers"]]
        slots = [(uuid, slot, generation) for uuid, slot, generation in message["damaged_slots"]]
        return cls(**{**message, "tiers": tiers, "pool": Reread(**message["pool"]), "damaged_slots": slots})


def send_message(connection: socket.socket, message: dict[str, Any], *, wait: bool = False) -> bool:
    """Send a message. Returns False if it cannot be sent now (and ``wait`` is False), or if nobody is there."""
    flags = 0 if wait else socket.MSG_DONTWAIT
    try:
        connection.send(json.dumps(message, separators=(",", ":")).encode(), flags | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True


def receive_message(connection: socket.socket) -> dict[str, Any] | None:
    """Return a message that has arrived; an empty one if there is none yet; None if the other side has ended."""
    try:
        data = connection.recv(MESSAGE_NBYTES_MAX, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return {}
    except OSError:
        return None
    if not data:
        return None
    found = json.loads(data)
    assert isinstance(found, dict), "the other side is lightck"
    return found
