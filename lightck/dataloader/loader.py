"""``session.loader(dl)``: an iterable over a training loader whose position is part of every checkpoint.

Invariant: after a restore the wrapped loader gives the batches that the interrupted run would have given, and the
global generators draw what they would have drawn. A plain loader is replayed: its iterator is created from the random
state at the beginning of the pass, and the batches given before are fetched and dropped. A loader with ``state_dict``
loads its own state. This module decides no boundary and writes no checkpoint: it reports each ``next()`` to its host.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightck.dataloader.batch import TensorChecksums, checksum_of, differ
from lightck.dataloader.identity import (
    ITERABLE_IN_PROCESS_RISK,
    POSSIBLE_REASONS,
    TAKEN_BEFORE,
    drift_of,
    has_one_pass,
    identity_of,
    is_stateful,
    refuse_unforwarded,
    replay_error,
    replay_risk,
    report_drift,
)
from lightck.dataloader.loader_state import OwnedObjects, OwnGenerators, States
from lightck.dataloader.moved_position import adapted, batches_before
from lightck.dataloader.passes import LoaderHost, Pass, PassIterator, tick
from lightck.dataloader.position import PassState, Position, RngSnapshot, corrupt, same_rng
from lightck.dataloader.positions import ReusedBatches
from lightck.dataloader.preview import Previews, StartRead, is_lightning_probe, warn_lightning_counts
from lightck.dataloader.replay import SKIP_NOTE, PassTooShort, ReplayReport, iterate_restored, replay
from lightck.dataloader.sampler import SamplerWatch, watch_sampler
from lightck.dataloader.sharing import sharing_of
from lightck.dataloader.worker_streams import (
    warn_if_stateful_workers_begin_anew,
    warn_that_persistent_workers_begin_anew,
)
from lightck.dataloader.wrapped_loader import (
    inner_dataloader,
    is_accelerated_stateful,
    is_loader_of_torch,
    may_draw_here,
    may_prefetch,
    pass_number_of,
    reset_first_pass,
    set_pass_number,
)
from lightck.errors import CorruptPoolError, DriftError, SessionError

log = logging.getLogger("lightck")


class SessionLoader:
    """An iterable over ``dl`` that reports each ``next()`` to the session, and continues from a checkpoint's position.

    ::

        for epoch in range(loader.epoch, epochs):
            for i, batch in enumerate(loader, loader.start):
                ...

    A new ``iter()`` ends the pass before it. The restored position is used up once an update is made in the restored
    pass, or the restored pass ends. A batch that the script takes before the loop does not use it up.
    """

    loader: Any
    """The wrapped object."""
    name: str
    """The name under which the position is saved."""
    restored_epoch = 0
    """`epoch` as the restored checkpoint had it."""
    mid_batch_reported = position_was_read = has_drifted = False
    """Whether `MidBatch` has warned; whether `epoch` or `start` was read; whether the loader was built differently."""
    in_eval = False
    """Whether the model is in eval mode, set by the host at each ``next()``."""
    training_fetch_tick = 0
    """The `tick` of the last ``next()`` of any loader while the model was in training mode."""
    _prefetches = False
    """Whether the loader may fetch ahead of the batches that it gives."""
    is_begun = False
    """Whether the loader was iterated in this process."""
    _had_training_pass = False
    """Whether a pass that has ended in this process was a pass of the training loop."""
    _n_given_before = 0
    """Number of batches that earlier passes gave. Of a preview only the batches after the resume count."""
    _end_tick = 0
    """The `tick` at which the last pass ended."""
    _watch: SamplerWatch | None = None
    _ends_at_once = False
    """Whether the restored pass gives nothing more: it had no batch left, and the loader differs from the saved one."""
    _start_read: StartRead | None = None
    """The last reading of ``start``; None before the first one."""

    def __init__(
        self,
        dl: Iterable[object],
        host: LoaderHost,
        name: str,
        restored: Mapping[str, object] | None = None,
        rng_at_iter: bool = False,
        is_anew: bool = False,
        objects: Mapping[str, object] | None = None,
        skips: bool = False,
    ) -> None:
        """Wrap ``dl``.

        Args:
            dl: a DataLoader, a loader with ``state_dict`` and ``load_state_dict``, or any other iterable.
            host: the session.
            name: the name of the position, also for messages.
            restored: what `position` returned for the restored checkpoint. Untrusted.
            rng_at_iter: True if no loader was in a pass when the checkpoint closed. Then the first ``iter()`` applies
                the restored random state; otherwise the first ``next()`` of a restored pass does.
            is_anew: the user passed ``anew=True``.
            objects: the objects of ``state=`` by name. Passes change the state of those that are part of ``dl``.
            skips: a resume in mid-pass fetches only the last batch that was given.

        Raises:
            CorruptPoolError: ``restored`` is damaged.
            DriftError: the position lies in mid-pass of a loader that was built differently. (The length is compared at
                the first ``iter()``, because a sampler's ``set_epoch`` comes before that.)
        """
        self.loader, self._host, self.name = dl, host, name
        self._stateful = is_stateful(dl)
        self._is_accelerated_stateful = is_accelerated_stateful(dl)  # its resume: see wrapped_loader.py
        self._skips = skips
        self._owned = OwnedObjects(dl, name, {} if self._stateful else objects or {}, restored is not None)
        self._generators = OwnGenerators(dl)
        self._identity = identity_of(dl, self._stateful)
        self._dataloader = inner_dataloader(dl)
        workers = self._dataloader.num_workers if self._dataloader is not None else 0
        self._may_draw_here = workers == 0  # whether a next() may draw random numbers for a batch in this process
        self._persistent = workers > 0 and self._dataloader is not None and self._dataloader.persistent_workers
        self._makes_checksums = not self._stateful
        self._tensor_checksums: TensorChecksums = {}  # of the last batch
        self._risk = replay_risk(dl)
        self._epoch = 0
        self._pass: Pass | None = None
        self._has_one_pass = has_one_pass(dl)
        self._worker_rng: RngSnapshot | None = None  # from which persistent workers were started
        self._rng_at_iter = rng_at_iter
        self._generators_at_next: States | None = None  # the first ``next()`` restores them
        self._updates_at_start = host.updates
        self._previews = Previews(host.updates)
        self.reused = ReusedBatches(name)
        self._pending = None if restored is None else self._read_restored(dict(restored))
        """The restored position, until it is used up."""
        self._restored_position = self._pending
        self.is_anew = is_anew
        if self._risk is not None:
            self._warn_risk(self._risk, logging.INFO if self._risk is ITERABLE_IN_PROCESS_RISK else logging.WARNING)

    @property
    def has_trained_here(self) -> bool:
        """Whether an earlier pass was a pass of the training loop, or this process made updates in the present one."""
        pass_ = self._pass
        return self._had_training_pass or (pass_ is not None and pass_.has_updates_here(self._host.updates))

    @property
    def is_training(self) -> bool:
        """Whether an earlier pass or the present one is of the training loop (`Pass.is_of_training_loop`), so that each
        ``next()`` belongs to that loop. An evaluation that left the model in eval mode does not change this."""
        return self._had_training_pass or (self._pass is not None and self._is_of_training_loop(self._pass))

    def _is_of_training_loop(self, pass_: Pass) -> bool:
        return pass_.is_of_training_loop(self._host.updates, self.training_fetch_tick)

    @property
    def continues_restored_pass(self) -> bool:
        """Whether this loader continues a pass in which an earlier run made updates."""
        position = self._restored_position
        return self.is_begun and position is not None and position.in_pass and position.trained

    @property
    def trains_from_the_beginning(self) -> bool:
        """Whether the loop trains on batches of a pass that began in this process."""
        pass_ = self._pass
        return pass_ is not None and not pass_.restored and pass_.state.given > 0 and not pass_.evaluates

    @property
    def current_pass(self) -> Pass | None:
        """The pass whose iterator the loop holds now, or None."""
        return self._pass if self._pass is not None and not self._pass.was_left else None

    @property
    def epoch(self) -> int:
        """Number of finished passes. A pass left by ``break`` after an update counts when the next pass begins."""
        self.position_was_read = True
        self._drop_used_position()
        return self._epoch

    @property
    def start(self) -> int:
        """Number of batches that the next ``iter()`` skips: 0 unless a checkpoint was restored in mid-pass. It stays at
        this number until an update is made in the restored pass, or the loop leaves that pass. If another number of
        ranks began the pass, the samples that they got are counted in batches of the present ranks."""
        self.position_was_read = True
        self._drop_used_position()
        pending = self._pending
        skipped = pending.state.given + batches_before(pending, self.loader) if pending is not None else 0
        self._start_read = StartRead(skipped, self._pass)
        return skipped

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Forward other attributes to the wrapped loader: ``dataset``, ``sampler``, ``batch_size``, ``set_epoch``."""
        refuse_unforwarded(self, name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if is_lightning_probe(sys._getframe(1)):
            warn_lightning_counts(self.name, self._pending)
            return iter(())
        self._leave_pass()
        position = self._pending
        if position is not None and position.in_pass:
            return self._resume(position)
        return self._begin(position)

    def position(self) -> dict[str, object]:
        """Return everything that a checkpoint saves about this loader: plain data for ``values.pack``. Pack the result
        before the next batch is fetched, because a stateful loader may change objects in it."""
        self._drop_used_position()
        if self._pending is not None:
            return self._pending.to_value()
        pass_, updates, epoch = self._pass, self._host.updates, self._epoch
        previews, in_loop = self._previews.with_pass(pass_)
        if pass_ is not None and pass_.is_over(updates):
            epoch += int(pass_.restored or pass_.has_updates(updates))
            pass_ = None
        if pass_ is None:
            state = PassState(inner=self._own_state(), pass_number=pass_number_of(self.loader))
        else:
            state = pass_.state if self._is_accelerated_stateful else replace(pass_.state, inner=self._own_state())
        return Position(
            kind="stateful" if self._stateful else "plain",
            epoch=epoch,
            in_pass=pass_ is not None,
            trained=pass_ is not None and pass_.has_updates(updates),
            identity=self._identity,
            generators=(self._generators if pass_ is not None else self._generators.found_again()).states(),
            worker_rng=self._worker_rng,
            state=state,
            previews=previews,
            previews_in_loop=in_loop,
            used_again=self.reused.were_used_again,
            sharing=None if pass_ is None else pass_.sharing,
        ).to_value()

    def _own_state(self) -> object:
        has_one = (self._stateful or self._is_accelerated_stateful) and self.is_begun
        return self.loader.state_dict() if has_one else None

    def _warn_risk(self, risk: str, level: int = logging.WARNING) -> None:
        self._risk = risk
        text = "lightck: loader %r: a resume in mid-pass may not be exact, or may be refused: %s"
        log.log(level, text, self.name, risk)

    # -- restoring

    def _read_restored(self, value: dict[str, object]) -> Position:
        kind = "stateful" if self._stateful else "plain"
        position = adapted(Position.from_value(value), self.loader, kind, self._generators.states())
        self._epoch = self.restored_epoch = position.epoch
        self._previews.restored(position)
        if position.used_again:
            self.reused.warn_restored()
        self._worker_rng = position.worker_rng if self._persistent else None
        drift = drift_of(position, kind, len(self._generators), self._identity)
        self.has_drifted = bool(drift)
        if drift:
            report_drift(self.name, drift, position)
            if position.in_pass:
                self._ends_at_once, self._worker_rng = True, None
                return position
        if position.kind != kind or len(position.generators) != len(self._generators):
            state = replace(position.state, inner=None)
            position = replace(position, kind=kind, generators=self._generators.states(), worker_rng=None, state=state)
            self._worker_rng = None
        try:
            for states in (position.generators, *(snapshot.generators for snapshot in position.snapshots())):
                self._generators.try_states(states)
        except (RuntimeError, TypeError, CorruptPoolError) as error:
            raise corrupt(f"a generator refuses its state ({error})") from error
        self._generators.set_states(position.generators)
        if position.in_pass:
            self._generators_at_next = position.generators
        set_pass_number(self.loader, position.state.pass_number)
        return position

    def _compare_length(self, position: Position) -> None:
        """Report the length if it differs from the saved one. It is compared when the pass continues, because
        ``set_epoch`` may change it until then."""
        self._identity = identity_of(self.loader, self._stateful)
        was, now = position.identity.get("length"), self._identity.get("length")
        if was != now and not self._ends_at_once and "length" in position.identity:
            report_drift(self.name, {"length": (was, now)}, position)
            self._ends_at_once = True

    def _drop_used_position(self) -> None:
        """Drop the restored position once it is used up: the loop has left a pass that was no preview; or the saved
        pass had updates, and the present pass has one; or the saved pass had none, and an update was made since the
        restore or the present pass evaluates. Without a present pass nothing is dropped. But after an update, a saved
        pass without updates is counted as finished."""
        position, pass_ = self._pending, self._pass
        if position is None:
            return
        is_later = self._host.updates > self._updates_at_start
        if pass_ is not None:
            had_updates = position.in_pass and position.trained
            is_used = pass_.has_updates_here(self._host.updates) if had_updates else is_later or pass_.evaluates
            if is_used or (pass_.was_left and not self.is_preview(pass_)):
                self._pending = None
        elif is_later and position.in_pass and not position.trained:
            self._pending = position.between_passes()
            self._epoch += 1
            self._generators_at_next = None

    def is_preview(self, pass_: Pass) -> bool:
        """Whether this pass, which began from the restored position, was a preview (see ``preview.py``)."""
        is_last = pass_ is self._pass and self._pending is not None
        return pass_.was_preview or (is_last and self._previews.is_preview(pass_, self._pending))  # type: ignore[arg-type]

    def _leave_pass(self) -> None:
        """End the last pass before a new one begins. If it was a preview, the new pass gets the restored position."""
        if self._pass is not None:
            self._pass.leave(self._host.updates)
        self._drop_used_position()
        if self._pending is None and self._start_read is not None:
            self._start_read.check_new_pass(self.name, self._pass)
        if self._pending is not None and self._pass is not None:
            self._pass.was_preview = True
            self._n_given_before += self._pass.fetched_here
            self._previews.left(self._pass)
            self._return_to(self._pending)

    def _return_to(self, position: Position) -> None:
        self._pass, self._pending, self._epoch = None, position, position.epoch
        if not self._ends_at_once:
            self._worker_rng = position.worker_rng if self._persistent else None
            self._generators.set_states(position.generators)
        set_pass_number(self.loader, position.state.pass_number)
        self._owned.put_back()
        if self._persistent and self._dataloader is not None:
            self._dataloader._iterator = None  # its workers' random streams have advanced

    def put_back(self) -> None:
        """Return to the restored position if the loop has left a pass since the restore. To be called if a ``next()``
        closed the restored checkpoint. Then the saved positions include the passes that the script made before its
        loop, and this run has just made these passes again."""
        position, pass_ = self._restored_position, self._pass
        if position is None or pass_ is None or not pass_.was_left or self._host.updates > self._updates_at_start:
            return
        self._n_given_before += pass_.fetched_here
        self._previews.left(pass_)
        self._return_to(position)

    def _apply_restored_rng(self, pass_: Pass, generators: States | None) -> None:
        state = self._host.take_restored_rng(self, pass_)
        if state is not None:
            state.restore()
            if generators is not None:
                self._generators.set_states(generators)

    # -- beginning a pass

    def _begin(self, position: Position | None) -> PassIterator:
        self._count_left_pass()
        pass_ = self._new_pass()
        if self._rng_at_iter:
            self._apply_restored_rng(pass_, None if position is None else position.generators)
        if position is not None:
            self._prepare(position)
        self._identity = identity_of(self.loader, self._stateful)
        if self._has_one_pass and self._n_given_before:
            self._identity[TAKEN_BEFORE] = self._n_given_before
        state = pass_.state
        state.at_iter, state.pass_number = self._generators.found_again().snapshot(), pass_number_of(self.loader)
        if self._is_accelerated_stateful:
            restored = None if self.is_begun else position  # only the first pass begins with the restored state
            state.inner = copy.deepcopy(self._own_state()) if restored is None else restored.state.inner
        state.objects = self._owned.packed_states()
        inner = iter(self.loader)
        if self._persistent and self._worker_rng is None and not same_rng(state.at_iter, self._generators.snapshot()):
            self._worker_rng = state.at_iter  # iter() drew the workers' seed; some wrappers draw it at next()
        return self._start_pass(inner, pass_)

    def _count_left_pass(self) -> None:
        pass_, self._pass = self._pass, None
        if pass_ is not None:
            pass_.leave(self._host.updates)
            self._previews.left(pass_)
            self._had_training_pass |= self._is_of_training_loop(pass_)
            self._n_given_before += pass_.state.given
            self._end_tick = pass_.left_tick
            self._epoch += int(pass_.restored or pass_.has_updates(self._host.updates))

    def _prepare(self, position: Position) -> None:
        """Restore what a loader keeps between passes: persistent workers, and a stateful loader's own state."""
        if (self._stateful or self._is_accelerated_stateful) and position.state.inner is not None:
            with self._generators.preserved():
                self._load(position.state.inner)
                if self._dataloader is not None:
                    # The first iter() after a load continues the loaded, finished pass. It is made here, so that the
                    # next one begins a new pass. It draws random numbers, too; ``preserved`` undoes the draws.
                    iter(self._dataloader)
        elif self._persistent and self._worker_rng is not None and self._dataloader is not None:
            with self._generators.preserved():
                self._generators.restore(self._worker_rng)
                iter(self._dataloader)

    def _load(self, inner: object) -> None:
        try:
            self.loader.load_state_dict(copy.deepcopy(inner))
        except (KeyError, AssertionError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise DriftError(
                f"loader {self.name!r} refuses its saved state ({type(error).__name__}: {error}), which another "
                "class or release saved. Build it as it was, or begin the pass anew: session.loader(..., anew=True)."
            ) from error

    def _new_pass(self) -> Pass:
        return Pass(self._host.updates, tick(), self._end_tick, PassState(self._generators.snapshot()))

    def _start_pass(self, inner: Iterator[object], pass_: Pass) -> PassIterator:
        self.is_begun = True
        self._pass = pass_
        self.reused.begins()
        pass_.sharing = sharing_of(self.loader)
        self._may_draw_here = may_draw_here(self.loader, self._dataloader, inner)
        self._prefetches = self._may_draw_here and not self._stateful and may_prefetch(inner)
        is_watched = not (self._risk or self._stateful)
        self._watch = watch_sampler(inner, self._may_draw_here, self._generators) if is_watched else None
        return PassIterator(self._next, lambda: self._host.updates, self._pass, inner)

    def _resume(self, position: Position) -> PassIterator:
        assert position.state.at_iter is not None  # checked when the position was read
        self._compare_length(position)
        pass_ = self._new_pass()
        pass_.trained_before, pass_.restored, pass_.skipped = position.trained, True, position.state.given
        if self._ends_at_once:
            pass_.state.given = position.state.given
            self._generators_at_next = self._generators.states()
            return self._start_pass(iter(()), pass_)
        with self._generators.preserved():
            self._owned.load(position.state.objects)
            is_later_pass = self._start_workers(position)
            if self._is_accelerated_stateful:
                reset_first_pass(self._dataloader) if position.state.inner is None else self._prepare(position)
            self._generators.restore(position.state.at_iter)
            if self._stateful:
                self._load(position.state.inner)
            skips = self._skips and position.state.given > 1 and not position.state.samples_before
            inner = iterate_restored(self.loader, self.name, position, self._generators.restore, skips=skips)
            if not self._stateful and (position.state.given or position.state.raised) and not self._was_replayed():
                self._replay(inner, position, not is_later_pass and self._risk is None, skips)
            self._owned.put_back()
        self._generators.set_states(position.generators)
        self._generators_at_next = position.generators
        pass_.state = replace(position.state, raised=dict(position.state.raised))
        return self._start_pass(inner, pass_)

    def _was_replayed(self) -> bool:
        """Whether the loader is an iterator with only one pass, and a preview has replayed this pass already. Raises
        ``DriftError`` if an earlier pass in this process took batches from the iterator."""
        if self._has_one_pass and self._n_given_before:
            raise DriftError(
                f"loader {self.name!r} cannot go on in mid-pass: it is an iterator, which has only one pass, and "
                "batches were taken from it since it was created. Pass the iterable that creates the iterator."
            )
        return self._has_one_pass and self.is_begun

    def _start_workers(self, position: Position) -> bool:
        """Return whether the restored pass is a later pass of persistent workers. If so, start the workers with the
        seed of their first pass. Warn if the random streams of workers do not continue."""
        if self._stateful and not self.is_begun:
            warn_if_stateful_workers_begin_anew(self.name, self._dataloader, position)
        if self._stateful or not self._persistent or position.worker_rng is None:
            return False
        if any(same_rng(position.worker_rng, one) for one in (position.state.at_iter, position.state.at_first)):
            return False
        if not self.is_begun:
            warn_that_persistent_workers_begin_anew(self.name)
        self._generators.restore(position.worker_rng)
        iter(self._dataloader)  # type: ignore[arg-type]
        return True

    def _replay(self, inner: Iterator[object], position: Position, must_match: bool, skips: bool) -> None:
        """Fetch and drop the batches given before, and compare the last one with its checksum. ``must_match``: a
        difference raises ``DriftError`` instead of a warning."""
        is_wrapper, given = not is_loader_of_torch(self.loader), position.state.given
        try:
            if skips:
                self._generators.restore(position.state.at_first)  # type: ignore[arg-type]
                position = position.with_last_only()
            report = ReplayReport(self.name, position.state.given)
            batch = replay(inner, position, self._generators.restore, report)
        except PassTooShort as ended:
            n_found = "some" if skips else ended.args[0]
            fact = f"its pass ended after {n_found} of the {given} batches of the interrupted run"
            raise replay_error(self.name, fact, is_wrapper) from None
        if position.state.checksum is not None and position.state.given:
            checksum = checksum_of(batch)
            if checksum is not None and differ(position.state.checksum, checksum):
                fact = f"batch {given - 1} of the pass is not that of the interrupted run{SKIP_NOTE if skips else ''}"
                if must_match:
                    raise replay_error(self.name, fact, is_wrapper)
                log.warning(
                    "lightck: loader %r: %s, so the training goes on with other data than the interrupted run. %s",
                    self.name,
                    fact,
                    f"Possible reason: {self._risk}" if self._risk is not None else POSSIBLE_REASONS,
                )

    # -- one batch

    def _next(self, batches: PassIterator) -> object:
        if batches.inner is None:
            raise StopIteration
        pass_ = self._pass
        if pass_ is None or pass_ is not batches.of_pass:
            raise SessionError(
                f"loader {self.name!r} was iterated again, which ended this pass: a session loader has only one "
                "position. Pass a second DataLoader to session.loader(), or take batches for other purposes from the "
                "wrapped loader, which is the attribute .loader."
            )
        self._host.loader_next(self)
        self._restore_rng(pass_)
        is_first = pass_.state.at_first is None and not self._stateful
        needs_snapshot = self._may_draw_here and (self._makes_checksums or self._prefetches)
        before = self._generators.snapshot() if is_first or needs_snapshot else None
        if is_first:
            pass_.state.at_first = before
            if self._persistent and self._worker_rng is None:
                self._worker_rng = before
        if self._watch is not None:
            self._watch.before()
        try:
            batch = next(batches.inner)
        except StopIteration:
            self._finish(batches)
            raise
        except Exception:
            # The loop may catch the error and continue.
            pass_.state.raised[pass_.state.given] = pass_.state.raised.get(pass_.state.given, 0) + 1
            raise
        if self._watch is not None and (risk := self._watch.risk()) is not None:
            self._watch = None
            self._warn_risk(risk)
        self._count_batch(pass_, batch, before)
        self._host.loader_gave(
            self, pass_, batch, pass_.state.checksum if self._makes_checksums else None, self._tensor_checksums
        )
        return batch

    def _restore_rng(self, pass_: Pass) -> None:
        """Apply the checkpoint's random state, once, after the replays and before the first fetch."""
        generators, self._generators_at_next = self._generators_at_next, None
        if generators is not None:
            self._apply_restored_rng(pass_, generators)

    def _count_batch(self, pass_: Pass, batch: object, before: RngSnapshot | None) -> None:
        if TAKEN_BEFORE in self._identity and self._risk is None:
            self._warn_risk(
                "the loader is an iterator, which has only one pass, and the loop has begun a second `for` over it. In "
                "a new process the iterator begins at its first batch, so a resume in mid-pass will be refused. Pass "
                "the iterable that makes the iterator"
            )
        state = pass_.state
        state.given += 1
        self.reused.fetched(batch)
        pass_.evaluates |= self.in_eval or not torch.is_grad_enabled()
        pass_.updates_at_fetch, pass_.fetched_tick, pass_.in_eval = self._host.updates, tick(), self.in_eval
        if self._makes_checksums:
            self._tensor_checksums.clear()
            state.checksum = checksum_of(batch, self._tensor_checksums)
            self._makes_checksums = state.checksum is not None  # if not, later batches cannot be compared
        state.before_last = state.last if self._prefetches else None
        state.last = before if self._may_draw_here and (self._makes_checksums or self._prefetches) else None

    def _finish(self, batches: PassIterator) -> None:
        batches.inner = None
        self._tensor_checksums.clear()
        self._host.loader_pass_ended(self)
        self._had_training_pass |= self._is_of_training_loop(batches.of_pass)
        self._n_given_before += batches.of_pass.state.given
        self._end_tick = tick()
        self._epoch += 1
        batches.of_pass.has_ended = True
        self._pass = self._pending = None
