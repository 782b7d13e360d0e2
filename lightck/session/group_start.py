"""How the ranks of a group attach together.

    meet        The ranks wait for each other. From now on an error of one rank is raised on all.
    report      Each rank sends its arguments, a digest of its tensors, and the list of its checkpoints. All compute the
                same decision: a checkpoint to continue from, or a new training.
    restore     To continue, each rank restores its part of the chosen checkpoint, and votes. If a rank finds its part
                damaged, that checkpoint is struck from the reports, and all decide again.
    adopt       To continue, each rank records the checkpoint and the agreed incarnation in its pool.
    create      For a new training, each rank creates its pool.
    begin       Each rank opens the pools of the others on its host, to read their commit logs. In a new training each
                rank also commits checkpoint 0. ``attach`` returns when all ranks have done this. If there are several
                hosts, a helper thread exchanges from now on what the pools hold.

Invariant: a rank that continues changes nothing in its pool before *adopt*, and *adopt* changes no checkpoint. So if a
process is killed at any moment, the ranks choose the same checkpoint at the next start. In a new training ``attach``
returns only when all ranks hold step 0. So if the ranks have no checkpoint in common later, one was lost.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TypeAlias

import msgpack

from lightck.errors import RankError, UnsupportedError, listed
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.format.group import ID_NBYTES, GroupIdentity
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.pool.storage.durability import TIER_CACHE
from lightck.ranks.agreement import Report, Start, decide, refuse_differences
from lightck.ranks.meet import Meeting
from lightck.ranks.neighbours import GroupRule, Neighbour
from lightck.ranks.publication import Publication
from lightck.ranks.rule import Adoption, CheckpointId, Knowledge, PoolView
from lightck.restore.recover import LiveRestore
from lightck.restore.resume import Resumed
from lightck.restore.usable import parse, usable_by_id
from lightck.session.arguments import Arguments
from lightck.session.group import (
    Group,
    Membership,
    boot_id,
    directory_id,
    ensure_directory,
    host_name,
    path_of_own_pool,
)
from lightck.session.pool_file import PoolFile
from lightck.state.parts import mesh_of
from lightck.tiers.pin import Holds

log = logging.getLogger("lightck")
SLOTS_MIN = 3
"""The least number of slots in a rank's pool. One slot holds the newest checkpoint, and one is being written. A third
one holds the checkpoint before, which may be the newest that all ranks have."""
_NAMES_NBYTES_MAX = 1 << 20
"""The largest number of bytes that a rank sends of its tensors' names, for the error that lists differences."""
Stored: TypeAlias = dict[CheckpointId, list[StoredCheckpoint]]
"""The usable checkpoints in one pool, by id. If a step was saved twice, its list has two items, the newer one first."""


@dataclass(slots=True)
class GroupStart:
    """One attach of a group, on this rank."""

    group: Group
    meeting: Meeting
    rule: GroupRule | None = None
    """None until ``join`` is called."""
    _adoption: Adoption = field(default_factory=lambda: Adoption(None, 1))
    _ids: dict[int, CheckpointId] = field(default_factory=dict)
    """Generation -> id of each checkpoint in this rank's pool."""
    _directory_ids: list[str] = field(default_factory=list)
    """Rank -> host and directory of its pool (``directory_id``)."""

    @classmethod
    @contextmanager
    def of(cls, group: Group | None, timeout: float) -> Iterator[GroupStart | None]:
        """Meet the other ranks, and yield the start of the group. If the block raises an error, the other ranks raise
        ``RankError``. Without a group, yield None. ``timeout``: seconds that one wait for other ranks may take."""
        if group is None:
            yield None
            return
        meeting = Meeting(group.store, group.rank, group.world_size, timeout)
        meeting.meet(host_name())
        with meeting.shares_errors():
            yield cls(group, meeting)

    # -- before anything is opened -----------------------------------------------------------------------

    def check(self, arguments: Arguments) -> None:
        """Raise ``UnsupportedError`` or ``ValueError`` for what a group cannot do yet."""
        options = arguments.save_options
        is_adaptive = type(options.interval) is not int
        refused = (
            (is_adaptive, f"interval={options.interval!r}", "each rank would choose an interval of its own"),
            (options.keep is not None, "keep=", "use `lightck export` on the directory, also while training runs"),
            (options.pause_on_nonfinite, "pause_on_nonfinite=True", "one rank could pause and another go on"),
            (arguments.backend == "devdax", 'backend="devdax"', "a device holds one pool"),
        )
        for is_passed, what, why in refused:
            if is_passed:
                raise UnsupportedError(
                    f"{what} is not supported in a group of ranks yet ({why}). Leave it out; or pass group=False, to "
                    "save this process alone."
                )
        if options.slots is not None and options.slots < SLOTS_MIN:
            raise ValueError(
                f"slots={options.slots}: in a group of ranks a pool has at least {SLOTS_MIN} slots, because a rank "
                "must keep a checkpoint until all ranks have committed a newer one."
            )
        _refuse_old_fsdp(arguments)

    def own_path(self, arguments: Arguments) -> str:
        """Return the path of this rank's pool in the directory. Create the directory if it does not exist."""
        return path_of_own_pool(ensure_directory(arguments.pool_path), self.group)

    # -- the pool ----------------------------------------------------------------------------------------

    def open(self, file: PoolFile, pipeline: Pipeline) -> Resumed | None:
        """Continue from the newest checkpoint that all ranks have, or create this rank's pool. Returns None for a new
        training."""
        reader = file.existing()
        try:
            stored = {} if reader is None else self._stored(reader, file)
            reports = self._exchange_reports(file, reader, stored)
            refuse_differences(reports)
            self._refuse_other_tensors(file, reports)
            start = decide(reports, resume=file.arguments.resume, overwrite=file.arguments.overwrite)
            if start.adopted is None:
                if reader is not None:
                    reader.close()
                self._create(file, pipeline, start)
                return None
            assert reader is not None, "all ranks have the checkpoint"
            return self._continue(file, pipeline, reader, stored, reports, start)
        except BaseException:
            if reader is not None and pipeline.pool.writer is None:
                reader.close()
            raise

    def _stored(self, reader: PoolReader, file: PoolFile) -> Stored:
        """Return the usable checkpoints of this rank's pool. Raises ``UnsupportedError`` if the pool is that of a
        single process, and ``CorruptPoolError`` if its commit records were erased."""
        if reader.group is None:
            raise UnsupportedError(
                f"The pool {reader.path!r} is that of a training in a single process, and not of a rank. Nothing was "
                "changed. Use another directory; or remove the pool if nobody needs it."
            )
        file.refuse_erased_log(reader)
        return usable_by_id(reader)

    def _refuse_other_tensors(self, file: PoolFile, reports: list[Report]) -> None:
        """Raise ``RankError`` if the tensors of a rank differ from those of rank 0. The ranks exchange the names of
        their tensors only in this case, for the message."""
        other = next((rank for rank, one in enumerate(reports) if one.tensors != reports[0].tensors), None)
        if other is None:
            return
        own = "\n".join(_tensor_lines(file)).encode("utf-8", "replace")[:_NAMES_NBYTES_MAX]
        texts = self.meeting.exchange("names of tensors", own if self.group.rank in (0, other) else b"")
        first, second = (set(texts[rank].decode("utf-8", "replace").splitlines()) for rank in (0, other))
        raise RankError(
            f"The tensors of model and optimizer on {self.meeting.name_of(other).lower()} differ from those on "
            f"{self.meeting.name_of(0).lower()}. Only on rank 0: {listed(sorted(first - second)) or 'none'}. Only on "
            f"rank {other}: {listed(sorted(second - first)) or 'none'}. All ranks of a group must build the same model "
            "and optimizer; stages of a pipeline are not supported yet."
        )

    def _exchange_reports(self, file: PoolFile, reader: PoolReader | None, stored: Stored) -> list[Report]:
        identity = None if reader is None else reader.group
        report = Report(
            host=host_name(),
            directory=os.path.dirname(file.path),
            boot_id=boot_id(),
            directory_id=directory_id(os.path.dirname(file.path)),
            arguments=_arguments_to_compare(file.arguments),
            tensors=_digest(file),
            new_ids=os.urandom(2 * ID_NBYTES),
            run_id=b"" if identity is None else identity.run_id,
            world_id=b"" if identity is None else identity.world_id,
            checkpoints=tuple((one.incarnation, one.step) for one in stored),
            incarnation=0 if reader is None else reader.commit_log().incarnation,
        )
        reports = [Report.unpack(data) for data in self.meeting.exchange("reports", report.pack())]
        self._directory_ids = [one.directory_id for one in reports]
        return reports

    def _create(self, file: PoolFile, pipeline: Pipeline, start: Start) -> None:
        mesh_shape, coordinate = mesh_of(file.capture.tensors())
        pipeline.pool.group = GroupIdentity(
            run_id=start.run_id,
            world_id=start.world_id,
            rank=self.group.rank,
            world_size=self.group.world_size,
            mesh_shape=mesh_shape,
            coordinate=coordinate,
        )
        file.create_at_once(pipeline)

    def _continue(
        self,
        file: PoolFile,
        pipeline: Pipeline,
        reader: PoolReader,
        stored: Stored,
        reports: list[Report],
        start: Start,
    ) -> Resumed:
        """Restore the chosen checkpoint, and adopt it."""
        restore = file.live_restore(reader)
        with restore.poisons_on_error():
            start, chosen, is_done = self._restore_and_vote(restore, stored, reports, start)
        contents, recorded = parse(chosen), reader.next_batches(chosen.record)
        self._adoption = Adoption(start.adopted, start.incarnation)
        self._ids = {one.record.payload_generation: name for name, many in stored.items() for one in many}
        file.adopt(pipeline, reader, contents, chosen.record, incarnation=start.incarnation)
        resumed = Resumed.from_contents(contents, recorded)
        resumed.done = is_done
        return resumed

    def _restore_and_vote(
        self, restore: LiveRestore, stored: Stored, reports: list[Report], start: Start
    ) -> tuple[Start, StoredCheckpoint, bool]:
        """Restore the chosen checkpoint. If a rank cannot restore it, restore the next older common one, and so on.
        Returns the last decision, the checkpoint that this rank has restored, and whether the training was declared
        finished in that checkpoint on all ranks."""
        struck: dict[CheckpointId, str] = {}
        while True:
            assert start.adopted is not None, "resume=True, so a checkpoint is chosen or an error is raised"
            chosen, problem = _restored(restore, stored[start.adopted])
            is_done = chosen is not None and parse(chosen).done
            votes = [msgpack.unpackb(one) for one in self.meeting.exchange("votes", msgpack.packb([problem, is_done]))]
            failed = [rank for rank, (text, _) in enumerate(votes) if text]
            if not failed:
                assert chosen is not None, "this rank has voted for it"
                return start, chosen, all(done for _, done in votes)
            why = f"{self.meeting.name_of(failed[0]).lower()} cannot restore it: {votes[failed[0]][0]}"
            log.warning(
                "lightck: the checkpoint of step %d cannot be used on any rank, because %s. An older one is looked for",
                start.adopted.step,
                why,
            )
            struck[start.adopted] = why
            start = decide(reports, resume=True, overwrite=False, struck=struck)

    # -- the group begins --------------------------------------------------------------------------------

    def join(self, file: PoolFile, pipeline: Pipeline, holds: Holds) -> None:
        """Open the pools of the other ranks on this host, and add the commit rule of the group to the pipeline.
        ``holds``: of this session."""
        writer = pipeline.pool.writer
        assert writer is not None, "a rank's pool exists from attach on"
        own = msgpack.packb([file.path, writer.superblock.uuid])
        neighbours: list[Neighbour] = []
        must_sync = pipeline.durability.tier != TIER_CACHE
        try:
            for rank, (path, uuid) in enumerate(map(msgpack.unpackb, self.meeting.exchange("pools", own))):
                if rank != self.group.rank and self._directory_ids[rank] == self._directory_ids[self.group.rank]:
                    neighbours.append(Neighbour(rank, open_pool(path), self._adoption, must_sync=must_sync))
                    self._check_neighbour(neighbours[-1], uuid)
        except BaseException:
            for neighbour in neighbours:
                neighbour.close()
            raise
        self.rule = GroupRule(
            neighbours,
            Knowledge.at_start(self._adoption),
            self._ids,
            holds,
            timeout=self.meeting.timeout,
            name_of=self.meeting.name_of,
        )
        pipeline.decisions.add_group(self.rule)
        pipeline.events.add(self.rule)

    def membership(self) -> Membership:
        assert self.rule is not None, "join was called"
        return Membership(self.group.rank, self.group.world_size, self.rule)

    def _check_neighbour(self, neighbour: Neighbour, uuid: bytes) -> None:
        """Raise ``RankError`` if this is not the pool that the other rank has opened. ``uuid``: that of the pool that
        it has opened."""
        if neighbour.uuid != uuid:
            raise RankError(
                f"The pool of {self.meeting.name_of(neighbour.rank).lower()} was replaced while the ranks attached. Is "
                "a second job using the directory? End it, and start again."
            )

    def begin(self) -> None:
        """Wait until each rank has adopted the chosen checkpoint, or, in a new training, has committed checkpoint 0."""
        self.meeting.exchange("readiness", b"")
        assert self.rule is not None, "join was called"
        start = self._adoption.adopted or CheckpointId(self._adoption.incarnation, 0)
        if self._adoption.adopted is None:
            self.rule.knowledge = replace(self.rule.knowledge, common=start)
        if len(set(self._directory_ids)) > 1:
            own = PoolView.of([start])
            self.rule.follow(
                Publication(self.group.store, self.meeting.key, self.group.rank, self.group.world_size, own)
            )


def _restored(restore: LiveRestore, candidates: list[StoredCheckpoint]) -> tuple[StoredCheckpoint | None, str]:
    """Restore the first of these checkpoints of one step that verifies. Returns the checkpoint and "", or None and the
    reason why the first one does not verify."""
    problem = ""
    for stored in candidates:
        try:
            restore.take(stored, parse(stored), [])
            return stored, ""
        except DamagedError as err:
            problem = problem or str(err)
    return None, problem


def _arguments_to_compare(arguments: Arguments) -> dict[str, str]:
    """Return the arguments of attach that must be the same on all ranks: name -> text."""
    options = arguments.save_options
    return {
        "interval=": repr(options.interval),
        "slots=": repr(options.slots),
        "resume=": repr(arguments.resume),
        "overwrite=": repr(arguments.overwrite),
        "strategy=": type(options.strategy).__name__,
        "strict_data=": repr(options.strict_data),
    }


def _digest(file: PoolFile) -> str:
    """Return a digest of the names, dtypes and logical shapes of the tensors of model and optimizers. Ranks that hold
    different parts of the same tensors have the same digest."""
    return blake2b("\n".join(_tensor_lines(file)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _tensor_lines(file: PoolFile) -> list[str]:
    """Return a line with name, dtype and logical shape of each tensor of model and optimizers, and one with the class
    of each optimizer."""
    lines = [
        f"{entry.name} ({entry.dtype}, {list(entry.logical_shape or entry.shape)})"
        for entry in file.entries.values()
        if entry.role != "state"
    ]
    return sorted([*lines, *(view.class_name for view in file.capture.optimizers)])


def _refuse_old_fsdp(arguments: Arguments) -> None:
    for module in arguments.model.modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise UnsupportedError(
                "The model contains FullyShardedDataParallel, whose flat parameters do not say which part of a tensor "
                "a rank holds. Use torch.distributed.fsdp.fully_shard, which takes its place."
            )
