"""Small parts of the campaigns of ``kills.py`` and ``kills_group.py``, which are run by hand."""

from __future__ import annotations

import pytest

from lightck.strategy.gradients import Gradients
from tiers import kills, kills_group


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_killed_the_training_goes_on_exactly(tmp_path, seed):
    counts = kills.run(25, seed, tmp_path)
    assert counts.kills >= 25
    assert counts.last_step > 0


@pytest.mark.long
def test_whatever_is_killed_a_training_with_gradients_goes_on_exactly(tmp_path):
    assert kills.run(12, 5, tmp_path, strategy=Gradients(base_every=4)).last_step > 0


@pytest.mark.long
def test_whatever_is_killed_a_training_whose_compression_changes_goes_on_exactly(tmp_path):
    assert kills.run(25, 2, tmp_path, (None, "zstd", "lz4")).kills >= 25


@pytest.mark.long
def test_whatever_is_killed_a_group_of_ranks_goes_on_exactly(tmp_path):
    assert kills_group.run(8, 2, tmp_path).last_step > 0
