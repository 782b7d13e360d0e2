"""A model of a pool with a gradient log: places that hold values, a writer that does what ``GradientLog`` plans, and a
reader that recovers. It knows nothing of bytes.

The state of a unit is a number that depends on every update that it has seen, so that a state which was put together
wrongly equals no other. A crash may come after every store, and of the stores since the last fence it drops any subset.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lightck.pool.commit_log import CommitLog, candidates
from lightck.pool.format.gradients import IN_RECORD
from lightck.pool.format.structures import KIND_ADOPTION, KIND_CHECKPOINT, CommitRecord
from lightck.pool.gradient_log import (
    Bases,
    GradientLog,
    GradientRecord,
    LoggedCheckpoint,
    RecordPlan,
    next_position_in_gradient_pool,
)

RING_LINES = 16
BLOCKS = 2
"""Blocks of a home: some may be written, and others not."""
DAMAGED = "damaged"


class CrashError(Exception):
    """The process ends here."""


class ProblemError(AssertionError):
    """A promise was broken."""


class StuckError(Exception):
    """No record slot is free."""


# -- the medium --------------------------------------------------------------------------------------------------------

Place = tuple[Any, ...]


@dataclass
class Medium:
    chance: random.Random
    places: dict[Place, Any] = field(default_factory=dict)
    """What is durable."""
    unfenced: list[tuple[Place, Any]] = field(default_factory=list)
    calls_left: int | None = None
    """The process ends after so many stores and fences; None: never."""

    def store(self, place: Place, value: Any) -> None:
        self._count()
        self.unfenced.append((place, value))

    def _count(self) -> None:
        if self.calls_left is not None:
            if self.calls_left == 0:
                raise CrashError
            self.calls_left -= 1

    def fence(self) -> None:
        self._count()
        self.places.update(self.unfenced)
        self.unfenced = []

    def crash(self) -> None:
        share = self.chance.choice((0, 0.5, 0.9, 1))
        self.places.update(one for one in self.unfenced if self.chance.random() < share)
        self.unfenced = []
        self.calls_left = None


# -- what is written ---------------------------------------------------------------------------------------------------


class ChainEntry(NamedTuple):
    """A gradient record as a manifest names it."""

    record: GradientRecord
    place: int
    manifest_hash: int
    is_committed: bool
    """Whether the record is a checkpoint. Otherwise it holds only what its update consumed."""


class Manifest(NamedTuple):
    generation: int
    step: int
    rows: tuple[tuple[int, int, int], ...]
    """For each unit: home, generation and step of its base."""
    older: tuple[tuple[int, int], ...]
    """For each unit: generation and step of its older base."""
    chain: tuple[ChainEntry, ...]
    """Without the record of the manifest itself."""
    present: tuple[tuple[int, str], ...]
    """The units of which the record holds something: ``gradient`` or ``whole``."""
    slot: int


@dataclass
class Training:
    """The state of all units, and what it was at each generation."""

    states: list[int]
    truth: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Generation -> step, states."""


def after_update(state: int, gradient: int) -> int:
    return hash((state, gradient))


class Writer:
    """Trains, and writes each record as the log plans it."""

    log_type: type[GradientLog] = GradientLog

    def __init__(self, chance: random.Random, n: int, n_records: int, n_units: int, *, in_group: bool) -> None:
        self.chance, self.medium = chance, Medium(chance)
        self.n, self.n_records, self.in_group = n, n_records, in_group
        self.group = [chance.randrange(n) for _ in range(n_units)]
        self.training = Training([chance.getrandbits(60) for _ in self.group])
        self.generation, self.incarnation, self.step = 0, 1, -1
        self.log = self._new_log()
        self.position = -1
        self.entries: dict[int, ChainEntry] = {}
        """Generation -> what a chain says of it."""
        self.places = [0] * n_records
        """For each slot the place of its next manifest."""
        self.promised: list[int] = []
        """Generations of the checkpoints that must be recoverable, oldest first."""
        self.committing: int | None = None
        """The generation whose commit record is being written."""
        self.recovered: int | None = None
        """The generation that was the newest after a crash, until another one is adopted: it need not be promised."""

    def _new_log(self) -> GradientLog:
        return self.log_type.new(self.n, self.n_records, self.group, self.step, in_group=self.in_group)

    # -- training

    def update(self, updated: np.ndarray, outside: np.ndarray) -> dict[int, int]:
        """Make an update. Returns unit -> gradient."""
        self.step += 1
        gradients = {int(unit): self.chance.getrandbits(60) for unit in np.flatnonzero(updated)}
        states = self.training.states
        for unit, gradient in gradients.items():
            states[unit] = after_update(states[unit], gradient)
        self._write_outside(outside)
        return gradients

    def _write_outside(self, units: np.ndarray) -> None:
        for unit in np.flatnonzero(units):
            self.training.states[unit] = self.chance.getrandbits(60)

    def load_state(self, units: np.ndarray) -> None:
        """Something else writes to units, between two updates."""
        self._write_outside(units)
        self.log = self.log.with_hole(self.step, units)

    def not_saved(self, updated: np.ndarray) -> None:
        self.update(updated, np.zeros_like(updated))
        self.log = self.log.with_hole(self.step, updated)

    def lower_base_every(self, base_every: int) -> None:
        turns = [self.chance.randrange(base_every) for _ in self.group]
        self.log = self.log.with_hole(self.step, np.ones(len(self.group), np.bool_)).with_base_every(base_every, turns)

    def save(self, updated: np.ndarray, outside: np.ndarray, *, commits: bool, is_given_up: bool = False) -> bool:
        """Make an update and write its record. Returns whether it was committed."""
        gradients = self.update(updated, outside)
        plan = self.log.next_record(self.generation + 1, updated, outside, commits=commits)
        if plan is None:
            raise StuckError
        self.generation += 1
        self.training.truth[self.generation] = self.step, tuple(self.training.states)
        self.log = self.log.with_record(plan)
        self.medium.store(("header", plan.slot), plan.generation)
        self.medium.fence()
        stores = [*self._record(plan, gradients), *self._homes(plan)]
        self.chance.shuffle(stores)
        if is_given_up:
            self.entries[plan.generation] = ChainEntry(plan.checkpoint.records[-1], 0, 0, False)
            for place, value in stores[: self.chance.randrange(len(stores) + 1)]:
                self.medium.store(place, value)
            self.log = self.log.with_hole(self.step, updated | outside)
            return False
        self._finish(plan, stores, self._manifest(plan, gradients), commits)
        return commits

    def _record(self, plan: RecordPlan, gradients: dict[int, int]) -> Iterator[tuple[Place, Any]]:
        yield ("small", plan.slot), plan.generation
        whole = set(plan.in_record.tolist())
        for unit in {*gradients, *whole}:
            value = self.training.states[unit] if unit in whole else gradients[unit]
            yield ("record", plan.slot, unit), (plan.generation, value)

    def _homes(self, plan: RecordPlan) -> Iterator[tuple[Place, Any]]:
        for unit, home in zip(plan.units.tolist(), plan.homes.tolist(), strict=True):
            for block in range(BLOCKS):
                yield ("home", unit, home, block), (plan.generation, self.training.states[unit])

    def _manifest(self, plan: RecordPlan, gradients: dict[int, int]) -> Manifest:
        bases, whole = plan.checkpoint.bases, set(plan.in_record.tolist())
        units = sorted({*gradients, *whole})
        return Manifest(
            plan.generation,
            plan.step,
            tuple(zip(bases.home.tolist(), bases.generation.tolist(), bases.step.tolist(), strict=True)),
            tuple(zip(bases.older_generation.tolist(), bases.older_step.tolist(), strict=True)),
            tuple(self.entries[record.generation] for record in self.chain(plan)),
            tuple((unit, "whole" if unit in whole else "gradient") for unit in units),
            plan.slot,
        )

    def chain(self, plan: RecordPlan) -> tuple[GradientRecord, ...]:
        return plan.chain

    def _finish(self, plan: RecordPlan, stores: list[tuple[Place, Any]], manifest: Manifest, commits: bool) -> None:
        place = self.places[plan.slot]
        self.places[plan.slot] = 1 - place
        entry = ChainEntry(plan.checkpoint.records[-1], place, hash(manifest), commits)
        self.entries[plan.generation] = entry
        for at, value in [*stores, (("manifest", plan.slot, place), manifest)]:
            self.medium.store(at, value)
        if not commits:
            return
        self.medium.fence()
        self.commit(KIND_CHECKPOINT, plan.generation, entry)
        self.log = self.log.with_commit(plan)
        self.promised = [*self.promised, plan.generation][-self._n_needed() :]
        slots = {one.records[-1].slot for one in self.log.protected if one.generation in self.promised}
        self.log = self.log.with_protected_only(slots)

    def _n_needed(self) -> int:
        """How many of the newest checkpoints are needed: in a group one or two, as the other ranks have committed."""
        return self.chance.choice((1, 2, 2)) if self.in_group else 1

    def commit(self, kind: int, generation: int, entry: ChainEntry) -> None:
        record = CommitRecord(
            generation,
            self.incarnation,
            entry.record.step,
            entry.record.generation,
            entry.manifest_hash,
            0,
            kind,
            entry.record.slot,
            entry.place,
        )
        self.committing = entry.record.generation
        commit_log = Reader(self.medium.places).commit_log()
        protected = {one.generation for one in self.log.protected}
        self.position = next_position_in_gradient_pool(commit_log, 2, RING_LINES, self.position, protected)
        self.medium.store(("line", self.position, "rest"), record)
        self.medium.fence()
        self.medium.store(("line", self.position, "first"), generation)
        self.medium.fence()
        self.committing = None

    # -- after a crash

    def adopt(self, found: Recovered) -> None:
        """Continue from this checkpoint. May end in the middle, as every write may."""
        reader = Reader(self.medium.places)
        lines = reader.commit_log()
        self.generation = max(self.generation, lines.generation, *reader.header_generations(), 0) + 1
        self.incarnation = lines.incarnation + 1
        self.position = max(lines.records, key=lambda p: lines.records[p].generation, default=-1)
        self.commit(KIND_ADOPTION, self.generation, found.entry)
        self.promised, self.recovered = [found.entry.record.generation], None
        self.step, self.training.states = found.entry.record.step, list(found.states)
        self.entries = {one.record.generation: one for one in (*found.manifest.chain, found.entry)}
        self.log = self._new_log().adopted(found.checkpoint)


# -- recovery ----------------------------------------------------------------------------------------------------------


@dataclass
class Recovered:
    entry: ChainEntry
    manifest: Manifest
    states: tuple[int, ...]
    checkpoint: LoggedCheckpoint
    """With the bases that were used."""


class Reader:
    """Reads what is durable."""

    def __init__(self, places: dict[Place, Any]) -> None:
        self.places = places

    def commit_log(self) -> CommitLog:
        records, damaged = {}, []
        for position in range(RING_LINES):
            first, rest = (self.places.get(("line", position, name)) for name in ("first", "rest"))
            if rest is None:
                continue
            is_rebuilt = first is None and rest != DAMAGED and rest.kind == KIND_CHECKPOINT
            if rest != DAMAGED and (first == rest.generation or is_rebuilt):
                records[position] = rest
            else:
                damaged.append(position)
        return CommitLog(records, tuple(damaged))

    def header_generations(self) -> list[int]:
        return [value for place, value in self.places.items() if place[0] == "header" and value != DAMAGED]

    def recovered(self) -> Iterator[Recovered]:
        """What can be recovered, newest first: for each commit record its checkpoint, then those of its chain."""
        for line in candidates(self.commit_log()):
            record = GradientRecord(line.step, line.payload_generation, line.slot)
            entry = ChainEntry(record, line.manifest_index, line.manifest_hash, True)
            manifest = self.manifest(entry)
            if manifest is None:
                continue
            for one in (entry, *reversed(manifest.chain)):
                found = self.load(one) if one.is_committed else None
                if found is not None:
                    yield found

    def manifest(self, entry: ChainEntry) -> Manifest | None:
        if (self.header(entry.record.slot) or 0) > entry.record.generation:
            return None
        found = self.places.get(("manifest", entry.record.slot, entry.place))
        if found is None or found == DAMAGED or hash(found) != entry.manifest_hash:
            return None
        assert (found.generation, found.step, found.slot) == (
            entry.record.generation,
            entry.record.step,
            entry.record.slot,
        )
        return found

    def header(self, slot: int) -> int | None:
        found = self.places.get(("header", slot))
        return None if found == DAMAGED else found

    def load(self, entry: ChainEntry) -> Recovered | None:
        manifest = self.manifest(entry)
        if manifest is None or self.places.get(("small", entry.record.slot)) != entry.record.generation:
            return None
        chain = (*manifest.chain, entry)
        steps = [one.record.step for one in chain]
        if steps != list(range(steps[0], manifest.step + 1)):
            return None
        states, rows = [], []
        for unit in range(len(manifest.rows)):
            found = self._unit(unit, manifest, chain)
            if found is None:
                return None
            states.append(found[0])
            rows.append(found[1])
        home, generation, step = (np.array(column) for column in zip(*rows, strict=True))
        zeros = np.zeros(len(rows), np.int64)
        bases = Bases(home.astype(np.uint8), generation, step, step, zeros, step)
        records = tuple(one.record for one in chain)
        return Recovered(
            entry, manifest, tuple(states), LoggedCheckpoint(manifest.step, manifest.generation, bases, records)
        )

    def _unit(
        self, unit: int, manifest: Manifest, chain: tuple[ChainEntry, ...]
    ) -> tuple[int, tuple[int, int, int]] | None:
        """The state of a unit, and the row of the base that was used."""
        home, generation, step = manifest.rows[unit]
        if home == IN_RECORD:
            state = self._replayed(unit, None, step, chain)
            return None if state is None else (state, manifest.rows[unit])
        rows = [(home, generation, step), (1 - home, *manifest.older[unit])]
        for row in rows:
            base = self._base(unit, row[0], row[1])
            if row[1] and base is not None:
                state = self._replayed(unit, base, row[2], chain)
                if state is not None:
                    return state, row
        return None

    def _base(self, unit: int, home: int, generation: int) -> int | None:
        blocks = [self.places.get(("home", unit, home, block)) for block in range(BLOCKS)]
        if any(block is None or block == DAMAGED or block[0] != generation for block in blocks):
            return None
        return int(blocks[0][1])

    def _replayed(self, unit: int, state: int | None, step: int, chain: tuple[ChainEntry, ...]) -> int | None:
        if chain[0].record.step > step + 1:
            return None
        for entry in chain:
            if entry.record.step <= step:
                continue
            manifest = self.manifest(entry)
            if manifest is None:
                return None
            kind = dict(manifest.present).get(unit)
            if kind is None:
                continue
            found = self.places.get(("record", entry.record.slot, unit))
            if found is None or found == DAMAGED or found[0] != entry.record.generation:
                return None
            if kind == "gradient":
                if state is None:
                    return None
                state = after_update(state, found[1])
            else:
                state = found[1]
        return state


# -- a life of a pool --------------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    n: int
    n_records: int
    interval: int = 1
    in_group: bool = False
    has_damages: bool = False
    has_crashes: bool = True
    share_of_every_place: float = 0.0
    """How often every place is damaged in turn, and not only one of them."""
    n_units: int = 4
    lowers: bool = False
    """Whether ``base_every`` is lowered now and then, with a full checkpoint."""


@dataclass
class Counts:
    """What happened, so that a test can ask whether enough did."""

    commits: int = 0
    crashes: int = 0
    damages: int = 0
    lost_at_most: int = 0
    """Updates, by a damage."""
    stuck: int = 0
    """Whether no record slot was free after a damage."""


class Life:
    """Updates, holes, crashes and damages in random order. Raises ``ProblemError`` where a promise was broken."""

    def __init__(self, seed: int, settings: Settings, writer: type[Writer] = Writer) -> None:
        self.chance, self.settings, self.counts = random.Random(seed), settings, Counts()
        self.writer = writer(self.chance, settings.n, settings.n_records, settings.n_units, in_group=settings.in_group)
        self.commits_in_a_row = 0
        self.committed_steps = [-1, -1]
        """Steps of the last two checkpoints that were committed or adopted."""
        self.activity = [1.0] * settings.n_units
        """How often each unit has an update."""

    def run(self, n_steps: int) -> Counts:
        left = n_steps
        while left > 0:
            if self.settings.has_crashes and self.chance.random() < 0.7:
                self.writer.medium.calls_left = self.chance.choice((5, 30, 150, 600)) + self.chance.randrange(30)
            try:
                for _ in range(min(left, 60)):
                    left -= 1
                    self._step()
            except CrashError:
                self._crash()
            except StuckError:
                if not self.counts.damages:
                    raise ProblemError("no record slot is free") from None
                self.counts.stuck += 1
                return self.counts
        return self.counts

    def _step(self) -> None:
        chance, writer = self.chance, self.writer
        if chance.random() < 0.1:
            self.activity = [chance.choice((0, 0, 0.3, 1, 1, 1)) for _ in self.activity]
        updated = np.array([chance.random() < share for share in self.activity])
        outside = np.array([chance.random() < 0.02 for _ in self.activity])
        kind = chance.random()
        if self.settings.lowers and chance.random() < 0.03:
            writer.lower_base_every(chance.randint(2, writer.log.base_every))
            self.commits_in_a_row = 0
        if kind < 0.02:
            writer.not_saved(updated)
        elif kind < 0.04:
            writer.load_state(np.array([chance.random() < 0.7 for _ in self.activity]))
        elif kind < 0.06:
            writer.save(updated, outside, commits=False, is_given_up=True)
        else:
            commits = (writer.step + 1) % self.settings.interval == 0 or chance.random() < 0.03
            if writer.save(updated, outside, commits=commits):
                self._committed()
            return
        self.commits_in_a_row = 0

    def _committed(self) -> None:
        self.counts.commits += 1
        self.commits_in_a_row += 1
        self.committed_steps = [self.committed_steps[1], self.writer.step]
        if self.chance.random() < 0.1:
            self.check()
        n, n_records, interval, in_group, *_ = self.settings
        log = self.writer.log
        is_due = self.commits_in_a_row > (1 if interval == 1 else n)
        if n_records >= 2 * n - 1 and interval <= n and not in_group and is_due and not log.survives_damage():
            raise ProblemError("a unit has no older base that stands in for its base")
        if self.settings.has_damages and self.chance.random() < 0.3:
            self._damage()

    def check(self) -> Recovered | None:
        """Every promised checkpoint can be recovered, exactly, and nothing newer was lost."""
        writer, reader = self.writer, Reader(self.writer.medium.places)
        found = list(reader.recovered())
        for one in found:
            self._check_states(one)
        generations = [one.entry.record.generation for one in found]
        for generation in writer.promised:
            if generation not in generations:
                raise ProblemError(f"the checkpoint of step {writer.training.truth[generation][0]} is lost")
        if writer.promised and generations[0] not in (writer.promised[-1], writer.committing, writer.recovered):
            raise ProblemError("another checkpoint than the newest was recovered")
        return found[0] if found else None

    def _check_states(self, found: Recovered) -> None:
        if (found.manifest.step, found.states) != self.writer.training.truth[found.manifest.generation]:
            raise ProblemError(f"the state of step {found.manifest.step} is wrong")

    def _crash(self) -> None:
        writer = self.writer
        self.counts.crashes += 1
        self.commits_in_a_row = 0
        writer.medium.crash()
        newest = self.check()
        kept = [
            one for one in Reader(writer.medium.places).recovered() if one.entry.record.generation in writer.promised
        ]
        if newest is not None:
            writer.recovered = newest.entry.record.generation
            self._go_on(self.chance.choice([newest, *kept]) if self.settings.in_group else newest)
        else:
            writer.log = writer._new_log()
            writer.committing = None

    def _go_on(self, found: Recovered) -> None:
        """Adopt a checkpoint; that may be interrupted, too. Newer ones need not be there any more."""
        self.writer.promised = [found.entry.record.generation]
        if self.chance.random() < 0.2:
            self.writer.medium.calls_left = self.chance.randrange(5)
        try:
            self.writer.adopt(found)
            self.committed_steps = [found.manifest.step] * 2
        except CrashError:
            self._crash()

    def _damage(self) -> None:
        """Damage one place of the pool at rest, and perhaps go on with what is recovered."""
        writer = self.writer
        before = dict(writer.medium.places)
        places = sorted(before, key=repr)
        if self.chance.random() < self.settings.share_of_every_place:
            for place in places:
                self._damaged(place)
                writer.medium.places = dict(before)
            return
        found = self._damaged(self.chance.choice(places))
        if found is None or self.chance.random() < 0.8:
            writer.medium.places = before
            return
        self.commits_in_a_row = 0
        self._go_on(found)

    def _damaged(self, place: Place) -> Recovered | None:
        """Damage this place. What is recovered then must be exact, and not much older."""
        writer = self.writer
        self.counts.damages += 1
        survives = writer.log.survives_damage()
        writer.medium.places[place] = DAMAGED
        found = next(Reader(writer.medium.places).recovered(), None)
        if found is not None:
            self._check_states(found)
            lost = writer.step - found.manifest.step
            most = self.settings.n + self.settings.interval - 2
            if survives and lost > max(most, writer.step - self.committed_steps[0]):
                raise ProblemError(f"with {place} damaged, {lost} updates are lost")
            self.counts.lost_at_most = max(self.counts.lost_at_most, lost * survives)
        elif survives:
            raise ProblemError(f"with {place} damaged, nothing can be recovered")
        return found
