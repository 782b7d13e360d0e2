"""``lightck inject``: damages a copy of a pool, so that users can see which damage is found and what is recovered.

The pool itself is only read. The copy is a new file. A seed determines the damage: the same seed gives the same damage.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import click

from lightck.cli.base import OK, POOL, Command, ended_by_signals, json_option, usage_error
from lightck.cli.text import Facts, listed, print_json, print_line, size
from lightck.errors import ExportError, ExportExistsError, LightckError, PoolTruncatedError, UnsupportedError
from lightck.pool.format import anatomy
from lightck.pool.format.anatomy import Part
from lightck.pool.format.layout import GRADIENT_PREFIX
from lightck.pool.format.structures import PAGE
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.storage.backends import pool_path, readable_path
from lightck.pool.storage.extents import runs, total

ANYWHERE = "anywhere"
"""The WHERE of ``--flip`` and ``--zero-page`` without a value: any place of the newest checkpoint."""
TORN_NBYTES_MAX = 64 << 20
"""The largest number of bytes that ``--torn-slot`` overwrites."""
_WHERE = f"an offset in the pool (0x2000), {', '.join(anatomy.KINDS)}, or the name of a tensor"


@dataclass(frozen=True, slots=True)
class Damage:
    """One damage. ``offset`` counts bytes from the start of the pool, ``file_offset`` from the start of the pool's
    file."""

    said: str
    """What was damaged, and how, as text."""
    offset: int | None = None
    file_offset: int | None = None
    nbytes: int | None = None
    """The number of bytes that were changed, or cut off."""
    bit: int | None = None
    """The flipped bit, 0 to 7."""
    tensor: str | None = None
    """The tensor that is damaged; None if the damage is elsewhere."""
    step: int | None = None
    """The step of the checkpoint that is damaged; None if the damage is elsewhere."""


@click.command("inject", cls=Command, short_help="Damage a copy of a pool, to see what is found and what is recovered.")
@click.argument("pool", type=POOL)
@click.argument("copy", type=click.Path())
@click.option("--flip", is_flag=False, flag_value=ANYWHERE, metavar="[WHERE]", help="Flip one bit.")
@click.option("--zero-page", is_flag=False, flag_value=ANYWHERE, metavar="[WHERE]", help="Zero a page of 4 KiB.")
@click.option("--torn-slot", is_flag=True, help="Overwrite a part of the newest checkpoint with bytes of another slot.")
@click.option("--truncate", type=int, metavar="N", help="Cut the file to N bytes; -N: cut off N bytes.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    help="Draw the same damage as an earlier run with this seed. [default: random]",
)
@json_option
def command(
    pool: str,
    copy: str,
    flip: str | None,
    zero_page: str | None,
    torn_slot: bool,
    truncate: int | None,
    seed: int | None,
    as_json: bool,
) -> int:
    """Copy POOL to COPY, which must not exist, and damage the copy. POOL is only read.

    WHERE is an offset in the pool, in bytes; or a structure of the pool: superblock, table, next (the record of the
    batch that followed the checkpoint); or a part of the newest checkpoint: line (its commit record), header, manifest,
    payload, or the name of a tensor. Without WHERE, --flip and --zero-page choose a random place in the newest
    checkpoint; an option without WHERE must come after COPY.
    """
    if [flip, zero_page, torn_slot or None, truncate].count(None) != 3:
        usage_error("Pass exactly one of --flip, --zero-page, --torn-slot, --truncate.")
    seed = secrets.randbelow(2**31) if seed is None else seed
    with ended_by_signals(), copy_of(pool, copy) as made:
        rng = random.Random(seed)
        damage = cut(made, truncate) if truncate is not None else inject(made, rng, flip, zero_page)
    facts = {"pool": pool_path(pool), "copy": pool_path(copy), "seed": seed, "damage": asdict(damage)}
    if as_json:
        print_json(facts)
    else:
        _show(facts, pool, copy, damage)
    return OK


# -- the copy --------------------------------------------------------------------------------------------------------


@contextmanager
def copy_of(pool: str, copy: str) -> Iterator[str]:
    """Copy the pool to a new file, whose path the block receives. If the block raises, the file is removed. Raises
    ``ExportExistsError`` or ``ExportError`` if the file cannot be written, and ``PoolError`` if the pool cannot be
    read."""
    reader = open_pool(readable_path(pool), gradients=True)
    if not stat.S_ISREG(os.fstat(reader.container.fd).st_mode):
        reader.close()
        raise UnsupportedError(
            f"{pool!r} is a device, and inject damages copies of files only. Write its newest checkpoint to a file "
            f"first: lightck compact {shlex.quote(pool)} FILE"
        )
    target = pool_path(copy)
    try:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError as err:
        reader.close()
        raise ExportExistsError(f"{target!r} exists, and inject damages no existing file. Name a new file.") from err
    except OSError as err:
        reader.close()
        raise ExportError(
            f"{target!r} cannot be created: {err.strerror}. Name a file in a folder that you can write to."
        ) from err
    try:
        with os.fdopen(fd, "wb") as out:
            _copy(reader, out.fileno())
        yield target
    except BaseException as err:
        with contextlib.suppress(OSError):
            os.unlink(target)
        if isinstance(err, OSError) and not isinstance(err, LightckError):
            raise ExportError(
                f"{target!r} cannot be written: {err.strerror}. The copy was removed. Free some space, or name "
                "another file."
            ) from err
        raise
    finally:
        reader.close()


def _copy(reader: PoolReader, out: int) -> None:
    fd, at, end = reader.container.fd, 0, os.fstat(reader.container.fd).st_size
    os.ftruncate(out, end)
    while at < end:
        data = os.pread(fd, 1 << 20, at)
        if not data:
            raise PoolTruncatedError(
                f"The pool {reader.path!r} became shorter while it was copied: another process truncated it. Use a "
                "complete copy."
            )
        at += os.pwrite(out, data, at)


# -- the damage ------------------------------------------------------------------------------------------------------


def cut(path: str, nbytes: int) -> Damage:
    """Truncate the file at ``path`` to ``nbytes``; a negative number is the number of bytes to cut off."""
    before = os.stat(path).st_size
    after = nbytes if nbytes >= 0 else before + nbytes
    if not 0 <= after < before:
        usage_error(
            f"--truncate {nbytes} does not make the pool shorter: the pool has {before} bytes. Pass the new size, 0 to "
            f"{before - 1}, or minus the number of bytes to cut off."
        )
    os.truncate(path, after)
    return Damage(f"cut from {before} to {after} bytes", nbytes=before - after)


def inject(path: str, rng: random.Random, flip: str | None, zero_page: str | None) -> Damage:
    """Damage the pool at ``path``, a copy that this command made. ``flip``, ``zero_page``: the WHERE of the option; if
    both are None, the newest checkpoint is torn."""
    reader = open_pool(path, gradients=True)
    try:
        parts = anatomy.parts_of(reader)
        if flip is not None:
            return _flip(reader, parts, _offset(reader, parts, flip, rng), rng)
        if zero_page is not None:
            return _zero(reader, parts, _offset(reader, parts, zero_page, rng))
        return _tear(reader, parts, rng)
    finally:
        reader.close()


def _flip(reader: PoolReader, parts: Sequence[Part], offset: int, rng: random.Random) -> Damage:
    bit = rng.randrange(8)
    at = _write(reader, offset, bytes([reader.read(offset, 1)[0] ^ 1 << bit]))
    hit = _overlapping(parts, offset, 1)
    return Damage(
        f"flipped bit {bit} of byte {offset:#x}: {_description(hit)}", offset, at, 1, bit, *_tensor_and_step(hit)
    )


def _zero(reader: PoolReader, parts: Sequence[Part], offset: int) -> Damage:
    start = offset - offset % PAGE
    nbytes = min(PAGE, total(reader.container.extents) - start)
    if not reader.read(start, nbytes).strip(b"\0"):
        usage_error(f"The page at {start:#x} holds only zeros already. Pass another WHERE.")
    at = _write(reader, start, bytes(nbytes))
    hit = _overlapping(parts, start, nbytes)
    return Damage(
        f"zeroed {nbytes} bytes from {start:#x}: {_description(hit)}", start, at, nbytes, None, *_tensor_and_step(hit)
    )


def _tear(reader: PoolReader, parts: Sequence[Part], rng: random.Random) -> Damage:
    """Overwrite the newest payload, from a random tensor on, with the bytes of another slot, as if a write of the
    payload had been cut off."""
    if reader.superblock.has_gradients:
        usage_error(
            "--torn-slot is for pools whose slots hold the same tensors, and the slots of this pool hold gradient "
            "records. Use --flip payload or --zero-page payload."
        )
    payload = sorted(_named(parts, anatomy.TENSOR), key=lambda part: part.offset)
    sb, slot = reader.superblock, payload[0].slot
    assert slot is not None, "a payload lies in a slot"
    base, other = sb.slots[slot][0], sb.slots[(slot + 1) % len(sb.slots)][0]
    differing = [
        p for p in payload if reader.read(p.offset, p.nbytes) != reader.read(p.offset - base + other, p.nbytes)
    ]
    if not differing:
        usage_error("The other slot holds the same bytes, so --torn-slot would change nothing. Use --flip payload.")
    first = rng.choice(differing)
    start, end = first.offset, min(payload[-1].end, first.offset + TORN_NBYTES_MAX)
    at = _write(reader, start, reader.read(start - base + other, end - start))
    said = f"tore slot {slot}: {end - start} bytes, from {first.words} on, were replaced with those of another slot"
    return Damage(said, start, at, end - start, None, *_tensor_and_step([first]))


def _offset(reader: PoolReader, parts: Sequence[Part], where: str, rng: random.Random) -> int:
    """Return the offset in the pool, in bytes, for WHERE: a random one if WHERE names a part."""
    try:
        offset = int(where, 0)
    except ValueError:
        part = rng.choice(_named(parts, where))
        return part.offset + rng.randrange(part.nbytes)
    if not 0 <= offset < total(reader.container.extents):
        usage_error(
            f"The offset {where} is outside of the pool, which has {total(reader.container.extents)} bytes. "
            "Pass a smaller offset."
        )
    return offset


def _named(parts: Sequence[Part], where: str) -> list[Part]:
    """Return the parts that WHERE names. Parts of a checkpoint are those of the newest checkpoint only."""
    if where in (anatomy.SUPERBLOCK, anatomy.TABLE, anatomy.NEXT):
        structures = [part for part in parts if part.kind == where]
        if not structures:
            usage_error(
                f"This pool has no {where} to damage: an older lightck made it. Name another place, such as superblock."
            )
        return structures
    newest = next((part.generation for part in parts if part.kind == anatomy.MANIFEST), None)
    if newest is None:
        usage_error(
            "This pool holds no checkpoint to damage: none was committed yet, or none can be read. "
            "Name a place outside of checkpoints (superblock, table or an offset in the pool), for example "
            "--flip superblock."
        )
    found = [part for part in parts if part.generation == newest and where in (ANYWHERE, part.kind, part.tensor)]
    if not found:
        usage_error(
            f"{where!r} is not in the newest checkpoint of this pool. WHERE is {_WHERE}, as "
            f"lightck inspect --tensors lists it{_gradients_in(parts, newest)}."
        )
    return found


def _gradients_in(parts: Sequence[Part], generation: int) -> str:
    """Return what to add about the gradients of a record, which ``inspect`` does not list; "" if there are none."""
    names = [part.tensor for part in parts if part.generation == generation and part.tensor is not None]
    found = sorted(name for name in names if name.startswith(GRADIENT_PREFIX))
    return f"; or the name of a gradient ({listed(found)})" if found else ""


def _overlapping(parts: Sequence[Part], start: int, nbytes: int) -> list[Part]:
    """Return the parts that contain at least one of the bytes from ``start`` on."""
    return [part for part in parts if part.offset < start + nbytes and start < part.end]


def _description(hit: Sequence[Part]) -> str:
    return listed(part.words for part in hit) or "bytes that no reader uses"


def _tensor_and_step(hit: Sequence[Part]) -> tuple[str | None, int | None]:
    return (hit[0].tensor, hit[0].step) if hit else (None, None)


def _write(reader: PoolReader, offset: int, data: bytes) -> int:
    """Write bytes into the copy at an offset in the pool. Returns the offset of the first byte in the copy's file."""
    places = runs(reader.container.extents, offset, len(data))
    with open(reader.path, "r+b") as file:
        for at, n in places:
            file.seek(at)
            file.write(data[:n])
            data = data[n:]
    return places[0][0]


# -- text ------------------------------------------------------------------------------------------------------------


def _show(facts: Facts, pool: str, copy: str, damage: Damage) -> None:
    print_line(f"copied {pool} to {copy}, {size(os.stat(copy).st_size)}; the pool itself was only read")
    print_line(f"{damage.said} (seed {facts['seed']})")
    print_line()
    name = shlex.quote(copy)
    print_line(f"Next: lightck verify --deep {name}")
    print_line(f"      lightck inspect {name}")
