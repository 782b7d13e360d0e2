"""Compress the objects of a tier.

    shuffle       the first bytes of all elements are put together, then the second bytes, and so on (for lz4 the bits
                  instead of the bytes), because neighbours in a tensor have similar signs and exponents
                  (``native/src/shuffle.c``)
    compress      the whole piece: one frame of zstd at level 1, or one block of lz4
    compare       a piece that does not get smaller is stored as it is

Invariants: the same bytes, from the same release of the library, become the same object; decompression gives as many
bytes as the manifest says, or raises an error, and takes memory for no more than these bytes.

Failure cases: an object is untrusted input (``DamagedError`` with the reason); the library is missing (``TierError``,
before anything is read or written).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightck._native import check, ffi, lib
from lightck.errors import TierError
from lightck.pool.format.structures import DamagedError

CODECS = ("zstd", "lz4")
WIDTHS = (1, 2, 4, 8)
"""How many bytes the elements of a section may have."""
_ZSTD_LEVEL = 1
"""Levels 3 and 5 gain nothing with shuffled bytes."""
_WINDOW_LOG_MAX = 25
"""zstd: how far back a frame may refer: 32 MiB, the largest piece."""
_PACKAGES = {"zstd": "backports.zstd", "lz4": "lz4"}
_MODULES = {"zstd": ("compression.zstd", "backports.zstd"), "lz4": ("lz4.block",)}
"""The first one that can be imported is taken. Python has zstd itself from 3.14 on."""


class Section(NamedTuple):
    """Bytes of a piece whose elements have the same size."""

    width: int
    """Bytes of one element."""
    nbytes: int


class Coding(NamedTuple):
    """How the bytes of an object were made from those of a piece."""

    codec: str
    sections: tuple[Section, ...]
    """The sections of the piece, one after the other."""

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return sum(each.nbytes for each in self.sections)


def coding_of(codec: str, parts: Iterable[tuple[int, int]]) -> Coding:
    """Return the coding of a piece. ``parts``: (bytes of an element, bytes) of each of its parts, in their order."""
    sections: list[Section] = []
    for width, nbytes in parts:
        if sections and sections[-1].width == width:
            sections[-1] = Section(width, sections[-1].nbytes + nbytes)
        else:
            sections.append(Section(width, nbytes))
    return Coding(codec, tuple(sections))


def refuse_missing_libraries(codecs: Iterable[str | None]) -> None:
    """Raise ``TierError`` if the library of one of these codecs is not installed. None stands for no compression."""
    for codec in codecs:
        if codec is not None:
            _library(codec)


def encoded(data: bytes | memoryview, coding: Coding) -> bytes | None:
    """Compress a piece. Returns None if that does not make it smaller. Raises ``TierError`` if the library is
    missing."""
    library = _library(coding.codec)
    shuffled = _shuffled(lib.lck_shuffle, data, coding)
    if coding.codec == "zstd":
        compressed: bytes = library.compress(shuffled, level=_ZSTD_LEVEL)
    else:
        compressed = library.compress(shuffled, store_size=False)
    return compressed if len(compressed) < coding.nbytes else None


def decoded(data: bytes, coding: Coding) -> bytes | memoryview:
    """Return the piece that an object was made from. Raises ``DamagedError`` if its bytes are not those of a piece of
    this size, and ``TierError`` if the library is missing."""
    library = _library(coding.codec)
    shuffled = (_decompress_zstd if coding.codec == "zstd" else _decompress_lz4)(library, data, coding.nbytes)
    if len(shuffled) != coding.nbytes:
        raise DamagedError(f"it becomes {len(shuffled)} bytes, not {coding.nbytes}")
    return _shuffled(lib.lck_unshuffle, shuffled, coding).data


def _decompress_zstd(library: Any, data: bytes, nbytes: int) -> bytes:
    try:
        said = library.get_frame_info(data).decompressed_size
        if said != nbytes:
            raise DamagedError(f"its frame says that it becomes {said} bytes, not {nbytes}")
        options = {library.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX}
        frame = library.ZstdDecompressor(options=options)
        content: bytes = frame.decompress(data, max_length=nbytes + 1)
    except library.ZstdError as err:
        raise DamagedError(f"it is no frame of zstd: {err}") from err
    if not frame.eof or frame.unused_data:
        raise DamagedError("it is not one whole frame of zstd")
    return content


def _decompress_lz4(library: Any, data: bytes, nbytes: int) -> bytes:
    try:
        content: bytes = library.decompress(data, uncompressed_size=nbytes)
    except library.LZ4BlockError as err:
        raise DamagedError(f"it is no block of lz4: {err}") from err
    return content


def _shuffled(call: Callable[..., int], data: bytes | memoryview, coding: Coding) -> npt.NDArray[np.uint8]:
    """Shuffle each section, or put it back."""
    source, target = np.frombuffer(data, np.uint8), np.empty(coding.nbytes, np.uint8)
    assert source.nbytes == coding.nbytes, "the caller has checked the size"
    begin = 0
    for width, nbytes in coding.sections:
        places = (ffi.cast("void *", each.ctypes.data + begin) for each in (target, source))
        check(call(*places, nbytes, width, coding.codec == "lz4"), "shuffling elements")
        begin += nbytes
    return target


def _library(codec: str) -> Any:
    for name in _MODULES[codec]:
        try:
            return import_module(name)
        except ImportError:
            continue
    raise TierError(
        f"Compression with {codec} needs the package {_PACKAGES[codec]}, which is not installed. Nothing was changed. "
        "Install it with: pip install 'lightck[compression]'"
    )


def parsed_coding(codec: object, sections: object, nbytes_max: int) -> Coding:
    """Check what a manifest says of the compression of an object. ``nbytes_max``: the largest piece. Raises
    ``DamagedError`` with the reason."""
    if type(codec) is not str or codec not in CODECS:
        named = repr(codec[:20]) if isinstance(codec, str) else "no text"
        raise DamagedError(
            f"an object in it is compressed with {named}, which this release of lightck does not know: install the "
            "release that has sent it, or a newer one"
        )
    if not isinstance(sections, list) or not sections:
        raise DamagedError("an object in it has no sections")
    found = Coding(codec, tuple(_section(each, nbytes_max) for each in sections))
    if found.nbytes > nbytes_max:
        raise DamagedError(f"an object in it would become more than {nbytes_max} bytes")
    return found


def _section(value: object, nbytes_max: int) -> Section:
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value)
    if not is_pair or value[0] not in WIDTHS or not 0 < value[1] <= nbytes_max:  # type: ignore[index]
        raise DamagedError("a section of an object in it is malformed")
    return Section(*value)  # type: ignore[misc]
