"""What a checkpoint keeps of a layout comes back, or is refused by name: pools are untrusted."""

from __future__ import annotations

import pytest

from lightck.errors import CorruptPoolError
from lightck.layout import Average, Layout, Shard
from lightck.pool.format.group import RANKS_MAX
from lightck.restore.saved_layout import SavedLayout, saved_layout

LAYOUT = Layout({"norm": Average(), "up": Shard(0)}, 1, 2, stage=2, stages=3)


def test_a_layout_comes_back():
    kept = saved_layout(LAYOUT, ["up", "norm", "other"])
    assert kept[:5] == (1, 2, 2, 3, ("norm",))
    assert "Shard(dim=0" in kept.rules
    assert SavedLayout.parse(kept.to_value()) == kept
    assert SavedLayout.parse(None) is None


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2},
        {"rank": -1},
        {"size": 0},
        {"size": RANKS_MAX + 1},
        {"stage": 3},
        {"stages": 2},
        {"stages": RANKS_MAX + 1},
        {"rank": True},
        {"averaged": "norm"},
        {"averaged": [1]},
        {"rules": None},
    ],
)
def test_values_that_cannot_be_are_refused(change):
    value = saved_layout(LAYOUT, ["norm"]).to_value() | change
    with pytest.raises((CorruptPoolError, TypeError)):
        SavedLayout.parse(value)


@pytest.mark.parametrize("key", ["rank", "size", "stage", "stages", "averaged", "rules"])
def test_each_value_is_needed(key):
    value = saved_layout(LAYOUT, ["norm"]).to_value()
    del value[key]
    with pytest.raises(KeyError):
        SavedLayout.parse(value)
