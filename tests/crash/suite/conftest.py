"""Recordings that several tests of the simulator use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from crash.recorded import record
from crash.recording import Recording
from workloads import WORKLOADS


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Recording, Path]]:
    """By name of the workload: its recording, and the pool that it left."""
    known: dict[str, tuple[Recording, Path]] = {}

    def get(name: str) -> tuple[Recording, Path]:
        if name not in known:
            path = tmp_path_factory.mktemp("recorded") / "run.pool"
            known[name] = record(WORKLOADS[name], path), path
        return known[name]

    return get
