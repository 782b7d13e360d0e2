"""Two fork servers: one whose children use lightck, one whose children never import it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from resume.forkserver import ForkServer

from .harness import Bench


@pytest.fixture(scope="session")
def _servers() -> Iterator[tuple[ForkServer, ForkServer]]:
    with (
        ForkServer(programs="findings.programs") as ours,
        ForkServer(programs="findings.programs", without_lightck=True) as plain,
    ):
        yield ours, plain


@pytest.fixture
def bench(_servers: tuple[ForkServer, ForkServer], folder: Path) -> Iterator[Bench]:
    yield Bench(*_servers, folder)
    for server in _servers:
        server.bury()
