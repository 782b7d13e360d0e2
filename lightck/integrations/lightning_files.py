"""Checkpoint files that Lightning itself chooses for a fit that was given no ``ckpt_path``.

Under Slurm it takes ``hpc_ckpt_N.ckpt``, and with the callback ``OnExceptionCheckpoint`` the file of that callback, or
the last one of ``ModelCheckpoint``. Nobody has asked for them, and a file of mid-epoch is not exact: it has neither
random states nor the places in the loaders. So the pool counts, unless the file is ahead of it.
"""

from __future__ import annotations

import logging
import os
import sys
from types import FrameType
from typing import Any

from lightck.integrations.attributes import has_class

log = logging.getLogger("lightck")


def drop_loaded(trainer: Any, path: str, step: int) -> None:
    """Drop the file that Lightning has just read, and of which it has restored nothing yet, if Lightning has chosen it
    and the pool counts. ``path``: of the pool. ``step``: the Trainer's ``global_step`` in the pool.

    A pool that is one update behind counts too: the update in which a file is written is not finished, so the pool does
    not hold it yet, and it is made again.
    """
    connector = trainer._checkpoint_connector
    file, loaded = connector._ckpt_path, connector._loaded_checkpoint
    if not loaded or not _is_chosen_by_lightning(trainer, os.fspath(file)):
        return
    # In manual optimization each optimizer's step counts in global_step, so one update may count several steps.
    if loaded["global_step"] - step > max(1, len(loaded.get("optimizer_states", ()))):
        return
    connector._ckpt_path, connector._loaded_checkpoint = None, {}
    log.warning(
        "lightck: Lightning has found its checkpoint %s (step %d) by itself. It is not used: the training continues "
        "from the pool %s (step %d), exactly. Pass overwrite=True to LightckCallback for one start to use the file",
        file,
        loaded["global_step"],
        path,
        step,
    )


def _is_chosen_by_lightning(trainer: Any, file: str) -> bool:
    connector = trainer._checkpoint_connector
    if is_asked_for(trainer):
        return False
    if file == connector._hpc_resume_path:
        return True
    found = {os.fspath(one.ckpt_path) for one in trainer.callbacks if has_class(one, ("OnExceptionCheckpoint",))}
    if found:
        for one in trainer.checkpoint_callbacks:
            if hasattr(one, "_find_last_checkpoints"):
                found |= {os.fspath(last) for last in one._find_last_checkpoints(trainer)}
    return file in found


def is_asked_for(trainer: Any) -> bool:
    """Whether this fit begins with a file of Lightning that the script has asked for. (If it has passed "last", and
    there is no such file, Lightning gives ``_run`` no path.)"""
    is_asked = trainer._checkpoint_connector._user_managed or _was_passed(trainer, "fit")
    return bool(is_asked and _was_passed(trainer, "_run"))


def _was_passed(trainer: Any, method: str) -> bool:
    """Whether a method of the Trainer that runs now was given a ``ckpt_path``. (Lightning does not keep it.)"""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == method and frame.f_locals.get("self") is trainer and "ckpt_path" in frame.f_locals:
            return frame.f_locals["ckpt_path"] is not None
        frame = frame.f_back
    return False
