"""The search through all states of a model, breadth first, and the shortest way to the first that is wrong.

States that differ only in how steps and incarnations are numbered, or in the numbers of ranks that are alike, are one
state (``Canonical``). So their number is finite although a training has no end.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from lightck.ranks import rule
from lightck.ranks.rule import Adoption, CheckpointId, PoolView
from ranks.model import DOWN, EMPTY, NOTHING, TRAINING, Model, Move, Rank, Slot, State, committed, forget, stored

STATES_MAX = 2_000_000


@dataclass(frozen=True)
class Result:
    states: int
    seconds: float
    problem: str | None = None
    trace: tuple[str, ...] = ()
    """The events from the start to the problem, one a line."""

    def __str__(self) -> str:
        found = self.problem or "safe"
        return "\n".join([f"{found} ({self.states:,} states in {self.seconds:.1f} s)", *self.trace])


class Canonical:
    """One state in the place of all that differ from it in numbers alone."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._numbers: dict[Rank, int] = {}
        self._lowest: dict[Rank, tuple[int, int]] = {}
        self._moved: dict[tuple[Rank, int, int], Rank] = {}
        self._forgotten: dict[Rank, Rank] = {}

    def __call__(self, state: State) -> State:
        ranks = state.ranks
        if state.incarnation > 1:
            ranks = tuple(self._without_old_adoption(rank) for rank in ranks)
        lowest = [self._lowest_of(rank) for rank in ranks]
        incarnation, step = min(each[0] for each in lowest), min(each[1] for each in lowest)
        step -= step % self.model.topology.period
        incarnation = min(incarnation, state.incarnation) - 1
        is_down = any(rank.phase != TRAINING for rank in ranks)
        if step or incarnation:
            ranks = tuple(self._moved_back(rank, incarnation, step) for rank in ranks)
            state = state._replace(
                incarnation=state.incarnation - incarnation,
                verdict=back(state.verdict, incarnation, step),
                finished=state.finished - step,
                given_up=tuple(back(each, incarnation, step) for each in state.given_up),
            )
        finished = state.finished if is_down else 0
        return state._replace(ranks=self._ordered(ranks), finished=finished)

    def _without_old_adoption(self, rank: Rank) -> Rank:
        """The rank without an adoption that decides nothing: all of its checkpoints count, and one is of the adoption's
        incarnation, or the incarnation is known from elsewhere because training goes on."""
        found = self._forgotten.get(rank)
        if found is None:
            adoption, held = rank.adoption, stored(rank)
            found = rank
            if adoption is not None and rank.phase in (DOWN, TRAINING):
                is_seen = any(each.incarnation >= adoption.incarnation for each in held)
                if is_seen and not any(rule.is_dead(each, adoption) for each in held):
                    found = rank._replace(adoption=None)
            self._forgotten[rank] = found
        return found

    def _lowest_of(self, rank: Rank) -> tuple[int, int]:
        found = self._lowest.get(rank)
        if found is None:
            ids = [*(s.checkpoint for s in rank.slots if s.status != EMPTY), *committed(rank)]
            ids += [each for view in rank.views for each in (*view.committed, view.newest) if each is not None]
            ids += [each for each in (rank.known, rank.begun, rank.newest) if each != NOTHING]
            if rank.adoption is not None:
                ids.append(rank.adoption.adopted or CheckpointId(rank.adoption.incarnation, rank.step))
            steps = [each.step for each in ids]
            if rank.phase == TRAINING:
                steps.append(rank.step)
            found = min((each.incarnation for each in ids), default=1), min(steps, default=0)
            self._lowest[rank] = found
        return found

    def _moved_back(self, rank: Rank, incarnation: int, step: int) -> Rank:
        key = rank, incarnation, step
        found = self._moved.get(key)
        if found is None:
            adoption = rank.adoption
            if adoption is not None:
                adopted = adoption.adopted and back(adoption.adopted, incarnation, step)
                adoption = Adoption(adopted, adoption.incarnation - incarnation)
            found = rank._replace(
                step=rank.step - step if rank.phase == TRAINING else rank.step,
                slots=tuple(sorted(Slot(back(s.checkpoint, incarnation, step), s.status) for s in rank.slots)),
                known=back(rank.known, incarnation, step),
                adoption=adoption,
                begun=back(rank.begun, incarnation, step),
                files=tuple(frozenset(back(c, incarnation, step) for c in file) for file in rank.files),
                newest=back(rank.newest, incarnation, step),
                views=tuple(
                    PoolView(
                        frozenset(back(c, incarnation, step) for c in view.committed),
                        back(view.newest, incarnation, step),
                    )
                    for view in rank.views
                ),
            )
            self._moved[key] = found
        return found

    def _ordered(self, ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
        symmetries = self.model.symmetries
        if len(symmetries) == 1:
            return ranks
        number = self._numbers
        if ranks[0].views:
            found = [renumbered(ranks, order) for order in symmetries]
            return min(found, key=lambda each: [number.setdefault(rank, len(number)) for rank in each])
        keys = [number.setdefault(rank, len(number)) for rank in ranks]
        best = min(symmetries, key=lambda order: [keys[i] for i in order])
        return tuple(ranks[i] for i in best)


def renumbered(ranks: tuple[Rank, ...], order: tuple[int, ...]) -> tuple[Rank, ...]:
    return tuple(ranks[i]._replace(views=tuple(ranks[i].views[j] for j in order)) for i in order)


def back(checkpoint: Any, incarnation: int, step: int) -> Any:
    if checkpoint is None or checkpoint == NOTHING:
        return checkpoint
    return CheckpointId(checkpoint.incarnation - incarnation, checkpoint.step - step)


def explore(model: Model, states_max: int = STATES_MAX) -> Result:
    """Visit every state that can be reached, and stop at the first that is wrong."""
    begun = time.perf_counter()
    forget()
    canonical = Canonical(model)
    first = canonical(model.first())
    came_from: dict[State, State | None] = {first: None}
    todo = deque([first])
    problem = None
    while todo:
        state = todo.popleft()
        problem = model.problem(state)
        if problem is None:
            makes_progress = not model.is_near(state)
            for move in model.moves(state):
                makes_progress |= move.is_progress
                after = canonical(model.after(move))
                if after not in came_from:
                    came_from[after] = state
                    todo.append(after)
            problem = None if makes_progress else "no rank can go on"
        if problem is None and len(came_from) > states_max:
            problem = f"more than {states_max:,} states: not explored completely"
        if problem is not None:
            seconds = time.perf_counter() - begun
            return Result(len(came_from), seconds, problem, trace(model, canonical, way(came_from, state)))
    return Result(len(came_from), time.perf_counter() - begun)


def way(came_from: dict[State, State | None], state: State) -> list[State]:
    found = [state]
    while (before := came_from[found[-1]]) is not None:
        found.append(before)
    return found[::-1]


def trace(model: Model, canonical: Canonical, states: list[State]) -> tuple[str, ...]:
    """The way through these canonical states, with the numbers that ranks and steps really have."""
    state = model.first()
    lines = [f"  0. {pools(state)}"]
    for number, wanted in enumerate(states[1:], 1):
        move, state = next(
            (move, after) for move in model.moves(state) if canonical(after := model.after(move)) == wanted
        )
        lines.append(f"{number:3}. {event(move):45} {pools(state)}")
    return tuple(lines)


def event(move: Move) -> str:
    who = "" if move.rank is None else f"rank {move.rank} "
    if move.kind == "begins":
        new, over = move.what
        what = shown(new) + ("" if over == NOTHING else f" over {shown(over)}")
    else:
        what = "" if move.what is None else shown(move.what)
    return f"{who}{move.kind} {what}".rstrip()


def shown(what: Any) -> str:
    if isinstance(what, CheckpointId):
        return "nothing" if what == NOTHING else f"{what.incarnation}.{what.step}"
    return str(what)


def pools(state: State) -> str:
    """What is in all pools: checkpoints as incarnation.step, "..." in progress, "?" not durable yet."""
    ends = ("", "...", "?", "")
    found = []
    for rank in state.ranks:
        in_slots = " ".join(shown(s.checkpoint) + ends[s.status] for s in rank.slots if s.status != EMPTY)
        in_files = "".join(f" + {' '.join(map(shown, sorted(file)))}" for file in rank.files)
        found.append(f"[{in_slots}{in_files}]")
    return " ".join(found)
