"""Three faults for every way of saving: a SIGKILL at a random moment while each step is saved, one flipped bit in the
files of a finished run, and a truncated file.

The seed, the rival's name and the number of the trial determine a trial. The loaded state is compared, bit for bit,
with the state of the training after that step.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import forks, rivals, subject

LAST = 600
"""The last step of the training that is killed; it waits there for the kill."""
FINISHED = 6
"""The steps of the training whose files are damaged."""
PERIODS = 8
"""A kill comes within so many step times after the first step was reported as saved."""
HANGS_SECONDS = 60.0


@dataclass(slots=True)
class Tally:
    """The outcomes of the trials of one kind, for one rival."""

    trials: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    in_newest: int | None = 0
    """Trials that damaged a file of the newest checkpoint; None where all checkpoints share one file."""
    examples: dict[str, list[Any]] = field(default_factory=dict)
    """A few trials of each outcome, for inspection."""
    seconds: float = 0.0

    def add(self, outcome: str, example: Any) -> None:
        self.trials += 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        kept = self.examples.setdefault(outcome, [])
        if len(kept) < 5:
            kept.append(example)


@dataclass(frozen=True, slots=True)
class Trials:
    """The settings of one rival's trials."""

    name: str
    seed: int
    folder: Path
    seconds: float
    """The time after which no further trial begins, for each kind of fault."""

    def rng(self, kind: str, number: int) -> random.Random:
        return random.Random(f"{self.seed}:{self.name}:{kind}:{number}")

    def rival(self) -> rivals.Rival:
        return rivals.named(self.name, **rivals.EVERY_STEP.get(self.name, {}))


def loaded(trials: Trials, folder: Path) -> dict[str, Any]:
    """Call the rival's ``load`` on new objects: the step and the digest of the state, or the error."""
    model, optimizer = subject.build(seed=1)
    try:
        step = trials.rival().load(model, optimizer, str(folder))
    except Exception as err:
        return {"error": f"{type(err).__name__}: {err}"[:200]}
    return {"step": step, "digest": subject.digest(subject.parts(model, optimizer))}


# -- SIGKILL -------------------------------------------------------------------------------------------------------


class Reported:
    """The newest step that was reported as saved, readable after the process that wrote it was killed."""

    def __init__(self) -> None:
        self.shared = mmap.mmap(-1, 8)
        self.set(-1)

    def set(self, step: int) -> None:
        self.shared[:] = struct.pack("q", step)

    def get(self) -> int:
        return int(struct.unpack("q", self.shared[:])[0])


def train(trials: Trials, folder: Path, reported: Reported, last: int) -> None:
    model, optimizer = subject.build()
    rival = trials.rival()
    rival.start(model, optimizer, str(folder))
    for step in range(1, last + 1):
        subject.update(model, optimizer, step)
        rival.save(step)
        reported.set(rival.saved)
    while True:
        time.sleep(0.001)
        reported.set(rival.saved)


def period(trials: Trials) -> float:
    """The seconds from one saved step to the next."""

    def work(_: int) -> float:
        with tempfile.TemporaryDirectory(dir=trials.folder) as folder:
            model, optimizer = subject.build()
            rival = trials.rival()
            rival.start(model, optimizer, folder)
            for step in range(1, 21):
                if step == 6:
                    began = time.perf_counter()
                subject.update(model, optimizer, step)
                rival.save(step)
            seconds = (time.perf_counter() - began) / 15
            rival.finish()
            return seconds

    [(_, seconds)] = forks.results(work, [0], 300)
    if not isinstance(seconds, float):
        raise SystemExit(f"{trials.name}: a run without faults {seconds}")
    return seconds


def killed(trials: Trials, number: int, longest: float) -> tuple[Path, int]:
    """Kill a training: its folder, and the newest step that was reported as saved."""
    folder = Path(tempfile.mkdtemp(dir=trials.folder))
    reported = Reported()
    pid = forks.fork(lambda: train(trials, folder, reported, LAST))
    try:
        deadline = time.monotonic() + HANGS_SECONDS
        while reported.get() < 1:
            if time.monotonic() > deadline or os.waitpid(pid, os.WNOHANG)[0]:
                raise SystemExit(f"{trials.name}: saved nothing, without any fault")
            time.sleep(0.0005)
        time.sleep(trials.rng("kill", number).uniform(0, longest))
    finally:
        forks.kill(pid)
    return folder, reported.get()


def kills(trials: Trials, count: int, table: list[str], say: Callable[[str], None]) -> Tally:
    tally = Tally(in_newest=None)
    began = time.monotonic()
    longest = PERIODS * period(trials)
    for number in range(count):
        if time.monotonic() - began > trials.seconds:
            break
        folder, reported = killed(trials, number, longest)
        [(_, result)] = forks.results(lambda _, at=folder: loaded(trials, at), [0], HANGS_SECONDS)  # type: ignore[misc]
        outcome = after_kill(result, reported, table)
        files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
        tally.add(outcome, {"trial": number, "reported": reported, **result, "files": files[:8]})
        shutil.rmtree(folder)
        if number % 100 == 99:
            say(f"{number + 1} kills: {tally.outcomes}")
    tally.seconds = time.monotonic() - began
    return tally


def after_kill(result: dict[str, Any], reported: int, table: list[str]) -> str:
    if "digest" not in result:
        return "nothing loads"
    step = result["step"]
    if not 0 <= step < len(table) or result["digest"] != table[step]:
        return "wrong"
    return "older" if step < reported else "exact"


# -- damage --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Left:
    """The files of a finished run, and their bytes."""

    folder: Path
    files: dict[str, bytes]

    @classmethod
    def by(cls, trials: Trials) -> Left:
        folder = Path(tempfile.mkdtemp(dir=trials.folder))

        def work(_: int) -> int:
            model, optimizer = subject.build()
            rival = trials.rival()
            rival.start(model, optimizer, str(folder))
            for step in range(1, FINISHED + 1):
                subject.update(model, optimizer, step)
                rival.save(step)
            rival.finish()
            return rival.saved

        [(_, saved)] = forks.results(work, [0], 300)
        if saved != FINISHED:
            raise SystemExit(f"{trials.name}: a run without faults saved {saved}, not {FINISHED}")
        return cls(
            folder, {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
        )

    def byte(self, at: int) -> tuple[str, int]:
        """(file, offset) of byte ``at`` of the concatenated files."""
        for name, content in self.files.items():
            if at < len(content):
                return name, at
            at -= len(content)
        raise IndexError(at)

    @property
    def size(self) -> int:
        return sum(map(len, self.files.values()))

    def put_back(self, name: str) -> None:
        (self.folder / name).write_bytes(self.files[name])

    def is_newest(self, name: str) -> bool | None:
        """Whether the file belongs to the newest checkpoint; None where a file holds more than one."""
        if name.endswith(".pool"):
            return None
        steps = {re.match(r"step-\d+", each) for each in self.files}
        newest = max((found[0] for found in steps if found), default="")
        return name.startswith(newest)


@dataclass(frozen=True, slots=True)
class Damage:
    """One damage to one file."""

    name: str
    offset: int
    bit: int | None
    """None: the file is truncated at the offset."""

    def __str__(self) -> str:
        where = f"{self.name} byte {self.offset}"
        return f"{where} cut" if self.bit is None else f"{where} bit {self.bit}"

    def make(self, left: Left) -> None:
        path = left.folder / self.name
        if self.bit is None:
            os.truncate(path, self.offset)
            return
        with open(path, "r+b") as file:
            file.seek(self.offset)
            file.write(bytes([left.files[self.name][self.offset] ^ (1 << self.bit)]))


def flip(left: Left, rng: random.Random) -> Damage:
    """Draw one bit, uniformly over all files."""
    name, offset = left.byte(rng.randrange(left.size))
    return Damage(name, offset, rng.randrange(8))


def cut(left: Left, rng: random.Random) -> Damage:
    """Draw a file, weighted by size, and a length; one in ten is cut to nothing or by one byte."""
    name, offset = left.byte(rng.randrange(left.size))
    return Damage(name, rng.choice([offset] * 18 + [0, len(left.files[name]) - 1]), None)


def damaged(trials: Trials, kind: str, count: int, say: Callable[[str], None]) -> Tally:
    draw = {"flip": flip, "cut": cut}[kind]
    left = Left.by(trials)
    drawn = [draw(left, trials.rng(kind, number)) for number in range(count)]
    belongs = [left.is_newest(damage.name) for damage in drawn]
    tally = Tally(in_newest=None if None in belongs else 0)
    began = time.monotonic()

    def work(number: int) -> dict[str, Any]:
        drawn[number].make(left)
        try:
            return _compared(trials, left)
        finally:
            left.put_back(drawn[number].name)

    for number, result in forks.results(work, list(range(count)), HANGS_SECONDS):
        if "died" in result:
            left.put_back(drawn[number].name)
        tally.add(after_damage(result), {"trial": number, "damage": str(drawn[number]), **result})
        if tally.in_newest is not None:
            tally.in_newest += bool(belongs[number])
        if number % 250 == 249:
            say(f"{number + 1} {kind}s: {tally.outcomes}")
        if time.monotonic() - began > trials.seconds:
            break
    tally.seconds = time.monotonic() - began
    shutil.rmtree(left.folder)
    return tally


_states: list[dict[str, bytes]] = []
"""The state after each step, computed once in each child that compares."""


def _compared(trials: Trials, left: Left) -> dict[str, Any]:
    """Load the damaged files, and compare the state with that of the training."""
    if not _states:
        model, optimizer = subject.build()
        _states.append(dict(subject.parts(model, optimizer)))
        for step in range(1, FINISHED + 1):
            subject.update(model, optimizer, step)
            _states.append(dict(subject.parts(model, optimizer)))
    model, optimizer = subject.build(seed=1)
    try:
        step = trials.rival().load(model, optimizer, str(left.folder))
    except Exception as err:
        return {"error": f"{type(err).__name__}: {err}"[:200]}
    found = dict(subject.parts(model, optimizer))
    if not 0 <= step <= FINISHED:
        return {"step": step, "differs": ["the step"]}
    return {"step": step, "differs": differences(found, _states[step])}


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """The parts that differ, with the number of bytes."""
    wrong = []
    for name in sorted(found.keys() | expected.keys()):
        one, other = found.get(name, b""), expected.get(name, b"")
        if one != other:
            places = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
            at = places[0] if places else min(len(one), len(other))
            count = len(places) + abs(len(one) - len(other))
            wrong.append(f"{name}: {count} bytes, first {other[at : at + 1].hex()} -> {one[at : at + 1].hex()}")
    return wrong[:4]


def after_damage(result: dict[str, Any]) -> str:
    if "died" in result:
        return "crashed"
    if "error" in result:
        return "refused"
    if result["differs"]:
        return "wrong"
    return "harmless" if result["step"] == FINISHED else "fell back"
