"""The model of peer copies: the pool of each rank has a copy on the next host, and any one host can be lost.

Beside training, a helper of each rank copies what is due, drops from the copy what is no longer needed, and learns what
all copies have. Each of these happens at any moment. A copy counts from the moment at which it is durable: that its
acknowledgement comes later, and that the others read it later, makes no difference to them.

A crash may take a host with it: the pools of its ranks, and the copies that lie on it. Then all ranks come back to the
newest checkpoint that each of them has in its pool or in its copy. The pool of a rank on a lost host gets it from the
copy before the rank adopts it, and training goes on when the copies of all ranks have it. Until then nothing protects
the group from the loss of another host, but the same one may be lost again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import lcm
from typing import Any

from lightck.ranks import rule
from lightck.ranks.rule import CheckpointId, Knowledge, PoolView
from ranks.model import (
    ADOPTED,
    COMMITTED,
    FREE,
    NOTHING,
    Copy,
    Model,
    Move,
    Rank,
    Slot,
    State,
    committed,
    put,
    stored,
    view_of,
)

Hosts = tuple[tuple[int, ...], ...]


Views = tuple[PoolView, ...]
Change = tuple[str, CheckpointId | None, Rank]
"""What a helper does, with which checkpoint, and what its rank is then."""


@cache
def together(views: Views) -> PoolView:
    return PoolView.together(views)


@dataclass(eq=False)
class Copies(Model):
    hosts: Hosts | None = ((0,), (1,))
    slots: int = 4
    copy_every: int = 2
    copy_slots: int = 2
    """How many checkpoints a copy has room for."""
    publishes_late: bool = False
    """Whether what all ranks have together is made of what each has published at a moment of its own."""
    learns_number_late: bool = False
    """Whether a rank learns ``copy_every`` after training has begun."""
    lost_with_host_max: int = -1
    """The most that a crash costs that takes a host with it (without what was given up, this number is not exact)."""
    closes_gaps = True
    knowledge_type = Knowledge

    def __post_init__(self) -> None:
        assert self.hosts is not None
        self.topology = replace(self.topology, period=lcm(self.topology.period, self.copy_every))
        self._host = [next(at for at, host in enumerate(self.hosts) if i in host) for i in range(self.n)]
        self._host_of_copy = [self.host_of_copy(i) for i in range(self.n)]
        turned = [tuple((i + by) % self.n for i in range(self.n)) for by in range(self.n)]
        is_ring = len(self.hosts) == self.n
        self._symmetries = tuple(order for order in turned if order in self.topology.symmetries)[
            : None if is_ring else 1
        ]
        self._restorable: dict[Rank, tuple[frozenset[CheckpointId], frozenset[CheckpointId]]] = {}
        self._visible: dict[Rank, PoolView] = {}
        self._knowledge: dict[tuple[Rank, Views], list[Knowledge]] = {}
        self._changes: dict[tuple[Rank, Views], list[Change]] = {}

    def first(self) -> State:
        together.cache_clear()
        return super().first()

    @property
    def symmetries(self) -> tuple[tuple[int, ...], ...]:
        """Where each host has one rank: those of the topology that keep the order of the hosts, which is a ring."""
        return self._symmetries

    def may_be_lost(self, state: State) -> Iterable[int]:
        """The hosts any one of which may be lost."""
        assert self.hosts is not None
        lost = {self._host[i] for i, rank in enumerate(state.ranks) if copy_of(rank).is_pool_lost}
        return sorted(lost) or range(len(self.hosts))

    # -- what mutants replace

    def host_of_copy(self, i: int) -> int:
        assert self.hosts is not None
        return (self._host[i] + 1) % len(self.hosts)

    def copied(self, rank: Rank) -> frozenset[CheckpointId]:
        """What a rank publishes of its copy."""
        return self.reported(rank, copy_of(rank).held)

    def held_beside(self, copy: Copy) -> frozenset[CheckpointId]:
        """What stays in a copy when the next checkpoint begins to be copied."""
        return copy.held

    def trimmed_at(self, known: Knowledge) -> CheckpointId | None:
        """Older checkpoints are left out of what a rank reads in a pool on its host."""
        return known.floor

    def may_drop_copy(self, known: Knowledge, content: CheckpointId) -> bool:
        return known.may_drop_copy(content)

    def kept_in_recovery(self, state: State) -> frozenset[CheckpointId]:
        """What stays in the copies until all of them have the adopted checkpoint."""
        assert state.verdict is not None
        return rule.copies_to_keep(state.verdict, [self.copied(rank) for rank in state.ranks])

    def are_whole(self, state: State) -> bool:
        """Whether training may go on after a recovery."""
        return all(state.verdict in copy_of(rank).held for rank in state.ranks)

    # -- what others see, and what a rank knows

    def visible_to_others(self, rank: Rank) -> PoolView:
        found = self._visible.get(rank)
        if found is None:
            found = self._visible[rank] = view_of(rank)._replace(copied=self.copied(rank))
        return found

    def views(self, state: State, i: int) -> Views:
        """What a rank reads in the pools of its host, and what all ranks have together."""
        assert self.hosts is not None
        views = tuple(map(self.visible_to_others, state.ranks))
        here = (views[j]._replace(copied=frozenset()) for j in self.hosts[self._host[i]] if j != i)
        if self.publishes_late:
            return (*here, together(tuple(copy_of(rank).published for rank in state.ranks)))
        return (*here, together(views))

    def contents(self, rank: Rank) -> dict[int, CheckpointId | None]:
        """Without the slot that is being copied."""
        reading = copy_of(rank).reading
        return {at: one for at, one in super().contents(rank).items() if one is None or one != reading}

    def knows(self, rank: Rank) -> Knowledge:
        """What a rank knows for certain: what it has learnt late."""
        copy = copy_of(rank)
        common = max(rank.known, copy.known)
        return self.knowledge_type(common, rank.adoption, copied=copy.known, copy_every=copy.every)

    def knowledge(self, state: State, i: int) -> Iterable[Knowledge]:
        return self.known_from(state.ranks[i], self.views(state, i))

    def known_from(self, rank: Rank, views: Views) -> list[Knowledge]:
        """What a rank may know: it has read the pools, or not yet, or not as often."""
        found = self._knowledge.get((rank, views))
        if found is None:
            before, own, in_copy = self.knows(rank), committed(rank), copy_of(rank).held
            common = before.learn(own, views, (), in_copy).common
            full = before.learn(own, self.trimmed(views, replace(before, common=common)), (), in_copy)
            if self.reads == "earlier":
                full = replace(full, common=before.common)
            found = list(dict.fromkeys((full, before, replace(before, common=full.common))))
            self._knowledge[rank, views] = found
        return found

    def trimmed(self, views: Views, known: Knowledge) -> Views:
        oldest = self.trimmed_at(known)
        here = (view._replace(committed=frozenset(c for c in view.committed if c >= oldest)) for view in views[:-1])
        return (*here, views[-1])

    # -- what must hold

    def left(self, state: State, host: int | None) -> list[frozenset[CheckpointId]]:
        """What each rank can restore after a crash in which this host is lost (None: no host is)."""
        found = []
        for i, rank in enumerate(state.ranks):
            pool, copy = self.restorable(rank)
            left = pool if self._host[i] != host else frozenset()
            found.append(left | copy if self._host_of_copy[i] != host else left)
        return found

    def restorable(self, rank: Rank) -> tuple[frozenset[CheckpointId], frozenset[CheckpointId]]:
        """What a rank can restore from its pool, and from its copy."""
        found = self._restorable.get(rank)
        if found is None:
            pool, copy = self.reported(rank, committed(rank)), self.reported(rank, copy_of(rank).held)
            found = self._restorable[rank] = pool, copy
        return found

    def problem(self, state: State) -> str | None:
        for rank in state.ranks:
            reading = copy_of(rank).reading
            if reading != NOTHING and reading not in committed(rank):
                return "a slot is overwritten while its checkpoint is copied"
        common = rule.newest_common(self.left(state, None))
        if common is None:
            return "after a crash the ranks have no checkpoint in common"
        finished = max(state.finished, *(rank.step for rank in state.ranks))
        for host in self.may_be_lost(state):
            common_then = rule.newest_common(self.left(state, host))
            if common_then is None:
                return "after the loss of a host the ranks have no checkpoint in common"
            self.lost_with_host_max = max(self.lost_with_host_max, finished - common_then.step)
        lost = finished - common.step
        if any(copy_of(rank).is_pool_lost for rank in state.ranks):
            return None
        self.lost_max = max(self.lost_max, lost - len(state.given_up))
        if self.loss is not None and lost > self.loss + len(state.given_up):
            return f"a crash costs {lost} finished updates"
        return None

    # -- the helper

    def _trains(self, state: State, i: int) -> Iterator[Move]:
        yield from super()._trains(state, i)
        rank, views = state.ranks[i], self.views(state, i)
        changes = self._changes.get((rank, views))
        if changes is None:
            changes = self._changes[rank, views] = list(self._helps(rank, views))
        yield from self._moves_of(changes, state, i)

    def _moves_of(self, changes: Iterable[Change], state: State, i: int) -> Iterator[Move]:
        for kind, what, after in changes:
            yield self._move(kind, state, i, after, what)

    def _helps(self, rank: Rank, views: Views) -> Iterator[Change]:
        copy, knowledge = copy_of(rank), self.known_from(rank, views)
        yield from self._reads_on(rank)
        for one in {each.next_to_copy(committed(rank), copy.held) for each in knowledge}:
            yield from self._reads(rank, one)
        for one in copy.held:
            if any(self.may_drop_copy(each, one) for each in knowledge):
                yield "drops from its copy", one, with_copy(rank, held=copy.held - {one})
        copied = self.knows(rank).learn(committed(rank), views, views[-1].copied, copy.held).copied
        if copied != copy.known:
            yield "knows to be in all copies", copied, with_copy(rank, known=copied)
        if self.publishes_late and copy.published != self.visible_to_others(rank):
            yield "publishes what it has", None, with_copy(rank, published=self.visible_to_others(rank))
        if copy.every != self.copy_every:
            yield "learns how often it copies", None, with_copy(rank, every=self.copy_every)

    def _reads(self, rank: Rank, one: CheckpointId | None) -> Iterator[Change]:
        copy = copy_of(rank)
        if one is not None and copy.reading == NOTHING and len(copy.held) < self.copy_slots:
            yield "begins to copy", one, with_copy(rank, held=self.held_beside(copy), reading=one)

    def _reads_on(self, rank: Rank) -> Iterator[Change]:
        copy = copy_of(rank)
        if copy.reading != NOTHING:
            yield "has copied", copy.reading, with_copy(rank, held=copy.held | {copy.reading}, reading=NOTHING)

    # -- crash and recovery

    def _crashes(self, state: State) -> Iterator[Move]:
        for move in super()._crashes(state):
            ranks = tuple(with_copy(rank, reading=NOTHING) for rank in move.state.ranks)
            yield move._replace(state=move.state._replace(ranks=ranks))
            for host in self.may_be_lost(state):
                after = tuple(self._without_host(rank, i, host) for i, rank in enumerate(ranks))
                what = f"{move.what}; host {host} is lost"
                yield move._replace(state=move.state._replace(ranks=after), what=what)

    def _without_host(self, rank: Rank, i: int, host: int) -> Rank:
        if self._host_of_copy[i] == host:
            rank = with_copy(rank, held=frozenset())
        if self._host[i] == host:
            rank = with_copy(rank, is_pool_lost=True)
            rank = rank._replace(slots=(FREE,) * self.slots, newest=NOTHING, adoption=None)
        return rank

    def verdict(self, state: State) -> CheckpointId | None:
        return self.newest_common(
            [self.reported(rank, stored(rank) | copy_of(rank).held) for rank in state.ranks],
        )

    def _recovers(self, state: State) -> Iterator[Move]:
        for move in super()._recovers(state):
            if move.kind == "adopts":
                yield self._restored(state, move)
            elif move.kind != "all ranks have adopted" or self.are_whole(state):
                yield move
        for i, rank in enumerate(state.ranks):
            if state.verdict is not None and rank.phase == ADOPTED:
                yield from self._moves_of(self._copies_adopted(state, rank), state, i)

    def _restored(self, state: State, move: Move) -> Move:
        """A rank adopts: if its pool was lost, the checkpoint comes into its pool before."""
        assert move.rank is not None
        assert state.verdict is not None
        rank = move.state.ranks[move.rank]
        if state.verdict in committed(rank):
            return move
        assert state.verdict in copy_of(rank).held
        free = rank.slots.index(FREE)
        return self._move(move.kind, state, move.rank, put(rank, free, Slot(state.verdict, COMMITTED)), move.what)

    def _copies_adopted(self, state: State, rank: Rank) -> Iterator[Change]:
        copy = copy_of(rank)
        yield from self._reads_on(rank)
        if state.verdict not in copy.held and copy.reading == NOTHING:
            yield from self._reads(rank, state.verdict)
            for one in copy.held - self.kept_in_recovery(state):
                yield "drops from its copy", one, with_copy(rank, held=copy.held - {one})

    def _back_at(self, rank: Rank, common: CheckpointId) -> Rank:
        held = frozenset({common}) if rank.copy is None else rank.copy.held
        every = 0 if self.learns_number_late else self.copy_every
        return super()._back_at(rank, common)._replace(copy=Copy(held, NOTHING, common, every))


def copy_of(rank: Rank) -> Copy:
    assert rank.copy is not None
    return rank.copy


def with_copy(rank: Rank, **changes: Any) -> Rank:
    return rank._replace(copy=copy_of(rank)._replace(**changes))
