"""The version and the rows of Lightning's ``CSVLogger``, so that a resumed run goes on with the same file.

A logger takes a new version (a new folder) in each process. ``rewind`` gives it the version of the run before, and
leaves only the rows in its file that were logged before the checkpoint. The others are logged again. A
``TensorBoardLogger`` gets its version too. Other loggers go on as they do without lightck.

Failure case: with a version that the script chooses, Lightning deletes the file when the logger is made, before any
callback runs. A warning says so.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

log = logging.getLogger("lightck")
_COUNT = "_lightck_rows"
"""Attribute of the writer of a ``CSVLogger``: how many rows it has written to its file."""
_NAMES = ("CSVLogger", "TensorBoardLogger")


def saved(trainer: Any) -> list[dict[str, Any] | None]:
    """Return what is saved of each logger; None: nothing."""
    return [_state(logger) for logger in trainer.loggers]


def rewind(trainer: Any, states: list[dict[str, Any] | None]) -> None:
    """Let the loggers go on where the run before was. Call it on rank 0, before anything is logged."""
    for logger, state in zip(trainer.loggers, states, strict=False):
        if state is not None and type(logger).__name__ == state["class"] and logger.name == state["name"]:
            _rewind(logger, state)


def follow(trainer: Any) -> None:
    """Count the rows that each ``CSVLogger`` writes."""
    for logger in trainer.loggers:
        writer: Any = getattr(logger, "_experiment", None)
        if type(logger).__name__ == "CSVLogger" and hasattr(writer, "metrics") and not hasattr(writer, _COUNT):
            setattr(writer, _COUNT, 0)
            writer.save = functools.partial(_save, writer, writer.save)


def _save(writer: Any, save: Callable[[], None]) -> None:
    n_rows = len(writer.metrics)
    save()
    setattr(writer, _COUNT, getattr(writer, _COUNT) + n_rows)


def _state(logger: Any) -> dict[str, Any] | None:
    name = type(logger).__name__
    if name not in _NAMES or not hasattr(logger, "_version") or not hasattr(logger, "_experiment"):
        return None
    found = {"class": name, "name": logger.name, "version": logger.version}
    writer = logger._experiment
    if hasattr(writer, _COUNT):
        found |= {"keys": list(writer.metrics_keys), "waiting": [dict(row) for row in writer.metrics]}
        found["rows"] = getattr(writer, _COUNT)
    return found


def _rewind(logger: Any, state: dict[str, Any]) -> None:
    writer, new_folder = logger._experiment, logger.log_dir
    logger._version = state["version"]
    if os.path.abspath(new_folder) != os.path.abspath(logger.log_dir):
        with contextlib.suppress(OSError):
            os.rmdir(new_folder)  # it is empty: this process has made it
    if type(logger).__name__ != "CSVLogger":
        logger._experiment = None  # it is made again, in the folder of the run before
        return
    if "rows" not in state or not hasattr(writer, _COUNT):
        return
    writer.log_dir = logger.log_dir
    os.makedirs(writer.log_dir, exist_ok=True)  # somebody may have removed it
    writer.metrics_file_path = os.path.join(logger.log_dir, os.path.basename(writer.metrics_file_path))
    writer.metrics_keys, writer.metrics = list(state["keys"]), [dict(row) for row in state["waiting"]]
    setattr(writer, _COUNT, _keep_rows(writer.metrics_file_path, state["keys"], state["rows"]))


def _keep_rows(path: str, keys: list[str], n_rows: int) -> int:
    """Leave the first rows in the file, and return how many it has."""
    if not n_rows:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return 0
    try:
        with open(path, newline="") as file:
            rows = [{key: row.get(key, "") for key in keys} for row in csv.DictReader(file)]
    except FileNotFoundError:
        log.warning(
            "lightck: the file %s is gone, with its %d rows. Either somebody removed it, or version= is passed to the "
            "CSVLogger, which then deletes the file of the run before. Leave version= out, and a resumed run goes on "
            "with the file",
            path,
            n_rows,
        )
        return 0
    new = f"{path}.new"
    with open(new, "w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=keys)
        table.writeheader()
        table.writerows(rows[:n_rows])
    os.replace(new, path)
    return min(n_rows, len(rows))
