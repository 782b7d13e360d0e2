"""What all tests share: one thread, a folder on tmpfs for pools, and a heap that is quick to search.

``attach`` looks for optimizers among all live objects. What torch imports lazily is loaded here once and frozen out of
that search, so that an attach in a test costs milliseconds.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
gc_get_freeze_count = gc.get_freeze_count


def pytest_sessionstart(session: pytest.Session) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight]).step()


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """What was imported so far (torch.compile loads half of torch) is no candidate for anything. ``attach`` would
    unfreeze it; a test that wants that asks for ``whole_heap``."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 0)
        yield


@pytest.fixture
def whole_heap() -> Iterator[None]:
    """The heap as a program has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", gc_get_freeze_count)
        yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder, removed afterwards: in LIGHTCK_TEST_DIR where that is set, else on tmpfs."""
    base = os.environ.get("LIGHTCK_TEST_DIR") or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    path = Path(tempfile.mkdtemp(prefix="lightck-test-", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def pool(folder: Path) -> Path:
    """The path of a pool that does not exist yet."""
    return folder / "run.pool"


@pytest.fixture
def commits_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what happens before the gate: under LIGHTCK_CHECK=1 no version commits before all its sources were
    read again there."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
