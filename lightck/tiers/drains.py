"""All drains of one session, as if they were one.

One drain (``drain_link.py``) sends to all tiers, one after the other. But an object store that may be *fed* from a
folder tier has a drain of its own, which sends what lies in the folder (``feeding.py``). So it keeps no other tier
waiting, and holds no slot of the pool while it takes its time.

    claim      one claim for all tiers
    committed  the first drain is offered what is due. If the folder takes nothing, the fed drains are offered theirs
               too; else they follow the folder
    finish     the first drain, then the others: what lies in the folder need not be read from the pool again

Invariant: below one claim each tier has one drain, so one writer. In a group of ranks there is one drain for all tiers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from lightck.errors import TierError
from lightck.pool.listener import CommitListener
from lightck.pool.writer import PoolWriter
from lightck.stats import Meter, TierStats
from lightck.tiers.claiming import ResumePoint
from lightck.tiers.drain_link import DrainLink
from lightck.tiers.drain_reports import DrainReports
from lightck.tiers.drain_role import DrainRole
from lightck.tiers.group_schedule import GroupSchedule
from lightck.tiers.open_store import is_url
from lightck.tiers.pin import Holds
from lightck.tiers.session_claim import Claimed
from lightck.tiers.store import Store
from lightck.tiers.tier import Tier, n_spare_slots


class Drains(CommitListener):
    """The tiers of one session. All methods are called on the training thread, except where one says otherwise."""

    def __init__(
        self, tiers: Sequence[Tier], pool: str, meter: Meter, holds: Holds, *, may_feed_from_folders: bool = True
    ) -> None:
        """``may_feed_from_folders``: whether an object store may be fed from a folder."""
        self._tiers, self._meter = tiers, meter
        folder_of = folders_that_feed(tiers) if may_feed_from_folders else {}
        first = [number for number in range(len(tiers)) if number not in folder_of]
        self._numbers = [first, *([number] for number in folder_of)]
        """For each drain the numbers of its tiers."""
        self._links: list[DrainLink] = []
        self._folders = [first.index(number) for number in folder_of.values()]
        """For each fed drain the number of its folder among the tiers of the first drain."""
        meter.tiers = tuple(TierStats(each.path) for each in tiers)
        for number, own in enumerate(self._numbers):
            of_pool = Meter() if number else meter  # only the first drain reads the pool again
            role, show = self._role(number, folder_of), partial(self._show, own)
            self._links.append(DrainLink([tiers[each] for each in own], pool, of_pool, holds, role, show))
        self._n_in_folders = [0] * len(self._folders)
        """For each fed drain how many checkpoints its folder had got when the drain heard of it last."""

    def _role(self, number: int, folder_of: Mapping[int, int]) -> DrainRole:
        own = self._numbers[number]
        others = [each for each in range(len(self._tiers)) if each not in own]
        if number:
            return DrainRole(
                self._may_hold, number, [self._tiers[each] for each in others], others.index(folder_of[own[0]])
            )
        fed: defaultdict[int, list[Tier]] = defaultdict(list)
        for store, folder in folder_of.items():
            fed[own.index(folder)].append(self._tiers[store])
        return DrainRole(self._may_hold, number, [self._tiers[each] for each in others], feeds=fed)

    def _show(self, numbers: Sequence[int], stats: Sequence[TierStats]) -> None:
        """Put the figures of the tiers with these numbers into ``Stats``."""
        found = list(self._meter.tiers)
        for number, each in zip(numbers, stats, strict=True):
            found[number] = each
        self._meter.tiers = tuple(found)

    def _may_hold(self) -> bool:
        """Whether the pool has a slot for one more checkpoint that is held until a drain holds it."""
        return sum(each.n_holds for each in self._links) < self.n_spare_slots

    def __str__(self) -> str:
        return " and ".join(f"{each.path} (every {each.every})" for each in self._tiers)

    @property
    def stores(self) -> list[Store]:
        """The store of each tier."""
        found = {
            number: store
            for own, link in zip(self._numbers, self._links, strict=True)
            for number, store in zip(own, link.stores, strict=True)
        }
        return [found[number] for number in sorted(found)]

    @property
    def reports(self) -> DrainReports:
        """What the first drain reports of the pool, which it reads again."""
        return self._links[0].reports

    @property
    def n_spare_slots(self) -> int:
        return n_spare_slots(self._tiers)

    @property
    def keeps_best(self) -> bool:
        """Whether checkpoints stay because of a metric."""
        return any(each.keeps_best for each in self._links)

    # -- at attach

    def use_claim(
        self,
        claimed: Claimed,
        resume_point: ResumePoint | None,
        generation: int = 0,
        rank: int = 0,
        pools_of_ranks: Sequence[str] = ("",),
    ) -> None:
        """As for ``DrainLink``."""
        for own, link in zip(self._numbers, self._links, strict=True):
            link.use_claim(claimed.of_tiers(own), resume_point, generation, rank, pools_of_ranks)

    def agree(self, schedule: GroupSchedule, stop: Callable[[], None]) -> None:
        """As for ``DrainLink``."""
        self._links[0].agree(schedule, stop)

    @property
    def newest_steps(self) -> list[int | None]:
        """In a group: for each tier the step of its newest checkpoint; None if it holds none."""
        return self._links[0].newest_steps

    @property
    def newest_ages(self) -> list[float | None]:
        """In a group: for each tier how many seconds ago it got its newest checkpoint; None if it holds none."""
        return self._links[0].newest_ages

    def is_ready(self) -> bool:
        """In a group: whether the drain could take a checkpoint now. Called on any thread."""
        return self._links[0].is_ready()

    def start(self) -> None:
        """Start the drains. Raises ``TierError``; then none is left."""
        try:
            for each in self._links:
                each.start()
        except TierError:
            self.closed()
            raise

    # -- while the training runs

    def committed(self, writer: PoolWriter, step: int) -> None:
        first = self._links[0]
        first.committed(writer, step)
        for folder, link in zip(self._folders, self._links[1:], strict=True):
            if first.takes_nothing(folder):
                link.committed(writer, step)
            else:
                link.follow(step)
        self._tell_of_folders()

    def _tell_of_folders(self) -> None:
        """Let the fed drains look what has come into their folders."""
        for number, (folder, link) in enumerate(zip(self._folders, self._links[1:], strict=True)):
            n_there = self._links[0].n_sent(folder)
            if n_there != self._n_in_folders[number]:
                self._n_in_folders[number] = n_there
                link.look()

    def struck(self, slots: Sequence[int]) -> None:
        for each in self._links[1:]:  # the first one sends from the pool, which says what was struck
            each.struck()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """As for ``DrainLink``."""
        for each in self._links:
            each.log(step, metrics)

    def read(self, *, may_start: bool = True) -> None:
        """As for ``DrainLink``."""
        for each in self._links:
            each.read(may_start=may_start)
        self._tell_of_folders()

    def raise_failure(self) -> None:
        """As for ``DrainLink``."""
        for each in self._links:
            each.raise_failure()

    # -- before this process is ended

    def expect_signals(self, grace: float) -> None:
        """As for ``DrainLink``."""
        for each in self._links:
            each.expect_signals(grace)

    def ask_for_newest(self) -> None:
        """Let the drains send the newest checkpoint now. Any thread may call this."""
        for each in self._links:
            each.ask_for_newest()

    def send_newest(self, step: int, deadline: float) -> list[str]:
        """As for ``DrainLink``."""
        self.ask_for_newest()
        return [root for each in self._links for root in each.send_newest(step, deadline)]

    def names(self) -> str:
        return " and ".join(repr(each.path) for each in self._tiers)

    def holdings(self) -> str:
        """Say which step each tier holds."""
        return ", ".join(each.holdings() for each in self._links)

    # -- at the end

    def finish(self, deadline: Callable[[], float | None] | None = None) -> None:
        """As for ``DrainLink``."""
        for each in self._links:
            each.finish(deadline)

    def failure_at_close(self) -> TierError | None:
        """As for ``DrainLink``."""
        return next((found for each in self._links if (found := each.failure_at_close()) is not None), None)

    def closed(self) -> None:
        for each in self._links:
            each.closed()


def folders_that_feed(tiers: Sequence[Tier]) -> dict[int, int]:
    """Return a dict: number of an object store that is fed -> number of its folder. This is the first folder that gets
    checkpoints at least as often. (How long a number of updates takes is not known. A store whose ``every`` is a time
    may be fed from a folder whose ``every`` is a number of updates, but not the other way round: such a store might get
    too few checkpoints.)"""
    found = {}
    folders = [number for number, each in enumerate(tiers) if not is_url(each.root)]
    for number, store in enumerate(tiers):
        if is_url(store.root):
            folder = next((each for each in folders if _comes_as_often(tiers[each], store)), None)
            if folder is not None:
                found[number] = folder
    return found


def _comes_as_often(folder: Tier, store: Tier) -> bool:
    if folder.every_seconds is not None:
        return store.every_seconds is not None and folder.every_seconds <= store.every_seconds
    assert folder.every_steps is not None, "``every`` is a time or a number of updates"
    return store.every_steps is None or folder.every_steps <= store.every_steps
