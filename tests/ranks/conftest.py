"""Fixtures of the tests of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def pools(pool: Path) -> Path:
    """The directory of a group, which does not exist yet."""
    return pool.parent / "pools"
