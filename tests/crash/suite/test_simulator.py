"""The simulator itself: a recovery that is wrong is found, images are counted once, findings are made small."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import bugs
import pytest
import toys
from crash import fingerprint
from crash.cuts import ALL, Limits, images, minimal
from crash.fates import Fate, Queue
from crash.oracle import Outcome, Recovered, Refused
from crash.persistence import MODELS, PersistentMemory
from crash.recording import Recording
from crash.seen import Known
from crash.simulator import Effort, Simulator
from crash.verdict import disagreement

PM = PersistentMemory()
LIMITS = Limits(budget=64, metadata=8, payload=4, contents=4, prefixes=2, masks=4)
CLOSELY = Effort(LIMITS, again_every=1, compare_every=1, violations_max=1)


@pytest.fixture
def simulator(recorded: Callable[[str], tuple[Recording, Path]], folder: Path) -> Simulator:
    return Simulator(recorded("late")[0], str(folder), effort=CLOSELY)


def test_a_recovery_that_returns_other_values_is_found(simulator: Simulator) -> None:
    right = simulator.recover

    def wrong(path: str) -> Outcome:
        outcome = right(path)
        return Recovered(outcome.generation, outcome.step, b"other") if isinstance(outcome, Recovered) else outcome

    simulator.recover = wrong
    assert "other values" in str(simulator.check(PM))


def test_a_recovery_that_writes_is_found(simulator: Simulator) -> None:
    right = simulator.recover

    def writes(path: str) -> Outcome:
        outcome = right(path)
        toys.poke(path, 4096, b"\0")
        return outcome

    simulator.recover = writes
    assert "wrote to the file" in str(simulator.check(PM))


def test_a_recovery_that_is_never_the_same_is_found(simulator: Simulator) -> None:
    right, calls = simulator.recover, []

    def fickle(path: str) -> Outcome:
        outcome = right(path)
        calls.append(path)
        if len(calls) % 2 or not isinstance(outcome, Recovered):
            return outcome
        return Recovered(outcome.generation, outcome.step, b"other")

    simulator.recover = fickle
    assert "something else" in str(simulator.check(PM))


@pytest.mark.parametrize("verdict", ["wrong step", "refuses"])
def test_a_checker_that_disagrees_with_recovery_is_found(verdict: str, simulator: Simulator) -> None:
    def verify(path: str, outcome: Outcome, is_harmed: bool) -> str | None:
        other = Refused("NoCheckpointError", "", True)
        if verdict == "wrong step" and isinstance(outcome, Recovered):
            other = Recovered(outcome.generation, outcome.step + 1, outcome.digest)
        return disagreement(path, other, is_harmed)

    simulator.verify = verify
    simulator.effort = Effort(LIMITS, verify_every=1, violations_max=1)
    assert "recovery gives" in str(simulator.check(PM))


def test_a_training_that_does_not_go_on_is_found(simulator: Simulator) -> None:
    def goes_on(recorder: object) -> None:
        raise OSError("no")

    simulator.goes_on = goes_on
    simulator.effort = Effort(LIMITS, goes_on_every=1, violations_max=1)
    assert "does not go on: OSError: no" in str(simulator.check(PM))


# -- counting --------------------------------------------------------------------------------------------------------


def test_an_image_is_counted_once_whoever_sees_it(
    recorded: Callable[[str], tuple[Recording, Path]], folder: Path
) -> None:
    known = Known()
    simulators = [Simulator(recorded("late")[0], str(folder), known=known, effort=Effort(LIMITS)) for _ in range(2)]
    first = [simulators[0].check(model) for model in MODELS]
    assert sum(report.distinct for report in first) == len(known.outcomes) > 100
    assert all(report.images > report.distinct for report in first)
    second = [simulators[1].check(model) for model in MODELS]
    assert not any(report.crash_points or report.distinct for report in second), "the same past was looked at"


def test_fingerprints_of_words_and_of_bytes_agree_and_tell_places_and_values_apart() -> None:
    rng = random.Random(0)
    data = rng.randbytes(64) + bytes(64)
    offsets = range(4096, 4096 + 128, 8)
    parts = [data[i : i + 8] for i in range(0, 128, 8)]
    assert fingerprint.of_parts(offsets, parts) == fingerprint.of_bytes(4096, data) != 0
    assert fingerprint.of_parts([4096], [data]) == fingerprint.of_bytes(4096, data[:64])
    assert fingerprint.of_bytes(0, bytes(128)) == 0
    seen = {fingerprint.of_bytes(8 * at, (1 << bit).to_bytes(8, "little")) for at in range(64) for bit in range(64)}
    assert len(seen) == 64 * 64


# -- enumeration -----------------------------------------------------------------------------------------------------


def flags(n: int) -> list[Fate]:
    """Words of their own."""
    return [Queue(i, (8 * i,), (b"0" * 8,), (b"1" * 8,), (((0, b"1" * 8),),)) for i in range(n)]


def test_every_combination_is_built_where_there_are_few() -> None:
    fates = flags(5)
    built = [image for _, image in images(fates, [0] * 5, Limits(budget=32), random.Random(0))]
    assert len(built) == len({frozenset(image.missing(fates)) for image in built}) == 32


def test_else_none_all_one_lost_one_arrived_prefixes_and_masks() -> None:
    fates = flags(12)
    limits = Limits(budget=32, metadata=12, payload=12, contents=2, prefixes=11, masks=50)
    built = {frozenset(image.missing(fates)) for _, image in images(fates, [1] * 12, limits, random.Random(0))}
    whole = frozenset(range(12))
    assert {frozenset(), whole} < built
    assert {frozenset({i}) for i in whole} | {whole - {i} for i in whole} < built
    assert {frozenset(range(n)) for n in whole} | {frozenset(range(n, 12)) for n in whole} < built
    assert len(built) > 2 + 24 + 18 + 25


def test_metadata_is_combined_in_full_beside_much_payload() -> None:
    fates, kinds = flags(40), [0] * 4 + [2] * 36
    built = {frozenset(im.missing(fates)) for _, im in images(fates, kinds, Limits(budget=16), random.Random(0))}
    payload = frozenset(range(4, 40))
    combined = [frozenset(i for i in range(4) if mask >> i & 1) for mask in range(16)]
    assert {*combined, *(payload | part for part in combined)} < built


def test_the_same_seed_builds_the_same_images() -> None:
    def built(seed: int) -> list[dict[int, tuple[bytes, ...]]]:
        fates = flags(40)
        return [image.missing(fates) for _, image in images(fates, [2] * 40, Limits(budget=8), random.Random(seed))]

    assert built(1) == built(1) != built(2)


def test_what_is_found_is_made_small() -> None:
    def is_enough(items: Sequence[int]) -> bool:
        return {3, 77} <= set(items)

    assert minimal(range(100), is_enough) == [3, 77]


def test_a_finding_names_few_words_its_model_and_its_seed(
    recorded: Callable[[str], tuple[Recording, Path]], folder: Path
) -> None:
    effort = Effort(LIMITS, seed=5, violations_max=1 << 30)
    report = Simulator(recorded("two slots")[0], str(folder), effort=effort).check(PM, bugs.no_fence_before_the_record)
    reduced = [v for v in report.violations if "reduced" in v.image]
    assert reduced
    for violation in reduced:
        assert 0 < len(violation.words) <= 64, str(violation)
        assert "persistent memory" in str(violation)
        assert "seed 5" in str(violation)


def test_nothing_is_left_out_of_the_image_that_is_reported_from_all() -> None:
    assert not ALL.missing(flags(3))
