"""The state of a Trainer's callbacks: that of an ``ExportableState`` is saved, and other changes are named."""

from __future__ import annotations

import logging
from typing import Any

import transformers
from transformers.trainer_callback import ExportableState, TrainerCallback

log = logging.getLogger("lightck")


class CallbackStates:
    """The callbacks of a Trainer, and what of them is saved: the state of those that are ``ExportableState``."""

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer
        self._own: list[tuple[TrainerCallback, dict[str, object]]] = []
        """Callbacks of the user whose state is not saved, with their plain attributes at attach."""

    def _exportable(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    def states(self) -> list[list[Any]]:
        """Return name of the class and state, for each callback that has one."""
        return [[type(one).__name__, one.state()] for one in self._exportable()]

    def restore(self, states: list[list[Any]]) -> None:
        """Set the attributes that were saved. Callbacks of one class are identified by their order."""
        left = list(states)
        for callback in self._exportable():
            saved = next((one for one in left if one[0] == type(callback).__name__), None)
            if saved is None:
                continue
            left.remove(saved)
            for name, value in saved[1].get("attributes", {}).items():
                setattr(callback, name, value)
        if left:
            log.warning(
                "lightck: the run before had the callback %s, whose state is lost, because this Trainer has no such "
                "callback",
                left[0][0],
            )

    def watch(self) -> None:
        """Remember what user's callbacks have as plain attributes."""
        self._own = [
            (one, _plain_attributes(one))
            for one in self._trainer.callback_handler.callbacks
            if not isinstance(one, ExportableState) and _is_of_user(one)
        ]

    def warn_of_changes(self) -> None:
        """Warn once of each callback that has changed, because its changes are not saved."""
        for one in list(self._own):
            callback, before = one
            now = _plain_attributes(callback)
            changed = [name for name, value in now.items() if name not in before or before[name] != value]
            if changed:
                self._own.remove(one)
                log.warning(
                    "lightck: the callback %s changes its attribute %r while it trains, and a resume would not know "
                    "it. Let the class inherit transformers.trainer_callback.ExportableState too: lightck saves what "
                    "its state() returns",
                    type(callback).__name__,
                    changed[0],
                )


def _is_of_user(callback: object) -> bool:
    return type(callback).__module__.partition(".")[0] not in ("transformers", "trl", "peft", "lightck")


def _plain_attributes(callback: object) -> dict[str, object]:
    return {name: value for name, value in vars(callback).items() if isinstance(value, (int, float, str, bool))}
