"""Boxes: what they say agrees with arrays of indices, element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
from boxes_by_hand import at, indices
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.pool.format.boxes import Box, flat_boxes, intersection, subtraction, whole_box
from lightck.pool.format.structures import NUMBER_MAX

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def some_boxes(draw) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and several boxes in it."""
    shape = draw(SHAPES)
    found = []
    for _ in range(draw(st.integers(2, 5))):
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        found.append(Box(start, tuple(draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))))
    return shape, found


def marked(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How many of the boxes hold each element."""
    seen = np.zeros(shape, int)
    for box in boxes:
        seen[at(box)] += 1
    return seen


@given(some_boxes())
@settings(max_examples=300)
def test_intersection_and_subtraction(drawn):
    shape, (one, other, *more) = drawn
    common = intersection(one, other)
    both = (marked(shape, [one]) > 0) & (marked(shape, [other]) > 0)
    assert (marked(shape, [] if common is None else [common]) == both).all()
    left = marked(shape, subtraction(one, [other, *more]))
    assert (left == ((marked(shape, [one]) > 0) & (marked(shape, [other, *more]) == 0))).all()


@given(SHAPES, st.data())
@settings(max_examples=500)
def test_a_flat_range_is_a_few_boxes_in_its_order(shape, data):
    n = math.prod(shape)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    found = flat_boxes(shape, start, stop)
    elements = [indices(shape)[at(box)].ravel() for box in found]
    assert np.concatenate([np.arange(0), *elements]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_range_of_a_tensor_larger_than_memory_costs_no_more():
    shape = (2**20, 2**20, 2**20)
    found = flat_boxes(shape, 5, 2**60 - 5)
    assert sum(math.prod(box.size) for box in found) == 2**60 - 10
    assert len(found) == 5
    assert flat_boxes((NUMBER_MAX - 1,), 0, NUMBER_MAX - 1) == [whole_box((NUMBER_MAX - 1,))]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_a_range_outside_of_the_tensor_is_an_error(start, stop):
    with pytest.raises(ValueError, match=r"of shape \(4, 3\) has no elements"):
        flat_boxes((4, 3), start, stop)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_an_empty_tensor_has_no_boxes(shape):
    assert flat_boxes(shape, 0, 0) == []
