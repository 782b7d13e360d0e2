"""What the comparison of a unit with its copy in host memory says."""

from __future__ import annotations

import math

import pytest
import torch

from lightck.state.unit_replicas import largest_difference

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([INF, 2.0], [1.0, 2.0], INF),
        ([-INF, 2.0], [1.0, 2.0], INF),
        ([INF], [-INF], INF),
        ([NAN], [1.0], INF),
        ([INF, -INF, NAN], [INF, -INF, NAN], 0.0),
        ([], [], 0.0),
    ],
)
def test_the_largest_difference_of_two_tensors(one, other, expected):
    assert largest_difference(torch.tensor(one), torch.tensor(other)) == expected
