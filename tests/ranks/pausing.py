"""A model of a group of ranks whose values are not finite at times (``ranks/paused_ranks.py``). It imports the shipped
``lightck/ranks/rule.py``.

The rule decides which slots a rank may overwrite, from what is in all pools at that moment. Left to chance are: which
rank pauses at which step, how long each rank takes, and when others learn that a rank pauses, or pauses no more. A
checkpoint is committed as late as it may be: at the gate before the next update, or within its boundary. Mutants are
options.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightck.ranks import rule
from lightck.ranks.rule import Adoption, CheckpointId, Knowledge, PoolView

BOUNDARY, COMMITTING = 0, 1
NOTHING = -1
STUCK = "ranks wait for each other for ever"
OLDER = "the newest checkpoint that all ranks have became older"
BEHIND = "no rank pauses any more, and the newest checkpoint that all ranks have stays behind"


class Rank(NamedTuple):
    step: int = 1
    at: int = BOUNDARY
    held: frozenset[int] = frozenset({0})
    """Steps of the committed checkpoints in its pool."""
    writing: int = NOTHING
    newest: int = 0
    gave_up: bool = False
    """Whether it gave up its last checkpoint."""
    pauses: bool = False
    says: bool = False
    """What the others see: whether it pauses."""


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    pauses_left: int
    last_pause: int = 0
    """The newest step at which a rank paused."""


@dataclass(frozen=True)
class Pausing:
    """``steps``: after so many the training ends. ``pauses``: how often a rank pauses, all together. ``early_gate``:
    whether the gate stands before the collective."""

    n: int
    steps: int = 7
    pauses: int = 3
    slots: int = 3
    early_gate: bool = False
    # mutants
    gives_way: bool = True
    """Whether a rank that has no slot gives its checkpoint up while another one pauses."""
    commits_within_boundary: bool = True
    """Whether a rank that gave a checkpoint up commits the next one before it goes on."""
    knows_never_common: bool = True
    """Whether a rank overwrites checkpoints that another rank will never have."""

    def first(self) -> State:
        return State((Rank(),) * self.n, self.pauses)

    @property
    def program(self) -> tuple[str, ...]:
        places = ("gate", "collective") if self.early_gate else ("collective", "gate")
        return ("boundary", "committing", *places)

    def moves(self, state: State) -> Iterator[State]:
        for i, rank in enumerate(state.ranks):
            if rank.says != rank.pauses:
                yield with_rank(state, i, rank._replace(says=rank.pauses))
            if rank.step > self.steps:
                continue
            kind = self.program[rank.at]
            if kind == "boundary":
                yield from self.boundary(state, i)
            elif kind == "collective":
                if all((other.step, other.at) >= (rank.step, rank.at) for other in state.ranks):
                    yield with_rank(state, i, self.onward(rank))
            else:
                yield with_rank(state, i, self.onward(committed(rank)))

    def boundary(self, state: State, i: int) -> Iterator[State]:
        rank = state.ranks[i]
        if state.pauses_left:
            paused = rank._replace(pauses=True, gave_up=True, at=COMMITTING + 1)
            after = with_rank(state, i, paused)
            yield after._replace(pauses_left=state.pauses_left - 1, last_pause=max(state.last_pause, rank.step))
        over = self.slot(state, i)
        if over is not None:
            must_commit = rank.gave_up and self.commits_within_boundary
            begun = rank._replace(writing=rank.step, held=rank.held - {over}, at=COMMITTING + (not must_commit))
            yield with_rank(state, i, begun)
        elif self.gives_way and any(other.says for other in state.ranks if other is not rank):
            yield with_rank(state, i, rank._replace(gave_up=True, at=COMMITTING + 1))

    def slot(self, state: State, i: int) -> int | None:
        """The step that the rank overwrites (NOTHING: a slot is empty); None: it has to wait."""
        own = ids(state.ranks[i])
        views = [PoolView(ids(each), name(each.newest)) for j, each in enumerate(state.ranks) if j != i]
        known = Knowledge.at_start(Adoption(name(0), 1)).learn(own, views)
        if not self.knows_never_common:
            known = replace(known, never_common=frozenset())
        contents: dict[int, CheckpointId | None] = dict.fromkeys(range(self.slots))
        contents.update(enumerate(sorted(own)))
        found = known.slot_to_write(contents)
        if found is None:
            return None
        content = contents[found]
        return NOTHING if content is None else content.step

    def onward(self, rank: Rank) -> Rank:
        if rank.at + 1 < len(self.program):
            return rank._replace(at=rank.at + 1)
        return rank._replace(step=rank.step + 1, at=BOUNDARY)

    def problem(self, state: State) -> str | None:
        if all(rank.step > self.steps for rank in state.ranks):
            is_late = state.last_pause <= self.steps - 3
            return BEHIND if is_late and common(state) < self.steps - 1 else None
        return None if any(True for _ in self.moves(state)) else STUCK


def explore(model: Pausing) -> tuple[str | None, int]:
    """Visit every state. Return what is wrong in the first that is, and the number of states."""
    first = model.first()
    seen, todo = {first}, deque([first])
    while todo:
        state = todo.popleft()
        problem = model.problem(state)
        if problem is not None:
            return problem, len(seen)
        for after in model.moves(state):
            if common(after) < common(state):
                return OLDER, len(seen)
            ordered = after._replace(ranks=tuple(sorted(after.ranks, key=repr)))  # all ranks are alike
            if ordered not in seen:
                seen.add(ordered)
                todo.append(ordered)
    return None, len(seen)


def name(step: int) -> CheckpointId:
    return CheckpointId(1, step)


def ids(rank: Rank) -> frozenset[CheckpointId]:
    return frozenset(map(name, rank.held))


def common(state: State) -> int:
    """The newest checkpoint that all ranks have; NOTHING: there is none."""
    found = rule.newest_common([ids(rank) for rank in state.ranks])
    return NOTHING if found is None else found.step


def committed(rank: Rank) -> Rank:
    """The rank after what it writes is committed, if it writes."""
    if rank.writing == NOTHING:
        return rank
    return rank._replace(
        held=rank.held | {rank.writing}, newest=rank.writing, writing=NOTHING, gave_up=False, pauses=False
    )


def with_rank(state: State, i: int, rank: Rank) -> State:
    return state._replace(ranks=(*state.ranks[:i], rank, *state.ranks[i + 1 :]))
