"""A pool's file that was cut off, extended, or says of itself what no file of this machine and release says.

Cut at every boundary of the format and one byte before and after it; longer by a byte or a page; empty; of a foreign
kind, of the future, of the other byte order, with a dtype that nobody knows. Recovery, a resume and the commands answer
with the exact checkpoint or an error of lightck's own, within the memory that the file accounts for, and the file stays
as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import resource
import runpy
import shutil
import struct
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crash.campaign import Campaign, Order, Tally
from crash.stage import Stage, staged
from lightck.errors import FormatError, LightckError, NotAPoolError, PoolTruncatedError
from lightck.pool.format.layout import blocks_of
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    MAGIC,
    PAGE,
    SUPERBLOCK_NBYTES,
    SUPERBLOCK_OFFSETS,
    crc64,
    layout_hash,
)
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.storage import extents

STEPS = 4
_HERE = "crash.campaigns.truncations"
_MEMORY_SPARE = 256 << 20
"""Address space that a reader may take beyond what a process with torch has: far more than the file is long."""
_FIELDS = {
    "endianness": (8, "<I", 0x04030201),
    "major": (12, "<H", 2),
    "minor": (14, "<H", 9),
    "compat": (16, "<Q", 8),
    "ro_compat": (24, "<Q", 8),
    "incompat": (32, "<Q", 8),
}


@dataclass(frozen=True, slots=True)
class Damage:
    """What is done to a copy of the pool."""

    kind: str
    at: int = 0
    """Where it is cut off, or how many bytes are added."""
    what: str = ""
    copies: tuple[int, ...] = (0, 1)
    """Which superblocks are changed."""

    def __str__(self) -> str:
        if self.kind in ("cut", "extended"):
            return f"{self.kind} {'at' if self.kind == 'cut' else 'by'} {self.at} ({self.what})"
        return f"{self.what} in superblocks {list(self.copies)}" if self.kind == "field" else self.what


def run(order: Order, stage: Stage | None = None) -> Tally:
    tally = Tally()
    template = os.path.join(order.folder, "template.pool")
    with staged(stage) as stage:
        ending = stage.play(f"{_HERE}:made", template, order.backend)
        if ending.trouble():
            tally.found(-1, f"the pool was not made: {ending.trouble()}")
            return tally
        damages = _damages(template)
        tally.counts["places"] = len(damages)
        rng = random.Random(order.seed)
        cuts, others = ([d for d in damages if (d.kind == "cut") == is_cut] for is_cut in (True, False))
        damages = rng.sample(others, len(others)) + rng.sample(cuts, len(cuts))  # a few trials have all the rare ones
        for trial in order.trials:
            _trial(stage, order, tally, trial, template, damages[trial % len(damages)])
    return tally


def _trial(stage: Stage, order: Order, tally: Tally, trial: int, template: str, damage: Damage) -> None:
    copy = os.path.join(order.folder, f"trial-{trial}.pool")
    shutil.copyfile(template, copy)
    os.chmod(copy, 0o600)
    inflict(copy, damage)
    ending = stage.play(f"{_HERE}:looked_at", copy, order.backend, asdict(damage))
    for name in (copy, copy + ".lock"):
        Path(name).unlink(missing_ok=True)
    tally.counts["files"] += 1
    if ending.trouble():
        tally.found(trial, f"{damage}: {ending.trouble()}")
        return
    tally.counts[ending.result["outcome"]] += 1
    for reason in ending.result["broken"]:
        tally.found(trial, f"{damage}: {reason}")


# -- what is done to the file ----------------------------------------------------------------------------------------


def _damages(template: str) -> list[Damage]:
    reader = open_pool(template)
    try:
        size, places = os.path.getsize(template), reader.container.extents
        named = {0: "the start", size: "the end"}
        for at, what in _boundaries(reader):
            named |= {where: what for where, _ in extents.runs(places, at, 1)}
    finally:
        reader.close()
    for at, nbytes in places:
        named |= {at: "start of an extent", at + nbytes: "end of an extent"}
    cuts = {at + d: what for at, what in named.items() for d in (-1, 0, 1) if 0 <= at + d < size}
    found = [Damage("cut", at, what) for at, what in cuts.items()]
    found += [Damage("extended", n, "bytes") for n in (1, 8, PAGE, 2 << 20, 1 << 32)]
    found += [Damage("foreign", what=what) for what in ("magic", "text", "zeros", "dtype")]
    return found + [Damage("field", what=name, copies=which) for name in _FIELDS for which in ((0, 1), (0,), (1,))]


def _boundaries(reader: PoolReader) -> Iterator[tuple[int, str]]:
    """Offsets in the pool where one structure ends and another begins."""
    sb = reader.superblock
    for at in SUPERBLOCK_OFFSETS:
        yield from ((at, "superblock"), (at + len(MAGIC), "its magic"), (at + SUPERBLOCK_NBYTES, "end of a superblock"))
    for position in range(sb.ring_lines):
        yield from ((sb.commit_record_offset(position) + n, f"line {position}") for n in (0, 8, COMMIT_RECORD_NBYTES))
    for at in sb.table_offsets:
        yield from ((at, "layout table"), (at + sb.table_nbytes, "end of a layout table"))
    for number, (slot, nbytes) in enumerate(sb.slots):
        of = f"of slot {number}"
        yield from ((slot, f"header {of}"), (slot + COMMIT_RECORD_NBYTES, f"end of the header {of}"))
        for index in (0, 1):
            yield slot + sb.manifest_offset + index * sb.manifest_nbytes, f"manifest {index} {of}"
        for entry in reader.entries:
            for block in range(blocks_of(entry.nbytes, sb.block)):
                yield slot + entry.offset + block * sb.block, f"block {block} of {entry.name} {of}"
            yield slot + entry.offset + entry.nbytes, f"end of {entry.name} {of}"
        yield from ((slot + sb.reserve_offset, f"reserve {of}"), (slot + nbytes - 1, f"last byte {of}"))


def inflict(path: str, damage: Damage) -> None:
    """Do it to this file."""
    if damage.kind in ("cut", "extended"):
        os.truncate(path, damage.at if damage.kind == "cut" else os.path.getsize(path) + damage.at)
    elif damage.kind == "field":
        offset, kind, value = _FIELDS[damage.what]
        _change_superblocks(path, damage.copies, offset, struct.pack(kind, value))
    elif damage.what == "dtype":
        _change_dtype(path)
    else:
        start = {"magic": b"LIGHTCK\2", "text": b"# a list of things to do\n", "zeros": bytes(2 * SUPERBLOCK_NBYTES)}
        for copy in (0, 1):
            _write(path, SUPERBLOCK_OFFSETS[copy], start[damage.what][:SUPERBLOCK_NBYTES])


def _change_superblocks(path: str, copies: tuple[int, ...], offset: int, data: bytes) -> None:
    """A field, with a check that is right: as somebody who means it would write it."""
    for copy in copies:
        block = bytearray(_read(path, SUPERBLOCK_OFFSETS[copy], SUPERBLOCK_NBYTES))
        block[offset : offset + len(data)] = data
        block[-8:] = struct.pack("<Q", crc64(bytes(block[:-8])))
        _write(path, SUPERBLOCK_OFFSETS[copy], bytes(block))


def _change_dtype(path: str) -> None:
    reader = open_pool(path)
    table, offsets = reader.table, reader.superblock.table_offsets
    reader.close()
    changed = table.replace(b"float32", b"float99")
    assert changed != table, "the pool has tensors of that dtype"
    for at in offsets:
        _write(path, at, changed)
    _change_superblocks(path, (0, 1), _table_hash_at(path, layout_hash(table)), layout_hash(changed))


def _table_hash_at(path: str, known: bytes) -> int:
    return _read(path, 0, SUPERBLOCK_NBYTES).index(known)


def _places(path: str) -> extents.Extents:
    reader = open_pool(path)
    reader.close()
    return reader.container.extents


def _read(path: str, offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        return extents.read(file.fileno(), _PLACES[path], offset, nbytes)


def _write(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        for at, n in extents.runs(_PLACES[path], offset, len(data)):
            os.pwrite(file.fileno(), data[:n], at)
            data = data[n:]


class _Places(dict[str, extents.Extents]):
    """Where a pool's bytes lie, from before it was damaged."""

    def __missing__(self, path: str) -> extents.Extents:
        self.clear()
        self[path] = _places(path)
        return self[path]


_PLACES = _Places()


# -- scenes ----------------------------------------------------------------------------------------------------------


def made(path: str, backend: str) -> str:
    """A pool with two checkpoints of a short training."""
    import lightck
    from crash.life import Training

    training = Training()
    with lightck.attach(
        training.model, path, optimizer=training.optimizer, state={"box": training.box}, backend=backend
    ):
        for step in range(STEPS):
            training.update(step)
    return "made"


def looked_at(path: str, backend: str, damage: dict[str, Any]) -> dict[str, Any]:
    """What recovery, the commands and a resume make of a damaged file."""
    from crash.life import truth

    plan, broken = Damage(**damage | {"copies": tuple(damage["copies"])}), []
    exact = truth(STEPS)[STEPS]
    before = _content(path)
    _limit_memory()
    outcome, digest = _recovered(path)
    if digest not in ("", exact):
        broken.append("recovery gave wrong bytes")
    for command in ("inspect", "verify"):
        status, text = _command(command, path)
        if "Traceback" in text or status not in (0, 1, 2):
            broken.append(f"lightck {command} ended with {status}: {text[-500:]}")
        elif (status == 0) != bool(digest) and command == "verify" and len(plan.copies) == 2:
            broken.append(f"lightck verify ended with {status}, and recovery with {outcome}: {text[-300:]}")
    if _content(path) != before:
        broken.append("reading changed the file")
    resumed, digest = _resumed(path, backend)
    if digest not in ("", exact):
        broken.append("a resume gave wrong bytes")
    if resumed != "exact" and _content(path) != before:
        broken.append("a refused resume changed the file")
    wrong = _expected(plan, outcome, resumed)
    broken += [f"{what}: {expected} was expected, not {got}" for what, expected, got in wrong]
    return {"outcome": outcome, "broken": broken}


def _expected(plan: Damage, outcome: str, resumed: str) -> Iterator[tuple[str, str, str]]:
    """Where exactly one answer is right: (who, what was right, what it said)."""
    both = len(plan.copies) == 2
    if plan.kind in ("cut", "extended") and outcome not in (PoolTruncatedError.__name__, NotAPoolError.__name__):
        yield "recovery", "PoolTruncatedError or NotAPoolError", outcome
    if plan.kind in ("cut", "extended") and resumed != outcome:
        yield "a resume", outcome, resumed
    if plan.what in ("endianness", "major", "incompat") and both and outcome != FormatError.__name__:
        yield "recovery", "FormatError", outcome
    if plan.what in ("ro_compat", "minor", "compat") and outcome != "exact":
        yield "recovery", "exact", outcome
    if plan.what == "ro_compat" and both and resumed != FormatError.__name__:
        yield "a resume", "FormatError", resumed
    if plan.what in ("minor", "compat") and resumed != "exact":
        yield "a resume", "exact", resumed


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY_SPARE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _recovered(path: str) -> tuple[str, str]:
    import lightck
    from crash.life import Training

    training = Training(seed=1)
    try:
        lightck.recover(path, training.model, optimizer=training.optimizer, state={"box": training.box})
    except LightckError as err:
        return type(err).__name__, ""
    return "exact", training.digest()


def _resumed(path: str, backend: str) -> tuple[str, str]:
    import lightck
    from crash.life import Training

    training = Training(seed=1)
    try:
        lightck.attach(
            training.model,
            path,
            optimizer=training.optimizer,
            state={"box": training.box},
            resume=True,
            backend=backend,
        ).close()
    except LightckError as err:
        return type(err).__name__, ""
    return "exact", training.digest()


def _command(name: str, path: str) -> tuple[int, str]:
    """The command as the shell would run it, but in this process."""
    reported, before = io.StringIO(), sys.argv
    sys.argv = ["lightck", name, path]
    try:
        with contextlib.redirect_stdout(reported), contextlib.redirect_stderr(reported):
            runpy.run_module("lightck", run_name="__main__")
    except SystemExit as end:
        return (end.code if isinstance(end.code, int) else int(end.code is not None)), reported.getvalue()
    finally:
        sys.argv = before
    return 0, reported.getvalue()


def _content(path: str) -> str:
    """A digest; holes of a file that was made long are not read."""
    digest, size = hashlib.blake2b(str(os.path.getsize(path)).encode()), os.path.getsize(path)
    with open(path, "rb") as file:
        digest.update(file.read(min(size, 64 << 20)))
    return digest.hexdigest()


CAMPAIGN = Campaign(
    name="truncations",
    summary="a file cut at every boundary, extended, foreign, of the future: a typed error, or the exact checkpoint",
    small=40,
    long=1000,
    run=run,
)
