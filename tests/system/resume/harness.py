"""The test's side: a reference run, runs that are killed again and again, and what must hold between them.

1. At the end, weights, optimizer state and groups, objects and random states have the reference's bytes.
2. Each loss that any process reported for an update has the bits of the reference's loss for that update.
3. A kill loses at most one finished update (interval x (slots - 1)), and never one that a process had started from.
"""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from .forkserver import ForkServer
from .scenarios import Scenario

SEED = int(os.environ.get("LIGHTCK_TEST_SEED", "0"))
CHECKPOINT_SITES = ("header", "manifest", "sealed", "body", "word", "ack")  # passed once per checkpoint
ADOPTION_SITES = ("body", "word", "ack")


class Mismatch(AssertionError):
    """The killed run differs from the reference run."""


@dataclass(frozen=True)
class Kill:
    """How one process dies.

    clock: by the parent, ``delay`` after the ``nth`` update that it reports. birth: by the parent, ``delay`` after its
    fork. site, attach-site: by the library at the ``nth`` passing of kill point ``name``, armed after or before attach.
    place: by itself, at the ``nth`` passing of the place ``name`` of the scenario.
    """

    kind: str
    name: str = ""
    nth: int = 1
    delay: float = 0.0

    def request(self) -> dict[str, Any] | None:
        if self.kind in ("clock", "birth"):
            return None
        return {"kind": self.kind, "name": self.name, "nth": self.nth}

    def __str__(self) -> str:
        delay = f" +{self.delay * 1e3:.1f} ms" if self.kind in ("clock", "birth") else ""
        return f"{self.kind} {self.name or 'kill'} x{self.nth}{delay}"


@dataclass
class Reported:
    """What one process reported before its end."""

    start: int | None = None
    updates: int = 0
    losses: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """("update", its number, 0) or ("skip", updates before it, which one since then) -> the loss, by bits."""
    digests: dict[str, str] | None = None
    closed: int | None = None
    saw: dict[str, int] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """The log messages that a user sees who did not configure logging."""
    seconds: list[float] = field(default_factory=list)
    status: int = 0

    def take(self, message: Mapping[str, Any]) -> None:
        if "start" in message:
            self.start = self.updates = message["start"]
        elif "update" in message:
            self.updates = message["update"]
            self.losses["update", self.updates, 0] = message["loss"]
            self.seconds.append(time.monotonic())
        elif "skip" in message:
            before = sum(key[:2] == ("skip", self.updates) for key in self.losses)
            self.losses["skip", self.updates, before] = message["loss"]
        elif "saw" in message:
            self.saw[message["saw"]] = self.saw.get(message["saw"], 0) + 1
        elif "log" in message:
            self.logs.append(message["log"])
            if message["level"] not in ("DEBUG", "INFO"):
                self.warnings.append(message["log"])
        else:
            self.digests = message.get("digests", self.digests)
            self.closed = message.get("closed", self.closed)

    @property
    def has_finished(self) -> bool:
        return self.closed is not None

    @property
    def update_seconds(self) -> float:
        """Median time between two updates."""
        gaps = sorted(b - a for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        return gaps[len(gaps) // 2] if gaps else 0.001


@dataclass
class Survival:
    """All processes of one test."""

    kills: list[tuple[Kill, int]] = field(default_factory=list)
    """Kills that came, and the update that they came after."""
    logs: list[str] = field(default_factory=list)

    def count(self, *kinds: str) -> int:
        return sum(kill.kind in kinds for kill, _ in self.kills)

    @property
    def places(self) -> set[str]:
        return {kill.name for kill, _ in self.kills if kill.kind == "place"}


class Training:
    """One scenario with its fork server and a folder: runs single processes of it."""

    def __init__(
        self,
        server: ForkServer,
        scenario: Scenario,
        folder: Path,
        options: Mapping[str, Any] | None = None,
        sabotage: str | None = None,
        sees_frozen: bool = False,
    ) -> None:
        self.scenario = scenario
        self.folder = folder
        self.log = folder / f"{scenario.name}.log"
        self._server = server
        self._request = {"scenario": scenario.name, "options": dict(options or {}), "sabotage": sabotage}
        self._request["sees_frozen"] = sees_frozen
        self._n_children = 0

    def reference(self) -> Reported:
        """The training without lightck and without a kill."""
        reported = self._follow({"mode": "reference", "pool": "", "seed": 0}, None)
        if reported.status or reported.digests is None:
            raise Mismatch(f"the reference run failed:{self._tail()}")
        return reported

    def process(
        self, pool: Path, kill: Kill | None, *, fresh: bool, options: Mapping[str, Any] | None = None
    ) -> Reported:
        """One process with lightck, until ``kill`` or its end. ``fresh``: nothing may be committed yet."""
        self._n_children += 1
        seed = 0 if fresh else 1000 + self._n_children
        request: dict[str, Any] = {"mode": "lightck", "pool": str(pool), "seed": seed}
        if options is not None:
            request["options"] = dict(options)
        return self._follow(request, kill)

    def _follow(self, request: dict[str, Any], kill: Kill | None) -> Reported:
        request = {**self._request, **request, "kill": kill.request() if kill else None}
        child = self._server.start(request, self.log)
        reported = Reported()
        if kill is not None and kill.kind == "birth":
            time.sleep(kill.delay)
            child.kill()
        try:
            for message in child.messages():
                reported.take(message)
                due = "start" in message if kill and kill.nth == 0 else "update" in message
                if (
                    kill is not None
                    and kill.kind == "clock"
                    and due
                    and reported.updates - (reported.start or 0) == kill.nth
                ):
                    time.sleep(kill.delay)
                    child.kill()
        finally:
            reported.status = child.end()
        return reported

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-30:] if self.log.exists() else []
        return "".join(f"\n    {line}" for line in lines)

    def survive(self, reference: Reported, kills: Iterable[Kill], *, seed: int = SEED) -> Survival:
        """Run with these kills, one after the other, until all were used and a run has finished."""
        left, survival = deque(kills), Survival()
        again: set[Kill] = set()
        for n in range(1000):
            chain = Chain(self, reference, self.folder / f"{self.scenario.name}-{n}.pool", f"seed {seed}")
            missed = chain.run(left, survival)
            if missed is not None and missed.request() and missed not in again:
                again.add(missed)  # the process started too late for it: one on a new pool comes by
                left.appendleft(missed)
            if not left:
                return survival
        raise AssertionError("the kills do not end")


class Chain:
    """Processes on one pool, from nothing to the end of the training."""

    def __init__(self, training: Training, reference: Reported, pool: Path, what: str) -> None:
        self._training = training
        self._reference = reference
        self._pool = pool
        self._what = f"{training.scenario.name}, {what}"
        self.warnings: list[str] = []
        """Of all its processes."""
        self._history: list[str] = []
        self._reported = 0
        self._floor = 0

    def run(self, kills: deque[Kill], survival: Survival) -> Kill | None:
        """Until a process finishes. The kill that did not come to it."""
        while True:
            kill = kills.popleft() if kills else None
            if self.step(kill, survival):
                return kill

    def begin_at(self, update: int) -> None:
        """Note that the pool holds this update, whatever was reported before."""
        self._reported = self._floor = update

    def step(self, kill: Kill | None, survival: Survival, options: Mapping[str, Any] | None = None) -> bool:
        """One process: True when it finished the training."""
        fresh = self._reported <= self._training.scenario.loses and not self._floor
        reported = self._training.process(self._pool, kill, fresh=fresh, options=options)
        survival.logs.extend(reported.logs)
        self.warnings.extend(reported.warnings)
        self._history.append(f"{kill or 'no kill'}: started at {reported.start}, reported {reported.updates}")
        self._check_start(reported)
        self._check_losses(reported)
        if reported.digests is not None:
            self._check_end(reported)
        was_killed = kill is not None and reported.status == -signal.SIGKILL
        if reported.has_finished and (was_killed or not reported.status):
            return True
        if kill is None or not was_killed:
            self._fail(f"a process ended with status {reported.status}:{self._training._tail()}")
        survival.kills.append((kill, reported.updates))
        return False

    def _fail(self, fact: str) -> None:
        raise Mismatch("\n  ".join([f"{self._what}: {fact}", "processes on this pool:", *self._history]))

    def _check_start(self, reported: Reported) -> None:
        if reported.start is None:
            return
        least = max(self._floor, self._reported - self._training.scenario.loses)
        if not least <= reported.start <= self._reported:
            self._fail(
                f"update {self._reported} was reported and step {self._floor} was resumed from before, and the "
                f"next process starts at {reported.start}"
            )
        self._floor, self._reported = reported.start, reported.updates

    def _check_losses(self, reported: Reported) -> None:
        for key, bits in reported.losses.items():
            want = self._reference.losses.get(key)
            if bits != want:
                kind, update, _ = key
                self._fail(f"the loss of {kind} {update} is {_text(bits)}, in the reference {_text(want)}")

    def _check_end(self, reported: Reported) -> None:
        assert reported.digests is not None
        differ = _different(reported.digests, self._reference.digests or {})
        if differ:
            self._fail(f"at the end {len(differ)} of {len(reported.digests)} leaves differ: {', '.join(differ[:6])}")
        if reported.updates != self._reference.updates:
            self._fail(f"{reported.updates} updates were made, {self._reference.updates} in the reference")
        if reported.closed not in (None, reported.updates):
            self._fail(f"step {reported.closed} is committed at the end, {reported.updates} were made")


def _text(bits: str | None) -> str:
    return f"{float.fromhex(bits)!r} ({bits})" if bits is not None else "missing"


def _different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


# ---- which kills -------------------------------------------------------------------------------------------------


def draw_kills(scenario: Scenario, reference: Reported, *, seed: int = SEED) -> list[Kill]:
    """Places and kill points first, in turn; then kills at random instants."""
    draw = random.Random(zlib.crc32(scenario.name.encode()) ^ seed)
    instants = [_random_instant(draw, reference.update_seconds) for _ in range(scenario.kills)]
    if scenario.brief:
        return [*(Kill("place", place, 2) for place in scenario.places), instants[0]]
    anywhere = draw.choice(("update", "update", "before close", "after close"))
    places = [Kill("place", place) for place in (*scenario.places, anywhere)]
    draw.shuffle(places)
    sites = [_site(draw), _site(draw)]
    ordered = [kill for pair in zip_longest(places, sites) for kill in pair if kill is not None]
    return ordered + instants


def _site(draw: random.Random) -> Kill:
    if draw.random() < 0.25:
        return Kill("attach-site", draw.choice(ADOPTION_SITES), 1)
    if draw.random() < 0.2:
        return Kill("site", "block", draw.randint(1, 30))
    return Kill("site", draw.choice(CHECKPOINT_SITES), draw.randint(1, 2))


def _random_instant(draw: random.Random, update_seconds: float) -> Kill:
    if draw.random() < 0.15:
        return Kill("birth", delay=draw.uniform(0.0, 0.03))
    return Kill("clock", nth=draw.randint(0, 3), delay=draw.uniform(0.0, 3.0 * update_seconds))


def check_scenario_is_at_work(scenario: Scenario, reference: Reported) -> None:
    """The reference run did what the scenario is about."""
    for what, times in scenario.sees.items():
        seen = reference.saw.get(what, 0)
        if seen < times:
            raise AssertionError(f"{scenario.name}: {what!r} was to be seen {times} times and was seen {seen} times")
    for place in scenario.places:
        if not reference.saw.get(f"place {place}"):
            raise AssertionError(f"{scenario.name} never comes to {place!r}")


def check_kills_came(scenario: Scenario, survival: Survival) -> None:
    """Every place was a place of death, and kill points were too."""
    missed = set(scenario.places) - survival.places
    if missed:
        raise AssertionError(f"{scenario.name}: nothing was killed at {sorted(missed)}")
    if not scenario.brief and not survival.count("site", "attach-site"):
        raise AssertionError(f"{scenario.name}: the library's kill points did not kill: {survival.kills}")


def check_lightck_reported(scenario: Scenario, survival: Survival) -> None:
    for text in scenario.logs:
        if not any(text in line for line in survival.logs):
            raise AssertionError(f"{scenario.name}: lightck never logged {text!r}")
