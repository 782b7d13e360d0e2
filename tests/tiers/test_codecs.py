"""The codec of pieces: what it makes is put back bit by bit, and what is none of its objects is an error."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.pool.format.layout import ITEM_NBYTES
from lightck.pool.format.structures import DamagedError
from lightck.tiers import codecs
from lightck.tiers.codecs import CODECS, WIDTHS, Coding, Section, coding_of, decoded, encoded

zstd: Any = codecs._library("zstd")
ZSTD_1 = Coding("zstd", (Section(4, 4096),))
LZ4_1 = Coding("lz4", (Section(4, 4096),))


def weights(width: int, nbytes: int, seed: int) -> bytes:
    """Bytes as those of a trained tensor: exponents that are alike, mantissas that are not."""
    values = np.random.default_rng(seed).standard_normal(nbytes + 1) * 0.02
    if width == 2:  # bfloat16: the upper half of a float32
        return values.astype(np.float32).view(np.uint16)[1::2].tobytes()[:nbytes]
    return values.astype({1: np.int8, 4: np.float32, 8: np.float64}[width]).tobytes()[:nbytes]


contents = st.one_of(
    st.binary(max_size=2000),
    st.builds(bytes, st.integers(0, 200_000)),
    st.builds(weights, st.sampled_from(WIDTHS), st.integers(0, 200_000), st.integers(0, 2**32)),
)
pieces = st.lists(st.tuples(st.sampled_from(WIDTHS), contents.filter(len)), min_size=1, max_size=6)


@given(pieces, st.sampled_from(CODECS))
def test_a_piece_is_put_back_bit_by_bit_and_the_same_bytes_become_the_same_object(parts, codec):
    piece = b"".join(data for _, data in parts)
    coding = coding_of(codec, [(width, len(data)) for width, data in parts])
    assert coding.nbytes == len(piece)
    made = encoded(memoryview(piece), coding)
    if made is not None:
        assert len(made) < len(piece)
        assert bytes(decoded(made, coding)) == piece
        assert encoded(piece, coding) == made


@given(st.lists(st.tuples(st.sampled_from(WIDTHS), st.integers(1, 100)), max_size=8))
def test_neighbours_of_one_width_are_one_section(parts):
    sections = coding_of("zstd", parts).sections
    assert all(one.width != other.width for one, other in pairwise(sections))
    spread = [width for width, nbytes in sections for _ in range(nbytes)]
    assert spread == [width for width, nbytes in parts for _ in range(nbytes)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_trained_tensors_get_smaller_and_random_bytes_stay(codec, width):
    coding = Coding(codec, (Section(width, 1 << 16),))
    made = encoded(weights(width, 1 << 16, seed=1), coding)
    assert made is not None
    assert len(made) < 0.97 * (1 << 16)
    assert encoded(random.Random(2).randbytes(1 << 16), coding) is None


@pytest.mark.parametrize("width", WIDTHS)
def test_an_object_is_what_the_format_document_says(width):
    data = np.frombuffer(weights(width, 3 * 65536 + 8 * 9 + 5, seed=3), np.uint8)
    coding = Coding("zstd", (Section(width, data.size),))
    whole = data.size // width * width
    split = data[:whole].reshape(-1, width).T.tobytes() + data[whole:].tobytes()
    made = encoded(data.data, coding)
    assert made is None or zstd.decompress(made) == split
    assert bytes(decoded(zstd.compress(split), coding)) == data.tobytes()

    coding = Coding("lz4", coding.sections)
    blocks = []
    for at in range(0, data.size, 65536):
        block = data[at : at + 65536]
        whole = block.size // width // 8 * 8 * width
        bits = np.unpackbits(block[:whole].reshape(-1, width), axis=1, bitorder="little")
        blocks.append(np.packbits(bits.T, axis=1, bitorder="little").tobytes() + block[whole:].tobytes())
    made = encoded(data.data, coding)
    assert made is not None
    assert lz4.block.decompress(made, uncompressed_size=data.size) == b"".join(blocks)


def test_each_dtype_of_a_pool_has_a_width():
    for dtype, nbytes in ITEM_NBYTES.items():
        assert (nbytes // 2 if dtype.startswith("complex") else nbytes) in WIDTHS


# -- what is no object


def bomb() -> bytes:
    """A frame of 64 MiB that does not say how long it is."""
    maker = zstd.ZstdCompressor()
    return maker.compress(bytes(64 << 20)) + maker.flush()


def lying() -> bytes:
    """A frame whose header says 4096, and which holds 64 MiB."""
    frame = bytearray(zstd.compress(bytes(64 << 20)))
    assert frame[4] == 0x80, "a byte that says the window, four bytes of length"
    frame[6:10] = (4096).to_bytes(4, "little")
    return bytes(frame)


HOSTILE: list[tuple[str, Coding, Callable[[], bytes]]] = [
    ("empty", ZSTD_1, lambda: b""),
    ("noise", ZSTD_1, lambda: os.urandom(100)),
    ("another size", ZSTD_1, lambda: zstd.compress(bytes(4095))),
    ("a bomb", ZSTD_1, bomb),
    ("a bomb with a header that lies", ZSTD_1, lying),
    ("truncated", ZSTD_1, lambda: zstd.compress(bytes(4096))[:-1]),
    ("bytes behind it", ZSTD_1, lambda: zstd.compress(bytes(4096)) + b"x"),
    ("two frames", ZSTD_1, lambda: zstd.compress(bytes(4096)) + zstd.compress(bytes(4096))),
    ("a frame to skip", ZSTD_1, lambda: b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"),
    ("lz4 for zstd", ZSTD_1, lambda: lz4.block.compress(bytes(4096), store_size=False)),
    ("empty", LZ4_1, lambda: b""),
    ("noise", LZ4_1, lambda: b"\xff" * 100),
    ("another size", LZ4_1, lambda: lz4.block.compress(bytes(4095), store_size=False)),
    ("a bomb", LZ4_1, lambda: lz4.block.compress(bytes(64 << 20), store_size=False)),
    ("truncated", LZ4_1, lambda: lz4.block.compress(bytes(4096), store_size=False)[:-1]),
    ("zstd for lz4", LZ4_1, lambda: zstd.compress(bytes(4096))),
]


@pytest.mark.parametrize(("what", "coding", "made"), HOSTILE, ids=[f"{each[1].codec}: {each[0]}" for each in HOSTILE])
def test_what_is_no_object_is_an_error_and_takes_no_memory(what, coding, made):
    data = made()
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            decoded(data, coding)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300), st.integers(0, 10**6), st.sampled_from([ZSTD_1, LZ4_1]), st.booleans())
def test_a_damaged_object_is_an_error_or_has_the_size_that_was_said(noise, at, coding, cuts):
    made = encoded(weights(4, 4096, seed=4), coding)
    assert made is not None
    at %= len(made)
    damaged = made[:at] + (b"" if cuts else noise + made[at + len(noise) :])
    with suppress(DamagedError):
        assert len(decoded(damaged, coding)) == 4096
