"""A pool in several runs of its file reads and writes like one in one piece."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.pool.engine import Medium
from lightck.pool.storage import extents
from lightck.pool.storage.durability import MEDIUM_CACHE
from lightck.pool.storage.extents import Extents

PAGE = 4096
WHOLE: Extents = ((0, 5 * PAGE + 100),)
APART: Extents = ((8 * PAGE, 2 * PAGE), (PAGE, PAGE), (20 * PAGE, 2 * PAGE + 100))


@contextmanager
def filled(places: Extents) -> Iterator[tuple[int, bytes]]:
    """A file with a pool of known bytes in it."""
    data = bytes(i * 7 % 251 for i in range(extents.total(places)))
    with tempfile.TemporaryFile() as file:
        file.truncate(30 * PAGE)
        medium = Medium(file.fileno(), places, MEDIUM_CACHE)
        medium.store(0, data)
        medium.close()
        yield file.fileno(), data


@pytest.mark.parametrize("places", [WHOLE, APART])
@given(offset=st.integers(0, 6 * PAGE), nbytes=st.integers(0, 6 * PAGE))
def test_any_range_reads_as_if_the_pool_were_in_one_piece(places: Extents, offset: int, nbytes: int) -> None:
    with filled(places) as (fd, data):
        assert extents.read(fd, places, offset, nbytes) == data[offset : offset + nbytes]


def test_a_read_stops_where_the_file_ends() -> None:
    with filled(APART) as (fd, data):
        os.ftruncate(fd, 9 * PAGE)  # one page into the first run; the second run lies before it and is whole
        assert extents.read(fd, APART, 10, 3 * PAGE) == data[10:PAGE]
