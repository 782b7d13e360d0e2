"""``interval="auto"`` in a group: all ranks save the same steps, in whatever order they learn of an interval."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranked import die, everything, run_ranks, values
from toys import net, same

import lightck
from lightck.errors import RankError, UnsupportedError
from lightck.ranks.agreed_interval import Pattern, Schedule
from lightck.ranks.agreed_step import ACCEPTED, PASSED, Proposal

# -- every interleaving of small groups, with the shipped Schedule -----------------------------------------------------

STEPS, N_PROPOSALS = 9, 2
PATTERNS = [(2, 0), (1, 0)]
"""What rank 0 proposes, in this order; it begins with an interval of 1 of which each third step is left out."""


class Rank(NamedTuple):
    schedule: tuple[Any, ...]
    decisions: tuple[bool, ...] = ()
    saved: int = 0
    answer: int | None = None
    """To the present proposal."""
    has_learnt: bool = False
    """Whether it knows the verdict on the present proposal."""


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    proposal: Proposal | None = None
    n_proposals: int = 0


def packed(schedule: Schedule) -> tuple[Any, ...]:
    return tuple(schedule._patterns), schedule._pending, schedule._decided


def unpacked(kind: type[Schedule], data: tuple[Any, ...]) -> Schedule:
    schedule = kind(data[0][0])
    schedule._patterns, schedule._pending, schedule._decided = list(data[0]), *data[1:]
    return schedule


def moves(kind: type[Schedule], state: State) -> Iterator[State]:
    answers = [rank.answer for rank in state.ranks]
    verdict = None if None in answers else max(answers)
    for i, rank in enumerate(state.ranks):
        schedule = unpacked(kind, rank.schedule)
        if len(rank.decisions) < STEPS:
            step = len(rank.decisions) + 1
            due = schedule.is_due(step, rank.saved)
            if due is not None:
                after = rank._replace(decisions=(*rank.decisions, due), saved=step if due else rank.saved)
                yield changed(state, i, after._replace(schedule=packed(schedule)))
        schedule = unpacked(kind, rank.schedule)
        if state.proposal is not None and rank.answer is None:
            answer = schedule.answer(state.proposal)
            yield changed(state, i, rank._replace(answer=answer, schedule=packed(schedule)))
        if state.proposal is not None and verdict is not None and not rank.has_learnt:
            if i == 0 or rank.answer == ACCEPTED:
                schedule.decided(state.proposal, verdict)
            yield changed(state, i, rank._replace(has_learnt=True, schedule=packed(schedule)))
    if state.n_proposals < N_PROPOSALS and all(rank.has_learnt for rank in state.ranks):
        ranks = tuple(rank._replace(answer=None, has_learnt=False) for rank in state.ranks)
        for lead in (1, 3):
            step = len(state.ranks[0].decisions) + lead
            yield State(ranks, Proposal(step, PATTERNS[state.n_proposals]), state.n_proposals + 1)


def changed(state: State, i: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:i], rank, *state.ranks[i + 1 :]))


def problem(kind: type[Schedule], state: State) -> str | None:
    for decisions in zip(*(rank.decisions for rank in state.ranks), strict=False):
        if len(set(decisions)) > 1:
            return "ranks save different steps"
    is_over = all(len(rank.decisions) == STEPS for rank in state.ranks)
    return None if is_over or any(True for _ in moves(kind, state)) else "ranks wait for ever"


def explore(kind: type[Schedule], n_ranks: int) -> tuple[str | None, int]:
    begin = Rank(packed(kind(Pattern(1, 1, 2))), has_learnt=True)
    first = State((begin,) * n_ranks)
    seen, todo = {first}, deque([first])
    while todo:
        state = todo.popleft()
        found = problem(kind, state)
        if found is not None:
            return found, len(seen)
        for after in moves(kind, state):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return None, len(seen)


class AcceptsWhatHasPassed(Schedule):
    def answer(self, proposal: Proposal) -> int:
        self._pending = Pattern(proposal.step, *proposal.items)
        return ACCEPTED


class KeepsTwo(Schedule):
    """A rank that is two patterns behind lacks the one that it needs."""

    def decided(self, proposal: Proposal, verdict: int) -> None:
        super().decided(proposal, verdict)
        self._patterns = self._patterns[-2:]


class DoesNotWait(Schedule):
    def is_due(self, step: int, saved_step: int) -> bool | None:
        pending, self._pending = self._pending, None
        try:
            return super().is_due(step, saved_step)
        finally:
            self._pending = pending


class TakesUnagreed(Schedule):
    def decided(self, proposal: Proposal, verdict: int) -> None:
        super().decided(proposal, ACCEPTED)


@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_all_ranks_save_the_same_steps_and_none_waits_for_ever(n_ranks):
    found, n_states = explore(Schedule, n_ranks)
    assert found is None
    assert n_states > 1_000


@pytest.mark.parametrize("kind", [AcceptsWhatHasPassed, KeepsTwo, DoesNotWait, TakesUnagreed])
def test_each_part_of_the_agreement_is_needed(kind):
    assert explore(kind, 2)[0] == "ranks save different steps"


# -- patterns ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 1000))
def test_a_pattern_saves_one_of_any_max_gap_steps(interval, skip, begin):
    pattern = Pattern(7, interval, skip if interval == 1 else min(skip, 1))
    steps = range(7 + begin, 7 + begin + pattern.max_gap())
    assert any(pattern.is_due(step) for step in steps)
    saved = [step for step in range(7, 1000) if pattern.is_due(step)]
    assert saved[0] == 7
    apart = {later - earlier for earlier, later in pairwise(saved)}
    assert apart <= {interval, interval + 1}


def test_a_step_about_which_a_rank_has_decided_is_passed():
    schedule = Schedule(Pattern(1, 1))
    assert schedule.is_due(5, 4)
    assert schedule.answer(Proposal(5, (3, 0))) == PASSED
    assert schedule.answer(Proposal(6, (3, 0))) == ACCEPTED
    assert schedule.is_due(6, 5) is None, "the verdict is not known"
    schedule.decided(Proposal(6, (3, 0)), ACCEPTED)
    assert [step for step in range(6, 16) if schedule.is_due(step, step - 1)] == [6, 9, 12, 15]


# -- real ranks --------------------------------------------------------------------------------------------------------


def trained(folder: Path, rank: int, steps: int, interval: Any, dies_at: int = 0, seed: int = 0) -> dict[str, Any]:
    """Train, at a speed of this rank's own between the collectives."""
    torch.manual_seed(0)
    model = net(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    chance, committed = random.Random(100 * seed + rank), []
    with lightck.attach(model, folder, optimizer=optimizer, resume=True, interval=interval, timeout=30) as session:
        begin = session.step
        session.on_commit(committed.append)
        for number in range(begin, steps):
            torch.manual_seed(10 * number + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 4)).pow(2).mean().backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            threading.Event().wait(chance.choice((0, 0, 0.002)))
            optimizer.step()
            if rank == 0 and number + 1 == dies_at:
                die()
        chosen = session.stats().interval
    return {"begin": begin, "committed": committed, "interval": chosen, "model": everything(model, optimizer)}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_ranks_commit_the_same_steps_while_the_interval_changes(tmp_path, seed):
    print(f"seed {seed}")
    auto = lightck.Auto(budget=0.002, most=20)
    found = values(run_ranks(3, lambda rank: trained(tmp_path / "pools", rank, 240, auto, seed=seed)))
    first = found[0]
    assert all(one["committed"] == first["committed"] for one in found)
    assert first["interval"] > 1
    apart = [later - earlier for earlier, later in pairwise(first["committed"])]
    assert apart[0] == 1, "it begins with each step"
    assert max(apart[:-1]) <= 20
    assert first["committed"][-1] == 240


def test_a_killed_training_with_auto_goes_on_with_the_same_bits(tmp_path):
    auto = lightck.Auto(budget=0.002, most=20)
    pools = tmp_path / "pools"
    assert any(one.is_killed for one in run_ranks(2, lambda rank: trained(pools, rank, 150, auto, dies_at=120)))
    step = lightck.recover(pools).step
    assert 120 - 2 * 21 <= step <= 120
    resumed = values(run_ranks(2, lambda rank: trained(pools, rank, 150, auto)))
    whole = values(run_ranks(2, lambda rank: trained(tmp_path / "whole", rank, 150, 1)))
    for one, other in zip(resumed, whole, strict=True):
        assert one["begin"] == step
        assert same(one["model"], other["model"])


def test_ranks_with_other_budgets_are_refused(tmp_path):
    def attached(rank: int) -> None:
        trained(tmp_path / "pools", rank, 1, lightck.Auto(budget=0.01 * (1 + rank)))

    for one in run_ranks(2, attached):
        assert isinstance(one.error, RankError)
        assert "interval=" in str(one.error)


@pytest.mark.parametrize("options", [{"tiers": True}, {"replicas": 2}])
def test_what_does_not_go_together_is_refused_by_name(tmp_path, options):
    def attached(rank: int) -> None:
        model = net(8)
        optimizer = torch.optim.AdamW(model.parameters())
        given = {"tiers": [lightck.Tier(tmp_path / "tier", every="1h")]} if "tiers" in options else options
        with pytest.raises(UnsupportedError, match="interval='auto' together with"):
            lightck.attach(model, tmp_path / "pools", optimizer=optimizer, interval="auto", **given)

    values(run_ranks(2, attached))
