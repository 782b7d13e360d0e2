"""What to do about the pool's file: it is restored, gone on from, refused, discarded, or laid out anew."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field

from lightck.errors import CheckpointExistsError, LateError, NotAPoolError, PoolError, PoolNotFoundError, SessionError
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.commit_log import candidates
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.lock import PoolLock
from lightck.restore.changed_options import set_flags
from lightck.restore.contents import Contents
from lightck.restore.recover import erased_log_error, parse, restore_newest
from lightck.restore.resume import RestoredFrom, Resumed, forget, restored_from, warn_differences
from lightck.session.arguments import Arguments
from lightck.session.capture import Capture
from lightck.session.discover import Found
from lightck.state.inventory import entry_of
from lightck.state.predict import predict
from lightck.tiers.keep import refuse_unkept

log = logging.getLogger("lightck")


@dataclass(slots=True)
class PoolFile:
    """What to do about the pool's file."""

    said: Arguments
    path: str
    backend: Backend
    found: Found
    capture: Capture
    entries: dict[str, Entry] = field(init=False)
    """What a version would hold now: everything in it can be stored."""

    def __post_init__(self) -> None:
        self.entries = {live.name: entry_of(live) for live in self.capture.expected_tensors()}
        if self.said.how.keep is not None:
            refuse_unkept(self.said.how.keep, self.entries.values())
        self.capture.model.refuse_hidden_state()
        self.capture.note_built()
        self.capture.persistent.follow(self.found.persistent)

    def lock(self) -> PoolLock:
        """Its lock. What lies there and is no pool is refused first: nothing is made beside somebody else's file."""
        if os.path.lexists(self.path) and not self.backend.recognises(self.path):
            reader = self._existing(write=False)
            if reader is not None:
                reader.close()
        return PoolLock(self.path)

    def open(self, pipeline: Pipeline) -> Resumed | None:
        """Restore, adopt, or make the pool. None for a fresh start."""
        reader = self._existing()
        if reader is None:
            self._create(pipeline)
            return None
        try:
            checkpoint = self._checkpoint(reader)
        except BaseException:
            reader.close()
            raise
        if checkpoint is None:
            reader.close()
            self._create(pipeline)
            return None
        contents, record = checkpoint
        recorded = reader.next_batches(record)
        pipeline.pool.open(reader).adopt(record)
        pipeline.adopted(
            contents.step, contents.at_boundary, self.said.how.slots, record.payload_generation, contents.stale_after
        )
        self.capture.resizable.update(contents.resizable)
        set_flags(contents, self.capture.model)
        warn_differences(contents)
        forget(self.said.model)
        return Resumed.from_contents(contents, recorded)

    def _existing(self, *, write: bool = True) -> PoolReader | None:
        """The pool that lies there, if it may matter: None where there is none or it is to be discarded."""
        try:
            reader = open_pool(self.path, self.backend.name, write=write)
        except PoolNotFoundError:
            return None
        except PoolError as err:
            if not self.said.overwrite:
                raise
            if err.in_the_way if isinstance(err, NotAPoolError) else self.backend.recognises(self.path):
                return None
            raise
        if self.said.overwrite:
            reader.close()
            return None
        return reader

    def _checkpoint(self, reader: PoolReader) -> tuple[Contents, CommitRecord] | None:
        """The version to go on from; None where the pool never held one."""
        if reader.commit_log().is_empty:
            lost = erased_log_error(reader)
            if lost is not None:
                raise lost
            return None
        known = restored_from(self.said.model, self.path, reader.superblock.uuid)
        if known is not None:
            return self._go_on_from(reader, known)
        if not self.said.resume:
            records = candidates(reader.commit_log())
            held = f"step {records[0].step}" if records else "versions that cannot be read"
            raise CheckpointExistsError(
                f"The pool {self.path!r} holds {held}. It is neither loaded nor overwritten unasked. Say "
                "attach(..., resume=True) to go on from it, restore it yourself with lightck.recover(path, model, "
                "...), or say overwrite=True to discard it."
            )
        self._check_optimizer_in_time(reader)
        state = {**self.found.state, **dict.fromkeys(self.said.declined)}
        checkpoint = restore_newest(
            reader, None, self.said.model, list(self.found.optimizers), state, strict=True, complete=True
        )
        for rejected in checkpoint.rejected:
            log.warning("lightck: passed over %s", rejected)
        return checkpoint.contents, checkpoint.record

    def _go_on_from(self, reader: PoolReader, known: RestoredFrom) -> tuple[Contents, CommitRecord]:
        missing = [what for what in known.missing if what not in {f"state {name!r}" for name in self.said.declined}]
        if missing:
            raise SessionError(
                f"This model was restored from step {known.contents.step} of {self.path!r}, but "
                f"{', '.join(missing)} of that version was restored nowhere. Going on would lose it. Pass "
                "it to recover() or restore() too, use attach(..., resume=True), or train into another pool; "
                "overwrite=True discards what this one holds."
            )
        try:
            reader.checkpoint(known.record)
        except DamagedError as err:
            raise CheckpointExistsError(
                f"Step {known.contents.step}, which this model was restored from, is no longer in {self.path!r}: "
                f"{err}. The pool was trained on since. Use attach(..., resume=True) to go on from its newest step, or "
                "overwrite=True to discard it."
            ) from err
        self.capture.built.is_from(known.contents.built)
        return known.contents, known.record

    def _check_optimizer_in_time(self, reader: PoolReader) -> None:
        if self.found.optimizers:
            return
        for stored in reader.checkpoints():
            if isinstance(stored, StoredCheckpoint):
                try:
                    names = [o.class_name for o in parse(stored).optimizers]
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
        """Lay the pool out now, so that a full medium is an error here; later where the state cannot be foreseen."""
        forget(self.said.model)  # what it was restored from elsewhere: it trains on now
        entries = self._foreseen()
        if entries is not None:
            pipeline.pool.create(list(entries.values()), self.capture.expected_state_nbytes)
        elif self.said.overwrite:
            self.backend.discard(self.path)  # or a crash before the first version would bring it back

    def _foreseen(self) -> dict[str, Entry] | None:
        entries = dict(self.entries)
        if not self.capture.optimizers:
            log.info("lightck: no optimizer is alive yet: the pool is laid out at the first boundary")
            return None
        for view in self.capture.optimizers:
            foreseen = predict(view)
            if foreseen is None:
                return None
            for entry in foreseen:
                entries.setdefault(entry.name, entry)
        return entries
