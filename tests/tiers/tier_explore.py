"""The search through all states of a model of a tier, breadth first; and random runs through it."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightck.tiers.names import ManifestName
from tiers.tier_model import (
    IDLE,
    PASSES,
    SENDING,
    Model,
    Move,
    Recent,
    State,
    Store,
    exact_listing,
    lacking,
    left_over,
    newest_in,
    nonce_of,
    removed,
    shown,
)

STATES_MAX = 3_000_000


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


def explore(model: Model) -> Result:
    """Look at every state that can be reached, until one is wrong."""
    began, first = time.monotonic(), model.first()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        if problem := model.problem(state):
            return Result(len(came_from), time.monotonic() - began, problem, _trace(came_from, state))
        for event, after in model.moves(state):
            if after not in came_from:
                came_from[after] = state, event
                waiting.append(after)
        if len(came_from) > STATES_MAX:
            raise AssertionError(f"more than {STATES_MAX:,} states")
    return Result(len(came_from), time.monotonic() - began)


def _trace(came_from: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    events = []
    while (before := came_from[state]) is not None:
        state, event = before
        events.append(event)
    return tuple(f"{number:3}. {event}" for number, event in enumerate(reversed(events), start=1))


def forget() -> None:
    """Empty the caches of the model."""
    for cached in (exact_listing, newest_in, lacking, left_over):
        cached.cache_clear()


def walk(model: Model, seed: int, moves_max: int = 200) -> Result:
    """Make one random run. Listings are late, deletions are carried out a second time, and a store may carry out the
    last request of a drain after the drain was killed, but not after the grace has passed."""
    began, chance = time.monotonic(), random.Random(seed)
    recent = Recent(chance)
    model = replace(model, recent=recent)
    state, events = model.first(), []
    late: list[Request] = []
    while len(events) < moves_max and (move := _chosen(model, state, chance)) is not None:
        before = state
        event, state = move
        events.append(event)
        if event == PASSES:
            recent.put.clear()
            recent.deleted.clear()
        late += requests_in_flight(before, state)
        while late and (event == PASSES or chance.random() < 0.2):
            request = late.pop(chance.randrange(len(late)))
            state = request(model, state)
            events.append("the store carries out a late request")
        if event == PASSES:
            state = state._replace(store=state.store._replace(young=frozenset()))
        else:
            now, then = names_in(state.store), names_in(before.store)
            recent.put |= now - then
            recent.deleted |= then - now
        if recent.deleted and chance.random() < 0.2:
            gone = chance.choice(sorted(recent.deleted, key=str))
            state = state._replace(store=removed(state.store, gone))
            events.append(f"{shown(gone)} is deleted a second time")
        if problem := model.problem(state):
            trace = tuple(f"{at:3}. {each}" for at, each in enumerate(events, start=1))
            return Result(len(events), time.monotonic() - began, f"seed {seed}: {problem}", trace)
    return Result(len(events), time.monotonic() - began)


def _chosen(model: Model, state: State, chance: random.Random) -> Move | None:
    """A move of one who is chosen by chance; None if nobody can do anything."""
    actors = list(model.actors(state))
    chance.shuffle(actors)
    found = next((moves for actor in actors if (moves := list(actor))), None)
    return None if found is None else chance.choice(found)


Request = Callable[[Model, State], State]


def requests_in_flight(before: State, after: State) -> list[Request]:
    """The request that a drain had sent when it was killed between the two states."""
    found: list[Request] = []
    for drain, now in zip(before.drains, after.drains, strict=False):
        if now.lives == drain.lives or drain.phase == IDLE:
            continue
        if drain.phase != SENDING:
            found.append(lambda model, state, gone=drain.todo[:1]: model.deleted(state, gone))
        elif drain.todo:
            found.append(lambda model, state, name=drain.todo[0]: model.put(state, name))
        else:
            manifest = ManifestName(drain.writer, drain.step + 1, nonce_of(drain))
            found.append(lambda model, state, name=manifest, names=drain.names: model.put(state, name, names))
    return found


def names_in(store: Store) -> set[object]:
    return {*store.claims, *store.objects, *(each for each, _ in store.manifests)}
