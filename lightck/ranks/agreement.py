"""What the ranks of a group report in attach, and how they decide from all reports.

Every rank gets the same reports and computes the same decision, so no rank has to announce it. The functions are pure.
If the decision is an error, all ranks raise it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import msgpack

from lightck.errors import CheckpointExistsError, RankError, listed
from lightck.pool.format.group import ID_NBYTES
from lightck.pool.format.structures import SLOTS_MAX
from lightck.ranks.directory import pool_name
from lightck.ranks.rule import CheckpointId, may_start_from_nothing, newest_common, next_incarnation

_NONE: Mapping[CheckpointId, str] = {}


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank sends to the others before anything is restored or created."""

    host: str
    """Name of the host, for messages."""
    directory: str
    """Path of the directory, for messages."""
    boot_id: str
    """Identifies the host."""
    directory_id: str
    """Identifies the host and the directory: ranks with equal values see the same files."""
    arguments: dict[str, str]
    """Arguments of attach that must be the same on all ranks: name -> text."""
    tensors: str
    """Digest of names, logical shapes and dtypes of the tensors."""
    new_ids: bytes
    """32 random bytes. If the ranks begin a new training, those of rank 0 become its run id and its world id."""
    run_id: bytes = b""
    """Id of the training in the rank's pool (``GroupIdentity.run_id``); empty if the rank has no pool."""
    world_id: bytes = b""
    """Id of the world of the rank's pool (``GroupIdentity.world_id``); empty if the rank has no pool."""
    checkpoints: tuple[tuple[int, int], ...] = ()
    """(incarnation, step) of each usable checkpoint in the pool (``usable_by_id``)."""
    incarnation: int = 0
    """The largest incarnation in the pool."""
    is_damaged: bool = False
    """Whether the pool has commit records, and none of its checkpoints is usable."""
    stage: int = 0
    """The pipeline stage of the rank."""
    has_parts: bool = False
    """Whether the rank holds parts of tensors, in its model or in a checkpoint."""

    def pack(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def unpack(cls, data: bytes) -> Report:
        """Raises ``RankError`` for the report of another release of lightck."""
        try:
            raw = msgpack.unpackb(data)
            return cls(**{**raw, "checkpoints": tuple((incarnation, step) for incarnation, step in raw["checkpoints"])})
        except (TypeError, KeyError, ValueError) as err:
            raise RankError(
                "The report of another rank cannot be read. All ranks must run the same release of lightck."
            ) from err

    @property
    def ids(self) -> frozenset[CheckpointId]:
        return frozenset(CheckpointId(*one) for one in self.checkpoints)


@dataclass(frozen=True, slots=True)
class Start:
    """The decision with which the group begins."""

    adopted: CheckpointId | None
    """The checkpoint to continue from; None: a new training."""
    incarnation: int
    """The incarnation of the checkpoints that the ranks write from now on."""
    run_id: bytes
    world_id: bytes
    sources: Mapping[int, int] = field(default_factory=dict)
    """Rank whose pool is lost -> rank from whose pool it takes the checkpoint."""


def refuse_differences(reports: Sequence[Report]) -> None:
    """Raise ``RankError`` if the arguments of attach differ between ranks, or the directories of ranks on one host.
    (``tensors`` is compared by the caller, which has the names for the message.)"""
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
        # Containers on one host may have a directory each under the same path. They count as separate hosts.
        if report.directory_id != reports[first].directory_id and report.directory != reports[first].directory:
            raise RankError(
                f"The directory {reports[first].directory!r} on {_name(reports, first)} is not the directory "
                f"{report.directory!r} on {_name(reports, rank)}, and both ranks run on the same host. The ranks on a "
                "host must pass the same directory. (If the group has two sessions, all ranks must attach them in the "
                "same order.)"
            )


def decide(
    reports: Sequence[Report], *, resume: bool, overwrite: bool, unrestorable: Mapping[CheckpointId, str] = _NONE
) -> Start:
    """Return how the group begins.

    resume, overwrite: the arguments of attach. unrestorable: checkpoint -> reason, for each that some rank could not
    restore.

    Raises ``CheckpointExistsError`` if there are checkpoints, and neither ``resume`` nor ``overwrite`` is True. Raises
    ``RankError`` if ranks hold checkpoints and have none in common, or pools of different trainings.

    If a rank has no pool, or a pool without a commit record, and others hold checkpoints above step 0, its pool is
    lost. A checkpoint is then common if all other ranks have it.
    """
    held = [report.ids for report in reports]
    # A random number is added, so that two trainings that continue from copies of one directory get different
    # incarnations.
    incarnation = next_incarnation(report.incarnation for report in reports) + _random_number(reports)
    if overwrite or not (any(held) or any(report.is_damaged for report in reports)):
        return _new_run(reports)
    if not any(held):  # each pool is damaged or lost
        raise _nothing_common(reports)
    runs = {(report.run_id, report.world_id) for report in reports if report.run_id}
    lost = ranks_without_pool(reports)
    restorable = [ids - unrestorable.keys() for rank, ids in enumerate(held) if rank not in lost]
    common = newest_common(restorable) if len(runs) == 1 else None
    if (common is None or lost) and not unrestorable and may_start_from_nothing(held):
        return _new_run(reports)  # an earlier start was killed before the first common checkpoint: nothing is lost
    if not resume:
        raise CheckpointExistsError(
            f"The directory holds checkpoints ({_listed_steps(reports)}). They are neither loaded nor overwritten "
            "unasked. Pass attach(..., resume=True) on all ranks to continue from the newest checkpoint that all ranks "
            "have, or overwrite=True to discard them."
        )
    if len(runs) > 1:
        with_pool = [rank for rank, report in enumerate(reports) if report.run_id]
        first = with_pool[0]
        ids = [(report.run_id, report.world_id) for report in reports]
        other = next(rank for rank in with_pool if ids[rank] != ids[first])
        what = "training" if ids[other][0] != ids[first][0] else "group of ranks of the same training"
        raise RankError(
            f"The pool of {_name(reports, other)} belongs to another {what} than that of {_name(reports, first)}. "
            "Nothing was changed. Put the pools that one group of ranks saved into the directory; attach(..., "
            "overwrite=True) on all ranks discards all pools and starts afresh."
        )
    if common is None and unrestorable:
        reasons = "; ".join(f"step {checkpoint_id.step}: {why}" for checkpoint_id, why in unrestorable.items())
        raise RankError(
            f"No checkpoint that all ranks have can be restored on all of them. {reasons}. Nothing was overwritten. "
            "Use another copy of these pools; attach(..., overwrite=True) on all ranks discards all pools and starts "
            "afresh."
        )
    if common is None:
        raise _nothing_common(reports)
    return Start(common, incarnation, *runs.pop(), _sources(reports, lost))


def ranks_without_pool(reports: Sequence[Report]) -> list[int]:
    """Return the ranks that have no pool, or one without a commit record."""
    return [rank for rank, report in enumerate(reports) if not report.checkpoints and not report.is_damaged]


def _sources(reports: Sequence[Report], lost: Sequence[int]) -> dict[int, int]:
    """Return, for each rank whose pool is lost, the rank from whose pool it takes the checkpoint: the lowest one on the
    same host. Raises ``RankError`` if there is none, or if ranks hold parts of tensors, which no other pool has."""
    sources: dict[int, int] = {}
    for rank in lost:
        name, world_size = _name(reports, rank), len(reports)
        fact = (
            f"The pool of {name} is lost: the directory {reports[rank].directory!r} has no pool of rank {rank} with a "
            f"checkpoint, neither under the name {pool_name(rank, world_size)!r} nor under another one"
        )
        cure = (
            "Nothing was changed. Put that pool back; attach(..., overwrite=True) on all ranks discards all pools and "
            "starts afresh."
        )
        if any(report.has_parts for report in reports):
            raise RankError(
                f"{fact}. No other pool has what this rank wrote, because the ranks hold parts of the model, or "
                f"because they divided what they write. {cure} For later trainings: replicas=2 keeps a copy of each "
                "pool on another host; where all ranks hold the whole model, split=False lets each pool keep all of it."
            )
        candidates = [
            candidate
            for candidate, other in enumerate(reports)
            if candidate not in lost and other.directory_id == reports[rank].directory_id
        ]
        if not candidates:
            raise RankError(f"{fact}. No other rank on that host has a pool that could replace the lost one. {cure}")
        sources[rank] = candidates[0]
    return sources


def describe_replaced(replaced: Mapping[int, int]) -> str:
    """Return what to say about ranks that took a checkpoint from the pool of another rank; "" if there is none.
    ``replaced``: rank -> that other rank."""
    return "; ".join(
        f"the pool of rank {rank} was lost: its tensors, its objects in state= and its positions in loaders are those "
        f"of rank {source}, and its random states are new"
        for rank, source in sorted(replaced.items())
    )


def describe_other_rows(differing: Sequence[Sequence[str]]) -> str:
    """Return what to say about ranks that do not get back the rows that they had, but different ones that other ranks
    wrote; "" if there is none. ``differing``: for each rank, the names of the tensors with such rows."""
    texts = [f"rank {rank} in {listed(names, 3)}" for rank, names in enumerate(differing) if names]
    if not texts:
        return ""
    return (
        "when the checkpoint was saved, ranks of one host had different bytes in tensors of which each wrote only some "
        f"rows ({'; '.join(texts)}): a rank named here gets the rows that other ranks wrote, and not those that it had"
    )


def describe_not_exact(reasons: Sequence[str]) -> str:
    """Return what to say about ranks whose parts are not what they had at the checkpoint; "" if there is none.
    ``reasons``: for each rank, why its part is not exact; "" if it is."""
    texts = [f"on rank {rank}, {reason}" for rank, reason in enumerate(reasons) if reason]
    n_more = len(texts) - 2
    more = [f"so it is on {n_more} more rank{'s' * (n_more > 1)}"] if n_more > 0 else []
    return "; ".join(texts[:2] + more)


def describe_other_parts(names: Sequence[str]) -> str:
    """Return what to add about tensors of which a rank held other parts before; "" if there is none."""
    if not names:
        return ""
    return (
        f"; layout= now gives each rank another part of {listed(list(names), 3)} than when the checkpoint was saved, "
        "so values were moved between the ranks (if the old rule was wrong, and the ranks held these parts already, "
        "the values are now in the wrong places: see `lightck docs layout`)"
    )


def describe_from_world(n_saved: int, n_now: int) -> str:
    """Return what to say about a checkpoint that ``n_saved`` ranks saved, and ``n_now`` ranks load."""
    if n_saved == n_now:
        return (
            "the same number of ranks saved the checkpoint, but they were on other hosts, held other parts of the "
            "tensors, or lost a pool, and so sums may be made in another order"
        )
    return (
        f"the checkpoint was saved by {n_saved} rank{'s' * (n_saved > 1)} and is loaded into {n_now}: random states "
        "are new, and objects in state= are those of the first rank"
    )


def describe_missing(missing: Sequence[int]) -> str:
    """Return what to say about a checkpoint that the same number of ranks saved and load, if the pools of some ranks
    are missing."""
    return (
        f"{describe_lost(missing)} missing, and all ranks load what the others have: random states are new, and "
        "objects in state= are those of the first rank"
    )


def describe_lost(ranks: Sequence[int]) -> str:
    """Return a text: "the pool of rank 1 is", or "the pools of ranks 1, 2 are"."""
    many = len(ranks) > 1
    numbers = listed(list(map(str, ranks)), 8)
    return f"the pool{'s' * many} of rank{'s' * many} {numbers} {'are' if many else 'is'}"


def new_world(reports: Sequence[Report], adopted: CheckpointId, run_id: bytes, incarnation: int) -> Start:
    """Return how a group begins that continues from a checkpoint of another world. ``adopted``: that checkpoint, which
    all ranks have loaded. ``incarnation``: the largest one in the directory."""
    return Start(
        adopted, next_incarnation([incarnation]) + _random_number(reports), run_id, reports[0].new_ids[ID_NBYTES:]
    )


def _nothing_common(reports: Sequence[Report]) -> RankError:
    damaged = [rank for rank, report in enumerate(reports) if report.is_damaged]
    steps = [{checkpoint.step for checkpoint in report.ids} for report in reports]
    cure = "If the pool of a rank was replaced by an older one, put the newer one back"
    if damaged:
        cure = (
            f"No checkpoint in the pool of {_name(reports, damaged[0])} is intact. Put another copy of that pool into "
            "the directory. Or remove the damaged pool, if each pool holds the whole model (split=False), or if there "
            "are peer copies (replicas=2): then the rank takes its tensors from another rank, or all go back to it"
        )
    elif set.intersection(*steps):
        cure = (
            "Steps with the same number are of different histories: the training continued from two copies of these "
            "pools, or from different steps. Put the pools of one history into the directory"
        )
    return RankError(
        f"The ranks have no intact checkpoint in common: {_listed_steps(reports)}. Nothing was overwritten. {cure}; "
        "attach(..., overwrite=True) on all ranks discards all pools and starts afresh."
    )


def _random_number(reports: Sequence[Report]) -> int:
    """Return a number of 20 bits, which is random, and the same on all ranks."""
    return int.from_bytes(reports[0].new_ids[:4], "little") >> 12


def _new_run(reports: Sequence[Report]) -> Start:
    ids = reports[0].new_ids
    return Start(None, 1, ids[:ID_NBYTES], ids[ID_NBYTES:])


def _name(reports: Sequence[Report], rank: int) -> str:
    return f"rank {rank} (host {reports[rank].host})"


def _listed_steps(reports: Sequence[Report]) -> str:
    """Return a text with the steps that each rank holds."""
    texts = []
    for rank, report in enumerate(reports):
        steps = sorted({checkpoint.step for checkpoint in report.ids})
        held = f"step {listed(list(map(str, steps)), SLOTS_MAX)}" if steps else "nothing"
        texts.append(f"{_name(reports, rank)} holds {held}")
    n_more = len(texts) - 8
    return "; ".join(texts[:8]) + (f"; and {n_more} more rank{'s' * (n_more > 1)}" if n_more > 0 else "")
