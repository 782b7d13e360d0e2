"""Checkpoints as files that other programs read: safetensors and torch.

``export_checkpoint`` writes a recovered checkpoint; ``tiers/keep.py`` writes versions of a running session with the
same parts. Names are those of the model's ``state_dict()``; a file appears under its name complete or not at all, and
none is replaced unasked. It is no way back into a pool: going on with a training is what pools are for.
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
    """What an export wrote."""

    path: str
    nbytes: int
    """Size of the file."""
    tensors: int
    """Tensors in it, tied ones counted once."""
    tied: Mapping[str, str]
    """Name that was left out -> name under which its tensor is stored. Empty for ``format="torch"``, which has both."""


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
        overwrite: replace a file that is there.

    Raises:
        StateValueError: a tensor whose dtype the format lacks; two things, or keys of one dict, of one name in it.
        ExportExistsError: there is a file, and ``overwrite`` was not said; or a pool, which is never replaced.
        ExportError: the file cannot be written.
    """
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"checkpoint is a {type(checkpoint).__name__}, not a lightck.Checkpoint. A pool is recovered first: "
            "lightck.export_checkpoint(lightck.recover(pool_path), file)."
        )
    path = file_path(to)
    check_what(what)
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: it is one of {', '.join(map(repr, FORMATS))}.")
    if format == "safetensors":
        return export_chosen(choose(checkpoint.contents, what, checkpoint.tensor), path, overwrite=overwrite)
    value = for_torch(checkpoint.model if what == "model" else everything(checkpoint))
    with atomic_file(path, overwrite=overwrite) as file:
        torch.save(value, file)
        nbytes = file.tell()
    return Exported(path, nbytes, count_tensors(value), MappingProxyType({}))


def export_chosen(chosen: Chosen, path: str, *, overwrite: bool, temporary: str | None = None) -> Exported:
    """Write what was chosen of a version as safetensors, one tensor in memory at a time."""
    with atomic_file(path, overwrite=overwrite, temporary=temporary) as file:
        write_tensors(file, chosen.tensors, chosen.metadata)
        nbytes = file.tell()
    return Exported(path, nbytes, len(chosen.tensors), MappingProxyType(dict(chosen.tied)))
