"""One fork server for all tests, and a folder on memory for the pools."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .forkserver import ForkServer

_MEMORY = Path("/dev/shm")


@pytest.fixture
def server(_server: ForkServer) -> Iterator[ForkServer]:
    yield _server
    _server.bury()


@pytest.fixture
def compiling_server(_compiling_server: ForkServer) -> Iterator[ForkServer]:
    yield _compiling_server
    _compiling_server.bury()


@pytest.fixture(scope="session")
def _server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


@pytest.fixture(scope="session")
def _compiling_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Its children find torch.compile warm, and share inductor's cache."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with ForkServer(compiles=True, environment=cache) as started:
        yield started


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """For pools and logs: in ``$LIGHTCK_TEST_DIR``, else on tmpfs where there is one, to wait for no disk."""
    parent = Path(os.environ.get("LIGHTCK_TEST_DIR", _MEMORY))
    if not parent.is_dir():
        yield tmp_path
        return
    made = Path(tempfile.mkdtemp(prefix="lightck-resume-", dir=parent))
    yield made
    shutil.rmtree(made, ignore_errors=True)
