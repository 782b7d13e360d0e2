"""What the writer of a pool with gradient records has committed is recovered after every kind of step, bit for bit.

The training is a toy: an update adds the gradient to the parameter, and three times the gradient to the optimizer
state, modulo 256. So a test can make the updates again, and a state that was put together wrongly equals no other.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pools_by_hand as by_hand
import pytest
from gradient_pools_by_hand import sentinels_of

from lightck.pool.create import create
from lightck.pool.engine import COPIED, ENDED, Engine
from lightck.pool.format.gradients import CHAIN_COMMITTED
from lightck.pool.format.layout import HOME_PLACE, Entry
from lightck.pool.format.structures import MIB, DamagedError
from lightck.pool.gradient_log import records_default, records_min
from lightck.pool.gradient_reader import GradientCheckpoint, checkpoint_of, committed, problems_of
from lightck.pool.gradient_writer import GradientWriter
from lightck.pool.planned_records import CopyPlan
from lightck.pool.reader import STRUCK_REASON, open_pool
from lightck.pool.storage.backends import backend_for
from lightck.pool.writer import RelayoutNeededError

UNITS = {"a": 5000, "b": 90, "c": MIB + 777, "d": 3}
"""Name -> bytes of the parameter. One has several blocks."""
STATELESS = "d"
LATE = "optimizer/b/exp_avg"
"""It does not exist before the first update of its unit, which begins with zeros."""
FACTORS = {"model": 1, "optimizer": 3}


def entries() -> tuple[list[Entry], list[str]]:
    """The entries of the pool, and the unit of each entry in a home."""
    homes, units, slots = [], [], [by_hand.entry("model/mean", (5,), role="buffer", dtype="uint8")]
    for unit, n in UNITS.items():
        homes.append(by_hand.entry(f"model/{unit}", (n,), dtype="uint8", place=HOME_PLACE))
        units.append(unit)
        if unit != STATELESS:
            name = f"optimizer/{unit}/exp_avg"
            homes.append(by_hand.entry(name, (n,), dtype="uint8", role="optimizer", place=HOME_PLACE))
            units.append(unit)
        slots.append(by_hand.entry(f"gradient/{unit}", (n,), dtype="uint8", role="gradient"))
    return [*homes, *slots], units


class Training:
    """A training of four units, whose pool it writes. ``history``: generation -> step and state of each checkpoint that
    was begun."""

    def __init__(self, path: Path, seed: int, n: int, n_records: int) -> None:
        self.path, self.n, self.rng = path, n, np.random.default_rng(seed)
        self.entries, self.units = entries()
        kind = backend_for(str(path))
        container, _ = create(kind, str(path), self.entries, slots=n_records, state_nbytes=100)
        container.publish()
        container.close()
        self.states = {e.name: self.random(e.nbytes) for e in self.entries if not e.name.startswith("gradient/")}
        del self.states[LATE]
        self.step = 0
        self.history: dict[int, tuple[int, dict[str, bytes]]] = {}
        self.acknowledged: int | None = None
        """The generation of the newest checkpoint that was committed."""

    def random(self, n: int) -> np.ndarray:
        return self.rng.integers(0, 256, n).astype(np.uint8)

    @contextmanager
    def opened(self) -> Iterator[GradientWriter]:
        """The writer. If the pool has a checkpoint, the training continues from it."""
        kind = backend_for(str(self.path))
        with ExitStack() as stack:
            engine = Engine(1)
            stack.callback(engine.close)
            reader = open_pool(str(self.path), write=True, gradients=True)
            writer = GradientWriter(
                reader, engine, kind.probe(str(self.path)), base_every=self.n, unit_names=self.units
            )
            stack.callback(writer.close)
            found = committed(reader)
            if found:
                newest = max(reader.commit_log().records.values(), key=lambda record: record.generation)
                writer.adopt(newest)
                self.step, state = self.history[newest.payload_generation]
                self.states = {name: np.frombuffer(data, np.uint8) for name, data in state.items()}
            yield writer

    def update(self, updated: list[str]) -> dict[str, np.ndarray]:
        self.step += 1
        gradients = {unit: self.random(UNITS[unit]) for unit in updated}
        if "b" in gradients:
            self.states.setdefault(LATE, np.zeros(UNITS["b"], np.uint8))
        for name in self.states:
            kind, _, unit = name.partition("/")
            unit = unit.removesuffix("/exp_avg")
            if unit in gradients:
                self.states[name] = self.states[name] + FACTORS[kind] * gradients[unit]
        self.states["model/mean"] = self.random(5)
        return gradients

    def save(self, writer: GradientWriter, gradients: dict[str, np.ndarray], *, how: str = "commits") -> None:
        """``how``: "commits", "is recorded" (is not committed), "is given up", "is given up between commits", or "is
        cut off" (the process ends before the commit)."""
        commits = how not in ("is recorded", "is given up between commits")
        plan = writer.plan_record(np.array([unit in gradients for unit in writer.units.names]), commits=commits)
        assert plan is not None
        sentinels = sentinels_of(self.entries, {LATE: np.zeros(0, np.uint8), **self.states}, self.step)
        slot = writer.prepare(plan, sentinels, commits=commits)
        left_out = [number for number in writer.not_due if self.entries[number].name in self.states]
        tensors = {f"gradient/{unit}": gradient for unit, gradient in gradients.items()}
        tensors |= {
            e.name: self.states[e.name]
            for i, e in enumerate(self.entries)
            if e.name in self.states and i not in left_out and (commits or e.place == HOME_PLACE)
        }
        numbers = np.array([writer.numbers[name] for name in tensors], np.int64)
        sources = np.array([data.ctypes.data for data in tensors.values()], np.uint64)
        at_boundary = self.rng.random(len(numbers)) < 0.5
        no, out = np.array([], np.int64), np.array(left_out, np.int64)
        step = self.step
        copies = CopyPlan(step, step, numbers, sources, at_boundary, out, no, len(numbers) + len(out), by_hand.NO_STATE)
        pending = writer.begin(copies, slot, list(tensors.values()))
        self.history[plan.generation] = step, {name: data.tobytes() for name, data in self.states.items()}
        pending.job.wait(COPIED)
        if how not in ("commits", "is recorded"):
            pending.job.drop()
            pending.job.forget()
            if how != "is cut off":
                writer.free_slot(pending, bad=False)
            return
        pending.job.release()
        pending.job.wait(ENDED)
        if how == "is recorded":
            writer.recorded(pending)
        else:
            writer.committed(pending)
            self.acknowledged = plan.generation
        pending.job.forget()

    def skip(self, writer: GradientWriter, gradients: dict[str, np.ndarray]) -> None:
        """This update gets no record."""
        writer.skipped(self.step, np.array([unit in gradients for unit in writer.units.names]))


def read(one: GradientCheckpoint, tensor) -> np.ndarray:
    found = np.zeros(tensor.entry.nbytes, np.uint8)
    one.read([(tensor, found.ctypes.data)])
    return found


def recovered(checkpoint: GradientCheckpoint) -> dict[str, bytes]:
    """The state of a checkpoint, made from its bases or, where one is damaged, from its older base."""
    records = {checkpoint.step: checkpoint}
    state: dict[str, np.ndarray] = {}
    for unit, (step, unit_state) in copies(checkpoint).items():
        for number in range(step + 1, checkpoint.step + 1):
            if number not in records:
                (entry,) = [one for one in checkpoint.part.chain if one.step == number]
                records[number] = checkpoint_of(checkpoint.reader, entry)
            gradient = records[number].in_record.get(f"gradient/{unit}")
            if gradient is not None:
                if unit == "b":
                    unit_state.setdefault(LATE, np.zeros(UNITS["b"], np.uint8))
                for name in unit_state:
                    unit_state[name] = unit_state[name] + FACTORS[name.split("/")[0]] * read(records[number], gradient)
        state |= unit_state
    state["model/mean"] = read(checkpoint, checkpoint.in_record["model/mean"])
    return {name: data.tobytes() for name, data in state.items()}


def copies(checkpoint: GradientCheckpoint) -> dict[str, tuple[int, dict[str, np.ndarray]]]:
    """Unit -> step and tensors of its base, or of its older base, if a block of the base is damaged."""
    found: dict[str, tuple[int, dict[str, np.ndarray]]] = {}
    damaged = set()
    for base in checkpoint.bases():
        unit = base.entry.name.split("/")[1]
        try:
            found.setdefault(unit, (base.step, {}))[1][base.entry.name] = read(checkpoint, base)
        except DamagedError:
            damaged.add(unit)
    for unit in damaged:
        found.pop(unit, None)
    for base in checkpoint.older_bases():
        unit = base.entry.name.split("/")[1]
        if unit in damaged:
            found.setdefault(unit, (base.step, {}))[1][base.entry.name] = read(checkpoint, base)
    return found


def newest(path: Path) -> tuple[int, int, dict[str, bytes]]:
    """Generation, step and state of the newest checkpoint. It must have no damage."""
    with closing(open_pool(str(path), gradients=True)) as reader:
        checkpoint = checkpoint_of(reader, committed(reader)[0])
        assert problems_of(reader, checkpoint) == []
        return checkpoint.header.generation, checkpoint.step, recovered(checkpoint)


def check(training: Training) -> None:
    generation, step, state = newest(training.path)
    assert generation == training.acknowledged
    assert (step, state) == training.history[generation]


def names_but(*asleep: str) -> list[str]:
    return [unit for unit in UNITS if unit not in asleep]


@pytest.fixture
def training(folder: Path) -> Training:
    return Training(folder / "run.pool", 1, 3, records_default(3))


def test_each_step_is_recovered(training):
    with training.opened() as writer:
        for _ in range(12):
            training.save(writer, training.update(names_but()))
            check(training)
        assert writer.log.survives_damage()


def test_in_the_long_run_a_step_writes_a_turn_of_the_units(training):
    with training.opened() as writer:
        counts = []
        for _ in range(13):
            plan_of = writer.plan_record(np.ones(len(UNITS), np.bool_))
            assert plan_of is not None
            counts.append(len(plan_of.units))
            training.save(writer, training.update(names_but()))
    assert counts[0] == len(UNITS)
    assert sum(counts[-3:]) == len(UNITS)


def test_state_that_appears_after_the_base_of_its_unit_is_recovered(training):
    with training.opened() as writer:
        for _ in range(5):
            training.save(writer, training.update(names_but("b")))
        for _ in range(4):
            training.save(writer, training.update(names_but()))
            check(training)


def test_a_unit_that_sleeps_is_not_written(training):
    with training.opened() as writer:
        for _ in range(8):
            training.save(writer, training.update(names_but()))
        for _ in range(8):
            training.save(writer, training.update(names_but("c")))
            check(training)
        c = writer.units.numbers["c"]
        assert writer.log.bases.step[c] == training.step  # its base counts as the state of each later step


def test_after_a_record_that_was_given_up_the_next_checkpoint_is_full(training):
    with training.opened() as writer:
        for _ in range(7):
            training.save(writer, training.update(names_but()))
        training.save(writer, training.update(names_but()), how="is given up")
        check(training)
        assert writer.log.must_be_full
        training.save(writer, training.update(names_but()))
        check(training)
        assert not writer.log.must_be_full


def test_after_a_step_without_a_record_the_next_checkpoint_is_full(training):
    with training.opened() as writer:
        for _ in range(7):
            training.save(writer, training.update(names_but()))
        training.skip(writer, training.update(names_but("b")))
        check(training)
        training.save(writer, training.update(names_but("a")))
        check(training)


@pytest.mark.parametrize("n_before", range(1, 8))
def test_a_training_goes_on_from_its_pool(training, n_before):
    with training.opened() as writer:
        for _ in range(n_before):
            training.save(writer, training.update(names_but()))
        training.save(writer, training.update(names_but()), how="is cut off")
    check(training)
    for _ in range(3):
        with training.opened() as writer:
            check(training)
            for _ in range(3):
                training.save(writer, training.update(names_but()))
                check(training)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_life(folder, seed):
    chance = random.Random(seed)
    n = chance.choice((2, 3, 4))
    training = Training(folder / "run.pool", seed, n, chance.choice((records_min(n), records_default(n))))
    for _ in range(4):
        with training.opened() as writer:
            for _ in range(chance.randrange(1, 9)):
                gradients = training.update([unit for unit in UNITS if chance.random() < 0.7])
                how = chance.choices(("commits", "is given up", "skip"), (8, 1, 1))[0]
                training.skip(writer, gradients) if how == "skip" else training.save(writer, gradients, how=how)
                if training.acknowledged is not None:
                    check(training)
            if chance.random() < 0.5:
                training.save(writer, training.update(names_but()), how="is cut off")
        if training.acknowledged is not None:
            check(training)
        else:
            return  # nothing was committed, so there is no state to continue from


@pytest.mark.parametrize("seed", range(12))
def test_a_random_life_in_which_some_records_are_not_committed(folder, seed):
    """After each store, what is recovered is the newest commit, and no record that came after it."""
    chance = random.Random(seed)
    n, interval = chance.choice(((2, 2), (3, 2), (4, 3), (2, 5), (6, 3)))
    n_records = chance.choice((records_min(n, interval), records_default(n, interval)))
    training = Training(folder / "run.pool", seed, n, n_records)
    for _ in range(3):
        with training.opened() as writer:
            for _ in range(chance.randrange(1, 4 * interval)):
                gradients = training.update([unit for unit in UNITS if chance.random() < 0.8])
                commits = training.step % interval == 0
                if chance.random() < 0.08 or (not commits and not writer.takes_record(training.step)):
                    training.skip(writer, gradients)
                elif chance.random() < 0.08:
                    training.save(writer, gradients, how="is given up" if commits else "is given up between commits")
                else:
                    training.save(writer, gradients, how="commits" if commits else "is recorded")
                if training.acknowledged is not None:
                    check(training)
        if training.acknowledged is None:
            return


def test_the_manifest_of_a_record_that_is_not_committed_is_in_the_chain_of_the_next_commit(training):
    with training.opened() as writer:
        for number in range(7):
            training.save(writer, training.update(names_but()), how="is recorded" if number in (5, 6) else "commits")
        check(training)
        training.save(writer, training.update(names_but()))
        check(training)
    with closing(open_pool(str(training.path), gradients=True)) as reader:
        checkpoint = checkpoint_of(reader, committed(reader)[0])
        flags = {one.step: one.flags for one in checkpoint.part.chain}
        assert (checkpoint.step, flags[5], flags[6], flags[7]) == (8, CHAIN_COMMITTED, 0, 0)
        assert "model/mean" not in checkpoint_of(reader, checkpoint.part.chain[-1]).in_record


def test_a_struck_checkpoint_is_named_as_such(training):
    """Not as one whose slot a newer record took: no record is newer than the strike."""
    with training.opened() as writer:
        for _ in range(3):
            training.save(writer, training.update(names_but()))
        training.skip(writer, training.update(names_but()))
        training.save(writer, training.update(names_but()))
        full = training.acknowledged
        assert len(writer.strike(0, full)) == 3
    check(training)
    with closing(open_pool(str(training.path), gradients=True)) as reader:
        struck = [one for one in committed(reader) if one.generation < full]
        assert struck
        for one in struck:
            with pytest.raises(DamagedError) as found:
                checkpoint_of(reader, one)
            assert str(found.value) == STRUCK_REASON


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_base_is_replaced_by_the_older_one(folder, seed):
    training = Training(folder / "run.pool", seed, 3, records_default(3))
    with training.opened() as writer:
        for _ in range(9 + seed):
            training.save(writer, training.update(names_but()))
    generation, step, state = newest(training.path)
    with closing(open_pool(str(training.path), gradients=True)) as reader:
        for base in checkpoint_of(reader, committed(reader)[0]).bases():
            before = reader.read(base.offset, 1)
            flip(training.path, base.offset)
            checkpoint = checkpoint_of(reader, committed(reader)[0])
            assert len(problems_of(reader, checkpoint)) == 1
            assert recovered(checkpoint) == state, f"the {generation}th checkpoint, of step {step}"
            flip(training.path, base.offset)
            assert reader.read(base.offset, 1) == before


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_new_parameter_needs_a_new_pool(training):
    with training.opened() as writer, pytest.raises(RelayoutNeededError, match="no home"):
        writer.add([by_hand.entry("model/new", (4,), dtype="uint8")], set())


def test_units_are_packed_into_turns_of_nearly_equal_bytes(training):
    with training.opened() as writer:
        turns = writer.units.turns(3)
    nbytes = dict.fromkeys(range(3), 0)
    for unit, turn in zip(writer.units.names, turns, strict=True):
        nbytes[turn] += UNITS[unit]
    assert sorted(nbytes.values()) == [93, 5000, MIB + 777]


def test_the_same_seed_gives_the_same_states(folder):
    """So that a failure can be run again."""
    found = []
    for number in range(2):
        training = Training(folder / f"{number}.pool", 5, 3, 5)
        training.update(names_but())
        found.append(zlib.crc32(b"".join(one.tobytes() for one in training.states.values())))
    assert found[0] == found[1]
