"""The checkpoints of a tier, as ``list``, ``inspect`` and ``verify`` show them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lightck.cli.text import Facts, clean, columns, size

if TYPE_CHECKING:
    from lightck.tiers.candidates import Candidate
    from lightck.tiers.decisions import Listing
    from lightck.tiers.names import TierCheckpoint
    from lightck.tiers.store import Store


class Found(NamedTuple):
    candidates: list[Candidate]
    """The complete checkpoints whose manifests can be read, newest first. A checkpoint that was sent twice is in the
    list twice."""
    unreadable: list[Facts]
    """A dict with ``step``, ``claim`` and ``reason`` for each checkpoint of which a manifest cannot be used."""

    @property
    def without_repeats(self) -> list[Candidate]:
        """Each checkpoint (claim and step) once, as it was sent last."""
        found: dict[TierCheckpoint, Candidate] = {}
        for each in self.candidates:
            found.setdefault(each.checkpoint, each)
        return list(found.values())


def find(store: Store, listing: Listing, step: int | None = None) -> Found:
    """Read the manifests of a tier, or those of ``step``. Raises ``TierError``."""
    from lightck.tiers.candidates import Rejected, candidates_of

    rejected: list[Rejected] = []
    candidates = list(candidates_of(store, listing, step, rejected))
    reasons = [{"step": one.step, "claim": str(one.checkpoint.claim), "reason": one.reason} for one in rejected]
    return Found(candidates, reasons)


def row(found: Candidate) -> Facts:
    """Return the object of a checkpoint for ``--json``."""
    from lightck.tiers.decisions import manifests_of

    sent_at = max(found.listing.manifests[name] for name in manifests_of(found.listing, found.checkpoint))
    facts: Facts = {"step": found.checkpoint.step, "claim": str(found.checkpoint.claim), "sent_at": sent_at}
    return facts | {"nbytes": found.nbytes, "metrics": dict(found.manifests[0].metrics), "ranks": found.world_size}


def table(rows: Sequence[Facts]) -> list[str]:
    """Return the lines of a table of rows (``row``). If the rows have ``new_nbytes``, the table has a column for the
    bytes that no older checkpoint of the claim has."""
    has_new = any("new_nbytes" in each for each in rows)
    cells = [("step", "sent", "size", *["new"] * has_new, "claim", "metrics")]
    for each in rows:
        metrics = ", ".join(f"{clean(name)} {value:g}" for name, value in sorted(each["metrics"].items()))
        new = [size(each["new_nbytes"])] if has_new else []
        cells.append((str(each["step"]), age(each["sent_at"]), size(each["nbytes"]), *new, each["claim"], metrics))
    return columns(cells, right=range(3 + has_new)) if rows else []


def age(sent_at: float) -> str:
    """Return a time of the past as text: "5 min ago"."""
    seconds = max(0.0, time.time() - sent_at)
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds / 86400:.0f} days ago"
