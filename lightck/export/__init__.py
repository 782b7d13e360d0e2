"""Checkpoints as files that other programs read: safetensors, torch, and folders of torch.distributed.checkpoint.

``export_checkpoint`` writes a recovered checkpoint; ``tiers/keep.py`` writes checkpoints of a running session with the
same functions. The model's tensors have the names of its ``state_dict()``. A file appears under its name complete or
not at all, and replaces an existing file only with ``overwrite=True``. A folder, too, appears complete or not at all.
But if a kill comes while one folder replaces another, nothing has the name, and both folders lie beside it under
temporary names. An exported file cannot be imported into a pool, so a training cannot be resumed from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from lightck.export.atomic import atomic_file, file_path
from lightck.export.choice import Chosen, check_what, choose
from lightck.export.plain import count_tensors, everything, for_torch
from lightck.export.tensors import write_tensors
from lightck.restore.checkpoint import Checkpoint

FORMATS = ("safetensors", "torch", "dcp")


@dataclass(frozen=True, slots=True)
class Exported:
    """The file (for ``format="dcp"`` the folder) that an export wrote."""

    path: str
    nbytes: int
    """Size of the file in bytes, or of all files in the folder."""
    tensors: int
    """Number of tensors in it; a tied tensor counts once."""
    tied: Mapping[str, str]
    """Name of a tied tensor that is not in the file -> name under which this tensor is stored. Only the format
    safetensors leaves such names out; for any other format this map is empty."""


def export_checkpoint(
    checkpoint: Checkpoint,
    to: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    what: str = "model",
    overwrite: bool = False,
) -> Exported:
    """Write a recovered checkpoint as a file, and return the file's path, size and content.

    Args:
        checkpoint: what :func:`lightck.recover` returned.
        to: path of the file; its folder must exist. For ``"dcp"`` the path of a folder, which is made.
        format: ``"safetensors"`` for ``safetensors.torch.load_file``, or ``"torch"`` for
            ``torch.load(..., weights_only=True)``. ``from_pretrained`` reads a safetensors file that is named
            ``model.safetensors`` and lies beside a ``config.json``. ``"dcp"`` for ``torch.distributed.checkpoint.load``
            in any number of ranks, with the keys that ``get_state_dict`` gives: ``model``, ``optimizer``.
        what: ``"model"``, or ``"all"`` for model, optimizer, ``state`` and random states (docs/history.md says under
            which names; ``"dcp"`` holds model, optimizer and ``step``).
        overwrite: replace an existing file, or a folder of torch.distributed.checkpoint.

    Raises:
        StateValueError: the format lacks a tensor's dtype, or two values would have the same name in the file.
        ExportExistsError: the file exists and ``overwrite`` is False; or the path is a pool, or is no regular file
            (such a path is never replaced).
        ExportError: the file cannot be written.
        PoolError: the tensors cannot be read from the pool.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"checkpoint is a {type(checkpoint).__name__}, not a lightck.Checkpoint. Recover a checkpoint of the pool "
            "first: lightck.export_checkpoint(lightck.recover(pool_path), file)."
        )
    path = file_path(to)
    check_what(what)
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown. Pass one of {', '.join(map(repr, FORMATS))}.")
    if format == "safetensors":
        # Unlike ``tensor``, ``read`` keeps no tensor in memory.
        read = checkpoint.read if checkpoint.is_lazy else checkpoint.tensor
        return export_chosen(choose(checkpoint.contents, what, read), path, overwrite=overwrite)
    if format == "dcp":
        from lightck.export.dcp import export_dcp  # it imports torch.distributed, which takes a second

        nbytes, counted = export_dcp(checkpoint, path, what=what, overwrite=overwrite)
        return Exported(path, nbytes, counted, MappingProxyType({}))
    value = for_torch(checkpoint.model if what == "model" else everything(checkpoint))
    with atomic_file(path, overwrite=overwrite) as file:
        torch.save(value, file)
        nbytes = file.tell()
    return Exported(path, nbytes, count_tensors(value), MappingProxyType({}))


def export_chosen(chosen: Chosen, path: str, *, overwrite: bool, temporary: str | None = None) -> Exported:
    """Write the chosen parts of a checkpoint as a safetensors file, with one tensor in memory at a time. ``temporary``:
    as in ``atomic_file``. Raises ``ExportError``."""
    with atomic_file(path, overwrite=overwrite, temporary=temporary) as file:
        write_tensors(file, chosen.tensors, chosen.metadata)
        nbytes = file.tell()
    return Exported(path, nbytes, len(chosen.tensors), MappingProxyType(dict(chosen.tied)))
