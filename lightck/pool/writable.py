"""Whether a training may go on in a pool that can be read: asked before anything in it, or in a model, is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightck.errors import CorruptPoolError, FormatError
from lightck.pool.format.structures import NUMBER_MAX

if TYPE_CHECKING:
    from lightck.pool.reader import PoolReader

HIGHEST = NUMBER_MAX // 2
"""Of any number to go on from: what comes after it is far from what a reader takes for damage."""


def refuse_unwritable(reader: PoolReader) -> None:
    """Raises ``FormatError``, ``CorruptPoolError``."""
    if not reader.is_writable:
        raise FormatError(
            f"{reader.path!r}: the pool uses features ({reader.superblock.ro_compat:#x}) that this lightck can "
            "read but not write. It was written by a newer lightck. Install that version to go on in it; "
            "lightck.recover() reads it."
        )
    generations = (reader.slot_generation(slot) or 0 for slot in range(len(reader.superblock.slots)))
    highest = max(reader.ring().highest, *generations)
    if highest >= HIGHEST:
        raise CorruptPoolError(
            f"The pool {reader.path!r} has counted up to {highest}, and its numbers end at {NUMBER_MAX}. No training "
            "comes so far: it is damaged, or was made to look like this. lightck.recover() reads it; train into "
            "another pool, or overwrite=True discards it."
        )
