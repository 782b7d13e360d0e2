"""What the ranks of a group report in attach, and what follows from the reports of all of them.

Every rank gets the same reports and computes the same decision, so no rank has to announce it. The functions are pure.
A decision that is an error is raised on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import msgpack

from lightck.errors import CheckpointExistsError, RankError, listed
from lightck.pool.format.structures import SLOTS_MAX
from lightck.ranks.rule import CheckpointId, may_start_from_nothing, newest_common, next_incarnation

_NONE: Mapping[CheckpointId, str] = {}


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank says of itself before anything is restored or created."""

    host: str
    """Name of the host, for messages."""
    directory: str
    """Path of the directory, for messages."""
    boot_id: str
    """Identifies the host."""
    place: str
    """Identifies the host and the directory: ranks with equal values see the same files."""
    arguments: dict[str, str]
    """Arguments of attach that must be the same on all ranks: name -> text."""
    tensors: str
    """Digest of names, logical shapes and dtypes of the tensors."""
    new_run: bytes
    """Random; that of rank 0 becomes the id of a new run."""
    run_id: bytes = b""
    """The run of the rank's pool; empty: it has no pool."""
    world_id: bytes = b""
    checkpoints: tuple[tuple[int, int], ...] = ()
    """(incarnation, step) of each checkpoint in the pool that counts and whose manifest verifies."""
    incarnation: int = 0
    """The largest incarnation in the pool."""

    def pack(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def unpack(cls, data: bytes) -> Report:
        """Raises ``RankError`` for the report of another release of lightck."""
        try:
            raw = msgpack.unpackb(data)
            return cls(**{**raw, "checkpoints": tuple((at, step) for at, step in raw["checkpoints"])})
        except (TypeError, KeyError, ValueError) as err:
            raise RankError(
                "The report of another rank cannot be read. All ranks must run the same release of lightck."
            ) from err

    @property
    def ids(self) -> frozenset[CheckpointId]:
        return frozenset(CheckpointId(*one) for one in self.checkpoints)


@dataclass(frozen=True, slots=True)
class Start:
    """How the group begins."""

    adopted: CheckpointId | None
    """The checkpoint to continue from; None: a new training."""
    incarnation: int
    """The incarnation of what the ranks write from now on."""
    run_id: bytes
    world_id: bytes


def refuse_differences(reports: Sequence[Report]) -> None:
    """Raise ``RankError`` if the ranks cannot be one group: other arguments, or other directories on one host. (The
    caller compares ``tensors``, because it has their names.)"""
    for name in reports[0].arguments:
        values = [report.arguments[name] for report in reports]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            raise RankError(
                f"{name} of lightck.attach is {values[0]} on {_name(reports, 0)} and {values[other]} on "
                f"{_name(reports, other)}. It must be the same on all ranks."
            )
    first_on: dict[str, int] = {}
    for rank, report in enumerate(reports):
        first = first_on.setdefault(report.boot_id, rank)
        # Containers on one host may have a directory each under the same path: they are as hosts are.
        if report.place != reports[first].place and report.directory != reports[first].directory:
            raise RankError(
                f"The directory {reports[first].directory!r} on {_name(reports, first)} is not the directory "
                f"{report.directory!r} on {_name(reports, rank)}, and both ranks run on the same host. The ranks on a "
                "host must pass the same directory. (If the group has two sessions, all ranks must attach them in the "
                "same order.)"
            )


def decide(
    reports: Sequence[Report], *, resume: bool, overwrite: bool, struck: Mapping[CheckpointId, str] = _NONE
) -> Start:
    """Return how the group begins. ``struck``: checkpoints that some rank could not restore, with the reason. Raises
    ``CheckpointExistsError`` if there are checkpoints, and the caller asked neither to continue nor to discard them.
    Raises ``RankError`` if ranks hold checkpoints and have none in common."""
    held = [report.ids for report in reports]
    incarnation = next_incarnation(report.incarnation for report in reports)
    if overwrite or not any(held):
        return _new_run(reports)
    runs = {(report.run_id, report.world_id) for report in reports if report.run_id}
    common = newest_common([ids - struck.keys() for ids in held]) if len(runs) == 1 else None
    if common is None and not struck and may_start_from_nothing(held):
        return _new_run(reports)  # an earlier start was killed before the first common checkpoint: nothing is lost
    if not resume:
        raise CheckpointExistsError(
            f"The directory holds checkpoints ({_listed_steps(reports)}). They are neither loaded nor overwritten "
            "unasked. Pass attach(..., resume=True) on all ranks to go on from the newest checkpoint that all ranks "
            "have, or overwrite=True to discard them."
        )
    if len(runs) > 1:
        with_pool = [rank for rank, report in enumerate(reports) if report.run_id]
        first = with_pool[0]
        other = next(rank for rank in with_pool if reports[rank].run_id != reports[first].run_id)
        raise RankError(
            f"The pool of {_name(reports, other)} belongs to another training than that of {_name(reports, first)}. "
            "Nothing was changed. Put the pools of one training into the directory; attach(..., overwrite=True) on all "
            "ranks discards all pools and starts afresh."
        )
    if common is None and struck:
        reasons = "; ".join(f"step {name.step}: {why}" for name, why in struck.items())
        raise RankError(
            f"No checkpoint that all ranks have can be restored on all of them. {reasons}. Nothing was overwritten. "
            "Use another copy of these pools; attach(..., overwrite=True) on all ranks discards all pools and starts "
            "afresh."
        )
    if common is None:
        raise RankError(
            f"The ranks have no intact checkpoint in common: {_listed_steps(reports)}. Nothing was overwritten. If the "
            "pool of a rank was lost or moved, put it back; attach(..., overwrite=True) on all ranks discards all "
            "pools and starts afresh."
        )
    return Start(common, incarnation, *runs.pop())


def _new_run(reports: Sequence[Report]) -> Start:
    new = reports[0].new_run
    return Start(None, 1, new[:16], new[16:])


def _name(reports: Sequence[Report], rank: int) -> str:
    return f"rank {rank} (host {reports[rank].host})"


def _listed_steps(reports: Sequence[Report]) -> str:
    """Return which steps each rank holds."""
    texts = []
    for rank, report in enumerate(reports):
        steps = sorted({checkpoint.step for checkpoint in report.ids})
        held = f"step {listed(list(map(str, steps)), SLOTS_MAX)}" if steps else "nothing"
        texts.append(f"{_name(reports, rank)} holds {held}")
    return "; ".join(texts[:8]) + (f"; and {len(texts) - 8} more ranks" if len(texts) > 8 else "")
