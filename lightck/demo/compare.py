"""Compares what the two runs of the demo reported, bit for bit.

This module works on records only, and uses no processes or files. Each difference is a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LOST_MAX = 1  # largest number of finished updates that one kill may lose (interval=1, two slots)
NAMED_MAX = 5  # largest number of differing tensors that are named; further ones are only counted


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill and the recovery after it. A step is a number of finished updates; 0 is a new training."""

    how: str  # how and when the kill came, in words
    reported: int  # the last update that the killed child reported
    recovered: int  # the step from which the next child resumed
    recovery_seconds: float

    @property
    def lost(self) -> int:
        """The number of reported updates that the next child had to repeat."""
        return self.reported - self.recovered


@dataclass(slots=True)
class Record:
    """One run, as its child processes reported it."""

    losses: dict[int, list[str]] = field(default_factory=dict)
    """Update -> ``float.hex()`` of the loss, once for each time that the update was made: an update that was repeated
    after a kill has several losses."""
    digests: dict[str, str] = field(default_factory=dict)
    """Path -> digest of the state at the end of the run."""
    imported_lightck: bool = False
    recovered: dict[str, Any] | None = None
    """Step and digests of the checkpoint in the pool at the end of the run; None without a pool."""


def differences(reference: Record, killed: Record, kills: tuple[Kill, ...], steps: int) -> tuple[str, ...]:
    """Return all differences between the reference run and the killed run as sentences. ``steps``: the number of
    updates of each run."""
    return (
        *_imports(reference, killed),
        *_losses(reference, killed, steps),
        *_digests("at the end", reference.digests, killed.digests),
        *_pool(reference, killed, steps),
        *_lost(kills),
    )


def _imports(reference: Record, killed: Record) -> Iterator[str]:
    if reference.imported_lightck:
        yield "the reference run imported lightck, so it proves nothing"
    if not killed.imported_lightck:
        yield "the killed run did not import lightck, so it proves nothing"


def _losses(reference: Record, killed: Record, steps: int) -> Iterator[str]:
    for update in range(1, steps + 1):
        expected, found = reference.losses.get(update, []), killed.losses.get(update, [])
        if len(expected) != 1:
            yield f"update {update}: the reference run reported this update {len(expected)} times"
        elif not found:
            yield f"update {update}: the killed run never reported it"
        elif set(found) != set(expected):
            yield f"update {update}: loss {_values(expected)} in the reference run, {_values(found)} in the killed run"


def _values(bits: list[str]) -> str:
    return " and ".join(repr(float.fromhex(each)) for each in bits)


def _digests(where: str, expected: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    if not expected:
        yield f"{where}: the reference run reported no digests"
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    for name in wrong[:NAMED_MAX]:
        yield f"{where}: {name} differs" if name in expected and name in found else f"{where}: only one run has {name}"
    if len(wrong) > NAMED_MAX:
        yield f"{where}: {len(wrong) - NAMED_MAX} more differ, of {len(expected)} compared values"


def _pool(reference: Record, killed: Record, steps: int) -> Iterator[str]:
    """Yield the differences between the checkpoint in the pool and the end of the reference run: the step, the weights
    and the optimizer."""
    recovered = killed.recovered
    if recovered is None:
        yield "the killed run did not read its pool at the end"
        return
    if recovered["step"] != steps:
        yield f"the pool holds step {recovered['step']} after {steps} updates"
    stored = {name: each for name, each in reference.digests.items() if name.startswith(("weights/", "optimizer/"))}
    yield from _digests("in the pool", stored, recovered["digests"])


def _lost(kills: tuple[Kill, ...]) -> Iterator[str]:
    for number, kill in enumerate(kills, 1):
        if not 0 <= kill.lost <= LOST_MAX:
            yield f"kill {number} ({kill.how}): {kill.lost} finished updates lost, but at most {LOST_MAX} may be"
