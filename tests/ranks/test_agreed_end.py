"""Ranks that agree where their loops end: helper threads of several ranks over one store, which may fail."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping

import pytest

from lightck.ranks.agreed_end import EndAgreement

from .test_agreed_step import Store, until


def begun(n_ranks: int, store: Store, learnt: list[list[int]]) -> list[EndAgreement]:
    def key(what: str, rank: int) -> str:
        return f"{what}/{rank}"

    return [EndAgreement(store, key, rank, n_ranks, learnt[rank].append) for rank in range(n_ranks)]


def all_end_alike(
    seed: int, agreements: list[EndAgreement], loop: Callable[[int], None], ended: Mapping[int, int | None]
) -> None:
    """Run the loop of each rank in a thread. ``ended``: rank -> where its loop has ended (None: it was never asked to
    end), filled by ``loop``; the same for all."""
    threads = [threading.Thread(target=loop, args=(rank,), daemon=True) for rank in range(len(agreements))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(ended) == len(agreements), f"seed {seed}: ranks hang, {ended} have ended"
    assert len(set(ended.values())) == 1, f"seed {seed}: {ended}"
    for one in agreements:
        one.close()


def test_without_a_request_every_point_is_passed():
    agreements = begun(2, Store(random.Random(0)), [[], []])
    assert all(agreement.pass_point() for agreement in agreements for _ in range(100))
    for each in agreements:
        each.close()


def test_a_rank_that_is_ahead_has_been_let_through_and_the_others_go_on_until_they_are_there():
    learnt: list[list[int]] = [[], []]
    agreements = begun(2, Store(random.Random(0)), learnt)
    passed = [3, 5]
    for agreement, n in zip(agreements, passed, strict=True):
        assert all(agreement.pass_point() for _ in range(n))
    agreements[0].request(15)
    ended = [False, False]
    while not all(ended):  # a point that is passed before the ranks know counts as well
        for rank, agreement in enumerate(agreements):
            answer = agreement.pass_point()
            passed[rank] += answer is True
            ended[rank] = answer is False
    assert passed[0] == passed[1]
    assert learnt == [[], [15]], "the other rank learns of it"
    agreements[0].postpone()
    assert agreements[0].pass_point() is False, "one point further"


def test_nobody_is_let_through_as_long_as_a_rank_does_not_answer():
    agreements = begun(3, Store(random.Random(0)), [[], [], []])
    agreements[2].close()
    agreements[0].request(10)
    until(lambda: agreements[0].pass_point() is None and agreements[1].pass_point() is None)
    until(lambda: agreements[0].missing == [2])
    for each in agreements:
        each.close()


def test_a_rank_that_gives_up_lets_all_ranks_go_on():
    """The late rank answers after that: it must not end alone."""
    store = Store(random.Random(0))
    *agreements, absent = begun(3, store, [[], [], []])
    absent.close()
    agreements[0].request(15)
    until(lambda: agreements[0].pass_point() is None and agreements[1].pass_point() is None)
    agreements[0].withdraw()
    until(lambda: agreements[0].is_withdrawn and agreements[1].is_withdrawn)
    late = EndAgreement(store, lambda what, rank: f"{what}/{rank}", 2, 3, lambda signum: None)
    until(lambda: late.is_withdrawn)
    assert all(each.pass_point() for each in (*agreements, late) for _ in range(10))
    for each in (*agreements, late):
        each.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_verdict_or_a_withdrawal_counts_on_all_ranks(seed, monkeypatch):
    """Each rank gives up after a time of its own, one stands still for a while, and the store fails now and then."""
    print(f"seed {seed}")
    for name, seconds in (("_POLL_SECONDS", 0.01), ("_WAITING_SECONDS", 0.001), ("_RETRY_SECONDS", 0.002)):
        monkeypatch.setattr(f"lightck.ranks.agreed_end.{name}", seconds)
    chance = random.Random(seed)
    n_ranks = 3
    agreements = begun(n_ranks, Store(chance, fails=0.1), [[] for _ in range(n_ranks)])
    waits = [chance.uniform(0.0, 0.04) for _ in range(n_ranks)]
    asleep = chance.uniform(0.0, 0.04)
    ended: dict[int, int | None] = {}

    def loop(rank: int) -> None:
        for step in range(1, 200):
            if step == 3 and rank == 0:
                agreements[rank].request(15)
            if step == 4 and rank == 1:
                time.sleep(asleep)
            time.sleep(0.0005)
            began = time.monotonic()
            while (passes := agreements[rank].pass_point()) is None:
                if time.monotonic() - began > waits[rank]:
                    agreements[rank].withdraw()
                time.sleep(0.0005)
            if not passes:
                ended[rank] = step
                return
        ended[rank] = None

    all_end_alike(seed, agreements, loop, ended)


@pytest.mark.parametrize("seed", range(6))
def test_all_loops_end_at_one_point_whatever_the_store_does(seed, monkeypatch):
    """Each loop runs on a thread of its own; in a step all ranks wait for each other, or none does. Some are asked to
    stop, at any time."""
    print(f"seed {seed}")
    for name, seconds in (("_POLL_SECONDS", 0.01), ("_WAITING_SECONDS", 0.001), ("_RETRY_SECONDS", 0.002)):
        monkeypatch.setattr(f"lightck.ranks.agreed_end.{name}", seconds)
    chance = random.Random(seed)
    n_ranks, meet = 4, chance.random() < 0.5
    agreements = begun(n_ranks, Store(chance, fails=0.1), [[] for _ in range(n_ranks)])
    collective = threading.Barrier(n_ranks, timeout=30)
    pauses = [chance.uniform(0.0, 0.004) for _ in range(n_ranks)]
    asked = {rank: chance.randrange(40) for rank in chance.sample(range(n_ranks), chance.randrange(1, n_ranks + 1))}
    ended: dict[int, int] = {}

    def loop(rank: int) -> None:
        step = 0
        while True:
            if meet:
                collective.wait()
            time.sleep(pauses[rank])
            step += 1
            if step == asked.get(rank):
                agreements[rank].request(15)
            while (passes := agreements[rank].pass_point()) is None:
                time.sleep(0.0005)
            if not passes:
                break
        ended[rank] = step

    if not any(step for step in asked.values()):
        asked[0] = 5
    all_end_alike(seed, agreements, loop, ended)
