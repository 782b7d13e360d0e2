"""Compares the first inputs after a resume with those that the interrupted training recorded after the checkpoint.

A resume is exact only if the loop continues with the same data. What only the loop's own variables hold (a batch
fetched ahead, a list of batches, a hidden state, a counter that indexes the data) is in no checkpoint. So checksums of
the first inputs after a checkpoint are stored in its slot as soon as they are known, and are compared after a resume.
The checksums cover a few kilobytes, and no commit waits for them. If the process is killed before they are stored, the
checkpoint is complete, but nothing can be compared.

::

    events of the session -> Continuation -> Recorder    collects FirstInputs after a checkpoint, and stores them in its
                                                         slot (a forward is reported to it directly)
                                          -> Comparison  after a resume: collects FirstInputs, and compares them with
                                                         the stored ones
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lightck.dataloader.batch import TensorChecksums, differ, is_partial
from lightck.dataloader.passes import Pass
from lightck.errors import DataMismatchError, listed
from lightck.events import ClosingEvent
from lightck.following.first_batch import BATCH, FORWARD, LATER_BATCH, RANDOM_STATES, FirstInput, FirstInputs
from lightck.following.loop_counter import LoopCounterCheck
from lightck.following.update_parts import GRADIENT, KINDS, LAYERWISE_STATE, OPTIMIZER_STATE, OPTIONS, UpdateParts
from lightck.pool.format.structures import NextBatch, next_batch_key

log = logging.getLogger("lightck")
_LOOPS_PAGE, _BOTH_PAGES = "`lightck docs loops`", "`lightck docs loops` and `lightck docs own-state`"
_PART = {
    GRADIENT: "the gradient of {}",
    OPTIONS: "an option of {} (for example its lr)",
    OPTIMIZER_STATE: "the optimizer's state of {}",
    LAYERWISE_STATE: "the optimizer's state of {}",
}


class Recorder:
    """Records the first inputs after the last closed checkpoint of one session."""

    def __init__(self, store: Callable[[Sequence[NextBatch]], None], parts: UpdateParts | None = None) -> None:
        """``store``: writes the record into the slot of the last closed checkpoint, if the slot still holds this
        checkpoint. ``parts``: reads the parts of updates of the followed optimizers."""
        self._store = store
        self._parts = parts or UpdateParts(())
        self._since_closed: FirstInputs | None = None
        """The first inputs after the last closed checkpoint; None if nothing is recorded for this checkpoint."""
        self._of_next: FirstInputs | None = None
        """The first inputs after the next checkpoint, if they are known before it closes; otherwise None. A checkpoint
        may close at a forward, or at the pre-step hook after a forward. This forward is the first one of the next step,
        and its inputs are kept here until the checkpoint has closed."""

    def closed(self, event: ClosingEvent) -> None:
        """A step was closed at this event, and its checkpoint is being saved."""
        is_of_next = event in (ClosingEvent.FORWARD, ClosingEvent.PRE_STEP) and self._of_next is not None
        self._since_closed = self._of_next if is_of_next else FirstInputs()
        self._of_next = None
        if is_of_next and self._since_closed is not None:
            self._record(self._since_closed)

    def closed_unsaved(self) -> None:
        """A step was closed whose checkpoint is not saved (``interval``)."""
        self._of_next = None

    def closing(self) -> None:
        """A checkpoint is about to be closed: stop recording for the previous checkpoint, even if closing fails."""
        self._since_closed = None

    def batch_given(
        self, name: str, pass_: Pass, batch: object, checksum: int | None, cache: TensorChecksums | None = None
    ) -> None:
        first_inputs = self._since_closed  # read once: another thread may close the session now
        if first_inputs is not None:
            first_inputs.batch_given(name, pass_, batch, checksum, cache)

    def forward(self, inputs: object, will_close: bool) -> None:
        """A training forward begins, and no checkpoint was closed at it yet. ``will_close``: this forward, or the
        pre-step hook after it, will close a checkpoint."""
        if will_close:
            self._of_next = self._of_next or FirstInputs()
            self._of_next.forward(inputs)
        if self._since_closed is not None and self._since_closed.forward(inputs):
            self._record(self._since_closed)

    def before_update(self, index: int | None = None) -> None:
        """An update is about to be made. ``index``: the index of the optimizer that makes the update; None if no
        optimizer is followed, or if a closure computes the gradients."""
        if self._since_closed is not None and self._since_closed.update(index, self._parts.to_record):
            self._record(self._since_closed)

    def _record(self, first_inputs: FirstInputs) -> None:
        if first_inputs.inputs:
            inputs = first_inputs.inputs
            self._store([NextBatch(next_batch_key(name), kind, checksum) for name, kind, checksum in inputs])


class Continuation:
    """How a training continues after its checkpoints. Passes the events of one session to its ``Recorder``, and after a
    resume also to the ``Comparison`` and the ``LoopCounterCheck``. (A forward is the exception: the session reports it
    directly to the recorder, before the forward closes a checkpoint.)"""

    def __init__(self, recorder: Recorder, comparison: Comparison | None, loop_counter: LoopCounterCheck) -> None:
        self.recorder, self.loop_counter = recorder, loop_counter
        self._comparison = comparison

    def batch_given(self, name: str, pass_: Pass, batch: object, checksum: int | None, cache: TensorChecksums) -> None:
        """A session loader gave a batch."""
        comparison = self._comparison
        self.recorder.batch_given(name, pass_, batch, checksum, cache)
        if comparison is not None:
            comparison.batch_given(name, pass_, batch, checksum, cache)

    def pass_ended(self) -> None:
        """A training pass over a session loader has ended."""
        self.loop_counter.pass_ended()
        if self._comparison is not None:
            self._comparison.pass_ended()

    def forward(self, inputs: object) -> None:
        """A training forward begins. If the forward closes a checkpoint, the checkpoint was closed before this call."""
        if self._comparison is not None:
            self._comparison.forward(inputs)

    def before_update(self, index: int | None) -> None:
        """An update is about to be made. If the pre-step hook closes a checkpoint, the checkpoint was closed before
        this call. ``index``: see ``Recorder.before_update``. Raises ``DataMismatchError``."""
        self.recorder.before_update(index)
        self.loop_counter.before_update()
        if self._comparison is not None:
            self._comparison.before_update(index)
            if self._comparison.is_over:
                self._comparison = None

    def compare_nothing(self) -> None:
        """Compare nothing from now on: the user requested other data than those that followed the restored
        checkpoint."""
        self._comparison = None

    def forget(self) -> None:
        """Drop all references: a closed session keeps nothing alive."""
        self.recorder.closing()
        self._comparison = None

    def session_ends(self) -> None:
        """The session is about to be closed."""
        if self._comparison is not None:
            self._comparison.session_ends()


@dataclass(slots=True)
class _Verdict:
    """The result of a comparison."""

    differing: list[FirstInput] = field(default_factory=list)
    equal: list[FirstInput] = field(default_factory=list)
    parts: dict[int, list[str]] = field(default_factory=dict)
    """Kind -> names of the parts of the update that differ."""


class Comparison:
    """Checks whether the first batches and the first update after a resume are those that followed the restored
    checkpoint. It decides at the first update, so a batch that is only inspected before the loop does not count.
    """

    def __init__(
        self,
        step: int,
        recorded: Sequence[NextBatch] | None,
        *,
        is_strict: bool,
        same_bits: bool = True,
        parts: UpdateParts | None = None,
    ) -> None:
        """``step``: the restored step. ``recorded``: what was recorded beside its checkpoint (None: nothing).
        ``is_strict``: whether a difference is an error instead of a warning. ``same_bits``: whether machine and torch
        are the same as in the interrupted run, so that an operation gives the same bits."""
        self._step = step
        self._same_bits = same_bits
        self._parts = parts or UpdateParts(())
        self._recorded = {(each.key, each.kind): each.checksum for each in recorded or ()}
        """(key of a name, kind) -> recorded checksum. What was compared is removed."""
        self._is_strict = is_strict
        self._seen = FirstInputs(both_forwards=True)
        self._error: DataMismatchError | None = None
        self._is_judged = False
        """Whether the first update after the resume was made, and its data were compared."""
        self._was_batch_requested = False
        """Whether the loop requested a batch when none was left."""
        self._has_other_data = False
        """Whether a difference in the first inputs was found."""
        self._updated: set[int] = set()
        """Indexes of the optimizers whose first update was compared."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to compare."""
        return self._is_judged and self._error is None and not self._recorded

    def batch_given(
        self, name: str, pass_: Pass, batch: object, checksum: int | None, cache: TensorChecksums | None = None
    ) -> None:
        self._seen.batch_given(name, pass_, batch, checksum, cache)

    def pass_ended(self) -> None:
        """A training pass over a session loader has ended: the loop requested a batch, and none was left."""
        self._was_batch_requested = True

    def forward(self, inputs: object) -> None:
        self._seen.forward(inputs)

    def before_update(self, index: int | None = None) -> None:
        """Compare what was recorded with what was seen so far. With ``is_strict``, a difference raises
        ``DataMismatchError``, at this update and at every later one."""
        self._seen.update(index, lambda _: ())
        verdict = self._compare()
        if index is not None and index not in self._updated:
            self._updated.add(index)
            self._compare_update_parts(self._parts.to_compare(index), verdict)
        if verdict.differing:
            self._has_other_data = True
            self._report_differing_inputs(verdict)
        if verdict.parts:
            self._report(self._update_message(verdict))
        if not (verdict.differing or verdict.parts or self._is_judged):
            self._log_result(verdict)
        if not self._is_judged:
            self._is_judged = True
            # From now on only parts of updates, and later batches of loaders that gave no batch yet, are expected.
            seen = {next_batch_key(name) for name in self._seen.loaders}
            self._recorded = {
                k: v for k, v in self._recorded.items() if k[1] in KINDS or (k[1] == LATER_BATCH and k[0] not in seen)
            }
        if self._error is not None:
            raise self._error

    def session_ends(self) -> None:
        """Warn if the session made no update, although the interrupted run began one after the restored checkpoint.
        (Recorded parts of an update show that it did; if no loader's batch was recorded, a training forward does.)

        Then the loop has ended too early: its last batches were in the memory of the killed process, or the restored
        pass had no batch left. If a loader's batch was recorded, warn only if the loop of this run has requested a
        batch, too."""
        kinds = {kind for _, kind in self._recorded}
        has_requested_batch = bool(self._seen.loaders) or self._was_batch_requested
        has_recorded_update = not kinds.isdisjoint(KINDS)
        # A loader's batch is recorded at the next training forward or update. So a recorded batch alone does not show
        # that an update followed.
        is_missed = (has_requested_batch and has_recorded_update) if BATCH in kinds else (FORWARD in kinds)
        if self._is_judged or not is_missed:
            return
        log.warning(
            "lightck: The first batch after the resume is missing: the interrupted run began another update after step "
            "%d, and in this run no update came before the session was closed. If you did not end this run early, the "
            "loop ended too soon: its batches were fetched ahead (list(loader)), it counted from 0 instead of "
            "loader.start, or the restored pass had no batch left. %s shows such loops, and how to make each exact",
            self._step,
            _LOOPS_PAGE,
        )

    def _compare(self) -> _Verdict:
        """Compare each input that was seen with the recorded one, once."""
        verdict = _Verdict()
        for first in self._seen.inputs:
            was = self._recorded.pop((next_batch_key(first.name), first.kind), None)
            if was is None:
                continue
            if differ(was, first.checksum):
                verdict.differing.append(first)
            elif not is_partial(was) and not is_partial(first.checksum):
                verdict.equal.append(first)
        return verdict

    def _compare_update_parts(self, parts: Iterable[tuple[str, FirstInput]], verdict: _Verdict) -> None:
        """Compare the parts of the update, and add the result to ``verdict``. Gradients are compared only if no data
        differ and the same operations give the same bits."""
        may_gradients_differ = self._has_other_data or bool(verdict.differing) or not self._same_bits
        for name, part in parts:
            was = self._recorded.pop((next_batch_key(part.name), part.kind), None)
            if was is None or (part.kind == GRADIENT and may_gradients_differ):
                continue
            if was != part.checksum:
                verdict.parts.setdefault(part.kind, []).append(name)
            elif part.kind == GRADIENT:
                verdict.equal.append(part)

    def _report_differing_inputs(self, verdict: _Verdict) -> None:
        data = _data_of(verdict.differing)
        self._report(self._data_message(data, verdict) if data else self._random_numbers_message())

    def _report(self, fact: str) -> None:
        """Log a warning. With ``is_strict``, keep an error instead, which ``before_update`` raises."""
        if self._is_strict:
            self._error = DataMismatchError(f"{fact}. attach(..., strict_data=False) makes this a warning.")
        else:
            log.warning("lightck: %s. attach(..., strict_data=True) makes this an error.", fact)

    def _random_numbers_message(self) -> str:
        return (
            "Torch's random state at the first training forward after the resume (without a forward: at the first "
            f"update) is not the one that followed step {self._step}: dropout, and all else that draws random numbers, "
            "gets other numbers than in a run that was never killed. Likely causes: the script draws random numbers "
            "between attach and the loop (draw them before attach); each epoch draws some before its first batch, for "
            "example in an evaluation (do that at the epoch's end); a DataLoader begins a pass outside "
            "session.loader(), or an evaluation loader has persistent workers (pass it to session.loader()). "
            f"{_LOOPS_PAGE} shows such loops, and how to make each exact"
        )

    def _data_message(self, differing: list[FirstInput], verdict: _Verdict) -> str:
        loaders = [first.name for first in differing if first.name]
        is_only_forward = not loaders and any(first.name for first in verdict.equal)
        what = [f"the first batch of loader {name!r}" for name in loaders]
        if len(what) < len(differing):
            what.append("what the model's forward is called with")
        if is_only_forward:
            why = (
                "The batches of its loaders are the same. Likely causes: the loop fetches a batch ahead, so that the "
                "batch that waited was lost with the process; a hidden state, or other data that one iteration leaves "
                "to the next, is not saved; the loop changes the batch with random numbers that it draws at the "
                "epoch's top or from a generator of its own, or with a counter that started over. Fetch each batch "
                "where it is used, pass what one iteration leaves to the next in state=, and count by session.step"
            )
        else:
            why = (
                "Likely causes: a batch that is fetched ahead by hand, one iteration before it is used; data that are "
                "drawn between attach and the loop; another data set, order or transform; a loop that starts at "
                "another place. Iterate over session.loader(loader) from loader.start, or end the iteration with "
                "session.end_step() and fetch the next batch after it"
            )
        first = "first input of the forward" if is_only_forward else "first batch"
        return (
            f"The {first} after the resume is not the one that followed step {self._step}: {' and '.join(what)} "
            f"differ{'' if len(what) > 1 else 's'}, so the training goes on with other data than a run that was never "
            f"killed. {why}. {_LOOPS_PAGE} shows such loops, and how to make each exact"
        )

    def _update_message(self, verdict: _Verdict) -> str:
        what = [
            _PART[kind].format(listed([repr(name) for name in dict.fromkeys(names)]))
            for kind, names in verdict.parts.items()
        ]
        why = []
        if GRADIENT in verdict.parts:
            begin = (
                "The batch of this update is the same, so something else" if _data_of(verdict.equal) else "Something"
            )
            why.append(
                f"{begin} that the loss depends on is in no checkpoint, or the loop changed it between the "
                "restore and this update. Likely causes: a counter of the loop that began at 0 again, for a loss "
                "weight, a warm-up, or accumulation (count by session.step and loader.start); a second model or a "
                "random generator that only the loss uses (pass it in state=); a number or a tensor that a module "
                "keeps as a plain attribute (make it a buffer); train() or eval() that the loop calls once (call it "
                "before each pass); a batch that the loop fetches between forward and update (fetch it where it is "
                "used); weights that the loop changes at an epoch's top (change them at its end); code that was edited "
                "between the runs"
            )
        if verdict.parts.keys() - {GRADIENT}:
            why.append(
                "Likely causes: the loop changed options or state of the optimizer once more, for example at an "
                "epoch's top, which runs again after a kill in mid-epoch; or it computes an option from a counter that "
                "began at 0 again. Change them at the epoch's end, or only where a pass begins (if loader.start == 0), "
                "and count by session.step"
            )
        return (
            f"The first update after the resume is not the one that followed step {self._step}. What differs: "
            f"{', '.join(what)}. {'. '.join(why)}. {_BOTH_PAGES} show such loops, and how to make each exact"
        )

    def _log_result(self, verdict: _Verdict) -> None:
        data = _data_of(verdict.equal)
        gradients = [part for part in verdict.equal if part.kind == GRADIENT]
        if not data and not gradients:
            log.info(
                "lightck: the first batch after the resume could not be checked: the batch that followed step %d "
                "is not recorded (for example after a kill at an epoch's end, in an evaluation, or soon after an "
                "update), or it lies on a device, where lightck does not read it. That is no error, and no proof that "
                "the data are the same",
                self._step,
            )
            return
        what = [f"loader {first.name!r}" if first.name else "the model's forward" for first in data]
        if gradients:  # the gradients of other parameters may differ, so the message names those that were compared
            names = dict.fromkeys(part.name.partition("/")[2] for part in gradients)
            what.append(f"the first update's gradients, only those of {listed([repr(name) for name in names])}")
        log.info(
            "lightck: the first batch after the resume is the one that followed step %d, as a checksum of shapes, "
            "dtypes and some of its bytes shows (compared: %s%s). A difference that acts later, or on "
            "other parameters, is not found: see `lightck docs trouble`",
            self._step,
            " and ".join(what),
            ""
            if gradients
            else "; not gradients: the killed run had not reached its next update, or they cannot be read",
        )


def _data_of(inputs: Iterable[FirstInput]) -> list[FirstInput]:
    """Return the inputs that are batches or arguments of a forward."""
    return [first for first in inputs if first.kind not in RANDOM_STATES and first.kind not in KINDS]
