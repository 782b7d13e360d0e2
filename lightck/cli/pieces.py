"""What ``lightck inspect --pieces`` shows: which pools hold which parts of the tensors of one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lightck.cli import groups
from lightck.cli.base import OK
from lightck.cli.text import Facts, columns, count, listed, print_json, print_line

if TYPE_CHECKING:
    from lightck.restore.ranges import StoredPiece


def inspect(path: str, step: int | None, as_json: bool) -> int:
    """Show the pieces of the newest checkpoint (of ``step``, if given) of a pool or of a directory of ranks. No payload
    is read. Raises as ``lightck.recover`` does."""
    import lightck
    from lightck.restore.averages import is_averaged

    with lightck.recover(path, step=step, lazy=True) as checkpoint:
        tensors = [
            {
                "name": name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "alias": entry.alias,
                "averaged": is_averaged(name, checkpoint.contents.entries, checkpoint.contents.layout),
                "pieces": [] if entry.alias is not None else [_facts(one) for one in checkpoint.pieces(name)],
            }
            for name, entry in checkpoint.contents.entries.items()
        ]
        if as_json:
            print_json({"path": os.path.abspath(path), "step": checkpoint.step, "tensors": tensors})
        else:
            print_line(f"step {checkpoint.step}: {count(len(tensors), 'tensor')}")
            print_line()
            for line in columns([("tensor", "shape", "held by", "from", "size"), *_rows(tensors)]):
                print_line(line)
    return OK


def _facts(piece: StoredPiece) -> Facts:
    return {"rank": piece.rank, "path": piece.path, "start": list(piece.start), "size": list(piece.size)}


def _rows(tensors: Sequence[Facts]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each part. Ranks that hold the same part share a row."""
    for tensor in tensors:
        name, shape = str(tensor["name"]), groups.shape_words(tensor["shape"])
        if tensor["alias"] is not None:
            yield name, shape, f"= {tensor['alias']}", "", ""
            continue
        holders: dict[tuple[str, str], list[str]] = {}
        for piece in tensor["pieces"]:
            where = f"({', '.join(map(str, piece['start']))})", groups.shape_words(piece["size"])
            holders.setdefault(where, []).append("" if piece["rank"] is None else str(piece["rank"]))
        for where, ranks in holders.items():
            held = "the pool" if ranks == [""] else f"rank{'s' * (len(ranks) > 1)} {listed(ranks, 8)}"
            held += ": their mean" if tensor["averaged"] and len(ranks) > 1 else ""
            yield name, shape, held, *where
        if not holders:
            yield name, shape, "nobody: it is empty", "", ""
