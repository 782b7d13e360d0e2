"""The search through all states of a model, breadth first, and the shortest way to the first that is wrong.

States that differ only in how steps and incarnations are numbered, or in the numbers of ranks that are alike, are one
state (``Canonical``). So their number is finite although a training has no end.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
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
        self._steps: dict[Rank, tuple[int, ...]] = {}

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
        if self.model.closes_gaps and not is_down:
            ranks, state = self._without_gaps(ranks, state)
        finished = state.finished if is_down else 0
        return state._replace(ranks=self._ordered(ranks), finished=finished)

    def _without_gaps(self, ranks: tuple[Rank, ...], state: State) -> tuple[tuple[Rank, ...], State]:
        """Of a training: the same with fewer steps between checkpoints that are not newer than the newest common one,
        because only their order counts, and the place of each in the period. (How many steps a crash costs is counted
        from the newest common one on.)"""
        period = self.model.topology.period
        common = rule.newest_common([committed(rank) for rank in ranks])
        steps = sorted({step for rank in ranks for step in self._steps_of(rank)})
        back_by, last = 0, steps[0]
        moved = []
        for step in steps:
            if common is not None and step <= common.step:
                back_by += (step - last - 1) // period * period if step > last else 0
            moved.append((step, back_by))
            last = step
        if not back_by:
            return ranks, state
        by = dict(moved)
        given_up = tuple(back(each, 0, back_by) for each in state.given_up)
        return tuple(renamed(rank, 0, by) for rank in ranks), state._replace(given_up=given_up)

    def _steps_of(self, rank: Rank) -> tuple[int, ...]:
        found = self._steps.get(rank)
        if found is None:
            found = self._steps[rank] = tuple({each.step for each in ids_of(rank)} | {rank.step})
        return found

    def _without_old_adoption(self, rank: Rank) -> Rank:
        """The rank without an adoption that decides nothing: all of its checkpoints count, and one is of the adoption's
        incarnation, or the incarnation is known from elsewhere because training goes on."""
        found = self._forgotten.get(rank)
        if found is None:
            adoption, held = rank.adoption, stored(rank)
            found = rank
            if adoption is not None and rank.phase in (DOWN, TRAINING):
                lasting = held
                if rank.copy is not None:  # a record may be lost together with the pools of others, which know it
                    lasting, held = committed(rank), held | rank.copy.held
                is_seen = any(each.incarnation >= adoption.incarnation for each in lasting)
                if is_seen and not any(rule.is_dead(each, adoption) for each in held):
                    found = rank._replace(adoption=None)
            self._forgotten[rank] = found
        return found

    def _lowest_of(self, rank: Rank) -> tuple[int, int]:
        found = self._lowest.get(rank)
        if found is None:
            ids = ids_of(rank)
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
            found = self._moved[key] = renamed(rank, incarnation, defaultdict(lambda: step))
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


def ids_of(rank: Rank) -> list[CheckpointId]:
    """The checkpoints that a rank holds or knows of."""
    ids = [*(s.checkpoint for s in rank.slots if s.status != EMPTY), *committed(rank)]
    views = rank.views if rank.copy is None else (rank.copy.published,)
    ids += [each for view in views for each in (*view.committed, *view.copied, view.newest) if each is not None]
    ids += [rank.known, rank.begun, rank.newest]
    if rank.copy is not None:
        ids += [*rank.copy.held, rank.copy.reading, rank.copy.known]
    if rank.adoption is not None:
        ids.append(rank.adoption.adopted or CheckpointId(rank.adoption.incarnation, rank.step))
    return [each for each in ids if each != NOTHING]


def renamed(rank: Rank, incarnation: int, by: Mapping[int, int]) -> Rank:
    """The rank with smaller numbers in all names. ``by``: step -> by how much it is made smaller."""

    def name(checkpoint: Any) -> Any:
        return checkpoint if checkpoint in (None, NOTHING) else back(checkpoint, incarnation, by[checkpoint.step])

    def names(checkpoints: Iterable[CheckpointId]) -> frozenset[CheckpointId]:
        return frozenset(map(name, checkpoints))

    def in_view(view: PoolView) -> PoolView:
        return PoolView(names(view.committed), name(view.newest), names(view.copied))

    adoption, copy = rank.adoption, rank.copy
    if adoption is not None:
        adoption = Adoption(name(adoption.adopted), adoption.incarnation - incarnation)
    if copy is not None:
        copy = copy._replace(held=names(copy.held), reading=name(copy.reading), known=name(copy.known))
        copy = copy._replace(published=in_view(copy.published))
    return rank._replace(
        step=rank.step - by[rank.step] if rank.phase == TRAINING else rank.step,
        slots=tuple(sorted(Slot(name(s.checkpoint), s.status) for s in rank.slots)),
        known=name(rank.known),
        adoption=adoption,
        begun=name(rank.begun),
        files=tuple(names(file) for file in rank.files),
        newest=name(rank.newest),
        views=tuple(map(in_view, rank.views)),
        copy=copy,
    )


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
    """The way through these canonical states, with the numbers that ranks and steps really have. (From a crash on, a
    model that closes gaps may have smaller ones.)"""
    state = model.first()
    lines = [f"  0. {pools(state)}"]
    for number, wanted in enumerate(states[1:], 1):
        move, state = next(
            (move, after)
            for before in (state, states[number - 1])
            for move in model.moves(before)
            if canonical(after := model.after(move)) == wanted
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
    """What is in all pools: checkpoints as incarnation.step, "..." in progress, "?" not durable yet. What follows
    "|" is in the peer copy."""
    ends = ("", "...", "?", "")
    found = []
    for rank in state.ranks:
        in_slots = " ".join(shown(s.checkpoint) + ends[s.status] for s in rank.slots if s.status != EMPTY)
        in_files = "".join(f" + {' '.join(map(shown, sorted(file)))}" for file in rank.files)
        in_copy = "" if rank.copy is None else f" | {' '.join(map(shown, sorted(rank.copy.held)))}"
        if rank.copy is not None and rank.copy.reading != NOTHING:
            in_copy += f" {shown(rank.copy.reading)}..."
        found.append(f"[{in_slots}{in_files}{in_copy}]")
    return " ".join(found)
