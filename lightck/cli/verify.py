"""``lightck verify``: checks structures, manifests and blocks of a pool against their checksums.

If a structure exists twice, both copies are checked. The blocks of checkpoints are read from the newest checkpoint on,
until one checkpoint is intact; ``--deep`` reads the blocks of every checkpoint. A half-written commit record is not
reported as damage if a kill explains it. Records and headers that a training is writing are read again.
"""

from __future__ import annotations

import os
import shlex
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

import click

from lightck.cli import directories, gradients, groups, stored_checkpoints, verify_tier
from lightck.cli.base import BAD, OK, POOL, Command, any_store_option, json_option, step_option, usage_error
from lightck.cli.open_tier import is_tier
from lightck.cli.output import progress_bar
from lightck.cli.text import Facts, columns, count, print_json, print_line, print_verdict, size
from lightck.errors import FormatError, NotAPoolError
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    SLOT_HEADER_NBYTES,
    SLOTS_MAX,
    SUPERBLOCK_NBYTES,
    SUPERBLOCK_OFFSETS,
    CommitRecord,
    DamagedError,
    Superblock,
    layout_hash,
)
from lightck.pool.reader import PoolReader, StoredCheckpoint

SHOWN_MAX = 10
"""The largest number of damaged tensors of one checkpoint that the text names."""
_GENERATIONS_TRIED = 1000
"""``_lacks_last_store`` tries generations up to this number above the generation of the payload. (The record of an
adoption has a larger generation than the payload.)"""
_READS, _PAUSE_SECONDS = 5, 0.02
"""The largest number of reads of a structure whose check fails, and the pause between two reads. (If a training is
writing the structure, its check succeeds at the next read.)"""


@click.command("verify", cls=Command, short_help="Check a pool against its checksums.")
@click.argument("pool", type=POOL)
@click.option("--deep", is_flag=True, help="Read every block of every checkpoint, not only of the newest one.")
@click.option(
    "--replay",
    is_flag=True,
    help="Replay the updates of gradient records, and compare the result with the records.",
)
@step_option
@any_store_option
@json_option
def command(pool: str, deep: bool, replay: bool, step: int | None, as_json: bool) -> int:
    """Check the structures of POOL, its manifests, and every block of the newest checkpoint. For the directory of
    a group of ranks, check also whether the parts of all ranks make whole tensors. For a pool with gradient records,
    check the bases and records from which the checkpoint is made, and with --replay make it from them. For a tier,
    check its claims, the manifests and objects of all checkpoints, and every block of the newest one.

    Nothing is written, and the pool may be in use. Exit status 1 if anything is damaged.
    """
    if is_tier(pool):
        if replay:
            refuse_replay(pool)
        return verify_tier.verify(pool, step, as_json, deep=deep)
    if os.path.isdir(pool):
        directories.refuse_options_of_one_pool(step)
        return directories.verify(pool, as_json, lambda path: pool_facts(path, None, deep, replays=replay))
    facts = pool_facts(pool, step, deep, replays=replay)
    if as_json:
        print_json(facts)
    else:
        _show(facts, pool, is_newest=step is None)
    return OK if facts["ok"] else BAD


# -- facts -----------------------------------------------------------------------------------------------------------


def refuse_replay(path: str) -> NoReturn:
    """Raise the error for ``--replay`` where there is no update to replay."""
    usage_error(
        f"--replay replays the updates of gradient records, and {path!r} holds none: its checkpoints are complete. "
        "Leave out --replay."
    )


def pool_facts(path: str, step: int | None, deep: bool, *, replays: bool = False) -> Facts:
    """Return the object that ``--json`` prints; docs/json.md lists its keys. ``replays``: replay updates."""
    with stored_checkpoints.open_reader(path) as reader:
        if replays and not reader.superblock.has_gradients:
            refuse_replay(path)
        structures = list(_structures(reader))
        checkpoints = _checkpoints(reader, step, deep, replays=replays)
        states = stored_checkpoints.COMMITTED, stored_checkpoints.RECORDED
        usable = [row for row in checkpoints if row["recoverable"] and row["state"] in states]
        damaged = [row for row in checkpoints if row["damage"]]
        return {
            "pool": reader.path,
            "group": groups.group_facts(reader.group),
            "ok": not damaged and not any(s["damaged"] for s in structures),
            "structures": structures,
            "checkpoints": checkpoints,
            "versions": checkpoints,  # the old name of the key
            "recoverable_step": usable[0]["step"] if usable else None,
        }


def _structures(reader: PoolReader) -> Iterator[Facts]:
    sb = reader.superblock
    for name, offset in zip("AB", SUPERBLOCK_OFFSETS, strict=True):
        yield _structure(f"superblock {name}", _superblock_reason(reader, offset))
    for name, offset in zip("AB", sb.table_offsets, strict=True):
        good = layout_hash(reader.read(offset, sb.table_nbytes)) == sb.table_hash
        yield _structure(f"layout table {name}", None if good else "it does not match its hash; the other copy is used")
    for position in range(sb.ring_lines):
        yield _structure(f"commit record {position}", *_stable_result(lambda at=position: _check_record(reader, at)))  # type: ignore[misc]
    if reader.generations_of_erased_records():
        yield _structure(
            "commit log", "all records are erased, but slots hold checkpoints: it is unknown which were committed"
        )
    for slot in range(len(sb.slots)):
        yield _structure(f"header of slot {slot}", *_stable_result(lambda at=slot: _check_header(reader, at)))  # type: ignore[misc]


def _structure(name: str, reason: str | None, is_explained: bool = False) -> Facts:
    return {"name": name, "damaged": reason is not None and not is_explained, "note": reason}


CheckResult = tuple[str | None, bool]
"""(reason, is_explained). ``reason``: what is wrong with a structure; None: nothing is wrong. ``is_explained``: whether
a kill explains the reason, so that the structure does not count as damaged; meaningless if nothing is wrong."""


def _stable_result(check: Callable[[], CheckResult]) -> CheckResult:
    """Check a structure with ``check``, at most ``_READS`` times until it is good, and return the result of the last
    check. A training that has the pool open finishes a record or header within microseconds, so within a pause."""
    for attempt in range(_READS):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        reason, is_explained = check()
        if reason is None:
            break
    return reason, is_explained


def _superblock_reason(reader: PoolReader, offset: int) -> str | None:
    try:
        same = Superblock.unpack(reader.read(offset, SUPERBLOCK_NBYTES)) == reader.superblock
    except (DamagedError, NotAPoolError, FormatError) as error:
        return f"{error}; the other copy is used"
    return None if same else "it differs from the other copy"


def _check_record(reader: PoolReader, position: int) -> CheckResult:
    sb = reader.superblock
    data = reader.read(sb.commit_record_offset(position), COMMIT_RECORD_NBYTES)
    try:
        CommitRecord.unpack(data, sb.uuid)
    except DamagedError as error:
        if _lacks_last_store(data, reader):
            return (
                "its write was not finished, as after a kill during a commit; the checkpoint of this record is not "
                "used",
                True,
            )
        return f"{error}: the checkpoint that it named cannot be found", False
    return None, True


def _lacks_last_store(data: bytes, reader: PoolReader) -> bool:
    """Whether a commit record is complete except for its first 8 bytes, the generation, which are stored last.

    The first 8 bytes of such a record still hold the generation of the record that it overwrote. That record is gone,
    and no two records have the same generation. So if a readable record has this generation, the first 8 bytes are
    damaged, and not merely unwritten: the result is False. The missing generation is that of the payload or, for an
    adoption, a larger one. Possible generations are tried until the checksum of the record matches.
    """
    (older,), (payload,) = struct.unpack_from("<Q", data), struct.unpack_from("<Q", data, 24)
    commit_log = reader.commit_log()
    if any(record.generation == older for record in commit_log.records.values()):
        return False
    last = min(commit_log.generation + SLOTS_MAX, payload + _GENERATIONS_TRIED)
    first = max(payload, older + 1)
    return any(_is_valid_with(generation, data, reader.superblock.uuid) for generation in range(first, last + 1))


def _is_valid_with(generation: int, data: bytes, uuid: bytes) -> bool:
    try:
        return CommitRecord.unpack(struct.pack("<Q", generation) + data[8:], uuid) is not None
    except DamagedError:
        return False


def _check_header(reader: PoolReader, slot: int) -> CheckResult:
    never_written = reader.read(reader.superblock.slots[slot][0], SLOT_HEADER_NBYTES) == bytes(SLOT_HEADER_NBYTES)
    newest = stored_checkpoints.newest_generations(reader.commit_log()).get(slot, 0)
    generation = reader.slot_generation(slot)
    if generation is not None and generation < newest:
        return (
            f"it names generation {generation}, but generation {newest} was committed in this slot: a write of the "
            "header was lost",
            False,
        )
    if generation is not None or (never_written and not newest):
        return None, True
    if not newest:
        return "it is damaged. No commit record names a checkpoint in this slot", False
    return (
        "it is damaged. The checkpoint in the slot can be read without this header, and the line of that checkpoint "
        "says whether the checkpoint is intact",
        False,
    )


def _checkpoints(reader: PoolReader, step: int | None, deep: bool, *, replays: bool) -> list[Facts]:
    """Return one object per checkpoint. If a training overwrote all checkpoints during the read, the pool is read
    again. Raises ``PoolLockedError`` after ``ATTEMPTS`` reads."""
    for _ in range(stored_checkpoints.ATTEMPTS):
        found = stored_checkpoints.find_checkpoints(reader, step)
        rows = _checked(reader, found, deep or step is not None, replays=replays)
        if not found or any(row["blocks"] != "overwritten" for row in rows):
            return rows
    raise stored_checkpoints.overwritten_error(reader)


def _checked(
    reader: PoolReader, found: tuple[stored_checkpoints.FoundCheckpoint, ...], all_blocks: bool, *, replays: bool
) -> list[Facts]:
    rows, is_one_intact = [], False
    newest = stored_checkpoints.newest_generations(reader.commit_log())
    nbytes = [_nbytes_to_read(each) for each in found]
    total = sum(nbytes) if all_blocks else max(nbytes, default=0)
    with progress_bar("verifying", total) as advance:
        for checkpoint in found:
            reads_blocks = all_blocks or (not is_one_intact and checkpoint.is_recovered_by_default)
            row = _row(reader, checkpoint, reads_blocks, advance, replays=replays)
            if row["damage"] and checkpoint.generation < newest.get(checkpoint.record.slot, 0):
                continue  # the slot holds a newer checkpoint, although the slot's header names this checkpoint
            rows.append(row)
            is_one_intact = is_one_intact or row["recoverable"]
    return rows


def _nbytes_to_read(checkpoint: stored_checkpoints.FoundCheckpoint) -> int:
    if checkpoint.stored is None or isinstance(checkpoint.stored, StoredCheckpoint):
        return checkpoint.nbytes or 0
    return gradients.read_nbytes(checkpoint.stored)


def _row(
    reader: PoolReader,
    checkpoint: stored_checkpoints.FoundCheckpoint,
    reads_blocks: bool,
    advance: Callable[[int], None],
    *,
    replays: bool,
) -> Facts:
    row: Facts = {
        "step": checkpoint.step,
        "generation": checkpoint.generation,
        "incarnation": checkpoint.record.incarnation,
        "slot": checkpoint.record.slot,
        "state": checkpoint.state,
        "nbytes": checkpoint.nbytes,
        "blocks": "not read",
        "recoverable": False,
        "spare": None,
        "replayed": None,
        "damage": [],
    }
    if checkpoint.stored is None:
        return row | {"damage": [{"tensor": None, "reason": checkpoint.reason, "logical_shape": None}]}
    if not reads_blocks:
        return row
    if isinstance(checkpoint.stored, StoredCheckpoint):
        with checkpoint.stored.hold():
            damage = list(_damage(checkpoint.stored, advance))
        found = {"blocks": "damaged" if damage else "verified", "recoverable": not damage, "damage": damage}
    else:
        places = partial(stored_checkpoints.places_of, reader)
        found = gradients.checked(checkpoint.stored, places, replays=replays, advance=advance)
    if not stored_checkpoints.is_in_slot(reader, checkpoint.record):
        return row | {"blocks": "overwritten"}
    return row | found


def _damage(stored: StoredCheckpoint, advance: Callable[[int], None]) -> Iterator[Facts]:
    """Yield an object for each tensor with a bad block. If the checkpoint was overwritten, stop at the first such
    tensor."""
    for name, entry in stored.entries.items():
        try:
            stored.read_into(name, 0)  # 0: verify the blocks, and keep no bytes
        except DamagedError as error:
            yield {"tensor": name, "reason": str(error), "logical_shape": groups.logical_shape_of(entry)}
            if not stored.owns_slot():
                return
        advance(entry.nbytes)


# -- text ------------------------------------------------------------------------------------------------------------


def _show(facts: Facts, path: str, *, is_newest: bool) -> None:
    structures = facts["structures"]
    bad = [s for s in structures if s["damaged"]]
    rows = [] if facts["group"] is None else [("group", "", groups.group_words(facts["group"]))]
    rows += [("structures", "damaged" if bad else "OK", count(len(structures), "structure") + " checked")]
    rows += [("", "", f"{s['name']}: {s['note']}") for s in structures if s["note"]]
    steps = Counter(checkpoint["step"] for checkpoint in facts["checkpoints"])
    for checkpoint in facts["checkpoints"]:
        rows += _rows(checkpoint, shows_generation=steps[checkpoint["step"]] > 1)
    for line in columns(rows):
        print_line(line)
    print_line()
    _show_verdict(facts, path, is_newest=is_newest)


def _rows(checkpoint: Facts, *, shows_generation: bool) -> list[tuple[str, str, str]]:
    """Return the lines of a checkpoint. ``shows_generation``: name its generation too, because another checkpoint has
    the same step."""
    note = {
        stored_checkpoints.DEAD: " (dead: training resumed from an older step)",
        stored_checkpoints.RECORDED: " (without an intact commit record)",
    }
    name = f"step {checkpoint['step']}" + note.get(checkpoint["state"], "")
    if shows_generation:
        name += f", generation {checkpoint['generation']}"
    damage = [_damage_words(each) for each in checkpoint["damage"]]
    if damage:
        rows = [(name if i == 0 else "", "damaged" if i == 0 else "", reason) for i, reason in enumerate(damage)]
        if len(rows) > SHOWN_MAX:
            rows[SHOWN_MAX:] = [("", "", f"and {len(rows) - SHOWN_MAX} more tensors (--json lists them)")]
        if checkpoint["recoverable"]:
            rows.append(("", "", "this step is recovered all the same: another copy stands in for what is damaged"))
        return rows
    return [(name, "-" if checkpoint["blocks"] == "overwritten" else "OK", _good_words(checkpoint))]


def _good_words(checkpoint: Facts) -> str:
    """Return what is said of a checkpoint without damage."""
    if checkpoint["blocks"] == "overwritten":
        return "not checked: newer checkpoints have overwritten it, or a part of what it needs"
    if checkpoint["blocks"] == "not read":
        return "its manifest matches; its blocks were not read (--deep reads them)"
    nbytes = size(checkpoint["nbytes"] or 0)
    if checkpoint["spare"] is None:
        return f"every block matches its checksum ({nbytes})"
    what = "bases, older bases and records" if checkpoint["spare"] == "verified" else "bases and records"
    words = f"every block of its {what} matches its checksum ({nbytes} of state)"
    if checkpoint["replayed"]:
        words += "; its replayed updates match the records"
    return words


def _damage_words(damage: Facts) -> str:
    shape = damage["logical_shape"]
    return str(damage["reason"]) + ("" if shape is None else f" (a part of {groups.shape_words(shape)})")


def _show_verdict(facts: Facts, path: str, *, is_newest: bool) -> None:
    step = facts["recoverable_step"]
    if facts["group"] is not None and step is not None:
        print_verdict(f"{'OK' if facts['ok'] else 'DAMAGED'}: step {step} of this rank is intact.", good=facts["ok"])
        print_line(groups.recovery_note(facts["group"]))
        return
    if facts["ok"]:
        if not facts["checkpoints"]:
            print_verdict("OK, and empty: no checkpoint was committed yet.", good=True)
        elif step is None:
            print_verdict("OK: nothing that was read is damaged.", good=True)
        elif _is_replay_open(facts):
            print_verdict(f"OK: every byte that step {step} needs is intact.", good=True)
            print_line(f"To replay its updates and compare the result: lightck verify --replay {shlex.quote(path)}")
        else:
            print_verdict(f"OK: step {step} can be recovered.", good=True)
    elif step is None:
        print_verdict(
            "DAMAGED, and no checkpoint that was checked can be recovered. Use another copy of the pool.", good=False
        )
        print_line("attach(..., overwrite=True) discards this pool (of a group: all pools) and starts a training anew.")
    else:
        how = "is intact" if _is_intact(facts, step) else "can be recovered all the same"
        users = "a recovery uses" if is_newest else f"recover(..., step={step}) uses"
        print_verdict(f"DAMAGED. Step {step} {how}: {users} it.", good=False)
        name = shlex.quote(path)
        print_line(f"To save step {step} outside of the pool: lightck export {name} FILE.safetensors --step {step}")


def _is_replay_open(facts: Facts) -> bool:
    """Whether the recoverable step needs updates that were not replayed here."""
    rows = [row for row in facts["checkpoints"] if row["step"] == facts["recoverable_step"] and row["recoverable"]]
    return any(row["spare"] is not None and row["replayed"] is None for row in rows)


def _is_intact(facts: Facts, step: int) -> bool:
    return any(row["step"] == step and row["recoverable"] and not row["damage"] for row in facts["checkpoints"])
