"""The container of a PMDK pool changed at random: PMDK's header, the layout string, the root object with its arenas.

The counterpart of ``mutations`` for what lies around a pool's bytes. Offsets are those of the file.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from crash import mutations
from lightck.pool.format.structures import crc64

Patch = tuple[int, bytes]
HEADER_NBYTES, LAYOUT_AT, LAYOUT_NBYTES, ROOT_AT = 136, 4096, 1024, 6144
_ROOT_NBYTES, _ARENA_NBYTES = 32, 32
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Base:
    """What of a good file is changed."""

    header: bytes
    layout: bytes
    where: bytes
    """Offset and length of the root object, and what lies between."""
    root_at: int
    root: bytes
    file_nbytes: int

    @classmethod
    def of(cls, file: bytes) -> Base:
        (at,) = _U64.unpack_from(file, ROOT_AT)
        (count,) = struct.unpack_from("<I", file, at + 12)
        end = at + _ROOT_NBYTES + count * _ARENA_NBYTES + 8
        return cls(
            file[:HEADER_NBYTES],
            file[LAYOUT_AT : LAYOUT_AT + LAYOUT_NBYTES],
            file[ROOT_AT : ROOT_AT + 24],
            at,
            file[at:end],
            len(file),
        )


def change(rng: random.Random, base: Base) -> list[Patch]:
    return rng.choice((_header, _layout, _where, _root, _root, _root, _arenas))(rng, base)


def _words(rng: random.Random, data: bytes, base: Base, start: int = 0) -> bytearray:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2))):
        mutations.word(rng, out, start, len(out), base.file_nbytes)
    return out


def _header(rng: random.Random, base: Base) -> list[Patch]:
    return [(0, bytes(_words(rng, base.header, base)))]


def _layout(rng: random.Random, base: Base) -> list[Patch]:
    name = rng.choice((b"lightck/2", b"lightck", b"lightck/1\xff", b"", b"other", b"l" * 1024, b"\x1b[2J"))
    return [(LAYOUT_AT, name[:LAYOUT_NBYTES].ljust(LAYOUT_NBYTES, b"\0"))]


def _where(rng: random.Random, base: Base) -> list[Patch]:
    return [(ROOT_AT, bytes(_words(rng, base.where, base)))]


def _root(rng: random.Random, base: Base) -> list[Patch]:
    return [(base.root_at, _sealed(_words(rng, base.root[:-8], base, 8)))]


def _arenas(rng: random.Random, base: Base) -> list[Patch]:
    """Arenas that repeat, overlap, change places, or are more than there is room for."""
    body = base.root[:-8]
    arenas = [body[at : at + _ARENA_NBYTES] for at in range(_ROOT_NBYTES, len(body), _ARENA_NBYTES)]
    chosen = rng.choices(arenas, k=rng.choice((0, 1, 2, 3, 100)))
    head = bytearray(body[:_ROOT_NBYTES])
    struct.pack_into("<I", head, 12, rng.choice((len(chosen), len(chosen), 32767, (1 << 32) - 1)))
    total = sum(_U64.unpack_from(arena, 24)[0] for arena in chosen)
    _U64.pack_into(head, 16, rng.choice((total, total, (1 << 64) - 1)) % (1 << 64))
    return [(base.root_at, _sealed(head + b"".join(chosen)))]


def _sealed(body: bytearray) -> bytes:
    return bytes(body) + _U64.pack(crc64(bytes(body)))
