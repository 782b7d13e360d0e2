"""The demo's parent process: a training that is not killed, the same training with kills, and their comparison.

Both trainings run ``child.py``, with the same arguments except for the pool. A kill loses the updates that the dead
child had reported and that come after the step from which the next child resumes. Only ``Size`` and the kill sites
depend on how a checkpoint is written.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from lightck.demo.compare import Kill, Record, differences
from lightck.demo.place import MIB, Place, open_place
from lightck.demo.plan import SITES, PlannedKill, draw, kill_setting
from lightck.demo.process import Child
from lightck.errors import LightckError

EPOCHS = 3
SILENCE_SECONDS_MAX = 180.0  # a child that reports nothing for longer is considered to hang
SITE_GRACE = 2  # a child that reports this many updates more than planned missed its kill site: the parent kills it
LOG_TAIL_BYTES = 2000  # how much of a child's output an error message quotes


class DemoError(LightckError, RuntimeError):
    """The demo could not be carried out. The error says nothing about checkpoints."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the model and of its batches: the arguments of the same names of ``train_gpt.py``."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int

    @property
    def parameters(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + self.width * (256 + self.context + 2)

    @property
    def pool_nbytes(self) -> int:
        """The approximate size of the pool in bytes: two slots, each with fp32 weights and two moments, and the pool's
        structures."""
        return 2 * 3 * 4 * self.parameters + 8 * MIB

    @property
    def blocks(self) -> int:
        """The number of blocks in a checkpoint: one per tensor, because each tensor is smaller than a block."""
        return 3 * (12 * self.layers + 4)

    def arguments(self) -> list[str]:
        names = ("layers", "width", "heads", "context", "batch")
        return [word for name in names for word in (f"--{name}", str(getattr(self, name)))]


SIZES = {
    "small": Size(layers=4, width=128, heads=4, context=128, batch=4),
    "tiny": Size(layers=2, width=32, heads=2, context=32, batch=2),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options. ``steps``: the number of updates before it is rounded up to whole epochs (``total``)."""

    kills: int
    steps: int
    seed: int
    size: Size
    keep: Path | None = None
    pool_dir: Path | None = None

    @property
    def updates(self) -> int:
        """The number of updates in one epoch."""
        return math.ceil(self.steps / EPOCHS)

    @property
    def total(self) -> int:
        """The number of updates in one run."""
        return EPOCHS * self.updates

    def arguments(self, pool: str, epochs: int = EPOCHS) -> list[str]:
        """Return the arguments of ``train_gpt.py``. The training has one thread, so that other cores are free for the
        copy threads."""
        run = {"--pool": pool, "--epochs": epochs, "--updates": self.updates, "--seed": self.seed, "--threads": 1}
        return [str(word) for pair in run.items() for word in pair] + self.size.arguments()


@dataclass(frozen=True, slots=True)
class Result:
    """The result of the demo. If ``differences`` is empty, the runs are bit-identical, and no kill lost more updates
    than lightck promises."""

    seed: int
    steps: int
    pool: str
    why_there: str
    kept: bool
    kills_planned: int
    kills: tuple[Kill, ...]
    differences: tuple[str, ...]
    seconds: float
    step_seconds: float  # median over the steps of the reference run
    stall_seconds_per_step: float  # median over the steps of the killed run, without the first step of each child
    wait_seconds_per_step: float  # mean over the steps of the killed run
    bytes_per_checkpoint: int
    checkpoints: int
    durability: dict[str, Any]

    @property
    def ok(self) -> bool:
        return not self.differences and bool(self.kills)


class Watch:
    """Receives the events of a running demo. This base class shows nothing."""

    def opened(self, place: Place, options: Options) -> None:
        """The folder of the pool was chosen."""

    def updated(self, run: str, step: int) -> None:
        """The run with the name ``run`` ("reference" or "killed") has finished update ``step``."""

    def reference_ended(self, seconds: float) -> None:
        """The reference run is over; it took ``seconds``."""

    def recovered(self, number: int, kill: Kill) -> None:
        """The child that resumes after kill ``number`` (from 1) has started."""


def run_demo(options: Options, watch: Watch | None = None) -> Result:
    """Do both runs, compare them, and return the result, which contains the differences.

    Raises:
        DemoError: a training process failed or hung.
    """
    watch = watch or Watch()
    began = time.monotonic()
    with _signals_exit(), open_place(options.size.pool_nbytes, options.keep, options.pool_dir) as place:
        watch.opened(place, options)
        with open(place.log, "w+b", buffering=0) as log:
            reference = _ReferenceRun(options, watch, log)
            reference.run()
            killed_run = _KilledRun(options, watch, log, str(place.pool), reference.step_seconds())
            killed_run.run()
    return _result(options, place, reference, killed_run, time.monotonic() - began)


def _result(options: Options, place: Place, reference: _ReferenceRun, killed_run: _KilledRun, seconds: float) -> Result:
    kills = tuple(killed_run.kills)
    steps, checkpoints = max(1, killed_run.total("updates")), killed_run.total("checkpoints")
    return Result(
        seed=options.seed,
        steps=options.total,
        pool=str(place.pool),
        why_there=place.why,
        kept=options.keep is not None,
        kills_planned=options.kills,
        kills=kills,
        differences=differences(reference.record, killed_run.record, kills, options.total),
        seconds=seconds,
        step_seconds=reference.step_seconds(),
        stall_seconds_per_step=statistics.median(killed_run.stalls or [0.0]),
        wait_seconds_per_step=killed_run.total("wait_seconds") / steps,
        bytes_per_checkpoint=round(killed_run.total("bytes_written") / max(1, checkpoints)),
        checkpoints=checkpoints,
        durability=killed_run.durability,
    )


class _Run:
    """The base class of both runs: reads the messages of a child into a record."""

    name = ""

    def __init__(self, options: Options, watch: Watch, log: IO[bytes]) -> None:
        self.options, self.watch, self.log = options, watch, log
        self.record = Record()
        self.done = False
        """Whether the training has reached its end."""

    def take(self, message: dict[str, Any]) -> None:
        if "update" in message:
            self.record.losses.setdefault(message["update"], []).append(message["loss_bits"])
            self.watch.updated(self.name, message["update"])
        if "digests" in message:
            self.record.digests = message["digests"]
            self.record.imported_lightck = message["imported_lightck"]
        if "done" in message:
            self.done = True
            self.record.recovered = message["recovered"]

    def failed(self, what: str) -> DemoError:
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        tail = self.log.read().decode(errors="replace").strip()
        return DemoError(f"{what}. This happened in the {self.name} run. Its last output:\n{tail or '(nothing)'}")

    def read(self, child: Child, due: float = math.inf) -> dict[str, Any] | None:
        """Return the child's next message, or None if the child has ended and all its messages were read. Raises
        ``TimeoutError`` at ``due``, a value of ``time.monotonic()``, and ``DemoError`` for a child that hangs."""
        limit = time.monotonic() + SILENCE_SECONDS_MAX
        try:
            return child.read(min(due, limit))
        except TimeoutError:
            if due <= limit:
                raise
        raise self.failed(f"the training process was silent for {SILENCE_SECONDS_MAX:.0f} s and was killed")


class _ReferenceRun(_Run):
    """The run without lightck and without kills."""

    name = "reference"

    def __init__(self, options: Options, watch: Watch, log: IO[bytes]) -> None:
        super().__init__(options, watch, log)
        self.arrivals: list[float] = []
        """For each update, the ``time.monotonic()`` at which its report was read."""

    def run(self) -> None:
        began = time.monotonic()
        with Child(self.options.arguments("none"), self.log) as child:
            while (message := self.read(child)) is not None:
                self.take(message)
                if "update" in message:
                    self.arrivals.append(time.monotonic())
            if child.status() != 0 or not self.done:
                raise self.failed(f"the training process ended with status {child.status()}")
        self.watch.reference_ended(time.monotonic() - began)

    def step_seconds(self) -> float:
        """Return the median of the times between two reports."""
        return statistics.median(b - a for a, b in itertools.pairwise(self.arrivals))


class _KilledRun(_Run):
    """The run with kills: one child process for each kill, and a last child process that is not killed."""

    name = "killed"

    def __init__(self, options: Options, watch: Watch, log: IO[bytes], pool: str, step_seconds: float) -> None:
        super().__init__(options, watch, log)
        self.arguments = options.arguments(pool)
        self.step_seconds = step_seconds
        self.position = 0  # the last update that a child reported, or the step from which the newest child resumed
        self.kills: list[Kill] = []
        self.deaths: list[tuple[str, int]] = []
        """(how, last reported update) of each kill after which no child has started yet."""
        self.counters: list[dict[str, Any]] = []
        """For each child, the session's counters in the child's last report."""
        self.stalls: list[float] = []
        """The stall of each update, in seconds. The first update of each child is left out, because lightck searches
        all live objects at this update."""
        self.durability: dict[str, Any] = {}

    def run(self) -> None:
        for planned in draw(self.options.kills, self.options.total, self.options.seed):
            self.run_child(planned)
            if self.done:  # the training ended before all kills: it was much faster than the reference run
                return
        self.run_child(None)

    def run_child(self, planned: PlannedKill | None) -> None:
        """Run one child until it is killed or the training ends. ``planned``: the kill; None: do not kill the child."""
        setting = (
            None
            if planned is None
            else kill_setting(planned, self.position, self.options.size.blocks, self.options.seed)
        )
        self.counters.append({})
        due, sent_kill = math.inf, ""
        with Child(self.arguments, self.log, setting) as child:
            while True:
                try:
                    message = self.read(child, due)
                except TimeoutError:
                    child.kill()
                    due, sent_kill = math.inf, self._describe_sent_kill(planned)
                    continue
                if message is None:
                    break
                self.take(message)
                if due == math.inf and not sent_kill and "update" in message:
                    due = self._due(planned)
            self._child_ended(child.status(), sent_kill or _at_site(setting))

    def _describe_sent_kill(self, planned: PlannedKill | None) -> str:
        """Return a description of a kill that the parent has sent, for ``Kill.how``."""
        assert planned is not None
        if planned.site is None:
            return f"timed, {planned.delay:.2f} steps after update {planned.after}"
        return f"timed, because the training did not reach the moment when {SITES[planned.site]}"

    def _due(self, planned: PlannedKill | None) -> float:
        """Return the ``time.monotonic()`` at which to kill the child; infinity if this time is not known yet, or if the
        child is not to be killed. Called when the child has reported an update."""
        if planned is None:
            return math.inf
        if planned.site is not None:
            return time.monotonic() if self.position >= planned.after + SITE_GRACE else math.inf
        return time.monotonic() + planned.delay * self.step_seconds if self.position >= planned.after else math.inf

    def _child_ended(self, status: int, how: str) -> None:
        """Store the kill that ended a child. How many updates the kill lost is known only when the next child starts.
        Raises ``DemoError`` if the child ended in another way. ``how``: a description of the kill; "" if there was
        none."""
        killed = status == -signal.SIGKILL and how != ""
        if self.done and (killed or status == 0):
            return  # the training had ended before a kill could lose anything
        if not killed:
            raise self.failed(f"the training process ended with status {status}")
        self.deaths.append((how, self.position))

    def take(self, message: dict[str, Any]) -> None:
        super().take(message)
        if "start" in message:
            self.durability = message["durability"]
            self._started(message["start"], message["recovery_seconds"])
        if "update" in message:
            self.position = message["update"]
            updates = self.counters[-1].get("updates", 0) + 1
            if updates > 1:
                self.stalls.append(message["stats"]["stall_seconds"] - self.counters[-1]["stall_seconds"])
            self.counters[-1] = {**message["stats"], "updates": updates}

    def _started(self, step: int, recovery_seconds: float) -> None:
        for how, reported in self.deaths:
            self.kills.append(Kill(how, reported, step, recovery_seconds))
            self.watch.recovered(len(self.kills), self.kills[-1])
        self.deaths.clear()
        self.position = step

    def total(self, counter: str) -> Any:
        """Return the sum of a counter over all children."""
        return sum(each.get(counter, 0) for each in self.counters)


def _at_site(setting: str | None) -> str:
    """Return a description of the moment at which a child killed itself, for ``Kill.how``. ``setting``: the child's
    LIGHTCK_KILL; None gives an empty text."""
    return f"when {SITES[setting.partition(':')[0]]} (LIGHTCK_KILL={setting})" if setting else ""


@contextlib.contextmanager
def _signals_exit() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise ``SystemExit`` in this block, so that the child is killed and the folder of the pool
    is removed, as after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
