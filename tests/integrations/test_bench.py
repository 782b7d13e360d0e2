"""The bench of frameworks trains under each of them, with lightck and without."""

from __future__ import annotations

import pytest
from toys import in_child

import lightck
from bench import frameworks

MODULES = {name: "torch" if name == "own loop" else name for name in frameworks.FRAMEWORKS}


@pytest.mark.frameworks
@pytest.mark.parametrize("name", frameworks.FRAMEWORKS)
def test_every_update_is_saved(name, pool):
    pytest.importorskip(MODULES[name])
    for path in (None, str(pool)):
        assert in_child(lambda path=path: frameworks.seconds_per_step(name, path, 12)) > 0
    assert lightck.recover(pool).step == 12


def test_the_table_shows_what_an_integration_adds_beyond_the_own_loop():
    rows = {
        "own loop": {"plain": [1.0, 2.0, 3.0], "lightck": [1.1, 2.2, 3.3], "again": [1.0, 2.0, 3.0]},
        "accelerate": {"plain": [1.0, 2.0, 3.0], "lightck": [1.2, 2.5, 3.3], "again": [0.9, 2.0, 3.1]},
    }
    own, other = frameworks.table(rows).splitlines()[2:]
    assert own == "| own loop | 2000.00 | 200000 (100000 to 300000) | 0 (0 to 0) |  |"
    assert other == "| accelerate | 2000.00 | 300000 (200000 to 500000) | 0 (-100000 to 100000) | 100000 |"
