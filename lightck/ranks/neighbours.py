"""What a rank learns of its group while training runs, by reading the commit logs in the pools of other ranks.

A rank reads the pools of the ranks on its host, so these ranks send no messages. A helper thread learns what the ranks
on other hosts have (``ranks/publication.py``). ``GroupRule`` makes the rule of ``ranks/rule.py`` a decision of the
pipeline: it holds the slots of this rank's pool that must not be overwritten yet. If it holds all slots, the rank waits
until it has learnt that one of them may be overwritten.

A commit record is visible before it is durable. A rank syncs its pool before it writes a record, and this sync makes
the previous record durable. So on a medium that must be synced, the last record in a pool does not count yet, and the
records before it do.

A relayout gives a rank's pool a new file, to which the rank carries over what the rule does not let it overwrite. The
other ranks on its host have the old file open, in which nothing changes any more. So each of them soon has no slot left
and must wait. Only then it looks for new files, so that this costs nothing while nobody waits.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from lightck.errors import PoolError, RankError, listed
from lightck.pool.format.structures import COMMIT_RECORD_NBYTES, KIND_CHECKPOINT, CommitRecord, DamagedError
from lightck.pool.listener import CommitListener
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.pool.writer import PoolWriter
from lightck.ranks.copy_cadence import CopyCadence
from lightck.ranks.copy_receiver import CopyReceiver
from lightck.ranks.copy_sender import CopySender
from lightck.ranks.paused_ranks import PausedRanks
from lightck.ranks.publication import Publication
from lightck.ranks.rule import Adoption, CheckpointId, Knowledge, PoolView, reported
from lightck.ranks.waiting import wait_until

log = logging.getLogger("lightck")
_PAUSES = (0.00005, 0.005)
"""Seconds between two reads of the neighbours' commit logs while a rank waits: the first pause, and the longest
one."""
_SECONDS_WITHOUT_COPIES = 2.0
"""If copying to another host has ended with an error, a rank that waits for room waits so long before it raises that
error."""


class Neighbour:
    """The pool of another rank on this host, as this rank sees it."""

    def __init__(
        self, rank: int, reader: PoolReader, adoption: Adoption, *, must_sync: bool, reads_checkpoints: bool = False
    ) -> None:
        """``reader``: reads that rank's pool; ``close`` closes it. ``adoption``: the adoption that all ranks of the
        group made. ``must_sync``: whether a record in this pool is durable only after a sync. ``reads_checkpoints``:
        whether ``stored`` will be called."""
        self.rank, self._reads_checkpoints = rank, reads_checkpoints
        self._adoption, self._must_sync = adoption, must_sync
        self._refused = b""
        """The uuid of the last pool that was found at this pool's path and is not its new file, so that a warning names
        it once."""
        self.view = PoolView.of(())
        self._use(reader)

    def _use(self, reader: PoolReader) -> None:
        """Read this pool from now on."""
        self._reader = reader
        if not self._reads_checkpoints:
            reader.table, reader.entries = b"", ()  # only the commit log is read
        sb = reader.superblock
        self._span = sb.ring_offset, (sb.ring_lines - 1) * sb.ring_stride + COMMIT_RECORD_NBYTES
        self._positions = tuple(range(0, sb.ring_lines * sb.ring_stride, sb.ring_stride))
        """Where each commit record begins, in bytes from the beginning of the first one."""
        self._first_words = struct.Struct("<" + f"Q{sb.ring_stride - 8}x" * (sb.ring_lines - 1) + "Q")
        """The first word of each commit record, which is its generation, and is stored last."""
        self._parsed = [0] * sb.ring_lines
        """The generation of each commit record that was parsed."""
        self._data = bytes(self._span[1])
        """The bytes of the commit log when it was last read."""
        self._found: dict[int, tuple[int, CheckpointId]] = {}
        """Position of a commit record -> its generation, and the id of its checkpoint. Without those that
        ``has_news`` leaves out."""

    @property
    def uuid(self) -> bytes:
        return self._reader.superblock.uuid

    def stored(self, checkpoint_id: CheckpointId) -> StoredCheckpoint | None:
        """Return a checkpoint of this pool, committed or about to be; None if the pool does not hold it now."""
        for record in self._reader.commit_log().records.values():
            if record.kind == KIND_CHECKPOINT and (record.incarnation, record.step) == tuple(checkpoint_id):
                with suppress(DamagedError):
                    return self._reader.checkpoint(record)
        return None

    def may_still_get(self, checkpoint_id: CheckpointId) -> bool:
        """Whether the pool may yet get a checkpoint that it does not hold now: it may if all that it holds are older.
        If the pool has moved to a new file, that file is read from now on."""
        self.look_for_new_file()
        records = self._reader.commit_log().records.values()
        return all(CheckpointId(one.incarnation, one.step) < checkpoint_id for one in records)

    def look_for_new_file(self) -> None:
        """If the pool has moved to a new file since it was opened, read that file from now on."""
        if self._reader.container.is_current():
            return
        try:
            reader = open_pool(self._reader.path, gradients=True)  # its commit log is read whatever kind of pool it is
        except PoolError as err:  # the rank itself will find that its pool was removed or damaged
            log.debug(
                "lightck: the pool of rank %d cannot be opened now, so this rank does not see newer checkpoints in "
                "that pool: %s",
                self.rank,
                err,
            )
            return
        if self._is_new_file(reader):
            old = self._reader
            self._use(reader)
            old.close()
            return
        if reader.superblock.uuid != self._refused:
            self._refused = reader.superblock.uuid
            log.warning(
                "lightck: the pool %r of rank %d was replaced by the pool of another rank or training, or by an older "
                "copy. The checkpoints in it do not count",
                reader.path,
                self.rank,
            )
        reader.close()

    def _is_new_file(self, reader: PoolReader) -> bool:
        """Whether a pool is the new file of this one: it belongs to the same rank of the same run and world, and holds
        a checkpoint that is at least as new as every one that was seen in the old file."""
        if reader.group is None or reader.group != self._reader.group:
            return False
        seen = max((one for _, one in self._found.values()), default=None)
        ids = [self._id_of(record) for record in reader.commit_log().records.values()]
        return seen is None or any(one is not None and one >= seen for one in ids)

    def has_news(self, floor: CheckpointId | None) -> bool:
        """Read the commit log, update ``view``, and return whether ``view`` has changed. ``floor``: older checkpoints
        are left out of ``view`` (``Knowledge.floor``)."""
        data, last = self._reader.read(*self._span), self._data
        if data == last or len(data) < len(last):
            return False
        for i, generation in enumerate(self._first_words.unpack_from(data)):
            if generation != self._parsed[i] and self._parse(self._positions[i], data):
                self._parsed[i] = generation
        self._data = data
        view = self._current_view(floor)
        is_new, self.view = view != self.view, view
        return is_new

    def _parse(self, at: int, data: bytes) -> bool:
        """Parse the commit record at position ``at``, and return True. If it is being written at this moment, its
        checksum does not match; then return False."""
        self._found.pop(at, None)
        try:
            record = CommitRecord.unpack(data[at : at + COMMIT_RECORD_NBYTES], self._reader.superblock.uuid)
        except DamagedError:
            return False
        named = None if record is None else self._id_of(record)
        if record is not None and named is not None:
            self._found[at] = record.generation, named
        return True

    def _id_of(self, record: CommitRecord) -> CheckpointId | None:
        """Return the id of the checkpoint that a record names. None if the checkpoint is older than the adopted one, or
        belongs to a history that the group has left."""
        named, adopted = CheckpointId(record.incarnation, record.step), self._adoption.adopted
        if record.incarnation == self._adoption.incarnation:
            return named if record.kind == KIND_CHECKPOINT else adopted
        return named if named == adopted and record.kind == KIND_CHECKPOINT else None

    def _current_view(self, floor: CheckpointId | None) -> PoolView:
        found = self._found
        if floor is not None:
            for at in [at for at, (_, one) in found.items() if one < floor]:
                del found[at]
        if self._must_sync:
            newest = max(found, key=found.__getitem__, default=None)
            if newest is not None and found[newest][1] != self._adoption.adopted:  # it may not be durable yet
                found = {at: one for at, one in found.items() if at != newest}
        return PoolView.of([one for _, one in found.values()], self.view.newest)

    def close(self) -> None:
        self._reader.close()


class SlotHolds(Protocol):
    """Holds checkpoints, so that a relayout carries them over: ``Holds`` (tiers/pin.py)."""

    def take_slot(self, writer: PoolWriter, index: int, *, is_for_ranks: bool) -> Any: ...

    def release(self, hold: Any) -> None: ...


class GroupRule(CommitListener):
    """The commit rule of a group, as a decision of this rank's pipeline (``GroupDecision``)."""

    def __init__(
        self,
        neighbours: Sequence[Neighbour],
        knowledge: Knowledge,
        ids: Mapping[int, CheckpointId],
        holds: SlotHolds,
        *,
        timeout: float,
        name_of: Callable[[int], str],
    ) -> None:
        """``neighbours``: the other ranks on this host. ``knowledge``: what every rank knows when attach returns.
        ``ids``: generation -> id of each checkpoint in this rank's pool. ``holds``: a commit listener that was added
        before this one. ``timeout``: seconds after which a wait for other ranks ends with an error. ``name_of``:
        returns the name of a rank for messages."""
        self.knowledge = knowledge
        self.wait_seconds = 0.0
        """Seconds that this rank has waited for other ranks, because it could overwrite no slot."""
        self.neighbours, self._timeout, self._name_of = neighbours, timeout, name_of
        self._ids = dict(ids)
        self._own: frozenset[CheckpointId] = frozenset()
        """The committed checkpoints in this rank's pool at the last call of ``_learn``."""
        self._holds = holds
        self._kept: list[Any] = []
        """During a relayout: the holds of what it carries over."""
        self.sender: CopySender | None = None
        """Copies this rank's checkpoints to another host; None if there are no peer copies."""
        self.receivers: Sequence[CopyReceiver] = ()
        """Keep the peer copies of ranks on another host."""
        self.cadence: CopyCadence | None = None
        """Chooses which checkpoints are copied, on rank 0; None if the user has chosen it."""
        self._publication: Publication | None = None
        self._together: PoolView | None = None
        """What all ranks have together, as far as this rank has learnt it from ``_publication``."""
        self.paused_ranks: PausedRanks | None = None
        """Which ranks commit nothing for now (``pause_on_nonfinite=True``); None: all commit."""

    def keep_copies(self, sender: CopySender, every: int) -> None:
        """Copy checkpoints to another host from now on, as ``Knowledge`` says. ``follow`` was called before. ``every``:
        the number of steps between two copies; 0: rank 0 chooses it (``CopyCadence``)."""
        assert self._publication is not None, "copies lie on other hosts"
        self.sender = sender
        self._publication.expects_copy_every = every == 0
        self.knowledge = replace(self.knowledge, copied=self.knowledge.common, copy_every=every)
        sender.start(frozenset(self._ids.values()), lambda: self.knowledge, self._publication.publish_copied)

    def follow(self, publication: Publication) -> None:
        """Learn from this object what the ranks on other hosts have. It is closed with this rank's pool."""
        self._publication = publication

    # -- decisions and events of the pipeline ------------------------------------------------------------

    def may_commit(self, closed_step: object) -> bool:
        return True

    def held(self, writer: PoolWriter) -> frozenset[int]:
        """Read the other pools, and return the slots of this rank's pool that must not be overwritten."""
        contents = self._contents(writer)
        if self.sender is not None and self.sender.is_refused and self.sender.failure is not None:
            raise self.sender.failure
        self._learn(frozenset(one for one in contents.values() if one is not None))
        copying = None if self.sender is None else self.sender.copying
        return frozenset(
            i
            for i, content in contents.items()
            if not self.knowledge.may_overwrite(content) or (content is not None and content == copying)
        )

    def wait_until(self, has_room: Callable[[], bool], pause: Callable[[], object]) -> bool:
        """Wait until ``has_room()``, which calls ``held``, is true, and return True. Return False as soon as another
        rank pauses. ``pause``: called at times, to let a signal's handler run. Raises ``RankError`` after the
        timeout."""
        began = time.monotonic()
        gives_way = False

        def is_over() -> bool:
            nonlocal gives_way
            for neighbour in self.neighbours:
                neighbour.look_for_new_file()
            if has_room() or self._raise_if_copies_ended(began):
                return True
            gives_way = self.paused_ranks is not None and self.paused_ranks.any_paused()
            return gives_way

        try:
            wait_until(
                is_over,
                timeout=self._timeout,
                pauses=_PAUSES,
                report=lambda seconds: log.warning(
                    "lightck: this rank has waited %.0f seconds for a newer checkpoint of %s. Until it comes, this "
                    "rank's pool has no room for a new checkpoint, because the ranks may still need the old ones",
                    seconds,
                    self._slowest(),
                ),
                error=self._timeout_error,
                between=pause,
            )
        finally:
            self.wait_seconds += time.monotonic() - began
            if self.paused_ranks is not None:
                self.paused_ranks.wait_ended(gives_way=gives_way)
        return not gives_way

    def _raise_if_copies_ended(self, began: float) -> bool:
        """Raise the error that ended the peer copies, if this rank waits only because of that. Else return False."""
        failure = None if self.sender is None else self.sender.failure
        if (
            failure is not None
            and time.monotonic() > began + _SECONDS_WITHOUT_COPIES
            and self.knowledge.waits_for_copies(self._own)
        ):
            raise failure
        return False

    def _timeout_error(self) -> RankError:
        """Return the error of a wait that took too long."""
        common = self.knowledge.common
        n_ahead = sum(common is None or one > common for one in self._own)
        return RankError(
            f"For {self._timeout:g} seconds (timeout=) no newer checkpoint came from {self._slowest()}. This rank is "
            f"{n_ahead} saved checkpoint{'s' * (n_ahead != 1)} ahead, and may not overwrite checkpoints that the other "
            "ranks still need. "
            "The checkpoints that all ranks have are intact. Look for an error of the ranks for which this rank "
            "waited. All ranks must make the same number of updates, and call session.paused() and session.flush() at "
            "the same ones. Without gradient records, a larger slots= of attach lets them be further apart."
        )

    def struck(self, slots: Sequence[int]) -> None:
        if self.sender is not None:
            self.sender.struck()

    def committed(self, writer: PoolWriter, step: int) -> None:
        slot = writer.slots.slots[writer.slots.protected or 0]
        assert slot.generation is not None, "it was committed just now"
        generations = {one.generation for one in writer.slots.slots}
        self._ids = {generation: one for generation, one in self._ids.items() if generation in generations}
        newest = CheckpointId(writer.incarnation, step)
        self._ids[slot.generation] = newest
        own = reported(self._ids.values(), self.knowledge.adoption)
        if self._publication is not None:
            self._publication.publish(PoolView.of(own, newest))
            if self.cadence is not None:
                every = self.cadence.committed(step, sum(entry.nbytes for entry in writer.entries))
                if every is not None:
                    self._publication.announce(every)
                    self.cadence = None
        if self.sender is not None:
            self.sender.committed(own)

    def relayout_begins(self, old: PoolWriter) -> None:
        """Have everything carried over that must not be overwritten. When the new file then takes the pool's name, all
        other checkpoints are overwritten at once, which the rule allows."""
        for index in sorted(self.held(old)):
            self._kept.append(self._holds.take_slot(old, index, is_for_ranks=True))

    def relayout_done(self, new: PoolWriter) -> None:
        self._release_kept()

    def relayout_failed(self) -> None:
        self._release_kept()

    def _release_kept(self) -> None:
        for hold in self._kept:
            self._holds.release(hold)
        self._kept = []

    def closed(self) -> None:
        if self.sender is not None:
            self.sender.close()
        for receiver in self.receivers:
            receiver.close()
        if self._publication is not None:
            self._publication.close()
        for neighbour in self.neighbours:
            neighbour.close()

    # -- knowledge ---------------------------------------------------------------------------------------

    def _contents(self, writer: PoolWriter) -> dict[int, CheckpointId | None]:
        """Return slot -> its committed checkpoint (None: it has none, for example because an in-flight checkpoint uses
        it)."""
        return {
            slot.index: None if slot.generation is None else self._ids.get(slot.generation)
            for slot in writer.slots.slots
        }

    def _learn(self, own: frozenset[CheckpointId]) -> None:
        """Read the other pools, and update ``knowledge``. ``own``: the committed checkpoints in this rank's pool."""
        floor = self.knowledge.floor
        news = [neighbour.has_news(floor) for neighbour in self.neighbours]
        together = None if self._publication is None else self._publication.together
        if any(news) or own != self._own or together is not self._together:
            self._own, self._together = own, together
            views = [neighbour.view for neighbour in self.neighbours]
            if together is None:
                self.knowledge = self.knowledge.learn(own, views)
            else:
                in_copy = () if self.sender is None else self.sender.in_copy
                self.knowledge = self.knowledge.learn(own, [*views, together], together.copied, in_copy)
        if self._publication is not None and self._publication.copy_every and not self.knowledge.copy_every:
            self.knowledge = replace(self.knowledge, copy_every=self._publication.copy_every)

    def _slowest(self) -> str:
        """Return a text with the other ranks that are farthest behind, and with the step of their newest checkpoint."""
        publication = self._publication
        if publication is not None and publication.error is not None:
            err = publication.error
            return f"ranks on other hosts (the store of the process group fails: {type(err).__name__}: {err})"
        views = dict(publication.views) if publication is not None else {}
        views.update({neighbour.rank: neighbour.view for neighbour in self.neighbours})
        steps = {rank: -1 if view.newest is None else view.newest.step for rank, view in views.items()}
        least = min(steps.values(), default=-1)
        names = [self._name_of(rank) for rank, step in steps.items() if step == least]
        at = f", whose newest checkpoint is that of step {least}" if least >= 0 else ""
        return f"{listed(names, 8) or 'ranks on other hosts'}{at}"
