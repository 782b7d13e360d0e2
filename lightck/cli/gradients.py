"""What ``inspect`` and ``verify`` say of a pool with gradient records: the bases of a checkpoint by their age, the
records that its chain names, and damage in any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightck.cli.text import Facts, columns, count, print_line, size
from lightck.pool.format.gradients import CHAIN_COMMITTED, ChainEntry
from lightck.pool.format.layout import GRADIENT_ROLE
from lightck.pool.format.structures import DamagedError
from lightck.pool.gradient_reader import (
    GradientCheckpoint,
    Problem,
    checkpoint_of,
    is_overwritten,
    needed_problems,
    older_base_problems,
)
from lightck.pool.overwritten import Places
from lightck.pool.reader import PoolReader

if TYPE_CHECKING:
    from lightck.restore.replayed import ReplayedCheckpoint

ROWS_MAX = 40
"""The largest number of records that the text lists."""


# -- facts of inspect --------------------------------------------------------------------------------------------------


def updates_to_replay(stored: ReplayedCheckpoint) -> int:
    """Return how many updates a recovery replays for the unit with the oldest base."""
    return len(needed_steps(stored.gradient_checkpoint))


def needed_steps(checkpoint: GradientCheckpoint) -> set[int]:
    """Return the steps whose gradient records are needed: those after the oldest base."""
    return set(range(checkpoint.oldest_base_step + 1, checkpoint.step + 1))


def contents(stored: ReplayedCheckpoint) -> Facts:
    """Return the object for ``--json``."""
    checkpoint = stored.gradient_checkpoint
    bases, reason = _bases(checkpoint)
    return {
        "base_every": _base_every(stored),
        "bases": bases,
        "reason": reason,
        "whole": _whole(checkpoint),
        "records": list(_records(checkpoint)),
    }


def _whole(checkpoint: GradientCheckpoint) -> Facts:
    """Return the number and the size of the units that are whole in each checkpoint."""
    from lightck.state.inventory import unit_of

    entries = [one.entry for one in checkpoint.units_without_home()]
    return {
        "units": len({unit_of(entry) for entry in entries}),
        "tensors": len(entries),
        "nbytes": sum(entry.nbytes for entry in entries),
    }


def _base_every(stored: ReplayedCheckpoint) -> int | None:
    """Return in how many steps each unit was written once; None if the checkpoint does not say it."""
    from lightck.restore.contents import unpack_dict
    from lightck.state.update_record import BASE_EVERY_KEY

    found = unpack_dict(stored.state).get(BASE_EVERY_KEY)
    return found if type(found) is int else None


def _bases(checkpoint: GradientCheckpoint) -> tuple[list[Facts], str | None]:
    """Return (rows, reason): one row for each step whose state the bases hold, newest first; or no rows, and why they
    cannot be listed."""
    from lightck.restore.unit_copies import Records, UnitCopies

    try:
        copies = UnitCopies(Records(checkpoint)).first_choices()
    except DamagedError as error:
        return [], str(error)
    rows: dict[int, Facts] = {}
    for copy in copies:
        empty = {"step": copy.step, "updates": checkpoint.step - copy.step, "units": 0, "tensors": 0, "nbytes": 0}
        row = rows.setdefault(copy.step, empty)
        row["units"] += 1
        row["tensors"] += len(copy.tensors)
        row["nbytes"] += sum(one.entry.nbytes for one in copy.tensors.values())
    return [rows[step] for step in sorted(rows, reverse=True)], None


def _records(checkpoint: GradientCheckpoint) -> Iterator[Facts]:
    """Yield one row for each record that the checkpoint names, its own first."""
    needed = {*needed_steps(checkpoint), checkpoint.step}
    for entry in (checkpoint.chain_entry, *reversed(checkpoint.part.chain)):
        facts = {
            "step": entry.step,
            "generation": entry.generation,
            "slot": entry.slot,
            "needed": entry.step in needed,
            "committed": bool(entry.flags & CHAIN_COMMITTED),
        }
        yield facts | _in_record(checkpoint.reader, entry)


def _in_record(reader: PoolReader, entry: ChainEntry) -> Facts:
    try:
        tensors = [one.entry for one in checkpoint_of(reader, entry).in_record.values()]
    except DamagedError as error:
        state = "overwritten" if is_overwritten(reader, entry) else "damaged"
        return {"state": state, "reason": str(error), "gradients": None, "gradient_nbytes": None, "other_nbytes": None}
    gradients = [one for one in tensors if one.role == GRADIENT_ROLE]
    nbytes = sum(one.nbytes for one in gradients)
    return {
        "state": "readable",
        "reason": None,
        "gradients": len(gradients),
        "gradient_nbytes": nbytes,
        "other_nbytes": sum(one.nbytes for one in tensors) - nbytes,
    }


# -- text of inspect ---------------------------------------------------------------------------------------------------


def show(facts: Facts, step: int) -> None:
    """Print what ``contents`` returns. ``step``: the step of the checkpoint."""
    if facts["reason"] is not None:
        print_line(f"The bases of step {step} cannot be listed: {facts['reason']}.")
    else:
        _show_bases(facts["bases"], step, facts["base_every"])
    whole = facts["whole"]
    if whole["units"]:
        units = f"{count(whole['units'], 'unit')} ({size(whole['nbytes'])})"
        print_line(f"Besides these, each checkpoint holds {units} whole.")
    print_line()
    _show_records(facts["records"])


def _show_bases(bases: list[Facts], step: int, base_every: int | None) -> None:
    table = [("base of step", "updates to replay", "units", "tensors", "size")]
    for row in bases:
        step_of_base, updates, units, tensors = (str(row[name]) for name in ("step", "updates", "units", "tensors"))
        table.append((step_of_base, updates, units, tensors, size(row["nbytes"])))
    for line in columns(table, right=range(5)):
        print_line(line)
    if base_every is not None:
        print_line(
            f"Each unit (a parameter and its optimizer state) is written once in {base_every} steps (base_every)."
        )
    older = sum(row["nbytes"] for row in bases if row["updates"])
    most = max((row["updates"] for row in bases), default=0)
    if older:
        print_line(
            f"To recover step {step}, at most {count(most, 'update')} of each unit are replayed, for units of "
            f"{size(older)} in all."
        )
    else:
        print_line(f"Step {step} is full: no update is replayed to recover it.")


def _show_records(records: list[Facts]) -> None:
    table = [("record of step", "slot", "gradients", "size", "other", "")]
    for row in records[:ROWS_MAX]:
        use = "needed" if row["needed"] else "spare"
        if row["state"] == "readable":
            sizes = str(row["gradients"]), size(row["gradient_nbytes"]), size(row["other_nbytes"])
            words = use if row["committed"] else f"{use}, not committed"
        else:
            sizes, words = ("-", "-", "-"), f"{use}, {row['state']}: {row['reason']}"
        table.append((str(row["step"]), str(row["slot"]), *sizes, words))
    for line in columns(table, right=range(5)):
        print_line(line)
    if len(records) > ROWS_MAX:
        print_line(f"and {count(len(records) - ROWS_MAX, 'record')} more (--json lists them)")


# -- verify ------------------------------------------------------------------------------------------------------------


def read_nbytes(stored: ReplayedCheckpoint) -> int:
    """Return an estimate of the bytes that ``checked`` reads. All records count as large as that of the checkpoint,
    because the sizes of the others are in their own manifests."""
    checkpoint = stored.gradient_checkpoint
    copies = sum(one.entry.nbytes for one in (*checkpoint.bases(), *checkpoint.older_bases()))
    record = sum(one.entry.nbytes for one in checkpoint.in_record.values())
    return copies + record * (1 + len(checkpoint.part.chain))


def checked(
    stored: ReplayedCheckpoint, places: Callable[[], Places], *, replays: bool, advance: Callable[[int], None]
) -> Facts:
    """Verify all that a checkpoint needs, and the spare copies: the older bases, which stand in for damaged ones, and
    the records that only they need. Returns the part of a row of ``verify`` that says what was found.

    places: returns what lies in the homes at this moment. replays: replay the updates too, and compare the result with
    the checksums of the records.
    """
    checkpoint = stored.gradient_checkpoint
    damage = needed_problems(checkpoint.reader, checkpoint, advance)
    if damage and _is_overwritten(checkpoint, places()):
        return {"blocks": "overwritten"}
    spare = _spare_problems(checkpoint, places, advance)
    reason = _why_unrecoverable(stored, replays=replays) if damage or spare or replays else None
    if reason is not None and _is_overwritten(checkpoint, places()):
        return {"blocks": "overwritten"}
    problems = [*damage, *(spare or ())]
    if reason is not None and not damage:  # the bytes are intact, and the replay differs
        problems.append(Problem(None, reason))
    return {
        "blocks": "damaged" if damage else "verified",
        "recoverable": reason is None,
        "spare": "not read" if spare is None else "damaged" if spare else "verified",
        "replayed": reason is None if replays else None,
        "damage": [{"tensor": one.tensor, "reason": one.reason, "logical_shape": None} for one in problems],
    }


def _is_overwritten(checkpoint: GradientCheckpoint, now: Places) -> bool:
    """Whether damage to a checkpoint is explained by newer checkpoints that overwrite it."""
    return now.is_overwritten(checkpoint) or now.may_be_overwritten(checkpoint)


def _spare_problems(
    checkpoint: GradientCheckpoint, places: Callable[[], Places], advance: Callable[[int], None]
) -> list[Problem] | None:
    """Return the damage in the older bases and the records that only they need. None: they were not checked to the end,
    because a newer checkpoint may have overwritten them."""
    if not places().are_older_bases_kept(checkpoint):
        return None
    found = older_base_problems(checkpoint.reader, checkpoint, advance)
    return found if places().are_older_bases_kept(checkpoint) else None


def _why_unrecoverable(stored: ReplayedCheckpoint, *, replays: bool) -> str | None:
    """Return why the checkpoint cannot be recovered; None if it can."""
    try:
        if replays:
            stored.replay()
        else:
            stored.refuse_unreadable()
    except DamagedError as error:
        return str(error)
    return None
