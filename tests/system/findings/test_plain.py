"""The harness itself: right loops are exact and quiet, and a wrong one is found."""

from __future__ import annotations

import pytest

from .harness import Bench


@pytest.mark.parametrize("name", ["batches-by-hand", "session-loader"])
def test_right_loops_are_exact_without_a_warning(name: str, bench: Bench) -> None:
    bench.exact(name)
