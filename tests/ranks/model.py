"""A model of a group of ranks that train, save, crash and recover. It imports the shipped ``lightck/ranks/rule.py``.

The rule decides; the model adds what is left to chance: how long each rank takes, when records become visible and when
durable, who has read what of whom, which checkpoints are given up or left out, relayouts, and crashes of all ranks at
any moment. (One rank that dies first is a rank that has stood still: the moment that counts is the one at which the
last rank has ended.) Mutants are subclasses in ``mutants.py``.

A step here is a step whose checkpoint is due.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from lightck.ranks import rule
from lightck.ranks.rule import Adoption, CheckpointId, Knowledge, PoolView
from ranks.topology import BEGIN, BOUNDARY, GATE, Place, Topology

EMPTY, WRITING, VISIBLE, COMMITTED = range(4)
"""What a slot holds. VISIBLE: the commit record is stored, but not durable yet."""
DOWN, ADOPTED, STARTING, TRAINING = range(4)
"""Phases of a rank. STARTING: it writes checkpoint 0 of a new training."""
NOTHING = CheckpointId(0, 0)
"""In the place of a checkpoint where there is none. As a verdict: a new training."""


class Slot(NamedTuple):
    checkpoint: CheckpointId
    status: int


FREE = Slot(NOTHING, EMPTY)


class Copy(NamedTuple):
    """The peer copy of a rank's pool on another host (``copying.py``)."""

    held: frozenset[CheckpointId]
    """The checkpoints that are durable in it."""
    reading: CheckpointId
    """The checkpoint that is being copied; NOTHING: none is."""
    known: CheckpointId
    """The newest checkpoint that this rank knows to be in the copies of all ranks."""
    every: int
    """Of which steps the checkpoints are due for copies, as far as this rank knows; 0: of none."""
    published: PoolView = PoolView(frozenset(), None)
    """What this rank has published of its pool and its copy, where that may be late."""
    is_pool_lost: bool = False
    """Whether the pool was lost with its host, and training has not gone on since then."""


class Rank(NamedTuple):
    phase: int
    step: int
    """Updates that the rank has made."""
    at: int
    """Where it waits: index in the program of a step."""
    slots: tuple[Slot, ...]
    """In one order, because it does not matter which slot holds what."""
    known: CheckpointId
    """The newest checkpoint that this rank knows to be common."""
    adoption: Adoption | None
    begun: CheckpointId
    """The last checkpoint that this rank gave up, until it has committed another one."""
    files: tuple[frozenset[CheckpointId], ...]
    """The checkpoints in each file that the pool had before a relayout, as long as it is kept."""
    newest: CheckpointId
    """The newest checkpoint that this rank ever committed."""
    views: tuple[PoolView, ...]
    """What this rank has read last in the pool of each other rank, where ranks read one pool after the other."""
    copy: Copy | None = None
    """None: there are no peer copies."""


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    incarnation: int
    crashes: int
    """Crashes that may still happen."""
    verdict: CheckpointId | None
    """While ranks recover: the checkpoint to which they come back, once it is agreed."""
    finished: int
    """The largest number of updates before the last crash."""
    given_up: tuple[CheckpointId, ...]
    """Checkpoints newer than the newest common one that at least one rank has given up."""
    has_started: bool
    """Whether ``attach`` has ever returned on any rank."""


class Choice(NamedTuple):
    slot: int | None
    """The slot that the next checkpoint gets; None: the rank must wait."""
    files: tuple[frozenset[CheckpointId], ...]
    """The files of before that stay."""


class Move(NamedTuple):
    kind: str
    rank: int | None
    what: Any
    state: State
    is_progress: bool = True
    """Whether the move happens sooner or later by itself. Bad luck (crashes, give-ups) and free choices do not count:
    with them alone, a group stands still."""


@cache
def committed(rank: Rank) -> frozenset[CheckpointId]:
    """The checkpoints that are durable in a rank's pool."""
    return frozenset(slot.checkpoint for slot in rank.slots if slot.status == COMMITTED).union(*rank.files)


@cache
def stored(rank: Rank) -> frozenset[CheckpointId]:
    """The same, with those whose commit records are not durable yet."""
    return frozenset(slot.checkpoint for slot in rank.slots if slot.status >= VISIBLE).union(*rank.files)


@cache
def view_of(rank: Rank) -> PoolView:
    return PoolView.of(committed(rank), None if rank.newest == NOTHING else rank.newest)


def is_idle(rank: Rank) -> bool:
    """Whether no checkpoint of this rank is in flight."""
    return all(slot.status in (EMPTY, COMMITTED) for slot in rank.slots)


@cache
def learned(
    known: CheckpointId, adoption: Adoption | None, own: frozenset[CheckpointId], others: tuple[PoolView, ...]
) -> Knowledge:
    return Knowledge(None if known == NOTHING else known, adoption).learn(own, others)


@dataclass(eq=False)
class Model:
    """What is explored. The fields are what a row of the tests chooses."""

    n: int
    topology: Topology
    loss: int | None = 1
    """The largest number of finished updates that a crash may cost, where no checkpoint was given up. Each step whose
    checkpoint was given up since the newest common one may cost another. None: any number."""
    slots: int = 3
    crashes: int = 0
    give_ups: int = 0
    """How many steps newer than the newest common checkpoint may have a checkpoint that was given up. Over the whole
    training there may be any number."""
    skips: int = 0
    """How many checkpoints in a row a rank may leave out."""
    files: int = 0
    """How many files from before relayouts a pool may have at a time."""
    hosts: tuple[tuple[int, ...], ...] | None = None
    """Ranks by host: of ranks on other hosts a rank knows only what all ranks together have. None: all on one."""
    reads: str = "at once"
    """When a rank reads the other pools. "at once": all at one moment, when it chooses a slot. "earlier": all at one
    moment, which may lie long before. "one by one": each at a moment of its own."""
    horizon: int | None = None
    """States are explored up to this many steps after the newest common checkpoint. Where ranks may leave checkpoints
    out, they may have no new one in common for ever, and the number of states would be infinite."""
    damages: bool = False
    """Whether the newest checkpoint of one rank may turn out to be damaged after a crash."""
    from_nothing: bool = False
    """Whether the model begins with empty pools."""
    uses_never_common: bool = True
    """Whether ranks overwrite what can never become common, or only what is older than a common checkpoint."""
    is_eager: bool = True
    """Whether ranks go on at once where they have no choice (``_settled``)."""
    lost_max: int = -1
    """The most that a crash costs in any state, beyond what was given up."""
    closes_gaps = False
    """Whether a training can go on for ever beside an old checkpoint that must stay. Then how much older it is counts
    only modulo the period."""

    def first(self) -> State:
        zero = CheckpointId(1, 0)
        held = [zero, CheckpointId(1, 1)] if self.damages else [] if self.from_nothing else [zero]
        slots = (*(FREE,) * (self.slots - len(held)), *(Slot(each, COMMITTED) for each in held))
        newest = held[-1] if held else NOTHING
        rank = Rank(DOWN, 0, 0, slots, NOTHING, None, NOTHING, (), newest, ())
        if not self.from_nothing:
            rank = self._back_at(rank, newest)
        ranks = (rank,) * self.n
        return self._settled(State(ranks, newest.incarnation, self.crashes, None, 0, (), not self.from_nothing))

    @property
    def symmetries(self) -> tuple[tuple[int, ...], ...]:
        """The renumberings of the ranks that change nothing."""
        return self.topology.symmetries if self.hosts is None else (tuple(range(self.n)),)

    # -- what mutants replace

    def visible_to_others(self, rank: Rank) -> PoolView:
        return view_of(rank)

    def reported(self, rank: Rank, held: frozenset[CheckpointId]) -> frozenset[CheckpointId]:
        return rule.reported(held, rank.adoption)

    def newest_common(self, sets: Iterable[Collection[CheckpointId]]) -> CheckpointId | None:
        return rule.newest_common(sets)

    def verdict(self, state: State) -> CheckpointId | None:
        return self.newest_common([self.reported(rank, stored(rank)) for rank in state.ranks])

    def views(self, state: State, i: int) -> tuple[PoolView, ...]:
        """What rank i knows of the other ranks."""
        views = state.ranks[i].views or tuple(self.visible_to_others(rank) for rank in state.ranks)
        if self.hosts is None:
            return tuple(view for j, view in enumerate(views) if j != i)
        here = next(host for host in self.hosts if i in host)
        return (*(views[j] for j in here if j != i), PoolView.together(views))

    def knowledge(self, state: State, i: int) -> Iterable[Knowledge]:
        """What rank i may know when it chooses a slot: it has looked, or not yet."""
        rank = state.ranks[i]
        full = learned(rank.known, rank.adoption, committed(rank), self.views(state, i))
        before = Knowledge(None if rank.known == NOTHING else rank.known, rank.adoption)
        if not self.uses_never_common:
            full = Knowledge(full.common, full.adoption)
        if self.reads == "one by one":
            return [full]
        if self.reads == "earlier":
            full = Knowledge(before.common, rank.adoption, full.never_common)
        return dict.fromkeys((full, before, Knowledge(full.common, rank.adoption)))

    def choices(self, state: State, i: int) -> set[Choice]:
        """What rank i may do for its next checkpoint, depending on what it knows."""
        rank = state.ranks[i]
        contents = self.contents(rank)
        return {
            Choice(each.slot_to_write(contents), tuple(file for file in rank.files if not each.may_remove(file)))
            for each in self.knowledge(state, i)
        }

    def contents(self, rank: Rank) -> dict[int, CheckpointId | None]:
        return {at: slot.checkpoint if slot.status == COMMITTED else None for at, slot in enumerate(rank.slots)}

    def must_commit_within_boundary(self, rank: Rank) -> bool:
        return rule.commits_within_boundary(None if rank.begun == NOTHING else rank.begun, rank.newest)

    # -- what must hold

    def problem(self, state: State) -> str | None:
        """What is wrong with a state, or None."""
        reports = [self.reported(rank, committed(rank)) for rank in state.ranks]
        common = rule.newest_common(reports)
        if common is None:
            is_fresh = not state.has_started and rule.may_start_from_nothing(reports)
            return None if is_fresh else "after a crash the ranks have no checkpoint in common"
        if state.verdict and state.verdict != NOTHING and any(state.verdict not in stored(r) for r in state.ranks):
            return "ranks adopt a checkpoint that one of them does not have"
        lost = max(state.finished, *(rank.step for rank in state.ranks)) - common.step
        if state.has_started:
            self.lost_max = max(self.lost_max, lost - len(state.given_up))
        if self.loss is not None and lost > self.loss + len(state.given_up):
            return f"a crash costs {lost} finished updates"
        if self.damages and any(rule.newest_common(without_newest(reports, i)) is None for i in range(self.n)):
            return "if the newest checkpoint of one rank is damaged, the ranks have none in common"
        return None

    # -- moves

    def moves(self, state: State) -> Iterator[Move]:
        if not self.is_near(state):
            return
        phases = {rank.phase for rank in state.ranks}
        if phases == {TRAINING}:
            for i in range(self.n):
                yield from self._trains(state, i)
        elif STARTING in phases:
            for i in range(self.n):
                yield from self._starts(state, i)
        else:
            yield from self._recovers(state)
        if state.crashes:
            yield from self._crashes(state)

    def is_near(self, state: State) -> bool:
        if self.horizon is None:
            return True
        common = rule.newest_common([self.reported(rank, committed(rank)) for rank in state.ranks])
        return common is None or max(rank.step for rank in state.ranks) - common.step <= self.horizon

    def _trains(self, state: State, i: int) -> Iterator[Move]:
        rank = state.ranks[i]
        yield from self._copies(state, i)
        yield from self._gives_up(state, i)
        yield from self._learns(state, i)
        if self.topology.program[rank.at] == BEGIN:
            yield from self._begins(state, i)
        places = [(each.step, each.at) for each in state.ranks]
        if not self.is_eager and self._may_pass(rank, places, i):
            after = at_place(rank, self._next_place(places[i]))
            yield self._move("goes on", state, i, after, self._named_place(rank))
        for choice in self.choices(state, i) if rank.files else ():
            if choice.files != rank.files:
                yield self._move("removes an old file", state, i, rank._replace(files=choice.files))

    def _copies(self, state: State, i: int) -> Iterator[Move]:
        """The copies of a checkpoint end; its record becomes durable."""
        rank = state.ranks[i]
        for at, (checkpoint, status) in enumerate(rank.slots):
            if status == WRITING:
                after = put(rank, at, Slot(checkpoint, VISIBLE))
                yield self._move("stores the record of", state, i, after, checkpoint)
            elif status == VISIBLE:
                after = put(rank, at, Slot(checkpoint, COMMITTED))._replace(begun=NOTHING, newest=checkpoint)
                yield self._move("has committed", state, i, after, checkpoint)

    def _gives_up(self, state: State, i: int) -> Iterator[Move]:
        rank = state.ranks[i]
        for at, (checkpoint, status) in enumerate(rank.slots):
            if status == WRITING and not self._is_at_boundary(rank):
                given_up = tuple(sorted({*state.given_up, checkpoint}))
                if len(given_up) <= self.give_ups:
                    after = put(rank, at, FREE)._replace(begun=checkpoint)
                    state_after = state._replace(given_up=given_up)
                    yield self._move("gives up", state_after, i, after, checkpoint, is_progress=False)

    def _named_place(self, rank: Rank) -> str:
        wait = self.topology.program[rank.at]
        return f"past the {wait if isinstance(wait, str) else 'collective'} of step {rank.step}"

    def _is_at_boundary(self, rank: Rank) -> bool:
        return self.topology.program[rank.at] == BOUNDARY

    def _learns(self, state: State, i: int) -> Iterator[Move]:
        rank = state.ranks[i]
        if self.reads == "one by one":
            for j in range(self.n):
                found = self.visible_to_others(state.ranks[j])
                found = PoolView(frozenset(each for each in found.committed if each >= rank.known), found.newest)
                if j != i and found != rank.views[j]:
                    views = (*rank.views[:j], found, *rank.views[j + 1 :])
                    after = self._with_known(state, i, rank._replace(views=views))
                    yield self._move("reads the pool of", state, i, after, f"rank {j}")
        elif self.reads == "earlier":
            after = self._with_known(state, i, rank)
            if after != rank:
                yield self._move("knows to be common", state, i, after, after.known)

    def _with_known(self, state: State, i: int, rank: Rank) -> Rank:
        views = self.views(state._replace(ranks=(*state.ranks[:i], rank, *state.ranks[i + 1 :])), i)
        common = learned(rank.known, rank.adoption, committed(rank), views).common
        if common is None or common == rank.known:
            return rank
        seen = tuple(PoolView(frozenset(c for c in held if c >= common), newest) for held, newest, _ in rank.views)
        return rank._replace(known=common, views=seen)

    def _begins(self, state: State, i: int) -> Iterator[Move]:
        rank = state.ranks[i]
        checkpoint = CheckpointId(state.incarnation, rank.step)
        onward = rank._replace(at=rank.at + 1)
        is_forced = self.must_commit_within_boundary(rank)
        last = max(rule.reported(committed(rank), rank.adoption))
        if self.skips and not is_forced and rank.step - last.step <= self.skips:
            yield self._move("leaves out", state, i, onward._replace(at=rank.at + 2), checkpoint, is_progress=False)
        if not is_forced:
            onward = onward._replace(at=rank.at + 2)
        for choice in sorted(self.choices(state, i), key=repr):
            onward = onward._replace(files=choice.files)
            if choice.slot is not None:
                over = rank.slots[choice.slot].checkpoint
                after = put(onward, choice.slot, Slot(checkpoint, WRITING))
                yield self._move("begins", state, i, after, (checkpoint, over))
            if len(choice.files) < self.files:
                slots = (*(FREE,) * (self.slots - 1), Slot(checkpoint, WRITING))
                after = onward._replace(slots=slots, files=self.files_after_relayout(onward))
                yield self._move("lays its pool out anew for", state, i, after, checkpoint, is_progress=False)

    def files_after_relayout(self, rank: Rank) -> tuple[frozenset[CheckpointId], ...]:
        in_slots = frozenset(slot.checkpoint for slot in rank.slots if slot.status == COMMITTED)
        return (*rank.files, in_slots)

    # -- start, crash and recovery

    def _starts(self, state: State, i: int) -> Iterator[Move]:
        """A new training: every rank commits step 0, and ``attach`` returns when all have."""
        rank = state.ranks[i]
        zero = CheckpointId(state.incarnation, 0)
        yield from self._copies(state, i)
        if rank.phase == STARTING and rank.at == 0:
            knowledge = Knowledge(None, rank.adoption)
            slot = knowledge.slot_to_write(self.contents(rank))
            if slot is not None:
                yield self._move(
                    "begins", state, i, put(rank, slot, Slot(zero, WRITING))._replace(at=1), (zero, NOTHING)
                )
        if i == 0 and all(zero in committed(each) for each in state.ranks):
            ranks = tuple(self._back_at(each, zero) for each in state.ranks)
            yield Move("all ranks have checkpoint 0", None, None, state._replace(ranks=ranks, has_started=True))

    def _crashes(self, state: State) -> Iterator[Move]:
        """All ranks end. A record that is visible and not durable is kept or lost, and may be lost later as well."""
        visible = [any(slot.status == VISIBLE for slot in rank.slots) for rank in state.ranks]
        for kept in product(*((True, False) if each else (False,) for each in visible)):
            ranks = tuple(after_crash(rank, keeps) for rank, keeps in zip(state.ranks, kept, strict=True))
            finished = max(state.finished, *(rank.step for rank in state.ranks))
            after = state._replace(ranks=ranks, crashes=state.crashes - 1, verdict=None, finished=finished)
            lost = [i for i, keeps in enumerate(kept) if visible[i] and not keeps]
            yield Move("all ranks crash; records are lost of ranks", None, lost, after, is_progress=False)

    def _recovers(self, state: State) -> Iterator[Move]:
        if state.verdict is None:
            verdict = self.verdict(state) or NOTHING
            seen = [each.incarnation for rank in state.ranks for each in stored(rank)]
            seen += [rank.adoption.incarnation for rank in state.ranks if rank.adoption is not None]
            after = state._replace(verdict=verdict, incarnation=rule.next_incarnation(seen))
            yield Move("the ranks agree on", None, verdict, after)
            return
        adoption = Adoption(None if state.verdict == NOTHING else state.verdict, state.incarnation)
        for i, rank in enumerate(state.ranks):
            if rank.phase == DOWN:
                slots = tuple(adopted_slot(slot, state.verdict) for slot in rank.slots)
                newest = max(rank.newest, state.verdict)
                after_rank = rank._replace(phase=ADOPTED, adoption=adoption, slots=in_order(slots), newest=newest)
                yield self._move("adopts", state, i, after_rank, state.verdict)
        if all(rank.phase == ADOPTED for rank in state.ranks):
            yield Move("all ranks have adopted", None, None, self._resumed(state, adoption))

    def _resumed(self, state: State, adoption: Adoption) -> State:
        known = Knowledge.at_start(adoption)
        if known.common is None:
            ranks = tuple(rank._replace(phase=STARTING, step=0, at=0) for rank in state.ranks)
        else:
            ranks = tuple(self._back_at(rank, known.common) for rank in state.ranks)
        return state._replace(ranks=ranks, verdict=None, finished=0, given_up=(), has_started=known.common is not None)

    def _back_at(self, rank: Rank, common: CheckpointId) -> Rank:
        """The rank trains, from a checkpoint that all ranks have. Where ranks read all pools when they choose a slot,
        what they knew before is not kept: they would find it again."""
        views = (PoolView(frozenset(), None),) * self.n if self.reads == "one by one" else ()
        known = NOTHING if self.reads == "at once" else common
        return rank._replace(phase=TRAINING, step=common.step, at=1, known=known, begun=NOTHING, views=views)

    # -- states

    def _move(self, kind: str, state: State, i: int, rank: Rank, what: Any = None, *, is_progress: bool = True) -> Move:
        ranks = (*state.ranks[:i], rank, *state.ranks[i + 1 :])
        return Move(kind, i, what, state._replace(ranks=ranks), is_progress)

    def _settled(self, state: State) -> State:
        """The state after every rank has gone on as far as it can without a choice (a collective, a gate, the update).
        Going on takes nothing from the other ranks, it only lets them go on as well, and it makes a crash dearer. So no
        order of events is left out that could end otherwise; rows with ``is_eager=False`` leave out none."""
        if not self.is_eager or state.ranks[0].phase != TRAINING:
            return state
        places = [(rank.step, rank.at) for rank in state.ranks]
        has_moved = True
        while has_moved:
            has_moved = False
            for i, rank in enumerate(state.ranks):
                if self._may_pass(rank, places, i):
                    places[i] = self._next_place(places[i])
                    has_moved = True
        ranks = zip(state.ranks, places, strict=True)
        return state._replace(ranks=tuple(at_place(rank, place) for rank, place in ranks))

    def _may_pass(self, rank: Rank, places: list[Place], i: int) -> bool:
        wait = self.topology.program[places[i][1]]
        if wait in (BOUNDARY, GATE):
            return is_idle(rank)
        return not isinstance(wait, str) and wait(places, i)

    def _next_place(self, place: Place) -> Place:
        step, at = place
        return (step, at + 1) if at + 1 < len(self.topology.program) else (step + 1, 0)

    def after(self, move: Move) -> State:
        """The state after a move, with what follows from it by itself."""
        state = self._settled(move.state)
        if state.given_up:
            common = rule.newest_common([self.reported(rank, committed(rank)) for rank in state.ranks])
            state = state._replace(given_up=tuple(c for c in state.given_up if common is None or c > common))
        return state


def at_place(rank: Rank, place: Place) -> Rank:
    return rank if (rank.step, rank.at) == place else rank._replace(step=place[0], at=place[1])


def forget() -> None:
    """Empty the caches: a row has no use for the ranks of another."""
    for cached in (committed, stored, learned, view_of):
        cached.cache_clear()


def in_order(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    return tuple(sorted(slots))


def put(rank: Rank, at: int, slot: Slot) -> Rank:
    return rank._replace(slots=in_order((*rank.slots[:at], slot, *rank.slots[at + 1 :])))


def after_crash(rank: Rank, keeps_visible: bool) -> Rank:
    kept = (COMMITTED, VISIBLE) if keeps_visible else (COMMITTED,)
    slots = in_order(slot if slot.status in kept else FREE for slot in rank.slots)
    return rank._replace(phase=DOWN, step=0, at=0, slots=slots, known=NOTHING, begun=NOTHING, views=())


def adopted_slot(slot: Slot, verdict: CheckpointId) -> Slot:
    """The adoption record names the adopted checkpoint, and so makes it durable. What was visible only and is not
    adopted does not count."""
    if slot.status == VISIBLE:
        return Slot(slot.checkpoint, COMMITTED) if slot.checkpoint == verdict else FREE
    return slot


def without_newest(reports: list[frozenset[CheckpointId]], i: int) -> list[frozenset[CheckpointId]]:
    return [*reports[:i], reports[i] - {max(reports[i])}, *reports[i + 1 :]]
