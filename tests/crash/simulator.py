"""The power is cut at every point of a recording, and what is left must recover.

A *crash image* is a file that a crash at one moment of the trace may leave behind, under a persistence model: what
was durable, and any of the contents that the model allows for the rest (``cuts`` says which are built). Each is
recovered by the shipped ``lightck.recover`` and has to keep the promise: nothing that was acknowledged is lost, nothing
is returned that was never begun, every tensor is exact, ``lightck verify`` agrees, and a training continues from it. An
image that differs from another one only in bytes that recovery does not read is not recovered again.

One rule cannot be seen in an image, since checksums would hide that it is broken: where fences order, a slot's header
names the new generation, durably, before the first byte of payload changes. It is checked on the trace.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from crash import cuts, fingerprint
from crash.cuts import ALL, Image, Limits
from crash.images import PAGE, ImageFile
from crash.oracle import Outcome, Recovered, recovery
from crash.persistence import Model, Tracker
from crash.point import Point, kind_of
from crash.promise import Promise
from crash.reads import Memory, Place, watched
from crash.recording import Recorder, Recording, Tape
from crash.report import Report, Violation
from crash.seen import Known, Past
from crash.trace import LOST, NOBODY, PUBLISHED, Event, Mark, Store

Transform = Callable[[Sequence[Event]], Iterable[Event]]
"""Turns a trace into the trace of a program with a bug."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How many images are built, and how often the expensive checks run."""

    limits: Limits = field(default_factory=Limits)
    again_every: int = 100
    """Every so many images the recovery is run for certain, and its outcome compared."""
    compare_every: int = 10
    """On every so many of those all bytes of the file are compared too."""
    verify_every: int = 200
    goes_on_every: int = 2000
    """On every so many images a training goes on, and the power is cut again."""
    violations_max: int = 20
    """A check ends there."""
    seed: int = 0

    def less(self) -> Effort:
        """For a recording that began in a crash image."""
        limits = Limits(budget=64, metadata=4, payload=2, contents=2, prefixes=1, masks=1)
        return replace(self, limits=limits)


Verify = Callable[[str, Outcome, bool], "str | None"]
"""``verify(path, outcome, is_harmed)``: why the checker's verdict does not fit what recovery made of an image."""


class Simulator:
    """A recording, to be checked under several models; what one check recovered, the next need not."""

    def __init__(
        self,
        recording: Recording,
        folder: str,
        *,
        recover: Callable[[str], Outcome] = recovery,
        goes_on: Callable[[Recorder], None] | None = None,
        verify: Verify | None = None,
        effort: Effort | None = None,
        known: Known | None = None,
    ) -> None:
        """``goes_on``: trains on from the recorder's pool, and raises where that does not work. ``known``: what other
        simulators with the same ``recover`` and the same effort found out."""
        self.recording = recording
        self.folder = folder
        self.recover = recover
        self.goes_on = goes_on
        self.verify = verify
        self.effort = effort or Effort()
        self.known = Known() if known is None else known
        self.memory: Memory[Outcome] = Memory()
        self.judged = 0
        """Images, of all checks: every so many of them are looked at more closely."""

    def check(self, model: Model, bug: Transform | None = None) -> Report:
        """Every image of every file under this model; ``bug`` changes the trace first."""
        check = _Check(self, model)
        for number, tape in enumerate(self.recording):
            events = list(tape.events if bug is None else bug(tape.events))
            check.tape(number, tape, events)
        return check.report()


class _Enough(Exception):
    """Whether enough violations were found to stop."""


@dataclass(slots=True)
class _Check:
    """One run over all files of a recording under one model."""

    simulator: Simulator
    model: Model
    events: int = 0
    crash_points: int = 0
    images: int = 0
    distinct: int = 0
    recovered: int = 0
    verified: int = 0
    went_on: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def report(self) -> Report:
        return Report(
            self.model.name,
            self.events,
            self.crash_points,
            self.images,
            self.distinct,
            self.recovered,
            self.verified,
            self.went_on,
            self.outcomes,
            tuple(self.violations),
        )

    def tape(self, number: int, tape: Tape, events: Sequence[Event]) -> None:
        path = os.path.join(self.simulator.folder, "crashed.pool")
        file = ImageFile(path, tape.nbytes, tape.pages, tape.places)
        try:
            _Tape(self, number, tape, file).run(events)
        except _Enough:
            pass
        finally:
            file.close()

    def add(self, nested: Report) -> None:
        """Of a training that continued from an image."""
        self.images += nested.images
        self.distinct += nested.distinct
        self.recovered += nested.recovered
        self.verified += nested.verified


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
        self._tracker: Tracker = check.model.tracker(file.read)
        self._is_visible = tape.is_visible
        self._is_damaged = False
        self._at = 0
        self._base = fingerprint_of(file, tape)
        self._past = Past(
            f"{check.model.name} {self._effort.limits} {self._effort.seed} {self._base} {tape.is_visible}"
        )

    def run(self, events: Sequence[Event]) -> None:
        self._check.events += len(events)
        for self._at, event in enumerate(events):
            if self._check.model.is_barrier(event):
                self._cut()
            self._feed(event)
            if isinstance(event, Store):
                self._whole()
            elif isinstance(event, Mark):
                self._cut()
        self._at = len(events)
        self._cut()

    def _feed(self, event: Event) -> None:
        self._past.feed(event)
        self._tracker.feed(event)
        self._promise.feed(event)
        if isinstance(event, Store):
            self._check_header(event)
            self._write(event)
        elif isinstance(event, Mark):
            self._is_visible |= event.mark == PUBLISHED
            self._is_damaged |= event.mark == LOST

    def _write(self, store: Store) -> None:
        low = store.offset // 8 * 8
        nbytes = -(-(store.offset + len(store.data)) // 8) * 8 - low
        self._base ^= fingerprint.of_bytes(low, self._file.read(low, nbytes))
        self._file.write(store.offset, store.data)
        self._base ^= fingerprint.of_bytes(low, self._file.read(low, nbytes))

    def _check_header(self, store: Store) -> None:
        slot = next((s for s in self._tape.slots if s.payload <= store.offset < s.end), None)
        if slot is None or store.thread == NOBODY or not self._check.model.fences_order:
            return
        names = int.from_bytes(self._file.read(slot.header, 8), "little")
        if names not in self._promise.begun or self._tracker.is_pending(slot.header):
            self._found("no image", (), "payload was stored into a slot that was not invalidated durably before")

    # -- crash points ------------------------------------------------------------------------------------------------

    def _whole(self) -> None:
        """A crash here, after which everything that was stored is there."""
        if self._is_visible:
            self._judge(Point(self._file, (), self._base), "everything arrived", ALL)

    def _cut(self) -> None:
        """A crash here: everything that it may leave behind."""
        if not self._is_visible or not self._simulator.known.is_new(self._past.so_far(self._promise.state())):
            return
        self._check.crash_points += 1
        fates = self._tracker.fates()
        kinds = [kind_of(fate, self._tape.slots, self._tape.homes) for fate in fates]
        rng = random.Random(f"{self._effort.seed}:{self._check.model.name}:{self._number}:{self._at}")
        point = Point(self._file, fates, self._base)
        for how, image in cuts.images(fates, kinds, self._effort.limits, rng):
            point.show(image)
            self._judge(point, how, image)
        point.show(ALL)

    def _judge(self, point: Point, how: str, image: Image) -> None:
        check = self._check
        check.images += 1
        self._simulator.judged += 1
        outcome = self._outcome(point, image)
        reason = self._promise.broken_by(outcome)
        if reason is not None:
            self._reduced(point, how, image, reason)
        self._look_closer(outcome, how, image is not ALL)

    def _outcome(self, point: Point, image: Image) -> Outcome:
        """What recovery makes of the image that is shown: known of the same bytes, or of those that it looks at."""
        outcomes = self._simulator.known.outcomes
        outcome = outcomes.get(point.fingerprint)
        if outcome is None:
            outcome = outcomes[point.fingerprint] = point.known(image) or self._recalled(point, image)
            self._check.distinct += 1
        elif not image.but and point.fates:
            self._recalled(point, image)
        return outcome

    def _recalled(self, point: Point, image: Image) -> Outcome:
        found = self._simulator.memory.recall(self._file.read)
        outcome, places = self._recovered() if found is None else found
        point.learn(image, outcome, places)
        return outcome

    def _recovered(self) -> tuple[Outcome, list[Place]]:
        changed_at = self._file.changed_at()
        with watched() as places:
            outcome = self._simulator.recover(self._file.path)
        self._simulator.memory.learn(places, self._file.read, outcome)
        self._check.outcomes[f"step {outcome.step}" if isinstance(outcome, Recovered) else outcome.error] += 1
        self._check.recovered += 1
        if self._file.changed_at() != changed_at:
            self._found("", (), "the recovery wrote to the file")
        return outcome, places

    # -- what is found -----------------------------------------------------------------------------------------------

    def _reduced(self, point: Point, how: str, image: Image, reason: str) -> None:
        """Found, with as little lost as still breaks the promise."""

        missing = image.missing(point.fates)

        def is_enough(lost: Sequence[int]) -> bool:
            less = Image(False, {i: missing[i] for i in lost})
            point.show(less)
            return self._promise.broken_by(self._outcome(point, less)) is not None

        few = cuts.minimal(list(missing), is_enough) if len(missing) > 1 else list(missing)
        point.show(image)
        how = f"{how}, reduced from {len(missing)} fates to {len(few)}" if len(few) < len(missing) else how
        self._found(how, point.lost({i: missing[i] for i in few}), reason)

    def _found(self, how: str, words: tuple[int, ...], reason: str) -> None:
        found = self._check.violations
        found.append(Violation(self._check.model.name, self._number, self._at, how, words, reason, self._effort.seed))
        if len(found) >= self._effort.violations_max:
            raise _Enough

    # -- now and then ------------------------------------------------------------------------------------------------

    def _look_closer(self, outcome: Outcome, how: str, is_harmed: bool) -> None:
        number, effort, simulator = self._simulator.judged, self._effort, self._simulator
        if number % effort.again_every == 0:
            self._again(outcome, how, number % (effort.again_every * effort.compare_every) == 0)
        if simulator.verify is not None and number % effort.verify_every == 0:
            self._check.verified += 1
            reason = simulator.verify(self._file.path, outcome, is_harmed or self._is_damaged)
            if reason is not None:
                self._found(how, (), reason)
        if simulator.goes_on is not None and number % effort.goes_on_every == 0:
            self._go_on(outcome, how, simulator.goes_on)

    def _again(self, outcome: Outcome, how: str, compare: bool) -> None:
        before, changed_at = bytes(self._file.whole()) if compare else b"", self._file.changed_at()
        self._check.recovered += 1
        if self._simulator.recover(self._file.path) != outcome:
            self._found(how, (), "a second recovery gave something else")
        if self._file.changed_at() != changed_at or (compare and self._file.whole() != before):
            self._found(how, (), "the recovery wrote to the file")

    def _go_on(self, outcome: Outcome, how: str, goes_on: Callable[[Recorder], None]) -> None:
        """Train on from this image, and cut the power at every point of that too."""
        self._check.went_on += 1
        simulator = self._simulator
        with tempfile.TemporaryDirectory(dir=simulator.folder) as folder:
            recorder = Recorder(os.path.join(folder, "again.pool"), "again")
            self._file.copy_to(recorder.path)
            try:
                with recorder:
                    goes_on(recorder)
            except Exception as err:
                self._found(how, (), f"a training does not go on: {type(err).__name__}: {err}")
                return
            acked = outcome.generation if isinstance(outcome, Recovered) else None
            again = Simulator(
                recorder.finish(self._tape, acked),
                folder,
                recover=simulator.recover,
                effort=self._effort.less(),
                known=simulator.known,
            )
            again.memory = simulator.memory
            report = again.check(self._check.model)
        self._check.add(report)
        for violation in report.violations:
            self._found(how, (), f"after a training went on: {violation}")


def fingerprint_of(file: ImageFile, tape: Tape) -> int:
    """Of all bytes of the pool in this file."""
    found, at = 0, 0
    for start, nbytes in tape.places:
        for number in tape.pages:
            if start <= number * PAGE < start + nbytes:
                inside = at + number * PAGE - start
                found ^= fingerprint.of_bytes(inside, file.read(inside, PAGE))
        at += nbytes
    return found
