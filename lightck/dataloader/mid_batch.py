"""Whether a checkpoint closes within a batch of a session loader, whose position counts that batch as a whole.

Two signs show that a checkpoint closes within a batch. The first sign: a forward, or the pre-step hook of the next
update, closes the checkpoint in mid-pass. Then the loop has not finished its batch, or it has fetched the next batch in
eval mode, in which ``next()`` closes nothing. The second sign: no loader fetches anything between two boundaries, so
both boundaries lie within one batch. The second sign counts only when it was seen on two batches, because a loop may
train on batches from elsewhere after the last batch of a loader.

If some loaders fetch between two boundaries and another loader does not, perhaps the loop takes a batch of this other
loader only in some iterations. Such a loop is correct, unless whole passes of one loader run inside a batch of another.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightck.dataloader.passes import Pass, tick
from lightck.events import ClosingEvent

if TYPE_CHECKING:
    from lightck.dataloader.loader import SessionLoader

log = logging.getLogger("lightck")
_PassAndCount = tuple["Pass | None", int]


class MidBatch:
    """Checks each boundary, also if its checkpoint is not saved. Warns once per loader if a checkpoint that is saved
    closes within a batch of this loader."""

    def __init__(self, loaders: Sequence[SessionLoader]) -> None:
        self._loaders = loaders
        self._saved: tuple[int, list[_PassAndCount]] | None = None
        """The last boundary (its step, and for each loader its pass and the number of batches given in it), if the
        checkpoint of that boundary was saved. Otherwise None."""
        self._unchanged_since: dict[str, _PassAndCount] = {}
        """Name of a loader -> its pass, and the number of batches given in it, when the second sign was seen for this
        loader for the first time. The sign counts when it is seen on a batch other than that one."""

    def next_begins(self, loader: SessionLoader, in_eval: bool) -> None:
        """Record a ``next()`` of this loader. ``in_eval``: whether the model is in eval mode."""
        loader.in_eval = in_eval
        now = tick()
        for each in self._loaders if not in_eval else ():
            each.training_fetch_tick = now

    def holds_batch(self, step: int) -> bool:
        """Whether the loop still holds the batch of the last update. If so, a forward closes no checkpoint, because
        the forward is perhaps for logging only.

        The checkpoint then closes at the next ``next()``. If another update comes before that, the checkpoint closes at
        the pre-step hook of the update, with a warning, and from then on forwards are boundaries again."""
        return bool(self._loaders) and any(
            _is_mid_batch(loader.current_pass, step) and not loader.mid_batch_reported for loader in self._loaders
        )

    def boundary(self, event: ClosingEvent, step: int, is_saved: bool) -> None:
        """Check the boundary of ``step``. ``is_saved``: whether its checkpoint will be saved. (It is not captured
        yet.)"""
        if not self._loaders:
            return
        counts = [_pass_and_count(loader.current_pass) for loader in self._loaders]
        if is_saved and event in (ClosingEvent.FORWARD, ClosingEvent.PRE_STEP):
            for loader, (pass_, _) in zip(self._loaders, counts, strict=True):
                if _is_mid_batch(pass_, step):
                    _warn(loader, step)
        if self._saved is not None:
            self._compare(counts, *self._saved)
        self._saved = (step, counts) if is_saved else None

    def _compare(self, counts: list[_PassAndCount], step_before: int, before: list[_PassAndCount]) -> None:
        """Compare the present boundary with the last one, at which ``step_before`` was saved. For each loader, its pass
        and the number of batches given in it: ``counts`` at the present boundary, ``before`` at the last one."""
        unchanged = [now[0] is then[0] and now[1] == then[1] for now, then in zip(counts, before, strict=False)]
        has_changed = len(counts) > len(before) or not all(unchanged)
        for loader, (pass_, given), is_unchanged in zip(self._loaders, counts, unchanged, strict=False):
            if pass_ is None or not given or not is_unchanged or pass_.in_eval:
                continue
            if has_changed:
                is_mid_batch = any(_runs_inside(inner, pass_, step_before) for inner, _ in counts)
            else:
                first = self._unchanged_since.setdefault(loader.name, (pass_, given))
                is_mid_batch = first[0] is not pass_ or first[1] != given
            if is_mid_batch:
                _warn(loader, step_before)


def _pass_and_count(pass_: Pass | None) -> _PassAndCount:
    return pass_, 0 if pass_ is None else pass_.state.given


def _is_mid_batch(pass_: Pass | None, step: int) -> bool:
    return pass_ is not None and pass_.state.given > 0 and (pass_.has_updates(step) or pass_.updates_at_fetch == step)


def _runs_inside(inner: Pass | None, outer: Pass, step: int) -> bool:
    """Whether updates are made in the pass ``inner``, and no update and no end of a pass came between the last batch of
    the pass ``outer`` and the beginning of ``inner``."""
    if inner is None or not inner.has_updates(step):
        return False
    return (
        inner.previous_end_tick < outer.fetched_tick < inner.begun_tick
        and inner.updates_at_begin == outer.updates_at_fetch
    )


def _warn(loader: SessionLoader, step: int) -> None:
    """Warn once that the position in the checkpoint of ``step`` counts a batch that the next step still uses."""
    if not loader.mid_batch_reported:
        loader.mid_batch_reported = True
        log.warning(
            "lightck: loader %r: step %d was saved although the loop still uses its batch, so a resume skips the "
            "rest of that batch. If the loop makes several updates on one batch, or contains a loop over another "
            "session loader, call session.end_step() when it is done with the batch. If this pass began in eval "
            "mode, lightck took it for an evaluation: call model.train() before such a pass",
            loader.name,
            step,
        )
