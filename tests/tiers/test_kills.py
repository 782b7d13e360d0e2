"""A small part of the campaign of ``kills.py``, which is run by hand."""

from __future__ import annotations

import pytest

from tiers.kills import run


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_killed_the_training_goes_on_exactly(tmp_path, seed):
    counts = run(25, seed, tmp_path)
    assert counts.kills >= 25
    assert counts.last_step > 0
