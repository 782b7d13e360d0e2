"""Boxes of stored tensors are read as they were saved, verified, and not a block more than needed."""

from __future__ import annotations

import itertools
import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pools_by_hand as by_hand
import pytest
import toys
from boxes_by_hand import at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightck.pool.format.boxes import Box, whole_box
from lightck.pool.format.layout import ITEM_NBYTES
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.restore import read_boxes as module
from lightck.restore.read_boxes import BoxRead, Destination, read_boxes

DTYPES = ["uint8", "bfloat16", "float32", "float64", "complex128"]
SHAPES = [
    (),
    (7,),
    (3, 5),
    (40_000,),
    (700, 90),
    (90, 700),
    (2, 300, 50),
    (5, 4, 3, 700),
    (1, 200_000),
    (9, 1, 9_000),
]


def dense_stride(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dimensions, from the slowest to the fastest, are ``order``."""
    stride, n = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim], n = n, n * shape[dim]
    return tuple(stride)


CASES = [
    (dtype, shape, dense_stride(shape, order))
    for dtype in DTYPES
    for shape in SHAPES
    for order in list(itertools.permutations(range(len(shape))))[:3]
]

LARGE = ("float64", (7000, 90), (90, 1))
"""Has several blocks."""
CASES.append(LARGE)


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Path:
    """A pool with a tensor for each case, with bytes that repeat only after 251."""
    path = tmp_path_factory.mktemp("boxes") / "boxes.pool"
    entries = [
        by_hand.entry(f"model/{number}", shape, dtype=dtype)._replace(stride=stride)
        for number, (dtype, shape, stride) in enumerate(CASES)
    ]
    by_hand.make(path, entries)
    with by_hand.writer_of(path) as writer:
        by_hand.commit(writer, 1)
    return path


@pytest.fixture
def stored(pool):
    with closing(open_pool(str(pool))) as reader:
        (found,) = [one for one in reader.checkpoints() if isinstance(one, StoredCheckpoint)]
        yield found


def elements(bytes_: np.ndarray, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> np.ndarray:
    """The elements of a stored tensor, as arrays of bytes."""
    item = ITEM_NBYTES[dtype]
    return np.lib.stride_tricks.as_strided(bytes_, (*shape, item), (*(item * step for step in stride), 1))


def whole(stored: StoredCheckpoint, number: int) -> np.ndarray:
    dtype, shape, stride = CASES[number]
    bytes_ = np.zeros(max(1, math.prod(shape)) * ITEM_NBYTES[dtype], np.uint8)
    stored.read_into(f"model/{number}", bytes_.ctypes.data)
    return elements(bytes_, dtype, shape, stride)


@st.composite
def tilings(draw, shape: tuple[int, ...]) -> list[Box]:
    """Boxes without common elements: the tensor is cut in some dimensions, and some of the parts are left out."""
    cuts = []
    for n in shape:
        places = sorted(draw(st.sets(st.integers(1, n - 1), max_size=2))) if n > 1 else []
        ends = [0, *places, n]
        cuts.append(list(itertools.pairwise(ends)))
    boxes = [Box(tuple(a for a, _ in chosen), tuple(b - a for a, b in chosen)) for chosen in itertools.product(*cuts)]
    return draw(st.lists(st.sampled_from(boxes), min_size=1, unique=True))


@given(st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_boxes_arrive_where_they_belong(stored, data):
    number = data.draw(st.integers(0, len(CASES) - 1))
    dtype, shape, _ = CASES[number]
    boxes = data.draw(tilings(shape))
    margin = tuple(data.draw(st.integers(0, 2)) for _ in shape)
    into_shape = tuple(n + m for n, m in zip(shape, margin, strict=True))
    order = data.draw(st.permutations(range(len(shape))))
    into_stride = dense_stride(into_shape, tuple(order))
    memory = np.full(max(1, math.prod(into_shape)) * ITEM_NBYTES[dtype], 0xEE, np.uint8)
    into = Destination(memory.ctypes.data, into_shape, into_stride)
    moved = [Box(tuple(a + m for a, m in zip(box.start, margin, strict=True)), box.size) for box in boxes]
    read_boxes(stored, [BoxRead(f"model/{number}", b, m, into) for b, m in zip(boxes, moved, strict=True)])
    saved = whole(stored, number)
    expected = np.full((*into_shape, ITEM_NBYTES[dtype]), 0xEE, np.uint8)
    for box, to in zip(boxes, moved, strict=True):
        expected[at(to)] = saved[at(box)]
    assert (elements(memory, dtype, into_shape, into_stride) == expected).all()


def test_many_tensors_on_several_threads(stored, monkeypatch):
    monkeypatch.setattr(module, "read_threads", lambda: 4)
    monkeypatch.setattr(module, "_BATCH_NBYTES", 1 << 18)
    kept, reads = [], []
    for number, (dtype, shape, _) in enumerate(CASES):
        if len(shape) < 2:
            continue
        columns = Box((*(0 for _ in shape[:-1]), 1), (*shape[:-1], shape[-1] - 1))
        memory = np.zeros(math.prod(columns.size) * ITEM_NBYTES[dtype], np.uint8)
        stride = dense_stride(columns.size, tuple(range(len(shape))))
        into = Destination(memory.ctypes.data, columns.size, stride)
        reads.append(BoxRead(f"model/{number}", columns, whole_box(columns.size), into))
        kept.append((number, memory, columns, stride))
    read_boxes(stored, reads)
    for number, memory, columns, stride in kept:
        got = elements(memory, CASES[number][0], columns.size, stride)
        assert (got == whole(stored, number)[at(columns)]).all()


def read_nbytes(stored: StoredCheckpoint, number: int, box: Box, monkeypatch) -> int:
    """How many bytes of the pool are read for a box."""
    dtype, _, _ = CASES[number]
    memory = np.zeros(math.prod(box.size) * ITEM_NBYTES[dtype], np.uint8)
    into = Destination(memory.ctypes.data, box.size, dense_stride(box.size, tuple(range(len(box.size)))))
    n_read = []
    read = StoredCheckpoint.read_blocks

    def counted(self, places):
        n_read.extend(nbytes for _, _, nbytes, _ in places)
        read(self, places)

    with monkeypatch.context() as patched:
        patched.setattr(StoredCheckpoint, "read_blocks", counted)
        read_boxes(stored, [BoxRead(f"model/{number}", box, whole_box(box.size), into)])
    return sum(n_read)


def test_rows_cost_at_most_two_blocks_more_and_columns_the_tensor_once(stored, monkeypatch):
    number = CASES.index(LARGE)
    block, nbytes = stored.block_nbytes, 7000 * 90 * 8
    assert nbytes > 4 * block
    for start in range(0, 7000, 377):
        for n in range(1, 7000 - start, 531):
            own = n * 90 * 8
            assert read_nbytes(stored, number, Box((start, 0), (n, 90)), monkeypatch) <= own + 2 * block
    assert read_nbytes(stored, number, Box((0, 5), (7000, 3)), monkeypatch) == nbytes
    assert read_nbytes(stored, number, Box((0, 5), (30, 3)), monkeypatch) <= 30 * 90 * 8 + 2 * block


def test_a_damaged_block_is_an_error_for_whoever_needs_it(stored, pool, tmp_path):
    number = CASES.index(LARGE)
    copy = tmp_path / "damaged.pool"
    copy.write_bytes(Path(pool).read_bytes())
    toys.damage(copy, f"model/{number}", at=6000 * 90 * 8)
    with closing(open_pool(str(copy))) as reader:
        (found,) = [one for one in reader.checkpoints() if isinstance(one, StoredCheckpoint)]
        for box, is_bad in (
            (Box((0, 0), (4000, 90)), False),
            (Box((5995, 0), (9, 90)), True),
            (Box((0, 3), (7000, 2)), True),
        ):
            memory = np.zeros(math.prod(box.size) * 8, np.uint8)
            into = Destination(memory.ctypes.data, box.size, dense_stride(box.size, (0, 1)))
            read = BoxRead(f"model/{number}", box, whole_box(box.size), into)
            if not is_bad:
                read_boxes(found, [read])
                assert (elements(memory, "float64", box.size, into.stride) == whole(stored, number)[at(box)]).all()
                continue
            with pytest.raises(DamagedError, match=rf"block {6000 * 90 * 8 // found.block_nbytes} of 'model/{number}'"):
                read_boxes(found, [read])
