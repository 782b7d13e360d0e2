"""The session's side of its loaders: a boundary at each ``next()``, and the restored random state."""

from __future__ import annotations

import threading

from lightck.dataloader.batch import TensorChecksums
from lightck.dataloader.loader import SessionLoader
from lightck.dataloader.passes import LoaderHost, Pass
from lightck.errors import SessionError
from lightck.events import ClosingEvent
from lightck.session.steps import Steps
from lightck.state.rng import RngState


class LoaderEvents(LoaderHost):
    """Receives the events of one session's loaders. Events after the session is closed, or in a forked child, are
    ignored."""

    def __init__(self, steps: Steps) -> None:
        self._steps, self._session_lock = steps, steps.session_lock

    @property
    def updates(self) -> int:
        return self._steps.boundary.step

    def loader_next(self, loader: SessionLoader) -> None:
        self._session_lock.run_if_open(lambda: self._next(loader))

    def _next(self, loader: SessionLoader) -> None:
        steps, model = self._steps, self._steps.model
        steps.capture.mid_batch.next_begins(loader, model is not None and not model.training)
        steps.capture.positions.next_begins(loader)
        if steps.commits.paused:
            return
        if steps.step_thread not in (None, threading.get_ident()):
            raise SessionError(
                f"loader {loader.name!r}: next() was called on another thread than optimizer.step(). next() "
                "closes a step, and the training would change the state while lightck reads it. Iterate in the "
                "training loop, and let the DataLoader fetch ahead (num_workers=, prefetch_factor=)."
            )
        if _serves_evaluation(loader):
            return  # the step stays open until the training continues
        with steps.meter.stall("next"):
            steps.commits.raise_failure()
            if steps.loop_top is not None:
                steps.loop_top.next_begins(loader)
            steps.handle(ClosingEvent.NEXT)
            steps.commits.run(steps.pipeline.poll)

    def loader_gave(
        self, loader: SessionLoader, pass_: Pass, batch: object, checksum: int | None, cache: TensorChecksums
    ) -> None:
        """Record a batch that a loader gave. The session's lock is not taken, because the record is safe on any
        thread."""
        if not self._session_lock.is_live or self._steps.commits.paused or _serves_evaluation(loader):
            return
        self._steps.flush_moment.batch_given()
        self._steps.fetched_ahead.batch_given(loader)
        self._steps.continuation.batch_given(loader.name, pass_, batch, checksum, cache)

    def loader_pass_ended(self, loader: SessionLoader) -> None:
        """Wait for the copies at the end of a pass, because an evaluation with swapped weights may follow."""
        self._session_lock.run_if_open(lambda: self._pass_ended(loader))

    def _pass_ended(self, loader: SessionLoader) -> None:
        steps = self._steps
        steps.capture.positions.pass_ended(loader)
        # A pass that ends in eval mode is an evaluation, even if this loader feeds the training loop too.
        if loader.is_training and not (loader.in_eval or steps.commits.paused):
            steps.flush_moment.pass_ended()
            steps.continuation.pass_ended()
        if steps.commits.failure is None:
            with steps.meter.stall("pass ended"):
                steps.commits.run(steps.pipeline.wait_for_copies)

    def take_restored_rng(self, loader: SessionLoader, pass_: Pass) -> RngState | None:
        return self._session_lock.run_if_open(lambda: self._restored_rng(loader, pass_))

    def _restored_rng(self, loader: SessionLoader, pass_: Pass) -> RngState | None:
        resumed = self._steps.resumed
        if resumed is None or self.updates > resumed.step:
            return None  # an update was made since the restore, without a loader
        state = resumed.take_rng(loader, pass_)
        if state is not None and resumed.closed_by_next:
            # A next() closed the restored checkpoint, so the saved positions include the passes that the script made
            # before its loop. This run has just made these passes again, which moved the loaders on. So each loader
            # returns to its saved position.
            for each in self._steps.capture.loaders:
                each.put_back()
        return state


def _serves_evaluation(loader: SessionLoader) -> bool:
    """Whether a ``next()`` of this loader belongs to an evaluation: the model is in eval mode, and no pass of this
    loader so far belongs to the training loop. (Eval mode alone is not enough, because some training loops leave the
    model in eval mode after an evaluation.)"""
    return loader.in_eval and not loader.is_training
