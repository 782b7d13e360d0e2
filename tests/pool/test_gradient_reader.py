"""Pools with gradient records are read as docs/format.md says, and one damaged place is noticed and named."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import format_reference as reference
import numpy as np
import pytest
import toys
from gradient_pools_by_hand import FACTORS, UNITS, HandPool, whole_at

from lightck.errors import FormatError
from lightck.pool.format.structures import DamagedError
from lightck.pool.gradient_log import GradientLog
from lightck.pool.gradient_reader import (
    GradientCheckpoint,
    StoredTensor,
    checkpoint_of,
    committed,
    logged_checkpoint,
    problems_of,
)
from lightck.pool.reader import PoolReader, open_pool


@pytest.fixture(scope="module")
def hand() -> HandPool:
    made = HandPool()
    made.train(9)
    made.train(2, asleep=["b"])
    made.train(1)
    return made


@pytest.fixture
def path(tmp_path: Path, hand: HandPool) -> Path:
    found = tmp_path / "run.pool"
    found.write_bytes(hand.data)
    return found


@pytest.fixture
def reader(path: Path) -> Iterator[PoolReader]:
    with closing(open_pool(str(path), gradients=True)) as found:
        yield found


def newest(reader: PoolReader) -> GradientCheckpoint:
    return checkpoint_of(reader, committed(reader)[0])


def content(one: GradientCheckpoint, tensor: StoredTensor) -> np.ndarray:
    found = np.zeros(tensor.entry.nbytes, np.uint8)
    one.read([(tensor, found.ctypes.data)])
    return found


def replayed(reader: PoolReader, one: GradientCheckpoint, base: StoredTensor) -> np.ndarray:
    """The tensor at the checkpoint: the base, and all updates after it."""
    name = base.entry.name
    state = content(one, base)
    for named in (*one.part.chain, one.chain_entry):
        if named.step > base.step:
            record = checkpoint_of(reader, named)
            gradient = record.in_record.get(f"gradient/model/{name.split('/')[1]}")
            if gradient is not None:
                state = state + FACTORS[name] * content(record, gradient)
    return state


def test_a_unit_without_a_home_is_whole_in_each_checkpoint(hand: HandPool, reader: PoolReader) -> None:
    for named in committed(reader)[:3]:
        one = checkpoint_of(reader, named)
        assert [tensor.entry.name for tensor in one.units_without_home()] == ["model/whole", "optimizer/whole/exp_avg"]
        for tensor in one.units_without_home():
            assert np.array_equal(content(one, tensor), whole_at(one.step, tensor.number))


def test_newest_checkpoint_is_its_bases_and_the_updates_after_them(hand: HandPool, reader: PoolReader) -> None:
    one = newest(reader)
    assert one.step == hand.step == 11
    assert problems_of(reader, one) == []
    bases = list(one.bases())
    assert {base.entry.name for base in bases} == FACTORS.keys()
    assert {base.step for base in bases} != {11}, "some base is older than the checkpoint"
    for base in bases:
        assert np.array_equal(content(one, base), hand.history[base.step][base.entry.name])
        assert np.array_equal(replayed(reader, one, base), hand.history[11][base.entry.name])


def test_older_bases_lead_to_the_same_state(hand: HandPool, reader: PoolReader) -> None:
    one = newest(reader)
    older = list(one.older_bases())
    assert {base.entry.name for base in older} == FACTORS.keys()
    for base in older:
        assert np.array_equal(replayed(reader, one, base), hand.history[11][base.entry.name])


def test_earlier_checkpoints_are_found_through_the_chain(hand: HandPool, reader: PoolReader) -> None:
    one = newest(reader)
    assert [named.step for named in one.part.chain] == [7, 8, 9, 10]
    before = checkpoint_of(reader, one.part.chain[-1])
    assert problems_of(reader, before) == []
    for base in before.bases():
        assert np.array_equal(replayed(reader, before, base), hand.history[10][base.entry.name])


def test_overwritten_record_is_named_as_such(reader: PoolReader) -> None:
    old = next(named for named in committed(reader) if named.step == 5)
    with pytest.raises(DamagedError, match="reused by a newer gradient record"):
        checkpoint_of(reader, old)


def gradients_in(record: GradientCheckpoint) -> set[str]:
    return {name for name in record.in_record if name.startswith("gradient/")}


def test_record_without_a_gradient_says_that_there_was_none(reader: PoolReader) -> None:
    named = {one.step: one for one in newest(reader).part.chain}
    assert gradients_in(checkpoint_of(reader, named[9])) == {"gradient/model/a"}
    assert gradients_in(checkpoint_of(reader, named[8])) == {f"gradient/model/{unit}" for unit in UNITS}


def test_the_part_of_a_manifest_that_no_longer_fits_is_damaged(path: Path, hand: HandPool) -> None:
    """A manifest with a right hash whose rows are of other bases."""
    broken = HandPool()
    broken.train(5)
    broken.row_crcs = {key: [0] * len(value) for key, value in broken.row_crcs.items()}
    broken.train(1)
    path.write_bytes(broken.data)
    with closing(open_pool(str(path), gradients=True)) as reader:
        assert "does not match its checksum" in problems_of(reader, newest(reader))[0]


def test_one_flipped_bit_costs_at_most_two_updates(path: Path, hand: HandPool) -> None:
    """Each place in turn that is needed, at some of its bits: what is left is exact, as the default number of records
    promises (n - 1 = 2)."""
    chance, lost = random.Random(5), []
    used = np.flatnonzero(np.frombuffer(hand.data, np.uint8))
    for at in chance.sample(used.tolist(), 250):
        toys.poke(path, at, bytes([hand.data[at] ^ 1 << chance.randrange(8)]))
        with closing(open_pool(str(path), gradients=True)) as reader:
            lost.append(hand.step - recovered(reader, hand))
        toys.poke(path, at, bytes([hand.data[at]]))
    assert set(lost) == {0, 1, 2}


def recovered(reader: PoolReader, hand: HandPool) -> int:
    """The step of the newest checkpoint that can be recovered; its state is compared."""
    for named in committed(reader):
        try:
            one = checkpoint_of(reader, named)
        except DamagedError:
            continue
        for earlier in (named, *reversed(one.part.chain)):
            try:
                compare(reader, checkpoint_of(reader, earlier), hand)
            except DamagedError:
                continue
            return earlier.step
    raise AssertionError("nothing can be recovered")


def compare(reader: PoolReader, one: GradientCheckpoint, hand: HandPool) -> None:
    content(one, one.in_record["model/mean"])
    older = {base.entry.name: base for base in one.older_bases()}
    for base in one.bases():
        try:
            state = replayed(reader, one, base)
        except DamagedError:
            if base.entry.name not in older:
                raise
            state = replayed(reader, one, older[base.entry.name])
        assert np.array_equal(state, hand.history[one.step][base.entry.name]), (one.step, base.entry.name)


def test_a_training_goes_on_from_what_was_read(hand: HandPool, reader: PoolReader) -> None:
    units = [[name for name in FACTORS if name.split("/")[1] == unit] for unit in UNITS]
    found, kept = logged_checkpoint(newest(reader), units), hand.log.protected[-1]
    assert (found.step, found.generation, found.records) == (kept.step, kept.generation, kept.records)
    for name in ("home", "generation", "step", "older_generation", "older_step"):
        assert getattr(found.bases, name).tolist() == getattr(kept.bases, name).tolist(), name
    log = GradientLog.new(3, 5, [0, 1], -1).adopted(found)
    assert log.needed_slots() == hand.log.needed_slots()
    plan = log.next_record(100, np.array([True, True]))
    assert plan is not None
    assert plan.slot not in hand.log.needed_slots()
    with pytest.raises(DamagedError, match="bases of different steps"):
        logged_checkpoint(newest(reader), [list(FACTORS)])


def test_a_second_reader_sees_the_same(hand: HandPool, reader: PoolReader) -> None:
    """It is written from docs/format.md alone."""
    pool = reference.GradientPool(bytes(hand.data))
    one, theirs = newest(reader), pool.named(pool.candidates()[0])
    assert [entry.to_map(has_gradients=True) for entry in reader.entries] == pool.entries
    for ours, other in ((one.bases(), theirs.bases), (one.older_bases(), theirs.older)):
        found = {base.entry.name: (base.step, content(one, base).tobytes()) for base in ours}
        assert found == other
        assert found.keys() == FACTORS.keys()
    assert [named._asdict() for named in one.part.chain] == theirs.chain
    for named, entry in zip((*one.part.chain, one.chain_entry), (*theirs.chain, pool.candidates()[0]), strict=True):
        record = checkpoint_of(reader, named)
        held = {name: content(record, tensor).tobytes() for name, tensor in record.in_record.items()}
        assert held == pool.named(entry).record
    pages = [(hand.states[name].tobytes()[:4096]) for name in FACTORS]
    assert one.part.sentinels.tolist() == theirs.sentinels == [reference.crc32c(page) for page in pages]


def test_a_pool_is_refused_by_readers_that_do_not_ask_for_gradients(path: Path) -> None:
    with pytest.raises(FormatError, match="holds gradient records"):
        open_pool(str(path))
