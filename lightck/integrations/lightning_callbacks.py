"""The state of a Trainer's callbacks, and the files that ``ModelCheckpoint`` has written after the last checkpoint.

A killed run may have written a file of ``ModelCheckpoint`` in the step that is made again. Lightning would give the
same file another name, because the name is taken. ``write_again`` lets it write the same file.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from lightck.integrations.attributes import has_class

log = logging.getLogger("lightck")
_OF_MODEL_CHECKPOINT = (
    "current_score",
    "best_model_path",
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",  # since Lightning 2.6
)
"""Attributes of ``ModelCheckpoint``. Its ``load_state_dict`` sets only ``best_model_path``. Some may not exist."""


def saved(trainer: Any, ours: Any) -> list[list[Any]]:
    """Return key, state and further attributes of each callback. ``ours``: the callback that is left out."""
    found = []
    for callback in trainer.callbacks:
        if callback is ours:
            continue
        further = {
            name: getattr(callback, name) for name in _OF_MODEL_CHECKPOINT if _is_model_checkpoint_with(callback, name)
        }
        state = callback.state_dict()
        if state or further:
            found.append([callback.state_key, state, further])
    return found


def restore(trainer: Any, states: list[list[Any]]) -> None:
    """Load the states into the callbacks with the same keys, as Lightning does it."""
    left = list(states)
    for callback in trainer.callbacks:
        one = next((one for one in left if one[0] == callback.state_key), None)
        if one is None:
            continue
        left.remove(one)
        if one[1]:
            callback.load_state_dict(dict(one[1]))
        for name, value in one[2].items():
            if _is_model_checkpoint_with(callback, name):
                setattr(callback, name, value)
    if left:
        log.warning(
            "lightck: the run before had the callback %s, whose state is lost, because this Trainer has no such "
            "callback",
            left[0][0],
        )


def _is_model_checkpoint_with(callback: Any, name: str) -> bool:
    return hasattr(callback, "best_k_models") and hasattr(callback, name)


def named(trainer: Any, ours: Any) -> list[tuple[str, int, Any]]:
    """Return a name, the place in the list, and the object, for each callback. Callbacks of one class are identified by
    their order. ``ours``: the callback that is left out."""
    found = []
    seen: Counter[str] = Counter()
    for number, callback in enumerate(trainer.callbacks):
        kind = type(callback).__name__
        seen[kind] += 1
        if callback is not ours:
            found.append((f"callback {kind}" + (f" {seen[kind]}" if seen[kind] > 1 else ""), number, callback))
    return found


def early_stops(trainer: Any) -> list[tuple[Any, Any]]:
    """Return what each ``EarlyStopping`` says of its last stop. It differs after another stop."""
    return [
        (one.stopped_epoch, getattr(one, "stopping_reason_message", None))
        for one in trainer.callbacks
        if has_class(one, ("EarlyStopping",)) and hasattr(one, "stopped_epoch")
    ]


def advice_of_timer(trainer: Any) -> str:
    """Return what a message says if the time of a ``Timer`` (``max_time``) is used up; else an empty text."""
    for one in trainer.callbacks:
        if has_class(one, ("Timer",)) and hasattr(one, "time_remaining"):
            left = one.time_remaining()
            if left is not None and left <= 0:
                return (
                    " The time of max_time is used up. It counts over all starts: give the next one a larger max_time, "
                    "or it stops after a step."
                )
    return ""


def write_again(trainer: Any, closed_at: float) -> None:
    """Let each ``ModelCheckpoint`` write the files once more that were written after ``closed_at`` (Unix time): the
    step in which they were written is made again."""
    for callback in trainer.callbacks:
        folder = getattr(callback, "dirpath", None)
        if hasattr(callback, "file_exists") and isinstance(folder, (str, os.PathLike)) and os.path.isdir(folder):
            with os.scandir(os.fspath(folder)) as entries:
                late = {os.path.abspath(one.path) for one in entries if one.stat().st_mtime > closed_at}
            if late:
                callback.file_exists = _exists_unless(late, callback.file_exists)


def _exists_unless(late: set[str], exists: Callable[..., bool]) -> Callable[..., bool]:
    """Return ``exists`` that says no, once, for each of the ``late`` files."""

    def file_exists(filepath: Any, *args: Any) -> bool:
        path = os.path.abspath(filepath)
        if path in late:
            late.discard(path)
            return False
        return exists(filepath, *args)

    return file_exists
