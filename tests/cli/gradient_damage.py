"""Damage to a pool with gradient records: to the base of one tensor, to an older base, to the record of one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toys import flip

from lightck.pool.gradient_reader import GradientCheckpoint, StoredTensor, checkpoint_of, committed
from lightck.pool.reader import open_pool


@contextmanager
def newest(pool: Path) -> Iterator[GradientCheckpoint]:
    """The newest checkpoint of a pool, for the time of the block."""
    reader = open_pool(str(pool), gradients=True)
    try:
        yield checkpoint_of(reader, committed(reader)[0])
    finally:
        reader.close()


def base_of(pool: Path, name: str) -> StoredTensor:
    with newest(pool) as checkpoint:
        return next(one for one in checkpoint.bases() if one.entry.name == name)


def older_base_of(pool: Path, name: str) -> StoredTensor:
    with newest(pool) as checkpoint:
        return next(one for one in checkpoint.older_bases() if one.entry.name == name)


def recorded_in(pool: Path, step: int) -> dict[str, StoredTensor]:
    """What the record of a step holds, which the newest checkpoint names."""
    with newest(pool) as checkpoint:
        entries = {one.step: one for one in (*checkpoint.part.chain, checkpoint.chain_entry)}
        return checkpoint_of(checkpoint.reader, entries[step]).in_record


def flip_oldest_base(pool: Path) -> StoredTensor:
    """Damage the base that is the most updates behind."""
    with newest(pool) as checkpoint:
        base = min(checkpoint.bases(), key=lambda one: one.step)
    flip(pool, base.offset)
    return base


def flip_gradient(pool: Path, step: int) -> StoredTensor:
    """Damage one gradient in the record of a step."""
    gradient = next(one for name, one in recorded_in(pool, step).items() if name.startswith("gradient/"))
    flip(pool, gradient.offset)
    return gradient


def flip_manifest(pool: Path, step: int) -> None:
    """Damage the manifest of the record of a step."""
    with newest(pool) as checkpoint:
        sb = checkpoint.reader.superblock
        entry = {one.step: one for one in (*checkpoint.part.chain, checkpoint.chain_entry)}[step]
    flip(pool, sb.manifest_at(entry.slot, entry.manifest_index) + 8)
