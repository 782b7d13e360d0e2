"""Checkpoints as folders of ``torch.distributed.checkpoint``, which any number of ranks loads.

The folder has the keys that ``torch.distributed.checkpoint.state_dict.get_state_dict`` gives: under ``model`` the names
of ``state_dict()``, and under ``optimizer`` the state and the options by the names of parameters.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from lightck.errors import ExportError, ExportExistsError, LightckError, listed
from lightck.export.atomic import cause_of, sync_folder_of
from lightck.export.plain import count_tensors
from lightck.pool.storage.file import sync_folder
from lightck.restore.by_parameter import merged_by_parameter
from lightck.restore.checkpoint import Checkpoint

_METADATA = ".metadata"
"""The file by which a folder is known as one of torch's; torch writes it last."""
_DATA = re.compile(r"__\d+_\d+\.distcp")
"""Names of torch's other files."""
_WRITER_OF_ZIP_FILES = "inline_container.cc"
"""The errors of torch's zip writer contain this file name. They do not say why a write has failed."""


def export_dcp(checkpoint: Checkpoint, path: str, *, what: str, overwrite: bool) -> tuple[int, int]:
    """Write a checkpoint as a folder. Returns the size of its files in bytes, and the number of tensors. ``what``:
    ``"model"``, or ``"all"`` for model, optimizer and number of the step. Raises ``ExportError``,
    ``ExportExistsError`` and ``StateValueError``."""
    handled = sys.exc_info()[1]
    value: dict[str, Any] = {"model": dict(checkpoint.model)}
    if what == "all":
        value |= {"optimizer": _optimizer(checkpoint), "step": checkpoint.step}
    with _atomic_folder(path, overwrite=overwrite) as folder:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                dcp.save(value, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        except (Exception, CheckpointException) as err:  # the latter is no Exception
            causes = [cause_of(one, handled, (OSError, LightckError, KeyboardInterrupt)) for one in _failures_in(err)]
            cause = next(filter(None, causes), None)
            if cause is not None:
                raise cause from err
            raise _error_of_torch(path, err) from err
        nbytes = sum(file.stat().st_size for file in Path(folder).iterdir())
    return nbytes, count_tensors(value)


def _failures_in(err: BaseException) -> list[BaseException]:
    """Return the errors that torch has caught and raised again as one of its own."""
    return [one[0] for one in err.failures.values()] if isinstance(err, CheckpointException) else [err]


def _error_of_torch(path: str, err: BaseException) -> ExportError:
    first = next(iter(_failures_in(err)), err)
    said = f"{type(first).__name__}: {(str(first).splitlines() or [''])[0].rstrip('.')}"
    if _WRITER_OF_ZIP_FILES in said:
        return ExportError(
            f"The folder {path!r} could not be written: a file in it could not be written whole (torch raised {said}). "
            "No part of it was left behind. Check the folder around it (space, limits), or choose another one."
        )
    return ExportError(
        f"The checkpoint cannot be written to {path!r}: torch.distributed.checkpoint raised {said}. Nothing was left "
        'there. Export with format="torch" instead.'
    )


def _optimizer(checkpoint: Checkpoint) -> dict[str, Any]:
    dicts = checkpoint.optimizer or []
    cure = 'Export with what="model", or with format="torch".'
    return merged_by_parameter(checkpoint.contents.optimizers, dicts if isinstance(dicts, list) else [dicts], cure)


@contextmanager
def _atomic_folder(path: str, *, overwrite: bool) -> Iterator[str]:
    """Yield a temporary folder beside ``path``. If the block ends without an exception, the folder is renamed to
    ``path``; otherwise it is removed. It replaces only what ``refuse_existing_folder`` lets pass."""
    path = path.rstrip(os.sep) or path
    refuse_existing_folder(path, overwrite=overwrite)
    temporary, replaced = (f"{path}.{secrets.token_hex(4)}.{kind}" for kind in ("tmp", "old"))
    try:
        os.mkdir(temporary)
        yield temporary
        sync_folder(temporary)
        refuse_existing_folder(path, overwrite=overwrite)
        _give_name(temporary, path, replaced)
        sync_folder_of(path, "folder")
    except LightckError:  # of a read of the pool, too
        raise
    except OSError as err:
        raise ExportError(
            f"The folder {path!r} could not be written: {err.strerror or err}. No part of it was left behind. Check "
            "the folder around it (space, owner, limits), or choose another one.",
            err.errno,
        ) from err
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _give_name(temporary: str, path: str, replaced: str) -> None:
    """Rename the new folder to ``path``. A folder that is there gets the name ``replaced`` first, and is removed last.
    (If the process is killed between the two renames, both folders are there, whole, under their other names.)"""
    is_there = os.path.lexists(path)
    if is_there:
        os.rename(path, replaced)
    try:
        os.rename(temporary, path)
    except OSError:
        if is_there:
            os.rename(replaced, path)
        raise
    if is_there:
        shutil.rmtree(replaced, ignore_errors=True)


def refuse_existing_folder(path: str, *, overwrite: bool) -> None:
    """Raise ``ExportExistsError`` for a path that exists, unless it may be replaced: an empty folder, or (with
    ``overwrite``) a folder that holds the files of one checkpoint of torch and nothing else."""
    if type(overwrite) is not bool:
        raise TypeError(f"overwrite={overwrite!r} is a {type(overwrite).__name__}. Pass True or False.")
    if not os.path.lexists(path):
        return
    if os.path.islink(path):
        what = "is a symbolic link, and the export would replace the link"
    elif not os.path.isdir(path):
        what = "exists, and is no folder"
    else:
        try:
            names = os.listdir(path)
        except OSError as err:
            raise ExportError(
                f"The folder {path!r} cannot be listed: {err.strerror}. Check its owner and permissions, or choose "
                "another folder.",
                err.errno,
            ) from err
        if not names:
            return
        others = [name for name in names if name != _METADATA and not _DATA.fullmatch(name)]
        is_torch_checkpoint = _METADATA in names and not others
        if is_torch_checkpoint and overwrite:
            return
        if is_torch_checkpoint:
            what = "exists, and holds a checkpoint of torch.distributed.checkpoint (overwrite=True, or --overwrite of "
            what += "lightck export, replaces it)"
        else:
            what = f"exists, and holds {listed(others, 3) or 'an unfinished checkpoint'}, so it is never replaced"
    raise ExportExistsError(f"{path!r} {what}. Nothing was written. Pass the path of a new folder.")
