"""The power is cut at every point of a recording, and what is left must recover.

A *crash image* is a file that a crash at one moment of the trace may leave behind, under a persistence model: with
everything before that moment in it, with nothing of what was not durable, and with each unit that was not durable
lost alone and arrived alone. Images are differences to one file. Each is recovered by the shipped ``lightck.recover``
and has to keep the promise: nothing that was acknowledged is lost, nothing is returned that was never begun, and
every tensor is exact. An image that differs only where recovery does not look is not recovered again.

One rule cannot be seen in an image, since checksums would hide that it is broken: where fences order, a slot's header
names the new generation, durably, before the first byte of payload changes. It is checked on the trace.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightck import _native
from lightck.testing.images import ImageFile
from lightck.testing.oracle import Outcome, Recovered, Refused, recovery
from lightck.testing.persistence import Model, Tracker
from lightck.testing.reads import Memory, watched
from lightck.testing.recording import Recorder, Recording, Tape
from lightck.testing.trace import LOST, PUBLISHED, Event, Mark, Store

Transform = Callable[[Sequence[Event]], Iterable[Event]]
"""Turns a trace into the trace of a program with a bug."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise, with what it takes to see it again."""

    tape: int
    event: int
    image: str
    units: tuple[int, ...]
    reason: str
    seed: int

    def __str__(self) -> str:
        where = f"file {self.tape}, before event {self.event}, seed {self.seed}, {self.image}"
        units = "".join(f" {unit:#x}" for unit in self.units)
        return f"{self.reason} [{where}{units}]"


@dataclass(frozen=True, slots=True)
class Report:
    """What a check saw. ``distinct`` images were recovered; the others differ from one of these only where recovery
    does not look."""

    model: str
    events: int
    crash_points: int
    images: int
    distinct: int
    again: int
    went_on: int
    images_after: int
    """Images of the trainings that went on."""
    outcomes: Counter[str]
    violations: tuple[Violation, ...]

    def __str__(self) -> str:
        outcomes = ", ".join(f"{n} {name}" for name, n in sorted(self.outcomes.items()))
        head = (
            f"{self.model}: {self.events} events, {self.crash_points} crash points, {self.images} images "
            f"({self.distinct} distinct, {self.again} recovered again), {self.went_on} trained on with "
            f"{self.images_after} images more: {outcomes}; {len(self.violations)} violations"
        )
        return "\n".join([head, *map(str, self.violations)])


@dataclass(frozen=True, slots=True)
class Effort:
    """How closely to look."""

    payload_units: int = 16
    """How many units of payload are lost, each alone, at one crash point."""
    metadata_units: int = 1 << 20
    """The same for metadata: all."""
    shuffles: int = 8
    """Images per crash point in which any subset of what is not durable is lost."""
    again_every: int = 200
    """Every so many images the recovery is run for certain, its outcome compared, and the file too."""
    goes_on_every: int = 1000
    """On every so many images a training goes on, and the power is cut again."""
    violations_max: int = 20
    """A check ends there."""
    seed: int = 0

    def less(self) -> Effort:
        """For a recording that began in a crash image."""
        return replace(self, payload_units=2, metadata_units=16, shuffles=1, again_every=200)


class Promise:
    """Which contents a recovery may return at one moment of the trace."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._acked = tape.acked
        self.begun: list[int] = []
        """Generations that were begun since the last one that was acknowledged."""

    def feed(self, event: Event) -> None:
        if not isinstance(event, Mark):
            return
        if event.mark == _native.MARK_BEGIN:
            self.begun.append(event.value)
        elif event.mark == _native.MARK_ACK:
            self._acked = event.value
            self.begun = [g for g in self.begun if g > event.value]
        elif event.mark == LOST:
            self.begun += [] if self._acked is None else [self._acked]
            self._acked = event.value

    def broken_by(self, outcome: Outcome) -> str | None:
        """The reason why this outcome must not be; None where it may."""
        if isinstance(outcome, Refused):
            if self._acked is None and outcome.error == "NoCheckpointError":
                return None
            before = "before" if self._acked is None else f"though generation {self._acked} was acknowledged, not"
            return f"{outcome.error} {before} anything was acknowledged: {outcome.message}"
        lines = [*self.begun, *([] if self._acked is None else [self._acked])]
        allowed = {self._tape.content.get(g, g) for g in lines}
        if outcome.generation not in allowed:
            return f"generation {outcome.generation} was recovered, only {sorted(allowed)} may be"
        known = self._tape.expected.get(outcome.generation)
        if known is None:
            return f"generation {outcome.generation} was recovered, and nobody knows what it has to hold"
        if (known.step, known.digest) != (outcome.step, outcome.digest):
            return f"generation {outcome.generation} was recovered as step {outcome.step} with other values"
        return None


@dataclass(frozen=True, slots=True)
class Cut:
    """How an image differs from "everything before this event has arrived"."""

    image: str
    units: tuple[int, ...] = ()
    """Offsets of the units that it is about."""


def images(
    file: ImageFile, tracker: Tracker, picked: Sequence[int], rng: random.Random, shuffles: int
) -> Iterator[Cut]:
    """Every image of one crash point, one after the other in ``file``, which then holds everything again.

    Of units that are not durable, those in ``picked`` are lost and arrive alone; ``shuffles`` images more give every
    unit any of its possible contents.
    """
    size, pending = tracker.unit, tracker.pending
    choices = {number: pending[number].contents() for number in picked}
    yield Cut("everything arrived")
    for number, contents in choices.items():
        newest = pending[number].newest
        for content in contents:
            if content != newest:
                file.write(number * size, content)
                yield Cut("one lost", (number * size,))
        file.write(number * size, newest)
    for number, unit in pending.items():
        file.write(number * size, unit.durable)
    yield Cut("nothing arrived")
    for number, contents in choices.items():
        for content in contents[1:]:
            file.write(number * size, content)
            yield Cut("one alone", (number * size,))
        file.write(number * size, contents[0])
    for _ in range(shuffles if len(pending) > 1 else 0):
        for number, unit in pending.items():
            file.write(number * size, rng.choice([unit.durable, unit.newest]))
        yield Cut("any of them", tuple(n * size for n, u in pending.items() if file.read(n * size, size) != u.newest))
    for number, unit in pending.items():
        file.write(number * size, unit.newest)


class Simulator:
    """A recording, to be checked under several models; what one check recovered, the next need not."""

    def __init__(
        self,
        recording: Recording,
        folder: str,
        *,
        recover: Callable[[str], Outcome] = recovery,
        goes_on: Callable[[Recorder], None] | None = None,
        effort: Effort | None = None,
    ) -> None:
        """``goes_on``: trains on from the recorder's pool, and raises where that does not work."""
        self.recording = recording
        self.folder = folder
        self.recover = recover
        self.goes_on = goes_on
        self.effort = effort or Effort()
        self.memory: Memory[Outcome] = Memory()

    def check(self, model: Model, bug: Transform | None = None) -> Report:
        """Every image of every file under this model; ``bug`` changes the trace first."""
        check = _Check(self, model)
        for number, tape in enumerate(self.recording):
            events = list(tape.events if bug is None else bug(tape.events))
            check.tape(number, tape, events)
        return check.report()


class _Enough(Exception):
    """So many violations that the rest tells nothing new."""


@dataclass(slots=True)
class _Check:
    """One run over all files of a recording under one model."""

    simulator: Simulator
    model: Model
    events: int = 0
    crash_points: int = 0
    images: int = 0
    distinct: int = 0
    again: int = 0
    went_on: int = 0
    images_after: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def report(self) -> Report:
        return Report(self.model.name, self.events, self.crash_points, self.images, self.distinct, self.again,
                      self.went_on, self.images_after, self.outcomes, tuple(self.violations))  # fmt: skip

    def tape(self, number: int, tape: Tape, events: Sequence[Event]) -> None:
        path = os.path.join(self.simulator.folder, "crashed.pool")
        file = ImageFile(path, tape.nbytes, tape.pages, tape.places)
        try:
            _Tape(self, number, tape, file).run(events)
        except _Enough:
            pass
        finally:
            file.close()


class _Tape:
    """One file under one model, from its first event to its last."""

    def __init__(self, check: _Check, number: int, tape: Tape, file: ImageFile) -> None:
        self._check = check
        self._simulator = check.simulator
        self._effort = check.simulator.effort
        self._number = number
        self._tape = tape
        self._file = file
        self._promise = Promise(tape)
        self._tracker = check.model.tracker(file.read)
        self._is_visible = tape.is_visible
        self._rng = random.Random(self._effort.seed)
        self._at = 0

    def run(self, events: Sequence[Event]) -> None:
        self._check.events += len(events)
        for self._at, event in enumerate(events):
            if self._check.model.is_barrier(event):
                self._cut()
            self._feed(event)
            if isinstance(event, Store):
                self._judge(Cut("everything arrived"))
            elif isinstance(event, Mark):
                self._cut()
        self._at = len(events)
        self._cut()

    def _feed(self, event: Event) -> None:
        self._tracker.feed(event)
        self._promise.feed(event)
        if isinstance(event, Store):
            self._check_header(event)
            self._file.write(event.offset, event.data)
        elif isinstance(event, Mark):
            self._is_visible |= event.mark == PUBLISHED

    def _check_header(self, store: Store) -> None:
        slot = next((s for s in self._tape.slots if s.payload <= store.offset < s.end), None)
        if slot is None or not self._check.model.fences_order:
            return
        names = int.from_bytes(self._file.read(slot.header, 8), "little")
        if names not in self._promise.begun or slot.header // self._tracker.unit in self._tracker.pending:
            self._violation(Cut("no image"), "payload was stored into a slot that was not invalidated durably before")

    def _cut(self) -> None:
        """A crash here: everything that it may leave behind."""
        if not self._is_visible:
            return
        self._check.crash_points += 1
        for cut in images(self._file, self._tracker, self._picked(), self._rng, self._effort.shuffles):
            self._judge(cut)

    def _picked(self) -> list[int]:
        """The units to lose."""
        size = self._tracker.unit
        metadata: list[int] = []
        payload: list[int] = []
        for number in self._tracker.pending:
            at = number * size
            is_payload = any(slot.payload <= at < slot.end for slot in self._tape.slots)
            (payload if is_payload else metadata).append(number)
        effort = self._effort
        return self._sample(metadata, effort.metadata_units) + self._sample(payload, effort.payload_units)

    def _sample(self, units: list[int], n: int) -> list[int]:
        return units if len(units) <= n else self._rng.sample(units, n)

    def _judge(self, cut: Cut) -> None:
        if not self._is_visible:
            return
        self._check.images += 1
        outcome = self._outcome(cut)
        reason = self._promise.broken_by(outcome)
        if reason is not None:
            self._violation(cut, reason)

    def _violation(self, cut: Cut, reason: str) -> None:
        found = self._check.violations
        found.append(Violation(self._number, self._at, cut.image, cut.units, reason, self._effort.seed))
        if len(found) >= self._effort.violations_max:
            raise _Enough

    def _outcome(self, cut: Cut) -> Outcome:
        """What recovery makes of this image; now and then we look closer."""
        check, effort = self._check, self._effort
        outcome = self._simulator.memory.recall(self._file.read)
        if outcome is None:
            outcome = self._recovered(cut)
        if check.images % effort.again_every == 0:
            self._again(cut, outcome)
        if self._simulator.goes_on is not None and check.images % effort.goes_on_every == 0:
            self._go_on(cut, outcome, self._simulator.goes_on)
        return outcome

    def _recovered(self, cut: Cut) -> Outcome:
        changed_at = self._file.changed_at()
        with watched() as places:
            outcome = self._simulator.recover(self._file.path)
        self._simulator.memory.learn(places, self._file.read, outcome)
        self._check.outcomes[f"step {outcome.step}" if isinstance(outcome, Recovered) else outcome.error] += 1
        self._check.distinct += 1
        if self._file.changed_at() != changed_at:
            self._violation(cut, "the recovery wrote to the file")
        return outcome

    def _again(self, cut: Cut, outcome: Outcome) -> None:
        before = bytes(self._file.whole())
        self._check.again += 1
        if self._simulator.recover(self._file.path) != outcome:
            self._violation(cut, "a second recovery gave something else")
        if self._file.whole() != before:
            self._violation(cut, "the recovery changed the file")

    def _go_on(self, cut: Cut, outcome: Outcome, goes_on: Callable[[Recorder], None]) -> None:
        """Train on from this image, and cut the power at every point of that too."""
        self._check.went_on += 1
        with tempfile.TemporaryDirectory(dir=self._simulator.folder) as folder:
            recorder = Recorder(os.path.join(folder, "again.pool"))
            self._file.copy_to(recorder.path)
            try:
                with recorder:
                    goes_on(recorder)
            except Exception as err:
                self._violation(cut, f"a training does not go on: {type(err).__name__}: {err}")
                return
            acked = outcome.generation if isinstance(outcome, Recovered) else None
            again = Simulator(recorder.finish(self._tape, acked), folder, effort=self._effort.less())
            again.memory = self._simulator.memory
            report = again.check(self._check.model)
        self._check.images_after += report.images
        for violation in report.violations:
            self._violation(cut, f"after a training went on: {violation}")
