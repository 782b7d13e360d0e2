"""What the tests of several files of a framework share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet_lightning() -> Iterator[None]:
    """Let Lightning log errors only."""
    names = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")
    before = [logging.getLogger(name).level for name in names]
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name, level in zip(names, before, strict=True):
        logging.getLogger(name).setLevel(level)
