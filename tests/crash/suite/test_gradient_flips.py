"""One flipped bit anywhere in a pool with gradient records, at rest: recovery gives the newest checkpoint, or one that
is at most ``base_every - 1`` updates older, bit for bit, and says so. It never gives other bits, and never nothing.

The bits are drawn from a seed, from each kind of place. A damaged base costs nothing: the older base stands in for it.
"""

from __future__ import annotations

import logging
import mmap
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from unittest.mock import patch

import pytest
import torch
import toys
from crash.gradient_lives import Drawn
from crash.gradient_workloads import Sleeper, with_momentum, with_sleeper
from crash.oracle import Recovered, digest, recovery, truth
from crash.reads import Memory, watched
from crash.recorded import one_step, record
from torch import nn

import lightck
from lightck.cli import verify
from lightck.pool.format.layout import GRADIENT_ROLE
from lightck.pool.format.structures import COMMIT_RECORD_NBYTES, SLOT_HEADER_NBYTES, SUPERBLOCK_NBYTES, DamagedError
from lightck.pool.gradient_reader import GradientCheckpoint, checkpoint_of, committed
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.storage import extents
from lightck.pool.storage.extents import Extents
from lightck.strategy.gradients import Gradients

BASE_EVERY = 3
SEED = 20261127
Place = tuple[int, int]
"""Offset in the pool and length in bytes."""


# -- pools at rest -----------------------------------------------------------------------------------------------------


@dataclass
class Life:
    """A training, and the true state of each of its steps."""

    path: Path
    truths: dict[int, bytes] = field(default_factory=dict)
    step: int = 0
    base_every: int = BASE_EVERY
    interval: int = 1

    @property
    def lost_max(self) -> int:
        """How many updates one flipped bit may cost."""
        return self.base_every + self.interval - 2

    @contextmanager
    def attached(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[lightck.Session]:
        more = {"strategy": Gradients(self.base_every), "interval": self.interval, "resume": True}
        with lightck.attach(model, self.path, optimizer=optimizer, **more) as session:
            yield session

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int,
        then: Callable[[nn.Module, int], None] = lambda model, step: None,
    ) -> None:
        for _ in range(steps):
            one_step(model, optimizer, self.step)
            self.step += 1
            then(model, self.step)
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (self.step + 1)
            self.truths[self.step] = truth(model, optimizer)


def steady(life: Life) -> None:
    model, optimizer = with_momentum()
    with life.attached(model, optimizer):
        life.train(model, optimizer, 9)


def first_steps(life: Life) -> None:
    model, optimizer = with_momentum()
    with life.attached(model, optimizer):
        life.train(model, optimizer, 2)


def clamp_at_8(model: nn.Module, step: int) -> None:
    if step == 8:
        with torch.no_grad():
            next(model.parameters()).clamp_(-0.1, 0.1)


def after_a_hole(life: Life) -> None:
    """The newest checkpoint is full, because a parameter was written outside of the update."""
    model, optimizer = with_momentum()
    with life.attached(model, optimizer):
        life.train(model, optimizer, 8, clamp_at_8)


def one_after_a_hole(life: Life) -> None:
    model, optimizer = with_momentum()
    with life.attached(model, optimizer):
        life.train(model, optimizer, 9, clamp_at_8)


def adopted(life: Life) -> None:
    """Reopened, and not trained on."""
    steady(life)
    with life.attached(*with_momentum()):
        pass


def one_after_an_adoption(life: Life) -> None:
    steady(life)
    model, optimizer = with_momentum()
    with life.attached(model, optimizer):
        life.train(model, optimizer, 1)


def asleep(life: Life) -> None:
    """A unit has had no update for longer than the records reach back."""
    model, optimizer = with_sleeper()
    assert isinstance(model, Sleeper)
    with life.attached(model, optimizer):
        life.train(model, optimizer, 4)
        model.is_awake = False
        life.train(model, optimizer, 6)


def just_awake(life: Life) -> None:
    model, optimizer = with_sleeper()
    assert isinstance(model, Sleeper)
    with life.attached(model, optimizer):
        life.train(model, optimizer, 4)
        model.is_awake = False
        life.train(model, optimizer, 6)
        model.is_awake = True
        life.train(model, optimizer, 1)


def with_interval(base_every: int, interval: int, steps: int) -> Callable[[Life], None]:
    """The last step is committed in its turn, or, if it is no multiple of the interval, when the session is closed."""

    def live(life: Life) -> None:
        life.base_every, life.interval = base_every, interval
        model, optimizer = with_momentum()
        with life.attached(model, optimizer):
            life.train(model, optimizer, steps)

    live.__name__ = f"{steps} steps, base_every={base_every}, interval={interval}"
    return live


def asleep_between(life: Life) -> None:
    """A unit wakes between two commits, after it had no update for a round."""
    life.base_every, life.interval = 4, 2
    model, optimizer = with_sleeper()
    assert isinstance(model, Sleeper)
    with life.attached(model, optimizer):
        life.train(model, optimizer, 8)
        model.is_awake = False
        life.train(model, optimizer, 7)
        model.is_awake = True
        life.train(model, optimizer, 3)


INTERVALS = (
    *(with_interval(*one) for one in ((6, 3, 18), (6, 3, 17), (4, 2, 12), (3, 2, 12), (4, 4, 16), (5, 3, 15))),
    *(with_interval(*one) for one in ((2, 5, 15), (2, 5, 16), (8, 3, 24))),
    asleep_between,
)
LIVES = (steady, after_a_hole, one_after_a_hole, adopted, one_after_an_adoption, asleep, just_awake)


# -- what a recovery gives ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a recovery gave. ``words``: what it said of damage: rejected checkpoints, and warnings."""

    step: int
    digest: bytes
    words: tuple[str, ...]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.words.append(record.getMessage())


def recovered(path: Path) -> Found:
    """``lightck.recover`` as a value. Raises what it raises."""
    heard = _Warnings()
    logger = logging.getLogger("lightck")
    logger.addHandler(heard)
    try:
        checkpoint = lightck.recover(path)
        content = digest([dict(checkpoint.model), checkpoint.optimizer, checkpoint.state])
    finally:
        logger.removeHandler(heard)
    return Found(checkpoint.step, content, (*map(str, checkpoint.rejected), *heard.words))


class Pool:
    """A pool's file, mapped, with the true state of each step."""

    def __init__(self, life: Life, mapped: mmap.mmap, places: Extents) -> None:
        self._life, self._map, self._extents = life, mapped, places
        self.newest, self.nbytes = life.step, extents.total(places)
        self._memory: Memory[Found] = Memory()
        with closing(open_pool(str(life.path), gradients=True)) as reader:
            self.places = {name: [one for one in found if one[1]] for name, found in places_of(reader).items()}
        assert self.recover() == Found(life.step, life.truths[life.step], ()), "nothing is damaged"

    def _read(self, offset: int, nbytes: int) -> bytes:
        return b"".join(self._map[at : at + n] for at, n in extents.runs(self._extents, offset, nbytes))

    def recover(self) -> Found:
        """Recover, unless the same bytes were read before."""
        known = self._memory.recall(self._read)
        if known is not None:
            return known[0]
        with watched() as places:
            found = recovered(self._life.path)
        self._memory.learn(places, self._read, found)
        return found

    def flipped(self, at: int, mask: int) -> Found:
        """Recover with these bits of a byte flipped. What comes must be exact, young enough, and said."""
        ((place, _),) = extents.runs(self._extents, at, 1)
        self._map[place] ^= mask
        try:
            found = self.recover()
        finally:
            self._map[place] ^= mask
        where = f"mask {mask:#x} of byte {at:#x}: step {found.step}, {found.words}"
        assert self._life.truths[found.step] == found.digest, f"other bits; {where}"
        assert self.newest - self._life.lost_max <= found.step <= self.newest, where
        return found

    def check(self, kind: str, count: int) -> Counter[str]:
        """Flip so many seeded bits in places of this kind. Returns what came how often: updates lost, with words or
        without."""
        rng, seen = random.Random(f"{SEED} {kind}"), Counter[str]()
        places = self.places[kind]
        for _ in range(count):
            start, nbytes = rng.choice(places)
            found = self.flipped(start + rng.randrange(nbytes), 1 << rng.randrange(8))
            seen[f"{self.newest - found.step} lost{', said' if found.words else ''}"] += 1
        print(f"seed {SEED}, {kind}: {dict(seen)}")
        return seen

    def is_reported(self, kind: str) -> bool:
        """Whether ``lightck verify --deep`` calls the pool damaged, with one bit flipped in a place of this kind."""
        start, nbytes = self.places[kind][-1]
        ((place, _),) = extents.runs(self._extents, start + nbytes // 2, 1)
        self._map[place] ^= 1
        try:
            return not verify.pool_facts(str(self._life.path), None, deep=True)["ok"]
        finally:
            self._map[place] ^= 1


def places_of(reader: PoolReader) -> dict[str, list[Place]]:
    """Kind -> the places of this kind in a pool."""
    sb, lines = reader.superblock, reader.commit_log().records
    newest = checkpoint_of(reader, committed(reader)[0])
    named = [newest]
    for entry in newest.part.chain:
        with suppress(DamagedError):  # a record that was given up may have overwritten one that is not needed
            named.append(checkpoint_of(reader, entry))
    newest_line = max(lines, key=lambda position: lines[position].generation)
    return {
        "superblocks": [(0, SUPERBLOCK_NBYTES), (SUPERBLOCK_NBYTES, SUPERBLOCK_NBYTES)],
        "tables": [(offset, sb.table_nbytes) for offset in sb.table_offsets],
        "the newest line": [(sb.commit_record_offset(newest_line), COMMIT_RECORD_NBYTES)],
        "other lines": [
            (sb.commit_record_offset(n), COMMIT_RECORD_NBYTES) for n in range(sb.ring_lines) if n != newest_line
        ],
        "slot headers": [(offset, SLOT_HEADER_NBYTES) for offset, _ in sb.slots],
        "the newest manifest": [manifest_of(newest)],
        "small state": [state_of(one) for one in named],
        "older manifests": [manifest_of(one) for one in named[1:]] or [manifest_of(newest)],
        "gradients": [
            (one.offset, one.entry.nbytes)
            for checkpoint in named
            for one in checkpoint.in_record.values()
            if one.entry.role == GRADIENT_ROLE
        ],
        "bases": [(one.offset, one.entry.nbytes) for one in newest.bases()],
        "older bases": [(one.offset, one.entry.nbytes) for one in newest.older_bases()],
        "anywhere": [(0, sb.nbytes)],
    }


def manifest_of(checkpoint: GradientCheckpoint) -> Place:
    entry = checkpoint.chain_entry
    return checkpoint.reader.superblock.manifest_at(entry.slot, entry.manifest_index), entry.manifest_nbytes


def state_of(checkpoint: GradientCheckpoint) -> Place:
    return manifest_of(checkpoint)[0] + checkpoint.header.state_offset, checkpoint.header.state_nbytes


PoolOf: TypeAlias = "Callable[[Callable[[Life], None]], Pool]"


@pytest.fixture
def pool_of(folder: Path) -> Iterator[PoolOf]:
    """Makes the pool of a life."""
    with ExitStack() as opened:

        def make(live: Callable[[Life], None]) -> Pool:
            life = Life(folder / "run.pool")
            live(life)
            file = opened.enter_context(open(life.path, "r+b"))
            mapped = opened.enter_context(mmap.mmap(file.fileno(), 0))
            return Pool(life, mapped, toys.places(life.path))

        yield make


# -- what has to hold --------------------------------------------------------------------------------------------------

TWICE = ("superblocks", "tables", "other lines", "slot headers", "older bases")
"""Places of which there are two, or that the newest checkpoint does not need: it is recovered."""


def check_all(pool: Pool, count: int) -> dict[str, Counter[str]]:
    """Flip bits in places of every kind. What is older than the newest checkpoint must be said; only a damaged commit
    record is as if it had never been written."""
    seen = {kind: pool.check(kind, count) for kind, places in pool.places.items() if places}
    for kind, found in seen.items():
        silent = set(found) - {"0 lost", "0 lost, said", "1 lost, said", "2 lost, said"}
        assert not silent or kind == "the newest line", f"{kind}: {found}"
        assert kind not in TWICE or set(found) == {"0 lost"}, f"{kind}: {found}"
    assert set(seen["the newest line"]) <= {"0 lost", "1 lost"}
    assert set(seen["the newest manifest"]) == {"1 lost, said"}
    return seen


def test_one_flipped_bit_costs_at_most_the_updates_of_a_round(pool_of: PoolOf) -> None:
    seen = check_all(pool_of(steady), 12)
    assert set(seen["bases"]) == {"0 lost, said"}
    assert len(seen["gradients"] + seen["small state"]) > 1, "some records are needed, and others are not"


def check_each(pool: Pool, count: int) -> dict[str, Counter[str]]:
    """Flip bits in places of every kind, in a pool in which not every step is committed."""
    seen = {kind: pool.check(kind, count) for kind, places in pool.places.items() if places}
    for kind, found in seen.items():
        silent = {one for one in found if not one.startswith("0 lost") and not one.endswith("said")}
        assert not silent or kind == "the newest line", f"{kind}: {found}"
        assert kind not in TWICE or set(found) == {"0 lost"}, f"{kind}: {found}"
    return seen


def test_with_an_interval_it_costs_the_updates_since_an_earlier_commit_too(pool_of: PoolOf) -> None:
    seen = check_each(pool_of(with_interval(6, 3, 18)), 12)
    assert set(seen["bases"]) == {"0 lost, said"}
    assert set(seen["the newest manifest"]) == {"3 lost, said"}
    assert set(seen["gradients"] + seen["small state"]) == {"0 lost", "3 lost, said", "6 lost, said"}


@pytest.mark.long
@pytest.mark.parametrize("live", INTERVALS, ids=lambda live: live.__name__)
def test_with_other_intervals_too(live: Callable[[Life], None], pool_of: PoolOf) -> None:
    check_each(pool_of(live), 20)


def test_verify_reports_a_damaged_place_of_each_kind(pool_of: PoolOf) -> None:
    """Also what a recovery need not say."""
    pool = pool_of(steady)
    anywhere = {"anywhere", "other lines"}  # there, nothing may lie
    assert [kind for kind in pool.places if kind not in anywhere and not pool.is_reported(kind)] == []


@pytest.mark.long
@pytest.mark.parametrize("live", LIVES, ids=lambda live: live.__name__)
def test_so_it_does_at_other_moments(live: Callable[[Life], None], pool_of: PoolOf) -> None:
    check_all(pool_of(live), 50)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_no_flipped_bit_gives_other_bits_whatever_happened_before(seed: int, folder: Path) -> None:
    """The loop may have died while a checkpoint was written. Then a flipped bit is a second fault, and there may be
    nothing to recover: an error says so."""
    path, rng = folder / "run.pool", random.Random(seed)
    expected = record(Drawn(seed).workload(), path)[-1].expected
    with closing(open_pool(str(path), gradients=True)) as reader:
        places = {kind: found for kind, found in places_of(reader).items() if kind not in TWICE}
    n_recovered = 0
    for start, nbytes in (rng.choice(found) for found in places.values() for _ in range(10) if found):
        at, mask = start + rng.randrange(nbytes), 1 << rng.randrange(8)
        toys.flip(path, at, mask)
        outcome = recovery(str(path))
        toys.flip(path, at, mask)
        if isinstance(outcome, Recovered):
            n_recovered += 1
            known = expected[outcome.generation]
            assert (outcome.step, outcome.digest) == (known.step, known.digest), f"bits {mask:#x} of byte {at:#x}"
        else:
            assert outcome.typed, f"bits {mask:#x} of byte {at:#x}: {outcome}"
    assert n_recovered


def test_a_base_for_which_no_older_one_stands_in_is_found(pool_of: PoolOf) -> None:
    pool = pool_of(steady)
    with patch.object(GradientCheckpoint, "older_bases", lambda self: iter(())), pytest.raises(AssertionError):
        pool.check("bases", 12)
