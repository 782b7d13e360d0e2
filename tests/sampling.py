"""Which combinations CI runs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def every_second(*axes: Iterable[Any]) -> list[Any]:
    """Return the combinations of what lies on the axes, as parameters. Neighbours on an axis take turns: CI runs one of
    them, and the other has the mark ``campaign``."""
    found = []
    axes = tuple(map(tuple, axes))
    assert not any(type(value).__name__ == "ParameterSet" for axis in axes for value in axis), "values, without marks"
    for each in product(*(enumerate(axis) for axis in axes)):
        is_left_out = sum(index for index, _ in each) % 2
        found.append(pytest.param(*(value for _, value in each), marks=pytest.mark.campaign if is_left_out else ()))
    return found
