"""A model of a tier: drains that send and delete, trainings that claim, readers, and a collector of what is left over.
It imports the shipped ``lightck/tiers/decisions.py``.

The decisions are the code's; the model adds what is left to chance: who acts next, who sleeps between a listing and
what follows, who is killed, and when the grace passes. Where listings are late, requests are repeated and answers are
lost, a state also has what happened since the grace passed last (``Recent``). Mutants are subclasses in
``tier_mutants.py``.

Each checkpoint of a rank has two objects: one whose content never changes, and one of its own.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from lightck.tiers import decisions
from lightck.tiers.decisions import Listing, Retention
from lightck.tiers.names import Claim, ManifestName, ObjectName, TierCheckpoint, Writer

GRACE = 1.0
NOW = 2.0
"""The time of each listing. What is older than the grace was written at 0.0, what is younger at NOW."""

OFF, IDLE, SENDING, CLEANING, SWEEPING, ENDED = range(6)
"""Phases of a drain. CLEANING: it deletes manifests; SWEEPING: objects."""
PASSES = "the grace passes"
CHOSEN, OPENED = 6, 7
"""Phases of a reader beside IDLE: it has chosen a checkpoint; it has read the manifests."""
LISTED, CLAIMED = 8, 9
"""Phases of a claimant beside OFF and ENDED: it has a listing; it has put its claim."""


def contents_of(rank: int, step: int) -> tuple[str, str]:
    """The contents of the two objects of a checkpoint. The first is the same in all steps; that of rank 1 is also the
    second one of rank 0 at step 1."""
    return f"{rank:064x}", f"{100 * rank + step:064x}"


KEEP_LAST_1 = Retention(keep_last=1)


class Drain(NamedTuple):
    writer: Writer
    phase: int
    step: int
    """The step of the last checkpoint that it has sent, or with which its training began."""
    names: tuple[ObjectName, ...] = ()
    """What the manifest of the checkpoint being sent names."""
    todo: tuple[Any, ...] = ()
    """What it still puts or deletes, in this order."""
    lives: int = 0
    """How many times it may still be killed and started again."""
    is_old: bool = False
    """Whether the grace has passed since it was started."""
    own: tuple[tuple[ManifestName, tuple[ObjectName, ...]], ...] = ()
    """The manifests that it has put since it was started, where a listing need not show them."""


class Claimant(NamedTuple):
    tag: str
    phase: int
    claim: Claim | None = None
    """The claim that it puts, or has put."""


class Reader(NamedTuple):
    is_fast: bool
    """Whether it reads a checkpoint within the grace."""
    phase: int = IDLE
    manifests: tuple[ManifestName, ...] = ()
    """The manifests of the checkpoint that it has chosen."""
    names: tuple[ObjectName, ...] = ()


class Collector(NamedTuple):
    phase: int = IDLE
    todo: tuple[Any, ...] = ()


class Store(NamedTuple):
    claims: frozenset[Claim]
    manifests: frozenset[tuple[ManifestName, tuple[ObjectName, ...]]]
    objects: frozenset[ObjectName]
    young: frozenset[ManifestName | ObjectName]
    """What is younger than the grace."""


class State(NamedTuple):
    store: Store
    drains: tuple[Drain, ...]
    claimants: tuple[Claimant, ...]
    readers: tuple[Reader, ...]
    collector: Collector | None
    best: TierCheckpoint | None
    """The newest checkpoint that was ever complete."""
    paths: tuple[tuple[Claim, TierCheckpoint | None], ...]
    """For each claim that a training has got, the checkpoint from which this training went on."""
    problem: str | None = None


class Move(NamedTuple):
    event: str
    state: State


@dataclass
class Recent:
    """Which names were put and deleted since the grace passed last. Only random runs have it."""

    chance: random.Random
    put: set[Any] = field(default_factory=set)
    deleted: set[Any] = field(default_factory=set)


@dataclass(eq=False)
class Model:
    """What is explored. The fields are what a row of the tests chooses."""

    n: int = 1
    """Number of ranks."""
    steps: int = 3
    """The step of the last checkpoint that a training makes."""
    claims: int = 1
    """Number of trainings that claim the tier, one of them before the model begins."""
    numbers: int = 3
    """The highest number that is claimed. (Trainings that claim again in turn could go on for ever. In the field each
    waits for a random time.)"""
    lives: int = 0
    """How many times each drain may be killed and started again."""
    fast_readers: int = 0
    slow_readers: int = 0
    collects: bool = False
    retention: Retention = KEEP_LAST_1
    is_fine: bool = True
    """Whether a drain can sleep or be killed between any two requests; else only where it matters."""
    recent: Recent | None = None

    def first(self) -> State:
        claim = Claim(1, "0" * 8)
        store = Store(frozenset([claim]), frozenset(), frozenset(), frozenset())
        drains = self._drains_of(claim, 0)
        waiting = tuple(Claimant(f"{number:08x}", OFF) for number in range(1, self.claims))
        readers = (Reader(True),) * self.fast_readers + (Reader(False),) * self.slow_readers
        collector = Collector() if self.collects else None
        return State(store, drains, waiting, readers, collector, None, ((claim, None),))

    def _drains_of(self, claim: Claim, step: int) -> tuple[Drain, ...]:
        return tuple(Drain(Writer(claim, rank, self.n), IDLE, step, lives=self.lives) for rank in range(self.n))

    # -- what mutants replace

    def objects_to_reuse(self, state: State, writer: Writer) -> Mapping[str, ObjectName]:
        return decisions.reusable(named(state.store), writer)

    def manifests_to_delete(self, state: State, listing: Listing, drain: Drain) -> list[ManifestName]:
        stays = self.kept(state, listing, drain.writer.claim)
        return decisions.manifests_to_delete(listing, stays, drain.writer, GRACE)

    def objects_to_delete(self, state: State, listing: Listing, drain: Drain) -> list[ObjectName]:
        began = 0.0 if drain.is_old else NOW
        found = self.named_in(state, listing)
        for _, names in drain.own:
            found[drain.writer].update(names)
        return decisions.objects_to_delete(listing, found, drain.writer, began, GRACE)

    def deletions(self, state: State, listing: Listing, drain: Drain) -> tuple[int, list[Any]]:
        """The phase that follows, and what is deleted in it."""
        if manifests := self.manifests_to_delete(state, listing, drain):
            return CLEANING, list(manifests)
        return SWEEPING, list(self.objects_to_delete(state, listing, drain))

    def is_superseded(self, listing: Listing, claim: Claim) -> bool:
        return decisions.is_superseded(listing, claim)

    def collected(self, state: State, listing: Listing) -> list[Any]:
        if manifests := decisions.manifests_to_collect(listing, is_stopped=False, grace=GRACE):
            return list(manifests)
        named = self.named_in(state, listing)
        return list(decisions.objects_to_collect(listing, named, is_stopped=False, grace=GRACE))

    # -- what is seen

    def kept(self, state: State, listing: Listing, claim: Claim) -> frozenset[TierCheckpoint]:
        return decisions.kept(listing, self.retention, claim, path_of(state, claim))

    def listing(self, store: Store) -> Listing:
        if self.recent is None:
            return exact_listing(store)
        claims, manifests, objects = set(store.claims), {each for each, _ in store.manifests}, set(store.objects)
        for each in (*self.recent.put, *self.recent.deleted):
            kind: set[Any] = claims if isinstance(each, Claim) else manifests
            kind = objects if isinstance(each, ObjectName) else kind
            if self.recent.chance.random() < 0.5:  # a put is not shown yet, a deletion neither
                (kind.discard if each in self.recent.put else kind.add)(each)
        return listing_of(claims, manifests, objects, store.young)

    def named_in(self, state: State, listing: Listing) -> dict[Writer, set[ObjectName]]:
        """What the manifests of a listing name, of those that can be read."""
        contents = dict(state.store.manifests)
        found: dict[Writer, set[ObjectName]] = {each.writer: set() for each in listing.objects}
        found.update({drain.writer: set() for drain in state.drains})
        for manifest in listing.manifests:
            found.setdefault(manifest.writer, set()).update(contents.get(manifest, ()))
        return found

    # -- moves

    def moves(self, state: State) -> Iterator[Move]:
        for moves in self.actors(state):
            yield from moves

    def actors(self, state: State) -> Iterator[Iterator[Move]]:
        """The moves of each one who can act."""
        for at, drain in enumerate(state.drains):
            yield self._drain(state, at, drain)
        for at, claimant in enumerate(state.claimants):
            yield self._claims(state, at, claimant)
        for at, reader in enumerate(state.readers):
            yield self._reads(state, at, reader)
        if state.collector is not None:
            yield self._collects(state, state.collector)
        yield self._passes(state)

    def _passes(self, state: State) -> Iterator[Move]:
        can_pass = state.store.young or any(not drain.is_old for drain in state.drains)
        if can_pass and not any(reader.is_fast and reader.phase != IDLE for reader in state.readers):
            yield self._grace_passes(state)

    def _grace_passes(self, state: State) -> Move:
        store = state.store._replace(young=frozenset())
        drains = tuple(drain._replace(is_old=True) for drain in state.drains)
        return Move(PASSES, state._replace(store=store, drains=drains))

    def _drain(self, state: State, at: int, drain: Drain) -> Iterator[Move]:
        who = f"drain {drain.writer.claim.number}.{drain.writer.rank}"
        if drain.phase == ENDED:
            return
        if drain.lives:
            killed = drain._replace(phase=IDLE, names=(), todo=(), lives=drain.lives - 1, is_old=False, own=())
            yield Move(f"{who} is killed", put_drain(state, at, killed))
        if not self.is_fine:
            yield from self._acts_at_once(state, at, drain, who)
        elif drain.phase == IDLE:
            if drain.step < self.steps:
                yield Move(f"{who} begins step {drain.step + 1}", put_drain(state, at, self._begun(state, drain)))
            yield from self._lists(state, at, drain, who)
        elif drain.phase == SENDING:
            yield from self._sends(state, at, drain, who)
        else:
            gone, *rest = drain.todo
            after = drain._replace(todo=tuple(rest), phase=drain.phase if rest else IDLE)
            yield Move(f"{who} deletes {shown(gone)}", put_drain(self.deleted(state, [gone]), at, after))

    def _acts_at_once(self, state: State, at: int, drain: Drain, who: str) -> Iterator[Move]:
        """The moves of a drain that sleeps only where it matters: until a higher claim exists. (Nobody else deletes
        below the highest claim, and what a drain of it may delete now it may delete later. So there it makes no
        difference when the drain does what it has begun.)"""
        has_higher = any(each > drain.writer.claim for each in state.store.claims)
        if drain.phase != IDLE:
            if has_higher:
                yield from self._finishes(state, at, drain, who)
            return
        may_sleep = not has_higher and any(each.phase != ENDED for each in state.claimants)
        listed = list(self._lists(state, at, drain, who))
        sent = []
        if drain.step < self.steps:
            begun = self._begun(state, drain)
            with_objects = put_drain(self._put_all(state, begun.todo), at, begun._replace(todo=()))
            sent = [Move(f"{who} begins step {drain.step + 1}", with_objects)]
        for move in (*listed, *sent):
            if may_sleep:
                yield Move(f"{move.event}, and sleeps", move.state)
            waiting = move.state.drains[at]
            if waiting.phase in (IDLE, ENDED):
                yield move
                continue
            for event, after in self._finishes(move.state, at, waiting, who):
                if has_higher:  # it lists before the manifest, and so this is its last one
                    after = put_drain(after, at, after.drains[at]._replace(phase=ENDED))
                yield Move(event, after)

    def _finishes(self, state: State, at: int, drain: Drain, who: str) -> Iterator[Move]:
        if drain.phase == SENDING:
            yield from self._sends(state, at, drain, who)
            return
        after = drain._replace(todo=(), phase=IDLE)
        yield Move(f"{who} deletes {shown(drain.todo)}", put_drain(self.deleted(state, drain.todo), at, after))

    def _put_all(self, state: State, names: Collection[Any]) -> State:
        for name in names:
            state = self.put(state, name)
        return state

    def _begun(self, state: State, drain: Drain) -> Drain:
        found = self.objects_to_reuse(state, drain.writer)
        step, nonce = drain.step + 1, nonce_of(drain)
        names, todo = [], []
        for content in contents_of(drain.writer.rank, step):
            name = found.get(content)
            if name is None:
                name = ObjectName(drain.writer, content, nonce)
                todo.append(name)
            names.append(name)
        return drain._replace(phase=SENDING, names=tuple(names), todo=tuple(todo))

    def _sends(self, state: State, at: int, drain: Drain, who: str) -> Iterator[Move]:
        if drain.todo:
            name, *rest = drain.todo
            after = put_drain(self.put(state, name), at, drain._replace(todo=tuple(rest)))
            yield Move(f"{who} puts {shown(name)}", after)
            return
        manifest = ManifestName(drain.writer, drain.step + 1, nonce_of(drain))
        own = () if self.recent is None else (*drain.own, (manifest, drain.names))
        after = drain._replace(phase=IDLE, step=drain.step + 1, names=(), todo=(), own=own)
        yield Move(f"{who} puts {shown(manifest)}", put_drain(self.put(state, manifest, drain.names), at, after))
        if self.is_superseded(self.listing(state.store), drain.writer.claim):
            yield Move(f"{who} learns of the higher claim", put_drain(state, at, drain._replace(phase=ENDED, todo=())))

    def _lists(self, state: State, at: int, drain: Drain, who: str) -> Iterator[Move]:
        """Between two checkpoints the drain looks for what may go."""
        listing = self.listing(state.store)
        if self.is_superseded(listing, drain.writer.claim):
            yield Move(f"{who} learns of the higher claim", put_drain(state, at, drain._replace(phase=ENDED)))
            return
        phase, gone = self.deletions(state, listing, drain)
        if gone:
            after = drain._replace(phase=phase, todo=tuple(gone))
            yield Move(f"{who} will delete {shown(gone)}", put_drain(state, at, after))

    def _claims(self, state: State, at: int, claimant: Claimant) -> Iterator[Move]:
        who = f"claimant {claimant.tag[-1]}"
        if claimant.phase == OFF:
            claim = decisions.next_claim(self.listing(state.store), claimant.tag)
            if claim.number > self.numbers:
                return
            yield Move(f"{who} lists", put_claimant(state, at, claimant._replace(phase=LISTED, claim=claim)))
        elif claimant.phase == LISTED:
            assert claimant.claim is not None
            after = put_claimant(self.put(state, claimant.claim), at, claimant._replace(phase=CLAIMED))
            yield Move(f"{who} puts {claimant.claim}", after)
        elif claimant.phase == CLAIMED:
            yield self._claimed(state, at, claimant, who)

    def _claimed(self, state: State, at: int, claimant: Claimant, who: str) -> Move:
        claim, listing = claimant.claim, self.listing(state.store)
        assert claim is not None
        if decisions.highest_claim(listing) != claim and self.is_superseded(listing, claim):
            again = Claimant(f"{int(claimant.tag, 16) + 16:08x}", OFF)  # each try has a tag of its own
            return Move(f"{who} tries again", put_claimant(state, at, again))
        parent = decisions.newest_complete(listing)
        drains = self._drains_of(claim, parent.step if parent else 0)
        after = put_claimant(state, at, claimant._replace(phase=ENDED))
        after = after._replace(drains=state.drains + drains, paths=(*state.paths, (claim, parent)))
        return Move(f"{who} has claim {claim.number} and goes on from {shown(parent)}", after)

    def _reads(self, state: State, at: int, reader: Reader) -> Iterator[Move]:
        who = f"{'fast' if reader.is_fast else 'slow'} reader"
        if reader.phase == IDLE:
            listing = self.listing(state.store)
            if newest := decisions.newest_complete(listing):
                chosen = reader._replace(phase=CHOSEN, manifests=tuple(decisions.manifests_of(listing, newest)))
                yield Move(f"{who} chooses {shown(newest)}", put_reader(state, at, chosen))
        elif reader.phase == CHOSEN:
            contents = dict(state.store.manifests)
            wanted = reader.manifests
            if all(each in contents for each in wanted):
                names = tuple(sorted({name for each in wanted for name in contents[each]}))
                yield Move(f"{who} opens", put_reader(state, at, reader._replace(phase=OPENED, names=names)))
            else:
                yield self._misses(state, at, reader, who)
        elif set(reader.names) <= state.store.objects:
            yield Move(f"{who} has read", put_reader(state, at, Reader(reader.is_fast)))
        else:
            yield self._misses(state, at, reader, who)

    def _misses(self, state: State, at: int, reader: Reader, who: str) -> Move:
        after = put_reader(state, at, Reader(reader.is_fast))
        if reader.is_fast:
            after = after._replace(problem="an object is gone before the grace has passed")
        return Move(f"{who} misses an object and starts again", after)

    def _collects(self, state: State, collector: Collector) -> Iterator[Move]:
        if collector.phase == IDLE:
            if gone := self.collected(state, self.listing(state.store)):
                after = state._replace(collector=Collector(SWEEPING, tuple(gone)))
                yield Move(f"the collector will delete {shown(gone)}", after)
            return
        now, rest = (collector.todo[:1], collector.todo[1:]) if self.is_fine else (collector.todo, ())
        after = self.deleted(state, now)._replace(collector=Collector(SWEEPING, rest) if rest else Collector())
        yield Move(f"the collector deletes {shown(now)}", after)

    # -- the store

    def put(self, state: State, name: Any, names: tuple[ObjectName, ...] = ()) -> State:
        store = state.store
        is_there = name in store.claims or name in store.objects or name in dict(store.manifests)
        problem = f"{shown(name)} is written twice" if is_there else None
        after = stored(store, name, names)
        state = state._replace(store=after, problem=state.problem or problem)
        newest = newest_in(after)
        if newest is not None and (state.best is None or newest > state.best):
            state = state._replace(best=newest)
        return state

    def deleted(self, state: State, names: Collection[Any]) -> State:
        store = state.store
        for name in names:
            store = removed(store, name)
        return state._replace(store=store)

    # -- what must hold

    def problem(self, state: State) -> str | None:
        """What is wrong with a state, or None."""
        if state.problem is not None:
            return state.problem
        if newest_in(state.store) != state.best:
            return f"the newest checkpoint, {shown(state.best)}, is gone"
        claim = max(each for each, _ in state.paths)
        if gone := lacking(state.store._replace(young=frozenset()), state.best, claim, tuple(path_of(state, claim))):
            return gone
        if all(drain.phase in (IDLE, ENDED) for drain in state.drains):
            return left_over(state.store._replace(young=frozenset()))
        return None


def stored(store: Store, name: Any, names: tuple[ObjectName, ...]) -> Store:
    match name:
        case Claim():
            return store._replace(claims=store.claims | {name})
        case ManifestName():
            others = {each for each in store.manifests if each[0] != name}
            return store._replace(manifests=frozenset(others | {(name, names)}), young=store.young | {name})
        case _:
            return store._replace(objects=store.objects | {name}, young=store.young | {name})


def removed(store: Store, name: Any) -> Store:
    manifests = frozenset(each for each in store.manifests if each[0] != name)
    return store._replace(manifests=manifests, objects=store.objects - {name}, young=store.young - {name})


def listing_of(
    claims: Iterable[Claim], manifests: Iterable[ManifestName], objects: Iterable[ObjectName], young: Collection[Any]
) -> Listing:
    age = {True: NOW, False: 0.0}
    return Listing(
        frozenset(claims),
        {each: age[each in young] for each in sorted(manifests)},
        {each: age[each in young] for each in sorted(objects)},
        NOW,
    )


@cache
def exact_listing(store: Store) -> Listing:
    return listing_of(store.claims, (each for each, _ in store.manifests), store.objects, store.young)


@cache
def newest_in(store: Store) -> TierCheckpoint | None:
    return decisions.newest_complete(exact_listing(store))


def named(store: Store) -> dict[Writer, set[ObjectName]]:
    found: dict[Writer, set[ObjectName]] = {each.writer: set() for each in store.objects}
    for manifest, names in store.manifests:
        found.setdefault(manifest.writer, set()).update(names)
    return found


@cache
def lacking(store: Store, best: TierCheckpoint | None, claim: Claim, path: tuple[TierCheckpoint, ...]) -> str | None:
    """Whether a complete checkpoint that the training has come through, or the newest one, is not whole."""
    contents, listing = dict(store.manifests), exact_listing(store)
    wanted = decisions.on_path(decisions.complete(listing), claim, path) | ({best} if best else set())
    for checkpoint in sorted(wanted):
        for manifest in decisions.manifests_of(listing, checkpoint):
            if not set(contents[manifest]) <= store.objects:
                return f"{shown(checkpoint)} is complete, and an object that it needs is gone"
    return None


@cache
def left_over(store: Store) -> str | None:
    """What is left when no drain does anything, and ``lightck gc --stopped`` has run."""
    for manifest in decisions.manifests_to_collect(exact_listing(store), is_stopped=True, grace=GRACE):
        store = removed(store, manifest)
    listing = exact_listing(store)
    for each in decisions.objects_to_collect(listing, named(store), is_stopped=True, grace=GRACE):
        store = removed(store, each)
    is_whole = {each.checkpoint for each, _ in store.manifests} <= decisions.complete(listing)
    wanted = {name for _, names in store.manifests for name in names}
    return None if is_whole and store.objects <= wanted else "something that nothing needs is left"


def path_of(state: State, claim: Claim) -> Collection[TierCheckpoint]:
    """The checkpoints of older claims from which trainings went on, until that of ``claim`` began."""
    parents, path = dict(state.paths), []
    while (parent := parents.get(claim)) is not None:
        path.append(parent)
        claim = parent.claim
    return path


def nonce_of(drain: Drain) -> str:
    """The nonce of the checkpoint that a drain sends next, in its present life."""
    return f"{drain.lives:04x}{drain.step + 1:04x}"


def put_drain(state: State, at: int, drain: Drain) -> State:
    return state._replace(drains=(*state.drains[:at], drain, *state.drains[at + 1 :]))


def put_claimant(state: State, at: int, claimant: Claimant) -> State:
    return state._replace(claimants=(*state.claimants[:at], claimant, *state.claimants[at + 1 :]))


def put_reader(state: State, at: int, reader: Reader) -> State:
    return state._replace(readers=(*state.readers[:at], reader, *state.readers[at + 1 :]))


def shown(name: Any) -> str:
    match name:
        case None:
            return "nothing"
        case list() | tuple() if not hasattr(name, "_fields"):
            return ", ".join(map(shown, name))
        case TierCheckpoint():
            return f"{name.claim.number}.{name.step}"
        case ManifestName():
            return f"manifest {name.writer.claim.number}.{name.step} of rank {name.writer.rank}"
        case ObjectName():
            return f"object {int(name.content, 16)}-{name.nonce} of {name.writer.claim.number}.{name.writer.rank}"
        case _:
            return str(name)
