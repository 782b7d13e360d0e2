"""What a rank learns of its group while training runs: it reads the commit logs in the pools of the other ranks.

All ranks run on one host, so the pools are the messages, and nothing is sent. ``GroupRule`` is the rule of
``ranks/rule.py`` as a decision of the pipeline: it holds those slots of this rank's pool that must not be overwritten
yet. If no slot is left, it waits until it has learnt enough.

A commit record is visible before it is durable. So, on a medium that must be synced, a rank's newest record counts only
when the rank has written a newer one: before a rank writes a record it syncs its pool, and with it the record before.

A relayout gives a rank's pool a new file. The rank carries over what the rule does not let it overwrite. The others
have the old file open, which says nothing new any more. So each of them soon has no slot left and must wait, and then
it looks whether the paths still name the files that it has open. Looking costs nothing where nobody waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lightck.errors import PoolError, RankError, listed
from lightck.pool.format.structures import COMMIT_RECORD_NBYTES, KIND_CHECKPOINT, CommitRecord, DamagedError
from lightck.pool.listener import CommitListener
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.writer import PoolWriter
from lightck.ranks.rule import Adoption, CheckpointId, Knowledge, PoolView
from lightck.ranks.waiting import wait_until

log = logging.getLogger("lightck")
_PAUSES = (0.00005, 0.005)
"""Seconds between two reads of the neighbours' commit logs while a rank waits: at first, and at most."""


class Neighbour:
    """The pool of another rank, as this rank sees it."""

    def __init__(self, rank: int, reader: PoolReader, adoption: Adoption, *, must_sync: bool) -> None:
        """``reader``: of that rank's pool; it belongs to this object from now on. ``adoption``: of the whole group.
        ``must_sync``: whether a record in this pool is durable only after a sync."""
        self.rank = rank
        self._adoption, self._must_sync = adoption, must_sync
        self._refused = b""
        """The uuid of a pool that has taken the path of this one, and that is not its new file."""
        self.view = PoolView.of(())
        self._use(reader)

    def _use(self, reader: PoolReader) -> None:
        """Read this pool from now on."""
        self._reader = reader
        reader.table, reader.entries = b"", ()  # only the commit log is read
        sb = reader.superblock
        self._span = sb.ring_offset, (sb.ring_lines - 1) * sb.ring_stride + COMMIT_RECORD_NBYTES
        self._positions = tuple(range(0, sb.ring_lines * sb.ring_stride, sb.ring_stride))
        """Where each commit record begins, relative to the first one."""
        self._data = bytes(self._span[1])
        self._found: dict[int, tuple[int, CheckpointId]] = {}
        """Beginning of a commit record -> generation and name of the checkpoint that it names."""

    @property
    def uuid(self) -> bytes:
        return self._reader.superblock.uuid

    def follow(self) -> None:
        """If the pool has got a new file since it was opened, read that file from now on."""
        if self._reader.container.is_current():
            return
        try:
            reader = open_pool(self._reader.path)
        except PoolError as err:  # the rank itself finds that its pool was removed or damaged
            log.debug("lightck: the pool of rank %d cannot be opened now: %s", self.rank, err)
            return
        if self._is_new_file(reader):
            old = self._reader
            self._use(reader)
            old.close()
            return
        if reader.superblock.uuid != self._refused:
            self._refused = reader.superblock.uuid
            log.warning(
                "lightck: the pool %r of rank %d was replaced by another one, or by an older copy. What it holds now "
                "does not count",
                reader.path,
                self.rank,
            )
        reader.close()

    def _is_new_file(self, reader: PoolReader) -> bool:
        """Whether a pool is the new file of this one: it belongs to the same rank of the same run and world, and has a
        checkpoint that is at least as new as every one that was seen in the old file."""
        if reader.group is None or reader.group != self._reader.group:
            return False
        seen = max((name for _, name in self._found.values()), default=None)
        named = [self._name(record) for record in reader.commit_log().records.values()]
        return seen is None or any(name is not None and name >= seen for name in named)

    def has_news(self, common: CheckpointId | None) -> bool:
        """Read the commit log, and return whether ``view`` has changed. ``common``: the newest checkpoint that is known
        to be common; older ones are left out of ``view``."""
        data, last = self._reader.read(*self._span), self._data
        if data == last or len(data) < len(last):
            return False
        for at in self._positions:
            record = data[at : at + COMMIT_RECORD_NBYTES]
            if record != last[at : at + COMMIT_RECORD_NBYTES]:
                self._parse(at, record)
        self._data = data
        view = self._current_view(common)
        is_new, self.view = view != self.view, view
        return is_new

    def _parse(self, at: int, data: bytes) -> None:
        """Parse one commit record. One that is being written at this moment fails its check, and counts as none."""
        self._found.pop(at, None)
        try:
            record = CommitRecord.unpack(data, self._reader.superblock.uuid)
        except DamagedError:
            return
        named = None if record is None else self._name(record)
        if record is not None and named is not None:
            self._found[at] = record.generation, named

    def _name(self, record: CommitRecord) -> CheckpointId | None:
        """Return the name of the checkpoint that a record names; None if the group had left it when it began."""
        name, adopted = CheckpointId(record.incarnation, record.step), self._adoption.adopted
        if record.incarnation == self._adoption.incarnation:
            return name if record.kind == KIND_CHECKPOINT else adopted
        return adopted if name == adopted and record.kind == KIND_CHECKPOINT else None

    def _current_view(self, common: CheckpointId | None) -> PoolView:
        found = self._found
        if self._must_sync:
            newest = max(found, key=found.__getitem__, default=None)
            if newest is not None and found[newest][1] != self._adoption.adopted:  # it may not be durable yet
                found = {at: one for at, one in found.items() if at != newest}
        return PoolView.of((one for _, one in found.values() if common is None or one >= common), self.view.newest)

    def close(self) -> None:
        self._reader.close()


class Keeper(Protocol):
    """What holds checkpoints during a relayout, so that they are carried over: ``Holds`` (tiers/pin.py)."""

    def take_slot(self, writer: PoolWriter, index: int, *, is_for_ranks: bool) -> Any: ...

    def release(self, hold: Any) -> None: ...


class GroupRule(CommitListener):
    """The commit rule of a group, as a decision of this rank's pipeline (``GroupDecision``)."""

    def __init__(
        self,
        neighbours: Sequence[Neighbour],
        knowledge: Knowledge,
        ids: Mapping[int, CheckpointId],
        keeper: Keeper,
        *,
        timeout: float,
        name_of: Callable[[int], str],
    ) -> None:
        """``knowledge``: what every rank knows when attach returns. ``ids``: generation -> checkpoint, for those that
        lie in this rank's pool. ``keeper``: a commit listener that was added before this one. ``timeout``: seconds
        after which a wait for other ranks ends with an error. ``name_of``: rank -> text with its host."""
        self.knowledge = knowledge
        self.wait_seconds = 0.0
        """How long this rank has waited for other ranks, because no slot could be overwritten."""
        self._neighbours, self._timeout, self._name_of = neighbours, timeout, name_of
        self._ids = dict(ids)
        self._own: frozenset[CheckpointId] = frozenset()
        self._keeper = keeper
        self._kept: list[Any] = []
        """Holds of what a relayout carries over."""

    # -- decisions and events of the pipeline ------------------------------------------------------------

    def may_commit(self, closed_step: object) -> bool:
        return True

    def held(self, writer: PoolWriter) -> frozenset[int]:
        """Return the slots that this rank must not overwrite, by what the other pools say now."""
        contents = self._contents(writer)
        self._learn(frozenset(one for one in contents.values() if one is not None))
        return frozenset(i for i, content in contents.items() if not self.knowledge.may_overwrite(content))

    def wait_until(self, has_room: Callable[[], bool], pause: Callable[[], object]) -> None:
        """Wait until ``has_room()``, which asks ``held``, is true. ``pause``: called at times, to let a signal's
        handler run. Raises ``RankError`` after the timeout."""
        began = time.monotonic()

        def is_over() -> bool:
            for neighbour in self._neighbours:
                neighbour.follow()
            return has_room()

        try:
            wait_until(
                is_over,
                timeout=self._timeout,
                pauses=_PAUSES,
                report=lambda seconds: log.warning(
                    "lightck: waiting for %s, since %.0f seconds", self._behind(), seconds
                ),
                error=self._stands_still,
                between=pause,
            )
        finally:
            self.wait_seconds += time.monotonic() - began

    def _stands_still(self) -> RankError:
        common = self.knowledge.common
        n_ahead = sum(common is None or one > common for one in self._own)
        return RankError(
            f"{self._behind()} has committed no newer checkpoint for {self._timeout:g} seconds (timeout=). This rank "
            f"is {n_ahead} saved checkpoints ahead, and may not overwrite what that rank still needs. What all ranks "
            "have is intact. Look for an error of that rank. All ranks must make the same number of updates; a larger "
            "slots= of attach lets them be further apart."
        )

    def committed(self, writer: PoolWriter, step: int) -> None:
        slot = writer.slots.slots[writer.slots.protected or 0]
        assert slot.generation is not None, "it was committed just now"
        generations = {one.generation for one in writer.slots.slots}
        self._ids = {at: one for at, one in self._ids.items() if at in generations}
        self._ids[slot.generation] = CheckpointId(writer.incarnation, step)

    def relayout_begins(self, old: PoolWriter) -> None:
        """Have everything carried over that must not be overwritten. Then the change of the file's name overwrites, all
        at once, only what the rule lets this rank overwrite."""
        for index in sorted(self.held(old)):
            self._kept.append(self._keeper.take_slot(old, index, is_for_ranks=True))

    def relayout_done(self, new: PoolWriter) -> None:
        self._release_kept()

    def relayout_failed(self) -> None:
        self._release_kept()

    def _release_kept(self) -> None:
        for hold in self._kept:
            self._keeper.release(hold)
        self._kept = []

    def closed(self) -> None:
        for neighbour in self._neighbours:
            neighbour.close()

    # -- knowledge ---------------------------------------------------------------------------------------

    def _contents(self, writer: PoolWriter) -> dict[int, CheckpointId | None]:
        """Return slot -> its committed checkpoint. A slot that a checkpoint in flight uses has none."""
        return {
            slot.index: None if slot.generation is None else self._ids.get(slot.generation)
            for slot in writer.slots.slots
        }

    def _learn(self, own: frozenset[CheckpointId]) -> None:
        common = self.knowledge.common
        news = [neighbour.has_news(common) for neighbour in self._neighbours]
        if any(news) or own != self._own:
            self._own = own
            self.knowledge = self.knowledge.learn(own, [neighbour.view for neighbour in self._neighbours])

    def _behind(self) -> str:
        """Return the names of the ranks whose newest checkpoint is the oldest one, with its step."""
        steps = {one.rank: -1 if one.view.newest is None else one.view.newest.step for one in self._neighbours}
        least = min(steps.values())
        names = [self._name_of(rank) for rank, step in steps.items() if step == least]
        at = f", whose newest checkpoint is that of step {least}," if least >= 0 else ""
        return f"{listed(names, 8)}{at}"
