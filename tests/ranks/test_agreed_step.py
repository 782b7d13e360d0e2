"""Ranks that agree on a step ahead of them: helper threads of several ranks over one store, which may fail."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from lightck.ranks.agreed_step import ACCEPTED, NOT_READY, PASSED, Proposal, StepAgreement


class Store:
    """The store of a process group. ``fails``: how often a call raises."""

    def __init__(self, chance: random.Random, fails: float = 0.0) -> None:
        self._values: dict[str, bytes] = {}
        self._chance, self._fails, self._lock = chance, fails, threading.Lock()

    def _maybe_fail(self) -> None:
        with self._lock:
            if self._chance.random() < self._fails:
                raise RuntimeError("the store is not there")

    def set(self, key: str, value: bytes, /) -> None:
        self._maybe_fail()
        self._values[key] = value
        self._maybe_fail()  # it was written, and the answer is lost

    def check(self, keys: list[str], /) -> bool:
        self._maybe_fail()
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        self._maybe_fail()
        return [self._values[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        assert expected == ""
        self._maybe_fail()
        with self._lock:
            found = self._values.setdefault(key, desired.encode())
        self._maybe_fail()
        return found


@dataclass
class Rank:
    """A rank that accepts the steps that it has not passed, if it is ready."""

    step: int = 0
    is_ready: bool = True
    accepted: list[int] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    verdicts: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, proposal: Proposal) -> int:
        with self.lock:
            if proposal.step <= self.step:
                return PASSED
            if not self.is_ready:
                return NOT_READY
            self.accepted.append(proposal.step)
            return ACCEPTED

    def decided(self, proposal: Proposal, verdict: int) -> None:
        (self.agreed if verdict == ACCEPTED else self.refused).append(proposal.step)
        self.verdicts.append(verdict)


def until(is_true: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


def begun(ranks: list[Rank], store: Store) -> list[StepAgreement]:
    def key(what: str, rank: int) -> str:
        return f"{what}/{rank}"

    return [StepAgreement(store, key, number, len(ranks), rank) for number, rank in enumerate(ranks)]


def closed(agreements: list[StepAgreement]) -> None:
    for each in agreements:
        each.close()


def test_all_ranks_learn_what_all_have_accepted():
    ranks = [Rank(), Rank(), Rank()]
    agreements = begun(ranks, Store(random.Random(0)))
    agreements[0].propose(Proposal(7, [0, 1]))
    until(lambda: all(rank.agreed == [7] for rank in ranks))
    agreements[0].propose(Proposal(9, [1]))
    until(lambda: all(rank.agreed == [7, 9] for rank in ranks))
    closed(agreements)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_nothing_is_agreed_if_one_rank_has_passed_the_step(where):
    ranks = [Rank(), Rank(), Rank()]
    ranks[where].step = 7
    agreements = begun(ranks, Store(random.Random(0)))
    agreements[0].propose(Proposal(7, [0]))
    until(lambda: all(rank.refused == [7] for number, rank in enumerate(ranks) if number != where))
    until(lambda: ranks[0].refused == [7])
    assert not any(rank.agreed for rank in ranks)
    assert ranks[0].verdicts == [PASSED], "rank 0 learns why"
    agreements[0].propose(Proposal(8, [0]))
    until(lambda: all(rank.agreed == [8] for rank in ranks))
    closed(agreements)


def test_nothing_is_decided_without_the_answer_of_a_rank():
    ranks = [Rank(), Rank()]
    agreements = begun(ranks, Store(random.Random(0)))
    agreements[1].close()
    agreements[0].propose(Proposal(3, [0]))
    until(lambda: ranks[0].accepted == [3])
    agreements[0].close()
    assert not ranks[0].agreed
    assert not ranks[0].refused


@pytest.mark.parametrize("seed", range(3))
def test_no_rank_acts_at_a_step_that_another_has_not_accepted_whatever_the_store_does(seed, monkeypatch):
    """Training threads run ahead meanwhile, at speeds of their own."""
    print(f"seed {seed}")
    monkeypatch.setattr("lightck.ranks.store_thread._RETRY_SECONDS", 0.002)
    chance = random.Random(seed)
    ranks = [Rank() for _ in range(4)]
    agreements = begun(ranks, Store(chance, fails=0.1))
    for _ in range(40):
        n_decided = len(ranks[0].agreed) + len(ranks[0].refused)
        for rank in ranks:
            with rank.lock:
                rank.step += chance.randrange(4)
                rank.is_ready = chance.random() < 0.9
        agreements[0].propose(Proposal(max(rank.step for rank in ranks) + chance.randrange(-3, 6), [0]))
        until(lambda before=n_decided: len(ranks[0].agreed) + len(ranks[0].refused) > before)
    until(lambda: all(rank.agreed == ranks[0].agreed for rank in ranks))
    closed(agreements)
    assert ranks[0].agreed
    for rank in ranks:
        assert set(ranks[0].agreed) <= set(rank.accepted)
    assert ranks[0].refused
