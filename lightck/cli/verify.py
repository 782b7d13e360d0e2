"""``lightck verify``: does a pool hold what it says? Structures, manifests, and blocks against their checksums.

Of everything that exists twice both copies are checked. Blocks are read of the newest version, and of the next older
ones until one is whole; with ``--deep`` of every version. What a kill or a writer at work explains is no
damage.
"""

from __future__ import annotations

import shlex
import struct
import time
from collections.abc import Callable, Iterator

import click

from lightck.cli import stored_checkpoints
from lightck.cli.base import BAD, OK, POOL, Command, json_option, step_option
from lightck.cli.output import bar
from lightck.cli.text import Facts, columns, count, say, say_json, size, verdict
from lightck.errors import FormatError, NotAPoolError
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
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
"""Damaged tensors that the text names per version."""
_GENERATIONS_TRIED = 1000
"""For the line of an adoption: how many generations may lie between it and its version."""
_LOOKS, _PAUSE_SECONDS = 5, 0.02
"""A structure that fails its check may be in the middle of being written: it is read again."""


@click.command("verify", cls=Command, short_help="Check a pool against its checksums.")
@click.argument("pool", type=POOL)
@click.option("--deep", is_flag=True, help="Read every block of every version, not of the newest only.")
@step_option
@json_option
def command(pool: str, deep: bool, step: int | None, as_json: bool) -> int:
    """Check POOL: its structures, its manifests, and every block of the newest version.

    Nothing is written, and a pool in use can be checked. Exit status 1 where anything is damaged.
    """
    facts = pool_facts(pool, step, deep)
    if as_json:
        say_json(facts)
    else:
        _show(facts, pool)
    return OK if facts["ok"] else BAD


# -- facts -----------------------------------------------------------------------------------------------------------


def pool_facts(path: str, step: int | None, deep: bool) -> Facts:
    """What ``--json`` prints; docs/tools.md names the keys."""
    with stored_checkpoints.reading(path) as reader:
        structures = list(_structures(reader))
        checkpoints = _checkpoints(reader, step, deep)
        usable = [v for v in checkpoints if v["blocks"] == "verified" and v["state"] == stored_checkpoints.COMMITTED]
        damaged = [v for v in checkpoints if v["damage"]]
        return {
            "pool": reader.path,
            "ok": not damaged and not any(s["damaged"] for s in structures),
            "structures": structures,
            "versions": checkpoints,
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
        yield _structure(f"commit line {position}", *_settled(lambda at=position: _record_reason(reader, at)))  # type: ignore[misc]
    if reader.unnamed_generations():
        yield _structure("commit lines", "all are erased, and slots hold versions: which were committed cannot be told")
    for slot in range(len(sb.slots)):
        yield _structure(f"header of slot {slot}", *_settled(lambda at=slot: _header_reason(reader, at)))  # type: ignore[misc]


def _structure(name: str, reason: str | None, normal: bool = False) -> Facts:
    return {"name": name, "damaged": reason is not None and not normal, "note": reason}


Reason = tuple[str | None, bool]
"""What is wrong with a structure, if anything, and whether a kill explains it."""


def _settled(look: Callable[[], Reason]) -> Reason:
    """The reason that stays: a writer at work is done with a line or a header in microseconds."""
    for attempt in range(_LOOKS):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        reason, normal = look()
        if reason is None:
            break
    return reason, normal


def _superblock_reason(reader: PoolReader, offset: int) -> str | None:
    try:
        same = Superblock.unpack(reader.read(offset, SUPERBLOCK_NBYTES)) == reader.superblock
    except (DamagedError, NotAPoolError, FormatError) as error:
        return f"{error}; the other copy is used"
    return None if same else "it differs from the other copy"


def _record_reason(reader: PoolReader, position: int) -> Reason:
    sb = reader.superblock
    data = reader.read(sb.commit_record_offset(position), COMMIT_RECORD_NBYTES)
    try:
        CommitRecord.unpack(data, sb.uuid)
    except DamagedError as error:
        if _lacks_last_store(data, reader):
            return "it lacks its last store, as a commit that a kill cut off; its version is not used", True
        return f"{error}: the version that it named cannot be found", False
    return None, True


def _lacks_last_store(data: bytes, reader: PoolReader) -> bool:
    """Whether all of the line is there but its generation, in whose place that of an older line stands.

    In the line of a version the generation stands twice. That of an adoption was the next one at some moment since. No
    generation is given to two lines: one that another line has, or a newer one, is what a flipped bit left."""
    (older,), (payload,) = struct.unpack_from("<Q", data), struct.unpack_from("<Q", data, 24)
    commit_log = reader.commit_log()
    if any(record.generation == older for record in commit_log.records.values()):
        return False
    newest = min(commit_log.generation + SLOTS_MAX, payload + _GENERATIONS_TRIED)
    first = max(payload, older + 1)
    return any(_passes(generation, data, reader.superblock.uuid) for generation in range(first, newest + 1))


def _passes(generation: int, data: bytes, uuid: bytes) -> bool:
    try:
        return CommitRecord.unpack(struct.pack("<Q", generation) + data[8:], uuid) is not None
    except DamagedError:
        return False


def _header_reason(reader: PoolReader, slot: int) -> Reason:
    never_written = reader.read(reader.superblock.slots[slot][0], COMMIT_RECORD_NBYTES) == bytes(COMMIT_RECORD_NBYTES)
    newest = stored_checkpoints.newest_generations(reader.commit_log()).get(slot, 0)
    generation = reader.slot_generation(slot)
    if generation is not None and generation < newest:
        return f"it names generation {generation}, and {newest} was committed: a write of it was lost", False
    if generation is not None or (never_written and not newest):
        return None, True
    return "it fails its check; its version is judged by its manifest and blocks", False


def _checkpoints(reader: PoolReader, step: int | None, deep: bool) -> list[Facts]:
    """One map per version held. Where a writer took all their slots meanwhile, the pool is looked at again."""
    for _ in range(stored_checkpoints.ATTEMPTS):
        held = stored_checkpoints.held(reader, step)
        rows = _checked(reader, held, deep or step is not None)
        if not held or any(row["blocks"] != "overwritten" for row in rows):
            return rows
    raise stored_checkpoints.overwritten(reader)


def _checked(reader: PoolReader, held: tuple[stored_checkpoints.Held, ...], all_blocks: bool) -> list[Facts]:
    rows, whole = [], False
    newest = stored_checkpoints.newest_generations(reader.commit_log())
    total = sum(each.nbytes or 0 for each in held) if all_blocks else max((h.nbytes or 0 for h in held), default=0)
    with bar("verifying", total) as advance:
        for each in held:
            read = all_blocks or (not whole and each.state == stored_checkpoints.COMMITTED)
            row = _row(reader, each, read, advance)
            if row["damage"] and each.generation < newest.get(each.record.slot, 0):
                continue  # a newer version was committed over it: it is gone, and only the slot's header is stale
            rows.append(row)
            whole = whole or row["blocks"] == "verified"
    return rows


def _row(reader: PoolReader, each: stored_checkpoints.Held, read: bool, advance: Callable[[int], None]) -> Facts:
    row = {
        "step": each.step,
        "generation": each.generation,
        "incarnation": each.record.incarnation,
        "slot": each.record.slot,
        "state": each.state,
        "nbytes": each.nbytes,
        "blocks": "not read",
        "damage": [],
    }
    if each.stored is None:
        return row | {"damage": [{"tensor": None, "reason": each.reason}]}
    if not read:
        return row
    damage = list(_damage(each.stored, advance))
    if not stored_checkpoints.still_there(reader, each.record):
        return row | {"blocks": "overwritten"}
    return row | {"blocks": "damaged" if damage else "verified", "damage": damage}


def _damage(stored: StoredCheckpoint, advance: Callable[[int], None]) -> Iterator[Facts]:
    """Each tensor with a bad block; of a version that is being overwritten only the first one."""
    for name, entry in stored.entries.items():
        try:
            stored.read_into(name, 0)
        except DamagedError as error:
            yield {"tensor": name, "reason": str(error)}
            if not stored.is_intact():
                return
        advance(entry.nbytes)


# -- text ------------------------------------------------------------------------------------------------------------


def _show(facts: Facts, path: str) -> None:
    structures = facts["structures"]
    bad = [s for s in structures if s["damaged"]]
    rows = [("structures", "damaged" if bad else "OK", count(len(structures), "structure") + " checked")]
    rows += [("", "", f"{s['name']}: {s['note']}") for s in structures if s["note"]]
    for stored in facts["versions"]:
        rows += _rows(stored)
    for record in columns(rows):
        say(record)
    say()
    _show_verdict(facts, path)


def _rows(stored: Facts) -> list[tuple[str, str, str]]:
    name = f"step {stored['step']}" + (" (dead)" if stored["state"] == stored_checkpoints.DEAD else "")
    damage = [each["reason"] for each in stored["damage"]]
    if damage:
        rows = [(name if i == 0 else "", "damaged" if i == 0 else "", reason) for i, reason in enumerate(damage)]
        if len(rows) > SHOWN_MAX:
            rows[SHOWN_MAX:] = [("", "", f"and {len(rows) - SHOWN_MAX} more tensors (--json names them)")]
        return rows
    said = {
        "verified": f"every block matches its checksum ({size(stored['nbytes'] or 0)})",
        "not read": "its manifest matches; its blocks were not read (--deep reads them)",
        "overwritten": "not checked: the training wrote a newer version over it meanwhile",
    }
    return [(name, "-" if stored["blocks"] == "overwritten" else "OK", said[stored["blocks"]])]


def _show_verdict(facts: Facts, path: str) -> None:
    step = facts["recoverable_step"]
    if facts["ok"]:
        if not facts["versions"]:
            verdict("OK, and empty: no version was committed yet.", good=True)
        elif step is None:
            verdict("OK, as far as it was read.", good=True)
        else:
            verdict(f"OK: step {step} can be recovered.", good=True)
    elif step is None:
        verdict("DAMAGED, and no version that was checked can be recovered. Use another copy of the pool;", good=False)
        say("attach(..., overwrite=True) discards this one and starts afresh.")
    else:
        verdict(f"DAMAGED. Step {step} is whole: attach(..., resume=True) and recover() give it.", good=False)
        say(f"To keep it outside of the pool: lightck export {shlex.quote(path)} FILE.safetensors --step {step}")
