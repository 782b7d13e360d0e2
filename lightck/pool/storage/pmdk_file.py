"""Parse the file of a PMDK pool: find the bytes of a lightck pool among PMDK's own structures.

A reader needs only this module and does not call libpmemobj. So a pool can be read where libpmemobj is not installed,
and while another process has the pool open. The bytes are untrusted: every offset is checked against the length of the
file before it is used.
docs/format.md, "In a PMDK pool", documents these bytes.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from itertools import pairwise

from lightck.errors import CorruptPoolError, FormatError, NotAPoolError, PoolError
from lightck.pool.format.structures import KIB, MAGIC, MIB, PAGE, SUPERBLOCK_OFFSETS, align_up, crc64
from lightck.pool.storage.extents import Extents
from lightck.pool.storage.failures import truncated_error

SIGNATURE = b"PMEMOBJ\0"
SET_SIGNATURE = b"PMEMPOOLSET"
LAYOUT_PREFIX, LAYOUT = b"lightck", "lightck/1"
PMDK_MAJOR = 6
"""The version of PMDK's file format."""
SHUTDOWN_STATE = 0x4
"""PMDK's incompat flag: the pool counts unsafe shutdowns."""

_HEADER = struct.Struct("<8sIIII16s16s16s16s16s16s")
_LAYOUT_OFFSET, _LAYOUT_NBYTES = 4096, 1024
_ROOT_OFFSET, _ROOT_NBYTES = 6144, 6160
_U64 = struct.Struct("<Q")

ROOT_MAGIC = b"LCKPMDK1"
ROOT_VERSION = 1
ROOT_NBYTES_MAX = MIB
_ROOT = struct.Struct("<8sIIQQ")
_ARENA = struct.Struct("<QQQQ")
_OBJECT = struct.Struct("<QQ")
ARENA_ALIGN = 2 * MIB
ARENA_MARGIN = PAGE
"""Unused bytes at the start of an object, where libpmemobj stores data of its own."""


@dataclass(frozen=True, slots=True)
class Arena:
    """One PMDK object at file offset ``offset``. The lightck pool uses ``nbytes`` bytes of the object, from file offset
    ``start`` on."""

    uuid_lo: int
    """PMDK's identity of the pool that the object belongs to."""
    offset: int
    start: int
    nbytes: int


def arena_start(offset: int) -> int:
    """Return the file offset at which the lightck pool's bytes begin in an object at file offset ``offset``."""
    return align_up(offset + ARENA_MARGIN, ARENA_ALIGN)


def root_nbytes(arenas: int) -> int:
    """Return the length of the root object for this number of arenas."""
    return align_up(_ROOT.size + arenas * _ARENA.size + _U64.size, PAGE)


def reference_offset(root: int, number: int) -> int:
    """Return the offset of the reference to an arena's object. The reference lies in the root object, which begins at
    offset ``root``. ``number``: the number of the arena, from 0."""
    return root + _ROOT.size + number * _ARENA.size


def read_object(fd: int, place: int) -> tuple[int, int]:
    """Read the reference to an object that libpmemobj wrote at file offset ``place``. Returns (identity of the object's
    pool, file offset of the object)."""
    uuid_lo, offset = _OBJECT.unpack(os.pread(fd, _OBJECT.size, place))
    return uuid_lo, offset


def pack_root(arenas: list[Arena], file_nbytes: int) -> bytes:
    """Return the content of the root object (docs/format.md, "In a PMDK pool")."""
    nbytes = sum(a.nbytes for a in arenas)
    body = _ROOT.pack(ROOT_MAGIC, ROOT_VERSION, len(arenas), nbytes, file_nbytes)
    body += b"".join(_ARENA.pack(a.uuid_lo, a.offset, a.start, a.nbytes) for a in arenas)
    return body + _U64.pack(crc64(body))


def is_pmdk(fd: int) -> bool:
    """Whether this is a PMDK pool of any program, or a PMDK poolset file."""
    head = os.pread(fd, len(SET_SIGNATURE), 0)
    return head.startswith(SIGNATURE) or head == SET_SIGNATURE


def is_ours(fd: int) -> bool:
    """Whether this is a PMDK pool that contains a lightck pool."""
    return (
        os.pread(fd, len(SIGNATURE), 0) == SIGNATURE
        and os.pread(fd, len(LAYOUT_PREFIX), _LAYOUT_OFFSET) == LAYOUT_PREFIX
    )


def has_shutdown_state(fd: int) -> bool:
    """Whether the pool counts unsafe shutdowns. libpmemobj must get this setting before it opens the pool."""
    incompat: int = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))[3]
    return bool(incompat & SHUTDOWN_STATE)


def read_extents(fd: int, path: str, file_nbytes: int) -> Extents:
    """Return the extents of the lightck pool in the file. Raises ``NotAPoolError``, ``FormatError``,
    ``PoolTruncatedError`` or ``CorruptPoolError``."""
    _check_header(os.pread(fd, _HEADER.size, 0), path, fd)
    if file_nbytes < _FILE_NBYTES_MIN:
        raise truncated_error(path, None, file_nbytes)
    _check_layout(os.pread(fd, _LAYOUT_NBYTES, _LAYOUT_OFFSET), path)
    offset, nbytes = (_U64.unpack(os.pread(fd, 8, at).ljust(8, b"\0"))[0] for at in (_ROOT_OFFSET, _ROOT_NBYTES))
    if offset == 0:
        raise _corrupt(path, "it has no root object")
    if not _ROOT.size <= nbytes <= ROOT_NBYTES_MAX or offset > file_nbytes - min(nbytes, file_nbytes):
        raise _corrupt(path, "its root object lies outside of the file")
    return _extents(os.pread(fd, nbytes, offset), (offset, offset + nbytes), path, file_nbytes)


def _check_header(header: bytes, path: str, fd: int) -> None:
    if header.startswith(SET_SIGNATURE):
        raise NotAPoolError(
            f"{path!r} is a PMDK poolset file, a list of parts and replicas. lightck writes to its pool without "
            "libpmemobj, so replicas would miss those writes. A lightck pool is a single file. Choose another path."
        )
    if not header.startswith(SIGNATURE):
        raise _no_pmdk(path, fd)
    if len(header) < _HEADER.size:
        raise truncated_error(path, None, len(header))
    _, major, _, _, _, _, uuid, *others = _HEADER.unpack(header)
    if major != PMDK_MAJOR:
        raise FormatError(
            f"The PMDK pool {path!r} has PMDK's format {major}, and this lightck reads format {PMDK_MAJOR}. The pool "
            "was made by another PMDK. Convert it (pmdk-convert), or use a newer lightck."
        )
    if any(other != uuid for other in others):
        raise NotAPoolError(
            f"{path!r} is one part of a PMDK pool of several files. A lightck pool is a single file. Choose another "
            "path."
        )


def _no_pmdk(path: str, fd: int) -> PoolError:
    if any(os.pread(fd, len(MAGIC), at) == MAGIC for at in SUPERBLOCK_OFFSETS):
        return NotAPoolError(
            f"The pool {path!r} is a plain file, not a PMDK pool. The backend of an existing pool cannot change. Use "
            'backend="auto" or "file", or another path.'
        )
    return NotAPoolError(
        f"The file {path!r} is not a PMDK pool: it has no PMEMOBJ signature. Nothing was changed. Choose another path, "
        "or remove the file if nobody needs it."
    )


def _check_layout(layout: bytes, path: str) -> None:
    name = layout.split(b"\0")[0].decode("utf-8", "replace")
    if not layout.startswith(LAYOUT_PREFIX):
        raise NotAPoolError(
            f"The PMDK pool {path!r} belongs to another program: its layout is {name!r}, not {LAYOUT!r}. Nothing was "
            "changed. Choose another path."
        )
    if name != LAYOUT:
        raise FormatError(
            f"The PMDK pool {path!r} has the layout {name!r}, and this lightck reads {LAYOUT!r}. The pool was written "
            "by a newer lightck. Install that version to read the pool."
        )


def _extents(root: bytes, root_range: tuple[int, int], path: str, file_nbytes: int) -> Extents:
    """Parse the root object. ``root``: its bytes. ``root_range``: as for ``_fit``."""
    if len(root) < _ROOT.size:
        raise _corrupt(path, "its root object lies outside of the file")
    magic, version, count, nbytes, file_nbytes_before = _ROOT.unpack_from(root)
    end = _ROOT.size + count * _ARENA.size
    if magic != ROOT_MAGIC or end + _U64.size > len(root) or crc64(root[:end]) != _U64.unpack_from(root, end)[0]:
        raise _corrupt(path, "its root object does not pass its check")
    if version != ROOT_VERSION:
        raise FormatError(
            f"The PMDK pool {path!r} has a root object of version {version}, and this lightck reads version "
            f"{ROOT_VERSION}. The pool was written by a newer lightck. Install that version to read the pool."
        )
    if file_nbytes_before != file_nbytes:
        raise truncated_error(path, file_nbytes_before, file_nbytes)
    arenas = [Arena(*_ARENA.unpack_from(root, reference_offset(0, i))) for i in range(count)]
    if sum(a.nbytes for a in arenas) != nbytes or not _fit(arenas, root_range, file_nbytes):
        raise _corrupt(path, "its root object names impossible places")
    return tuple((a.start, a.nbytes) for a in arenas)


def _fit(arenas: list[Arena], root_range: tuple[int, int], file_nbytes: int) -> bool:
    """Whether the arenas lie in the file, are aligned, and overlap neither each other nor PMDK's structures.
    ``root_range``: the file offsets at which the root object begins and ends."""
    in_file = sorted([root_range, *((a.start, a.start + a.nbytes) for a in arenas)])
    return (
        bool(arenas)
        and all(a.start == arena_start(a.offset) and a.start > _HEAP_OFFSET and a.nbytes > 0 for a in arenas)
        and all(a.nbytes % ARENA_ALIGN == 0 for a in arenas[:-1])
        and all(end <= start for (_, end), (start, _) in pairwise(in_file))
        and in_file[-1][1] <= file_nbytes
    )


def _corrupt(path: str, what: str) -> CorruptPoolError:
    return CorruptPoolError(
        f"The PMDK pool {path!r} is damaged: {what}. Without the root object nothing in the pool can be found. Use a "
        "copy of the pool if there is one."
    )


# -- how large a file has to be ----------------------------------------------------------------------------------

_FILE_NBYTES_MIN = 8 * MIB
_HEAP_OFFSET = 0x302000
_CHUNK = 256 * KIB
"""Bytes of a chunk, in which libpmemobj allocates."""
_ZONE_CHUNKS = 65528
"""Chunks of a zone of PMDK's heap."""
_ZONE_HEADER = 512 * KIB
"""Bytes at the start of a zone before its chunks, rounded up."""
_FIXED = 4 * MIB
"""Bytes before the first zone, rounded up."""
_SMALL_CHUNKS = 8
"""Chunks for the root object and for other small objects of libpmemobj."""
ARENA_NBYTES_MAX = 8 * 1024 * MIB - 16 * MIB
"""Two arenas of this length fit into a zone of PMDK's heap (16 GiB). No object can span two zones."""


def split(nbytes: int, arena_nbytes: int) -> list[int]:
    """Return the lengths of the arenas for a pool of ``nbytes``. All but the last have ``arena_nbytes``."""
    full, rest = divmod(nbytes, arena_nbytes)
    return [arena_nbytes] * full + ([rest] if rest else [])


def object_nbytes(arena_nbytes: int) -> int:
    """Return the size of an object in which an aligned arena fits. With the object's header of 16 bytes, the object
    fills whole chunks."""
    return align_up(arena_nbytes + ARENA_ALIGN + ARENA_MARGIN + 16, _CHUNK) - 16


def file_nbytes(lengths: list[int]) -> int:
    """Return the size of a file whose heap has room for arenas of these lengths."""
    zones, free = 1, _ZONE_CHUNKS - _SMALL_CHUNKS - root_nbytes(len(lengths)) // _CHUNK
    for length in lengths:
        chunks = align_up(object_nbytes(length), _CHUNK) // _CHUNK
        if chunks > free:
            zones, free = zones + 1, _ZONE_CHUNKS
        free -= chunks
    used = zones * (_ZONE_HEADER + _ZONE_CHUNKS * _CHUNK) - free * _CHUNK
    return align_up(_FIXED + used, ARENA_ALIGN)
