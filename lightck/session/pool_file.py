"""Open the pool at attach: restore it, continue from it, refuse it, discard it, or create it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from lightck.errors import (
    CheckpointExistsError,
    LateError,
    NoSpaceError,
    NotAPoolError,
    PoolError,
    PoolNotFoundError,
    SessionError,
    UnsupportedError,
    listed,
)
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.commit_log import candidates
from lightck.pool.format.layout import Entry
from lightck.pool.format.saved_by import RUN_ID_NBYTES
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.gradient_log import tolerant_base_every
from lightck.pool.reader import PoolReader, RejectedCheckpoint, open_pool
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.failures import undo_on_error
from lightck.pool.storage.lock import PoolLock
from lightck.restore.changed_options import set_requires_grad
from lightck.restore.contents import Contents
from lightck.restore.recover import LiveRestore, erased_log_error, refuse_part, restore_newest
from lightck.restore.replayed import ReplayedCheckpoint
from lightck.restore.resume import RestoredFrom, Resumed, forget_restored_from, restored_from, warn_differences
from lightck.restore.usable import checkpoints_of, parse_state, stored_checkpoint
from lightck.session.arguments import Arguments
from lightck.session.base_every import base_every_given
from lightck.session.capture import Capture
from lightck.session.discover import Found
from lightck.session.gradient_arguments import n_records, refuse_small_gain, space_advice
from lightck.session.new_kind import write_with_gradient_records
from lightck.state.inventory import entry_of
from lightck.state.parts import refuse_parts
from lightck.state.predict import predict
from lightck.state.rules import with_part_of_param
from lightck.tiers.keep import refuse_unexportable

log = logging.getLogger("lightck")


@dataclass(slots=True)
class PoolFile:
    """Opens or creates the pool of one attach."""

    arguments: Arguments
    path: str
    backend: Backend
    found: Found
    capture: Capture
    is_rank_pool: bool = False
    """Whether the pool belongs to a rank of a group. Such a pool may hold parts of tensors."""
    entries: dict[str, Entry] = field(init=False)
    """Name -> entry of each tensor that a checkpoint would hold now, apart from optimizer state that does not exist
    yet. All these tensors can be stored."""

    before_first_change: Callable[[Contents | None, CommitRecord | None], None] | None = field(init=False, default=None)
    """Called when it is known from which checkpoint the training goes on (None: from none), and before anything in the
    pool is changed."""

    was_restored_by_script: bool = field(init=False, default=False)
    """Whether the script has restored a checkpoint of this pool into the model before attach."""

    restored_incarnation: int = field(init=False, default=0)
    """The incarnation of the checkpoint that ``open`` has restored; read only if ``before_first_change`` is given."""

    _with_state: dict[str, Entry] | None = field(init=False, default=None)
    """``entries`` with the optimizers' state, once it was predicted for a rank's pool."""

    def __post_init__(self) -> None:
        if not self.is_rank_pool:
            self.capture.run_id = new_run_id()  # ``_take_over_ids_of`` replaces it if a training goes on
        lives = list(self.capture.expected_tensors())
        if not self.is_rank_pool:
            refuse_parts(lives)
        self.entries = {live.name: entry_of(live) for live in lives}
        if self.arguments.save_options.exports is not None:
            refuse_unexportable(self.arguments.save_options.exports, self.entries.values())
        self.capture.model.refuse_undeclared_state()
        self.capture.remember_built_buffers()
        self.capture.persistent.follow(self.found.persistent)

    @property
    def _saves_gradients(self) -> bool:
        return self.arguments.save_options.gradients is not None

    def lock(self) -> PoolLock:
        """Take the pool's lock, and return it. If the file at the path is no pool, raise before the lock is taken, so
        that no lock file is made beside that file."""
        if os.path.lexists(self.path) and not self.backend.recognises(self.path):
            reader = self.existing(write=False)
            if reader is not None:
                reader.close()
        return PoolLock(self.path)

    def open(self, pipeline: Pipeline) -> Resumed | None:
        """Continue from the pool's checkpoint, or create the pool. To continue, restore the checkpoint (unless the
        script has restored it into the model already), and adopt it. Returns None for a fresh start."""
        reader = self.existing()
        if reader is None:
            self._begin_anew(pipeline)
            return None
        try:
            if restored_from(self.arguments.model, self.path, reader.superblock.uuid) is not None:
                self.refuse_whole_checkpoints(reader)
            checkpoint = self._restored(reader)
            recorded = None if checkpoint is None else reader.next_batches(checkpoint[1])
            if checkpoint is not None:
                self._take_over_ids_of(checkpoint[0], reader)
                if self.before_first_change is not None:
                    self.before_first_change(*checkpoint)
        except BaseException:
            reader.close()
            raise
        if checkpoint is None:
            reader.close()
            self._begin_anew(pipeline)
            return None
        if self._saves_gradients and not reader.superblock.has_gradients:
            reader, checkpoint = self._with_gradient_records(pipeline, reader, *checkpoint)
        self.adopt(pipeline, reader, *checkpoint)
        return Resumed.from_contents(checkpoint[0], recorded)

    def _with_gradient_records(
        self, pipeline: Pipeline, reader: PoolReader, contents: Contents, record: CommitRecord
    ) -> tuple[PoolReader, tuple[Contents, CommitRecord]]:
        """Write a pool of whole checkpoints anew, as one with gradient records, and open it. ``contents``, ``record``:
        the checkpoint that was restored. Returns the reader of the new pool, and the checkpoint as it lies there."""
        entries = list((self._predicted() or self.entries).values())
        with undo_on_error(reader.close):
            refuse_small_gain(pipeline.pool.kind, {e.name: e for e in (*reader.entries, *entries)}.values())
        state_nbytes = self.capture.expected_state_nbytes
        with self._space_advised(pipeline, entries, state_nbytes):
            write_with_gradient_records(pipeline, reader, record, entries, state_nbytes)
        anew = self.existing()
        assert anew is not None, "it was made just now"
        return anew, (replace(contents, stale_after=None), candidates(anew.commit_log())[0])

    def _begin_anew(self, pipeline: Pipeline) -> None:
        if self.before_first_change is not None:
            self.before_first_change(None, None)
        self._create(pipeline)

    def _take_over_ids_of(self, contents: Contents, reader: PoolReader) -> None:
        """Save further checkpoints under the run id and the claim of the training that has saved this one."""
        self.capture.run_id = contents.run_id or reader.superblock.uuid.hex()
        self.capture.claim = contents.claim

    def adopt(
        self,
        pipeline: Pipeline,
        reader: PoolReader,
        contents: Contents,
        record: CommitRecord,
        *,
        incarnation: int | None = None,
    ) -> None:
        """Continue in this pool from a checkpoint that was restored. ``incarnation``: the incarnation of this session,
        on which the group has agreed (None: the largest in the pool plus 1)."""
        writer = pipeline.pool.open(reader)
        if incarnation is not None:
            writer.incarnation = incarnation
        writer.adopt(record)
        pipeline.adopted(
            contents.step,
            contents.copied_at_boundary,
            self._slots_wanted(reader),
            record.payload_generation,
            contents.stale_after,
        )
        self.capture.resizable.update(contents.resizable)
        set_requires_grad(contents, self.capture.model)
        warn_differences(contents)
        forget_restored_from(self.arguments.model)

    def _slots_wanted(self, reader: PoolReader) -> int | None:
        """Return the number of slots that this pool is to have; None if it keeps its number. In a pool with gradient
        records these are the slots for records."""
        options = self.arguments.save_options
        if options.gradients is not None:
            return options.gradients.log_records
        is_too_small = self.is_rank_pool and len(reader.superblock.slots) < options.replicas.slots_min
        return options.replicas.slots_min if options.slots is None and is_too_small else options.slots

    def n_slots_of_rank(self, source: PoolReader) -> int:
        """Return the number of slots of a new pool of this rank; in a pool with gradient records, of slots for records.
        ``source``: a pool from which it goes on."""
        options = self.arguments.save_options
        if options.gradients is not None:
            return n_records(options.gradients, options.fixed_interval, is_rank_pool=True)
        return options.slots or max(options.replicas.slots_min, len(source.superblock.slots))

    def existing(self, *, write: bool = True) -> PoolReader | None:
        """Open the pool at this path. Returns None if there is no pool, or if the pool is to be discarded."""
        try:
            reader = open_pool(self.path, self.backend.name, write=write, gradients=self._saves_gradients)
        except PoolNotFoundError:
            return None
        except PoolError as err:
            if not self.arguments.overwrite:
                raise
            # overwrite=True discards a pool that cannot be opened, if the backend recognises it as a pool. It never
            # discards a file that is no pool. Contents of a device that are no pool are discarded if the error says so
            # (``discard_helps``).
            may_discard = err.discard_helps if isinstance(err, NotAPoolError) else self.backend.recognises(self.path)
            if may_discard:
                return None
            raise
        if self.arguments.overwrite:
            reader.close()
            return None
        return reader

    def _restored(self, reader: PoolReader) -> tuple[Contents, CommitRecord] | None:
        """Return the checkpoint to continue from, and restore it unless the script has restored it into the model
        already. Returns None if the pool never held a checkpoint."""
        if reader.commit_log().is_empty:
            self.refuse_erased_log(reader)
            return None
        known = restored_from(self.arguments.model, self.path, reader.superblock.uuid)
        self.was_restored_by_script = known is not None
        if known is not None:
            return self._checkpoint_restored_by_script(reader, known)
        if not self.arguments.resume:
            records = candidates(reader.commit_log())
            held = f"step {records[0].step}" if records else "checkpoints that cannot be read"
            raise CheckpointExistsError(
                f"The pool {self.path!r} holds {held}. lightck.attach neither loads nor overwrites a checkpoint "
                "unasked. Pass attach(..., resume=True) to continue from the newest checkpoint, restore it yourself "
                "with lightck.recover(path, model, ...), or pass overwrite=True to discard all checkpoints of the pool."
            )
        refuse_part(reader)
        self._refuse_missing_optimizer(reader)
        checkpoint = restore_newest(
            reader,
            None,
            self.arguments.model,
            list(self.found.optimizers),
            self._state,
            strict=True,
            unused_is_drift=True,
        )
        if self.before_first_change is not None:
            self.restored_incarnation = stored_checkpoint(reader, checkpoint.record).header.incarnation
        for rejected in checkpoint.rejected:
            log.warning("lightck: a newer checkpoint cannot be used, and an older one is restored: %s", rejected)
        return checkpoint.contents, checkpoint.record

    def refuse_whole_checkpoints(self, reader: PoolReader) -> None:
        """Raise ``UnsupportedError`` if the strategy writes gradient records, and the pool has no place for them."""
        if self._saves_gradients and not reader.superblock.has_gradients:
            other = (
                "Or restore its checkpoint with lightck.recover(path, model, optimizer), and attach to another path."
                if self.is_rank_pool
                else "Or leave out lightck.recover(): attach(..., resume=True) restores the checkpoint too, and writes "
                "the pool anew, with that room."
            )
            raise UnsupportedError(
                f"The pool {self.path!r} was made by another strategy, and has no room for gradient records. Go on in "
                f"it with strategy=lightck.FullState(). {other}"
            )

    @property
    def _state(self) -> dict[str, object]:
        """Name -> object to restore; None for what the caller declined."""
        return {**self.found.state, **dict.fromkeys(self.arguments.declined)}

    def live_restore(self, reader: PoolReader) -> LiveRestore:
        """Return what restores checkpoints of ranks into the objects of this attach. ``reader``: of one of the pools
        that hold them."""
        self._refuse_missing_optimizer(reader)
        return LiveRestore(
            self.arguments.model,
            list(self.found.optimizers),
            self._state,
            strict=True,
            unused_is_drift=True,
            of_rank=True,
            layout=self.arguments.layout,
        )

    @staticmethod
    def refuse_erased_log(reader: PoolReader) -> None:
        """Raise ``CorruptPoolError`` if the pool's commit records were erased."""
        lost = erased_log_error(reader)
        if lost is not None:
            raise lost

    def _checkpoint_restored_by_script(self, reader: PoolReader, known: RestoredFrom) -> tuple[Contents, CommitRecord]:
        """Return the checkpoint that the script restored into the model before attach. Raises ``SessionError`` if parts
        of the checkpoint were restored nowhere, and ``CheckpointExistsError`` if the pool no longer holds the
        checkpoint."""
        unused_parts = [
            what for what in known.unused_parts if what not in {f"state {name!r}" for name in self.arguments.declined}
        ]
        if unused_parts:
            raise SessionError(
                f"This model was restored from step {known.contents.step} of {self.path!r}, but "
                f"{', '.join(unused_parts)} of that checkpoint was restored nowhere, and would be lost. Pass what is "
                "missing to recover() or restore() too, use attach(..., resume=True), or train into another pool. "
                "overwrite=True discards what this pool holds."
            )
        try:
            stored = stored_checkpoint(reader, known.record)
            if isinstance(stored, ReplayedCheckpoint):
                stored.find_damaged_bases()
        except DamagedError as err:
            raise CheckpointExistsError(
                f"Step {known.contents.step}, which this model was restored from, is no longer in {self.path!r}: "
                f"{err}. A training has gone on in the pool since. Use attach(..., resume=True) to continue from its "
                "newest step, or overwrite=True to discard it."
            ) from err
        self.capture.built.use_record(known.contents.built)
        return known.contents, known.record

    def _refuse_missing_optimizer(self, reader: PoolReader) -> None:
        """Raise ``LateError`` if no optimizer is followed, and the newest readable checkpoint holds the state of
        one."""
        if self.found.optimizers:
            return
        for stored in checkpoints_of(reader):
            if not isinstance(stored, RejectedCheckpoint):
                try:
                    names = [o.class_name for o in parse_state(stored).optimizers]
                except DamagedError:
                    continue
                if names:
                    raise LateError(
                        f"The pool {self.path!r} holds the state of {', '.join(names)}, and no live optimizer updates "
                        "this model. State is restored at attach. Build the optimizer first, or pass it: "
                        "attach(..., optimizer=opt)."
                    )
                return

    def _create(self, pipeline: Pipeline) -> None:
        """Create the pool now, so that a full medium is an error at attach. If the tensors of a checkpoint cannot be
        predicted, the pipeline creates the pool later."""
        # This training does not continue the pool from which the model was restored.
        forget_restored_from(self.arguments.model)
        entries = self._predicted()
        if entries is not None:
            self._create_for(pipeline, list(entries.values()))
        elif self.arguments.overwrite:
            self.backend.discard(self.path)  # else a crash before the first checkpoint would leave the old pool

    def _create_for(self, pipeline: Pipeline, entries: list[Entry]) -> None:
        state_nbytes = self.capture.expected_state_nbytes
        if self._saves_gradients:
            refuse_small_gain(pipeline.pool.kind, entries)
        with self._space_advised(pipeline, entries, state_nbytes):
            pipeline.pool.create(entries, state_nbytes)

    @contextmanager
    def _space_advised(self, pipeline: Pipeline, entries: list[Entry], state_nbytes: int) -> Iterator[None]:
        """Within this block: if a pool with gradient records does not fit, the error says which one would."""
        try:
            yield
        except NoSpaceError as err:
            options, pool = self.arguments.save_options, pipeline.pool
            if options.gradients is None:
                raise
            base_every = base_every_given(options.gradients) or tolerant_base_every(pool.n_slots)
            advice = space_advice(
                entries,
                state_nbytes,
                pool.kind,
                (base_every, options.gradients.log_records),
                options.fixed_interval,
                self.path,
                in_group=self.is_rank_pool,
            )
            raise NoSpaceError(f"{err} {advice}") from err

    def create_at_once(self, pipeline: Pipeline) -> None:
        """Create the pool of a rank. Raises ``UnsupportedError`` if the tensors of a checkpoint cannot be predicted."""
        forget_restored_from(self.arguments.model)
        self._create_for(pipeline, list(self.predicted_entries().values()))

    def predicted_entries(self) -> dict[str, Entry]:
        """Return the entries of all tensors of a rank's checkpoint, those predicted for the optimizers' state included.
        Raises ``UnsupportedError`` if they cannot be predicted."""
        updates_by_hand = self.found.optimizers_were_passed and not self.found.optimizers
        if self._with_state is None:  # a prediction makes a step of each optimizer on dummy parameters
            self._with_state = dict(self.entries) if updates_by_hand else self._predicted()
        entries = self._with_state
        if entries is None:
            names = listed([view.class_name for view in self.capture.optimizers])
            fact = f"The state of {names} cannot be predicted" if names else "There is no optimizer yet"
            cure = "Use another optimizer of torch.optim" if names else "Build the optimizer before attach"
            raise UnsupportedError(
                f"{fact}, so it is not known before the first update what the pool must hold. In a group of ranks each "
                f"pool is created in attach. {cure}."
            )
        return self.capture.shares.applied_to(entries)

    def _predicted(self) -> dict[str, Entry] | None:
        """Return the entries of all tensors, including those predicted for the optimizers' state. Returns None if that
        state cannot be predicted."""
        entries = dict(self.entries)
        if not self.capture.optimizers:
            log.info("lightck: no optimizer exists yet: the pool is created when the first step closes")
            return None
        for view in self.capture.optimizers:
            predicted = predict(view)
            if predicted is None:
                return None
            for entry in predicted:
                entry = entry if self.capture.layout is None else with_part_of_param(entry, self.entries)
                entries.setdefault(entry.name, entry)
        return entries


def new_run_id() -> str:
    """Return the id of a training that begins."""
    return os.urandom(RUN_ID_NBYTES).hex()
