"""The state of a Trainer's callbacks: that of an ``ExportableState`` is saved, and other changes are named."""

from __future__ import annotations

import json
import logging
from typing import Any

import transformers
from transformers.trainer_callback import EarlyStoppingCallback, ExportableState, TrainerCallback

from lightck.integrations.attributes import ChangedAttributes

log = logging.getLogger("lightck")


class CallbackStates:
    """The callbacks of a Trainer, and what of them is saved: the state of those that are ``ExportableState``."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self._own: list[tuple[TrainerCallback, ChangedAttributes]] = []
        """Callbacks of the user whose state is not saved, with their attributes."""
        self._restored = "[]"
        """The states of the run before, as JSON."""
        self._resumed_at = -1
        self._new: list[Any] = []
        """Callbacks that the run before did not have."""
        self._least_counts: list[int] = []
        """The lowest counter that each ``EarlyStoppingCallback`` had in this run."""
        self.had_stopped_early = False
        """Whether an ``EarlyStoppingCallback`` has ended the run before, and this run is not longer."""
        self._warned: set[tuple[int, str]] = set()
        """Number of the callback, and name of the attribute, that a warning has named."""

    def _exportable(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    def states(self) -> list[list[Any]]:
        """Return name of the class and state, for each callback that has one. At the step of the resume, those that are
        new are left out, so that the result is what was restored."""
        new = self._new if self._trainer.state.global_step == self._resumed_at else []
        return [[type(one).__name__, one.state()] for one in self._exportable() if one not in new]

    def restore(self, states: str) -> None:
        """Set the attributes that were saved (``states`` as JSON). Callbacks of one class are identified by their
        order."""
        self._register_new()
        self._restored, self._resumed_at = states, self._trainer.state.global_step
        if left := self.restore_again():
            log.warning(
                "lightck: the run before had the callback %s, whose state is lost, because this Trainer has no such "
                "callback",
                left[0],
            )

    def restore_again(self) -> list[str]:
        """Set the saved attributes again, because hooks may have overwritten the restored values. Returns the names of
        callbacks that this Trainer does not have."""
        left, self._new = json.loads(self._restored), []
        for callback in self._exportable():
            saved = next((one for one in left if one[0] == type(callback).__name__), None)
            if saved is None:
                self._new.append(callback)
                continue
            left.remove(saved)
            for name, value in saved[1].get("attributes", {}).items():
                setattr(callback, name, value)
        return [one[0] for one in left]

    def watch(self) -> None:
        """Remember what user's callbacks have as attributes."""
        self._own = [
            (one, ChangedAttributes(one, trained=self._trainer.model))
            for one in self._trainer.callback_handler.callbacks
            if not isinstance(one, ExportableState) and _is_of_user(one)
        ]
        for _, attributes in self._own:
            attributes.watch()
        self._least_counts = [one.early_stopping_patience_counter for one in self._early_stopping()]

    def update_ended(self) -> None:
        """Called after each update, before the evaluation that may follow it. So it sees the counters after each
        evaluation but the newest."""
        pairs = zip(self._early_stopping(), self._least_counts, strict=False)
        self._least_counts = [min(one.early_stopping_patience_counter, n) for one, n in pairs]

    def has_stopped_early(self) -> bool:
        """Whether an ``EarlyStoppingCallback`` has ended this run, or the run before. It has ended this run if its
        counter is at its limit and has risen in this run. (A run that goes on after an early end may begin with a
        counter at its limit, which alone means nothing.)"""
        if self.had_stopped_early:
            return True
        counts = zip(self._early_stopping(), self._least_counts, strict=False)
        return any(one.early_stopping_patience <= one.early_stopping_patience_counter > n for one, n in counts)

    def _early_stopping(self) -> list[EarlyStoppingCallback]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback)]

    def warn_of_changes(self) -> None:
        """Warn once of each attribute that has changed, because its changes are not saved. (``changed`` itself names
        those that are no plain values.)"""
        for number, (callback, attributes) in enumerate(self._own):
            new = {name for name in attributes.changed() if (number, name) not in self._warned}
            self._warned |= {(number, name) for name in new}
            for name in sorted(new):
                log.warning(
                    "lightck: the callback %s changes its attribute %r while it trains, and a resume would not know "
                    "it. Let the class inherit transformers.trainer_callback.ExportableState too: lightck saves what "
                    "its state() returns",
                    type(callback).__name__,
                    name,
                )

    def _register_new(self) -> None:
        """Give each callback that has a state a place in the Trainer's own state. A callback that the run before did
        not have has none there, and the Trainer needs it when it saves a checkpoint of its own."""
        known: Any = self._trainer.state.stateful_callbacks
        for callback in self._exportable():
            known.setdefault(type(callback).__name__, callback.state())


def _is_of_user(callback: object) -> bool:
    return type(callback).__module__.partition(".")[0] not in ("transformers", "trl", "peft", "lightck")
