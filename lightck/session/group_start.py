"""How the ranks of a group attach together.

    meet        The ranks wait for each other. From now on an error of one rank is raised on all.
    fetch       With ``resume=True`` and ``tiers=``: if a tier holds a newer checkpoint than the pools have in common,
                new pools with this checkpoint take their place (``newest_of_group.py``).
    report      Each rank sends its arguments, a digest of its tensors, and the list of its checkpoints. All compute the
                same decision: a checkpoint to continue from, or a new training.
    restore     To continue, each rank restores its part of the chosen checkpoint, and says whether it could (it votes).
                If a rank finds its part damaged, that checkpoint is left out of the reports, and all decide again.
    replace     A rank whose pool is lost has restored from the pool of another rank. It makes a new pool with a copy of
                that checkpoint (``lost_pool.py``), and goes on with this pool as all others do.
    adopt       To continue, each rank records the checkpoint and the agreed incarnation in its pool.
    create      For a new training, each rank creates its pool.
    join        Each rank opens the pools of the others on its host, to read their commit logs.
    begin       In a new training each rank has committed checkpoint 0 before. ``attach`` returns when all ranks are
                here. If there are several hosts, a helper thread exchanges from now on what the pools hold.

Invariant: between *fetch* and *adopt*, a rank that continues changes no pool that has a commit record, and *adopt*
changes no checkpoint. (Pools that an interrupted change of worlds left may be removed: ``other_world.py``.) So if a
process is killed at any moment, the ranks choose the same checkpoint at the next start. (After *replace* one more rank
has it.) In a new training ``attach`` returns only when all ranks hold step 0. So if the ranks have no checkpoint in
common later, a rank has lost checkpoints.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

import msgpack

from lightck.errors import RankError, UnsupportedError, capitalized, listed
from lightck.pipeline.nonfinite import NonfiniteCheck
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.format.group import ID_NBYTES, GroupIdentity
from lightck.pool.format.structures import CommitRecord
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.storage.durability import MEDIUM_CACHE
from lightck.pool.storage.temporary import remove_all_stale
from lightck.ranks.agreed_end import EndAgreement
from lightck.ranks.agreement import (
    Report,
    Start,
    decide,
    describe_from_world,
    describe_not_exact,
    describe_other_rows,
    describe_replaced,
    new_world,
    ranks_without_pool,
    refuse_differences,
)
from lightck.ranks.meet import Meeting
from lightck.ranks.neighbours import GroupRule, Neighbour
from lightck.ranks.paused_ranks import PausedRanks
from lightck.ranks.publication import Publication
from lightck.ranks.rule import Adoption, CheckpointId, Knowledge, PoolView
from lightck.restore.averages import describe_averaged
from lightck.restore.contents import Contents
from lightck.restore.moved_state import key_of_rank
from lightck.restore.recover import LiveRestore
from lightck.restore.resume import Resumed
from lightck.restore.usable import RankCheckpoint, parse, usable_by_id
from lightck.session.arguments import Arguments, SaveOptions
from lightck.session.gradient_arguments import optimizers_at_hand
from lightck.session.group import (
    Group,
    Membership,
    boot_id,
    directory_id,
    ensure_directory,
    host_name,
    path_of_own_pool,
    refuse_other_pools,
)
from lightck.session.group_arguments import arguments_to_compare
from lightck.session.group_interval import AgreedCadence
from lightck.session.group_tensors import (
    Stored,
    digest_of_lines,
    digest_of_tensors,
    has_parts,
    lines_of,
    refuse_other_tensors,
)
from lightck.session.interval import Auto, Cadence
from lightck.session.load_other_world import fetch_for_copy, load
from lightck.session.lost_pool import (
    copy_into_new_pool,
    has_checkpoints_of,
    open_source,
    replicated_lines,
    state_of_lost_rank,
)
from lightck.session.newest_of_group import replace_pools_from_tier
from lightck.session.other_world import OtherWorlds, find_other_worlds
from lightck.session.partial_copies import remove_partial_copies
from lightck.session.peer_copies import PeerCopies, hosts_of_copies
from lightck.session.pool_file import PoolFile
from lightck.session.pools_of_hosts import Hosts
from lightck.session.shares_of_others import restore_one_of
from lightck.session.split import shares_of
from lightck.session.tiers_of_group import TiersOfGroup
from lightck.state.parts import mesh_of, refuse_other_ranks
from lightck.stats import Meter
from lightck.tiers.pin import Holds

log = logging.getLogger("lightck")


@dataclass(frozen=True, slots=True)
class Restored:
    """What all ranks have restored."""

    checkpoint_id: CheckpointId
    start: Start
    """The decision that chose the checkpoint."""
    chosen: RankCheckpoint
    """This rank's part. ``checkpoint_id`` and ``chosen`` are of one checkpoint."""
    is_done: bool
    """Whether all ranks had declared the training finished there."""
    reason: str
    """Why the continuation is not bit-identical; empty if it is."""
    warned_ranks: Sequence[int]
    """The ranks on which a warning gives the reason."""
    remark: str = ""
    """What the warning adds."""

    @property
    def incarnation(self) -> int:
        return self.start.incarnation


@dataclass(slots=True)
class GroupStart:
    """One attach of a group, on this rank."""

    group: Group
    meeting: Meeting
    commit_rule: GroupRule | None = None
    """None until ``join`` is called."""
    _adoption: Adoption = field(default_factory=lambda: Adoption(None, 1))
    _ids: dict[int, CheckpointId] = field(default_factory=dict)
    """Generation -> id of each checkpoint in this rank's pool."""
    _directory_ids: list[str] = field(default_factory=list)
    """Rank -> host and directory of its pool (``directory_id``)."""
    _other_worlds: OtherWorlds | None = None
    """The pools of other worlds in the directory; None if there are none."""
    _save_options: SaveOptions | None = None
    _hosts_of_copies: Hosts | None = None
    """The hosts that keep peer copies; None if there are none."""
    _pool_path: str = ""
    """The path of this rank's pool."""
    tiers: TiersOfGroup | None = None
    _cadence: AgreedCadence | None = None
    """With ``interval="auto"``: what the ranks agree on while training runs."""

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
        start = cls(group, meeting)
        try:
            with meeting.shares_errors():
                yield start
        finally:
            if start._other_worlds is not None:
                start._other_worlds.close()

    # -- before anything is opened -----------------------------------------------------------------------

    def own_path(self, arguments: Arguments) -> str:
        """Return the path of this rank's pool in the directory. Create the directory if it does not exist."""
        directory = ensure_directory(arguments.pool_path)
        remove_partial_copies(directory)
        remove_all_stale(directory)  # no rank makes its pool before all ranks are beyond the exchange that follows
        if arguments.resume:
            refuse_other_pools(directory)
            tiers = arguments.save_options.tiers
            replace_pools_from_tier(directory, self.group, self.meeting, tiers, arguments.backend)
        replicas = arguments.save_options.replicas
        self._hosts_of_copies = hosts_of_copies(directory, self.group, self.meeting, replicas)
        self._other_worlds = find_other_worlds(directory, self.group, self.meeting, arguments)
        return path_of_own_pool(directory, self.group) if self._other_worlds is None else self._other_worlds.path

    # -- the pool ----------------------------------------------------------------------------------------

    def open(self, file: PoolFile, pipeline: Pipeline) -> Resumed | None:
        """Continue from the newest checkpoint that all ranks have, or create this rank's pool. Returns None for a new
        training."""
        refuse_other_ranks(file.capture.tensors(), self.group.members)
        if self._other_worlds is not None and self._other_worlds.source is not None:
            return self._load_other_world(file, pipeline, self._other_worlds)
        reader = file.existing()
        try:
            stored = {} if reader is None else self._stored(reader, file)
            reports = self._exchange_reports(file, reader, stored)
            refuse_differences(reports)
            refuse_other_tensors(file, reports, self.meeting)
            if not file.arguments.overwrite:
                self._refuse_moved(file, reports)
            start = decide(reports, resume=file.arguments.resume, overwrite=file.arguments.overwrite)
            source = start.sources.get(self.group.rank)
            if reader is not None and (start.adopted is None or source is not None):
                reader.close()  # it holds no checkpoint that is needed
            if start.adopted is None:
                if self.tiers is not None:
                    start = replace(start, run_id=self.tiers.run_of_new_training(start.run_id))
                self._divide(file)
                self._create(file, pipeline, start)
                return None
            if source is not None:
                reader = open_source(os.path.dirname(file.path), self.group, source, start.run_id)
                stored = usable_by_id(reader, optimizers_at_hand(file.capture))
            assert reader is not None, "a rank has its own pool or that of another rank"
            restored = self._restore(file, reader, stored, reports, start)
            self._divide(file)
            if source is not None:
                reader = self._copy_into_own_pool(file, pipeline, reader, restored, source)
                stored = usable_by_id(reader, optimizers_at_hand(file.capture))
                restored = replace(restored, chosen=stored[restored.checkpoint_id][0])
            if start.sources:
                self.meeting.exchange("copies", b"")
            return self._adopt(file, pipeline, reader, stored, restored)
        except BaseException:
            if reader is not None and pipeline.pool.writer is None:
                reader.close()
            raise

    def _load_other_world(self, file: PoolFile, pipeline: Pipeline, other: OtherWorlds) -> Resumed:
        """Continue from the newest checkpoint of another world, in a new pool."""
        reports = self._exchange_reports(file, None, {})
        refuse_differences(reports)
        refuse_other_tensors(file, reports, self.meeting)
        assert other.source is not None, "the caller has checked it"
        first = next(iter(other.source.readers.values()))
        restore = file.live_restore(first)
        with restore.poisons_on_error():
            loaded = load(other, self.group, self.meeting, restore)
        self._divide(file)
        source = loaded.checkpoint.with_shares(file.capture.shares)
        fetch_for_copy(other, source)
        start = new_world(reports, loaded.checkpoint_id, other.source.run_id, other.incarnation)
        pipeline.pool.group = self._identity(file, start.run_id, start.world_id)
        with other.discards_on_error():
            copy_into_new_pool(
                pipeline,
                source,
                loaded.checkpoint_id,
                list(file.predicted_entries().values()),
                n_slots=file.n_slots_of_rank(first),
                expected_state_nbytes=file.capture.expected_state_nbytes,
                changed_state=loaded.changed_state,
            )
            self.meeting.exchange("copies", b"")
        reader = file.existing()
        assert reader is not None, "it was made just now"
        try:
            stored = usable_by_id(reader, optimizers_at_hand(file.capture))
            chosen = stored[loaded.checkpoint_id][0]
            restored = Restored(loaded.checkpoint_id, start, chosen, loaded.is_done, loaded.reason, (0,))
            return self._adopt(file, pipeline, reader, stored, restored)
        except BaseException:
            if pipeline.pool.writer is None:
                reader.close()
            raise

    def _stored(self, reader: PoolReader, file: PoolFile) -> Stored:
        """Return the usable checkpoints of this rank's pool. Raises ``UnsupportedError`` if the pool is that of a
        single process, or of another strategy, and ``CorruptPoolError`` if its commit records were erased."""
        if reader.group is None:
            raise UnsupportedError(
                f"The pool {reader.path!r} is that of a training in a single process, and not of a rank. Nothing was "
                "changed. Use another directory; or remove the pool if nobody needs it."
            )
        file.refuse_whole_checkpoints(reader)
        file.refuse_erased_log(reader)
        return usable_by_id(reader, optimizers_at_hand(file.capture))

    def _exchange_reports(self, file: PoolFile, reader: PoolReader | None, stored: Stored) -> list[Report]:
        identity = None if reader is None else reader.group
        report = Report(
            host=host_name(),
            directory=os.path.dirname(file.path),
            boot_id=boot_id(),
            directory_id=directory_id(os.path.dirname(file.path)),
            arguments=arguments_to_compare(file.arguments),
            tensors=digest_of_tensors(file),
            new_ids=os.urandom(2 * ID_NBYTES),
            run_id=b"" if identity is None else identity.run_id,
            world_id=b"" if identity is None else identity.world_id,
            checkpoints=tuple((one.incarnation, one.step) for one in stored),
            incarnation=0 if reader is None else reader.commit_log().incarnation,
            is_damaged=reader is not None and not stored and bool(reader.commit_log().records),
            stage=0 if file.arguments.layout is None else file.arguments.layout.stage,
            has_parts=has_parts(file, reader, stored),
        )
        reports = [Report.unpack(data) for data in self.meeting.exchange("reports", report.pack())]
        self._directory_ids = [one.directory_id for one in reports]
        self._save_options = file.arguments.save_options
        return reports

    def _divide(self, file: PoolFile) -> None:
        """Decide what this rank writes. All ranks call this, with the tensors from which they go on. (With a layout
        nothing is divided, but the ranks compare the tensors that have no rule.)"""
        options = file.arguments.save_options
        # With gradient records, a rank replays the updates of its local tensors, and needs all their rows in its pool.
        divides = options.split and options.gradients is None
        if (divides or file.arguments.layout) and self.group.world_size > 1:
            entries = file.predicted_entries().values()
            file.capture.use_shares(shares_of(file.capture, entries, self.group, self.meeting, self._directory_ids))

    def _create(self, file: PoolFile, pipeline: Pipeline, start: Start) -> None:
        pipeline.pool.group = self._identity(file, start.run_id, start.world_id)
        self._claim_tiers(file, start, None, None)
        file.create_at_once(pipeline)

    def _identity(self, file: PoolFile, run_id: bytes, world_id: bytes) -> GroupIdentity:
        mesh_shape, coordinate = mesh_of(file.capture.tensors(), file.arguments.layout)
        return GroupIdentity(
            run_id=run_id,
            world_id=world_id,
            rank=self.group.rank,
            world_size=self.group.world_size,
            mesh_shape=mesh_shape,
            coordinate=coordinate,
        )

    def _restore(
        self, file: PoolFile, reader: PoolReader, stored: Stored, reports: list[Report], start: Start
    ) -> Restored:
        """Restore the chosen checkpoint. ``reader``: of this rank's pool; if that is lost, of its source's pool."""
        restore = file.live_restore(reader)
        with restore.poisons_on_error():
            return self._restore_and_vote(restore, stored, reports, start)

    def _adopt(
        self, file: PoolFile, pipeline: Pipeline, reader: PoolReader, stored: Stored, restored: Restored
    ) -> Resumed:
        """Adopt the checkpoint that was restored. ``reader``, ``stored``: of this rank's pool."""
        contents, recorded = parse(restored.chosen), reader.next_batches(restored.chosen.record)
        self._adoption = Adoption(restored.checkpoint_id, restored.incarnation)
        self._ids = {one.record.payload_generation: name for name, many in stored.items() for one in many}
        file.capture.claim = contents.claim
        self._claim_tiers(file, restored.start, contents, restored.chosen.record)
        without_reason = replace(contents, not_exact="")  # the warning below gives it, once for all ranks
        file.adopt(pipeline, reader, without_reason, restored.chosen.record, incarnation=restored.incarnation)
        resumed = Resumed.from_contents(contents, recorded)
        resumed.done = restored.is_done
        resumed.not_exact = restored.reason
        if resumed.not_exact and self.group.rank in restored.warned_ranks:
            log.warning(
                "lightck: %s. So the continuation of step %d is not bit-identical%s",
                resumed.not_exact,
                resumed.step,
                restored.remark,
            )
        return resumed

    def _claim_tiers(
        self, file: PoolFile, start: Start, contents: Contents | None, record: CommitRecord | None
    ) -> None:
        """Claim the tiers, before anything in a pool is changed. The arguments are those of ``TiersOfGroup.claim``."""
        if self.tiers is not None:
            pool = file.path if len(set(self._directory_ids)) == 1 else ""
            self.tiers.claim(file.capture, start.run_id, pool, contents, record)

    def _restore_and_vote(self, restore: LiveRestore, stored: Stored, reports: list[Report], start: Start) -> Restored:
        """Restore the chosen checkpoint. If a rank cannot restore it, restore the next older common one, and so on."""
        unrestorable: dict[CheckpointId, str] = {}
        while True:
            checkpoint_id = start.adopted
            assert checkpoint_id is not None, "resume=True, so a checkpoint is chosen or an error is raised"
            remark = self._compare_replicated_state(stored, start) if start.sources else ""
            chosen, problem, differing = restore_one_of(
                restore, checkpoint_id, stored.get(checkpoint_id, []), self.group
            )
            contents = None if chosen is None else parse(chosen)
            # The checkpoint of a source may itself be a copy of that of a third rank. For this rank the source counts.
            copied_from = start.sources.get(self.group.rank, None if contents is None else contents.copied_from)
            from_world = None if contents is None else contents.from_world
            # A vote: why this rank cannot restore the checkpoint ("": it can), whether the training is done there, the
            # rank from which the checkpoint was copied, the size of the world from which it was loaded, why this rank's
            # part is not exact, and the tensors in which this rank gets other rows than it held.
            not_exact = "" if contents is None else contents.not_exact
            own = [problem, contents is not None and contents.done, copied_from, from_world, not_exact, differing]
            votes = [msgpack.unpackb(one) for one in self.meeting.exchange("votes", msgpack.packb(own))]
            failed = [rank for rank, (text, *_) in enumerate(votes) if text]
            if not failed:
                assert chosen is not None, "this rank has voted for it"
                replaced = {rank: source for rank, (_, _, source, *_) in enumerate(votes) if source is not None}
                reasons = [describe_replaced(replaced), describe_other_rows([one[-1] for one in votes])]
                reasons.append(describe_not_exact([one[-2] for one in votes]))
                if from_world is not None and contents is not None:
                    reasons.append(describe_from_world(from_world, self.group.world_size))
                    reasons.append(describe_averaged(contents.averaged_names))
                is_done = all(done for _, done, *_ in votes)
                reason, warned = "; ".join(filter(None, reasons)), (0, *replaced)
                return Restored(checkpoint_id, start, chosen, is_done, reason, warned, remark)
            why = f"{self.meeting.name_of(failed[0])} cannot restore it: {votes[failed[0]][0]}"
            log.warning(
                "lightck: no rank uses the checkpoint of step %d, and an older one is tried: %s",
                checkpoint_id.step,
                why,
            )
            unrestorable[checkpoint_id] = why
            start = decide(reports, resume=True, overwrite=False, unrestorable=unrestorable)

    # -- a rank whose pool is lost -----------------------------------------------------------------------

    def _refuse_moved(self, file: PoolFile, reports: list[Report]) -> None:
        """Raise ``RankError`` if a rank has no pool in its directory, and the directory of another host has it. Then
        the pool is not lost, and the training is not new."""
        missing = ranks_without_pool(reports)
        if not missing or len(set(self._directory_ids)) == 1:
            return
        own, directory = self._directory_ids[self.group.rank], os.path.dirname(file.path)
        found = [
            rank
            for rank in missing
            if self._directory_ids[rank] != own and has_checkpoints_of(directory, rank, self.group.world_size)
        ]
        for holder, data in enumerate(self.meeting.exchange("moved pools", msgpack.packb(found))):
            for rank in msgpack.unpackb(data):
                raise RankError(
                    f"{capitalized(self.meeting.name_of(rank))} has no pool in its directory "
                    f"{reports[rank].directory!r}, and the directory {reports[holder].directory!r} of "
                    f"{self.meeting.name_of(holder)} has the pool of rank {rank}. Nothing was changed. Start the ranks "
                    "on the same hosts in the same order as before, or copy each pool to the host on which its rank "
                    "runs now; attach(..., overwrite=True) on all ranks discards all pools and starts afresh."
                )

    def _compare_replicated_state(self, stored: Stored, start: Start) -> str:
        """Raise ``RankError`` if the ranks whose pools are left differ in parameters or optimizer state: then none of
        these pools can replace a lost one. Returns a remark for the warning if only one pool is left, so that nothing
        can be compared. ``stored``: of this rank's pool, if that is left."""
        assert start.adopted is not None, "a checkpoint is chosen"
        holders = [rank for rank in range(self.group.world_size) if rank not in start.sources]
        lines = replicated_lines(stored[start.adopted][0]) if self.group.rank in holders else []
        digests = self.meeting.exchange("digests", digest_of_lines(lines).encode())
        first = holders[0]
        other = next((rank for rank in holders if digests[rank] != digests[first]), None)
        if other is None:
            alone = (
                f". Only the pool of rank {first} is left, so lightck could not check that all ranks had the same "
                "parameters and optimizer state"
            )
            return alone if len(holders) == 1 else ""
        one, two = lines_of(self.meeting, first, other, "tensors", lines)
        names = sorted({line.rpartition(" ")[0] for line in one ^ two})
        lost = min(start.sources)
        raise RankError(
            f"The pool of {self.meeting.name_of(lost)} is lost, and the pool of another rank cannot replace "
            f"it, because the ranks have different states: {self.meeting.name_of(first)} and "
            f"{self.meeting.name_of(other)} differ in {listed(names, 3)}. Nothing was changed. Put that pool "
            "back; attach(..., overwrite=True) on all ranks discards all pools and starts afresh."
        )

    def _copy_into_own_pool(
        self, file: PoolFile, pipeline: Pipeline, source: PoolReader, restored: Restored, source_rank: int
    ) -> PoolReader:
        """Make a new pool of this rank with a copy of the checkpoint that was restored, and open it. ``source``: the
        pool from which it was restored, which is closed."""
        start = restored.start
        pipeline.pool.group = self._identity(file, start.run_id, start.world_id)
        with closing(source):
            copy_into_new_pool(
                pipeline,
                restored.chosen,
                restored.checkpoint_id,
                source.entries,
                n_slots=len(source.superblock.slots),
                expected_state_nbytes=file.capture.expected_state_nbytes,
                changed_state=state_of_lost_rank(
                    restored.chosen,
                    source_rank,
                    key_of_rank(start.run_id, restored.checkpoint_id.step, self.group.rank),
                ),
            )
        reader = file.existing()
        assert reader is not None, "it was made just now"
        return reader

    # -- the group begins --------------------------------------------------------------------------------

    def join(self, file: PoolFile, pipeline: Pipeline, holds: Holds, check: NonfiniteCheck | None) -> None:
        """Open the pools of the other ranks on this host, and add the commit rule of the group to the pipeline.
        ``holds``, ``check``: of this session."""
        writer, self._pool_path = pipeline.pool.writer, file.path
        assert writer is not None, "a rank's pool exists from attach on"
        own = msgpack.packb([file.path, writer.superblock.uuid])
        neighbours: list[Neighbour] = []
        must_sync = pipeline.durability.medium_kind != MEDIUM_CACHE
        try:
            for rank, (path, uuid) in enumerate(map(msgpack.unpackb, self.meeting.exchange("pools", own))):
                if rank != self.group.rank and self._directory_ids[rank] == self._directory_ids[self.group.rank]:
                    neighbours.append(
                        Neighbour(
                            rank,
                            open_pool(path, gradients=True),
                            self._adoption,
                            must_sync=must_sync,
                            reads_checkpoints=bool(file.capture.shares.cuts),
                        )
                    )
                    self._check_neighbour(neighbours[-1], uuid)
        except BaseException:
            for neighbour in neighbours:
                neighbour.close()
            raise
        self.commit_rule = GroupRule(
            neighbours,
            Knowledge.at_start(self._adoption),
            self._ids,
            holds,
            timeout=self.meeting.timeout,
            name_of=self.meeting.name_of,
        )
        pipeline.decisions.add_group(self.commit_rule)
        pipeline.events.add(self.commit_rule)
        if check is not None and self.group.world_size > 1:
            paused = PausedRanks(self.group.connect(), self.meeting.key, self.group.rank, self.group.world_size)
            self.commit_rule.paused_ranks, check.on_refused = paused, paused.pause
            check.reason_of_others = lambda: paused.reason
            pipeline.events.add(paused)

    def agreed_cadence(
        self, interval: object, pipeline: Pipeline, resumed: Resumed | None, meter: Meter
    ) -> Cadence | None:
        """Return the cadence that all ranks share. None if the interval is fixed, or there is one rank only."""
        if isinstance(interval, int) or self.group.world_size == 1:
            return None
        first_step = 1 + (0 if resumed is None else resumed.step)
        auto = interval if isinstance(interval, Auto) else Auto()
        self._cadence = AgreedCadence(auto, first_step, self.group.rank == 0, meter, self.meeting.timeout)
        pipeline.events.add(self._cadence)
        return self._cadence

    def membership(self) -> Membership:
        assert self.commit_rule is not None, "join was called"
        numbers, group, key = itertools.count(), self.group, self.meeting.key

        def agree_on_end(requested: Callable[[int], None]) -> EndAgreement:
            number = next(numbers)  # one for each agreement, so that no key of an earlier one is used again

            def own_key(what: str, rank: int) -> str:
                return key(f"{what}-{number}", rank)

            return EndAgreement(group.connect(), own_key, group.rank, group.world_size, requested)

        return Membership(group.rank, group.world_size, self.commit_rule, agree_on_end)

    def _check_neighbour(self, neighbour: Neighbour, uuid: bytes) -> None:
        """Raise ``RankError`` if this is not the pool that the other rank has opened. ``uuid``: that of the pool that
        it has opened."""
        if neighbour.uuid != uuid:
            raise RankError(
                f"The pool of {self.meeting.name_of(neighbour.rank)} was replaced while the ranks attached. Is "
                "a second job using the directory? End it, and start again."
            )

    def begin(self) -> None:
        """Wait until each rank has adopted the chosen checkpoint, or, in a new training, has committed checkpoint 0.
        Then begin what runs while training goes on (exchange with other hosts, peer copies, tiers, the agreed
        interval), and remove the pools of other worlds and old peer copies."""
        self.meeting.exchange("readiness", b"")
        assert self.commit_rule is not None, "join was called"
        first_common = self._adoption.adopted or CheckpointId(self._adoption.incarnation, 0)
        if self._adoption.adopted is None:
            self.commit_rule.knowledge = replace(self.commit_rule.knowledge, common=first_common)
        if len(set(self._directory_ids)) > 1:
            own = PoolView.of([first_common])
            self.commit_rule.follow(
                Publication(self.group.store, self.meeting.key, self.group.rank, self.group.world_size, own)
            )
        assert self._save_options is not None, "the reports were exchanged"
        directory = os.path.dirname(self._pool_path)
        copies = PeerCopies(directory, self._pool_path, self.group, self.meeting)
        if self._hosts_of_copies is not None:
            copies.begin(self.commit_rule, first_common, self._hosts_of_copies, self._save_options)
        if self._other_worlds is not None:
            self._other_worlds.remove()
            self.meeting.exchange("removal of other pools", b"")
        copies.remove_old(Hosts.of(self._directory_ids))
        if self.tiers is not None:
            self.tiers.begin(self._save_options.fixed_interval)
        if self._cadence is not None:
            self._cadence.begin(self.group, self.meeting)
