"""Checkpoints as files that other programs read: safetensors and torch.

``export_checkpoint`` writes a recovered checkpoint; ``tiers/keep.py`` writes checkpoints of a running session with the
same functions. Tensor names are those of the model's ``state_dict()``. A file appears under its name complete or not at
all, and replaces an existing file only with ``overwrite=True``. An export cannot be imported into a pool: a training
continues from a pool.
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

FORMATS = ("safetensors", "torch")


@dataclass(frozen=True, slots=True)
class Exported:
    """The file that an export wrote."""

    path: str
    nbytes: int
    """Size of the file."""
    tensors: int
    """Number of tensors in it, tied ones counted once."""
    tied: Mapping[str, str]
    """Omitted name -> name under which its tensor is stored. Empty for ``format="torch"``, which stores all names."""


def export_checkpoint(
    checkpoint: Checkpoint,
    to: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    what: str = "model",
    overwrite: bool = False,
) -> Exported:
    """Write a recovered checkpoint as a file.

    Args:
        checkpoint: what :func:`lightck.recover` returned.
        to: the file; its folder must exist.
        format: ``"safetensors"``, for ``safetensors.torch.load_file`` and, named ``model.safetensors`` beside a
            ``config.json``, for ``from_pretrained``; or ``"torch"``, for ``torch.load(..., weights_only=True)``.
        what: ``"model"``, or ``"all"``: optimizer, ``state`` and random states too (docs/history.md says where).
        overwrite: replace an existing file.

    Raises:
        StateValueError: the format lacks a tensor's dtype, or two values would have the same name in the file.
        ExportExistsError: the file exists and ``overwrite`` is False, or it is a pool, which is never replaced.
        ExportError: the file cannot be written.
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
        return export_chosen(choose(checkpoint.contents, what, checkpoint.tensor), path, overwrite=overwrite)
    value = for_torch(checkpoint.model if what == "model" else everything(checkpoint))
    with atomic_file(path, overwrite=overwrite) as file:
        torch.save(value, file)
        nbytes = file.tell()
    return Exported(path, nbytes, count_tensors(value), MappingProxyType({}))


def export_chosen(chosen: Chosen, path: str, *, overwrite: bool, temporary: str | None = None) -> Exported:
    """Write the chosen parts of a checkpoint as safetensors, with one tensor in memory at a time."""
    with atomic_file(path, overwrite=overwrite, temporary=temporary) as file:
        write_tensors(file, chosen.tensors, chosen.metadata)
        nbytes = file.tell()
    return Exported(path, nbytes, len(chosen.tensors), MappingProxyType(dict(chosen.tied)))
