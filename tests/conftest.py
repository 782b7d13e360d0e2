"""What all tests share: one thread, a folder on tmpfs for pools, and a heap that is quick to search.

``attach`` looks for optimizers among all live objects. What torch imports lazily is loaded here once and frozen out of
that search, so that an attach in a test costs milliseconds.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

# Tests' models are small, and a small model is copied whole at the boundary. Most tests are about copies in the
# background, so the copies are made there, in this process and in all that are started from it. CI runs a part of the
# suite with LIGHTCK_TEST_BACKGROUND=0.
os.environ.setdefault("LIGHTCK_TEST_BACKGROUND", "1")

import pytest
import slow_transfers
import torch
from hypothesis import settings
from sampling import halve

from lightck.pool.engine import Job
from lightck.pool.format.structures import MIB
from lightck.pool.storage import backends, emulation, pmemobj
from lightck.pool.storage.emulation import Profile
from lightck.pool.storage.pmdk import PmdkBackend

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).resolve().parents[1]))  # for bench/; last: an installed lightck goes first

settings.register_profile("lightck", deadline=None)  # a machine that stands still for a moment is no failure
settings.load_profile("lightck")

# A shell that starts the suite in the background has it, and all that it starts, ignore Ctrl-C; tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup with the signal of a terminal that is closed.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The whole suite on another backend: LIGHTCK_TEST_BACKEND=pmdk makes every new pool one, in this process and in all
# that are started from it; LIGHTCK_TEST_DIR puts pools in another place than tmpfs. On tmpfs libpmemobj is made to
# believe that it is on persistent memory, so that its own metadata is flushed as it would be there; on a disk it is
# not.
if "LIGHTCK_TEST_BACKEND" in os.environ:
    os.environ["LIGHTCK_BACKEND"] = os.environ["LIGHTCK_TEST_BACKEND"]
    if "LIGHTCK_TEST_DIR" not in os.environ:
        os.environ["PMEM_IS_PMEM_FORCE"] = "1"
    # Several arenas in every pool of this process and its forks; processes of their own have pools of one arena.
    backends.BACKENDS["pmdk"] = PmdkBackend(arena_nbytes=4 * MIB)
gc_get_freeze_count = gc.get_freeze_count


def pytest_sessionstart(session: pytest.Session) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight]).step()


_LEFT_OUT = pytest.StashKey[bool]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the tests of frameworks, unless they are asked for: their imports make each fork slower."""
    if collection_path == Path(__file__).parent / "integrations" and "not frameworks" in config.option.markexpr:
        config.stash[_LEFT_OUT] = True
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    halve(items)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash.get(_LEFT_OUT, False):
        terminalreporter.write_line("left out: frameworks (pip install '.[frameworks]' && pytest -m frameworks)")


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """What was imported so far (torch.compile loads half of torch) is no candidate for anything. ``attach`` would
    unfreeze it; a test that wants that asks for ``whole_heap``."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: 0)
        yield


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Torch uses one thread, as every test found it. With more, a process that is forked later hangs in OpenMP."""
    yield
    assert torch.get_num_threads() == 1, "a test of this file left another number of threads"


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
    """An empty folder on tmpfs (or in ``$LIGHTCK_TEST_DIR``), removed afterwards."""
    base = os.environ.get("LIGHTCK_TEST_DIR") or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    path = Path(tempfile.mkdtemp(prefix="lightck-test-", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def pool(folder: Path) -> Path:
    """The path of a pool that does not exist yet."""
    return folder / "run.pool"


@pytest.fixture
def pmdk() -> None:
    """For tests of PMDK pools: skipped without libpmemobj, failed where ``LIGHTCK_REQUIRE_PMDK=1`` says it is there."""
    try:
        pmemobj.load()
    except pmemobj.MissingError as err:
        missing_pmdk(f"libpmemobj is not here: {err}")


@pytest.fixture
def pmempool(pmdk: None) -> str:
    """The path of PMDK's tool."""
    path = shutil.which("pmempool")
    if path is None:
        missing_pmdk("pmempool (Debian package pmdk-tools) is not here")
    return str(path)


def missing_pmdk(reason: str) -> NoReturn:
    if os.environ.get("LIGHTCK_REQUIRE_PMDK") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def commits_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what happens before the gate: under LIGHTCK_CHECK=1 no version commits before all its sources were
    read again there."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)


@pytest.fixture(autouse=True)
def _on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """``LIGHTCK_TEST_TRANSFERS=1``: in the whole suite every tensor is on a device whose copies arrive late."""
    if os.environ.get("LIGHTCK_TEST_TRANSFERS") == "1":
        transfer = slow_transfers.SlowTransfer(seed=1, seconds=0.002)
        slow_transfers.install(monkeypatch, lambda tensor: transfer)


@pytest.fixture
def slow_memory() -> Iterator[None]:
    """Pools that take 4 MB a second: who waits for a version finds blocks of it left, however fast the machine is."""
    before = emulation.active_profile()
    emulation.use(Profile("slow", 4_000_000, 1_000_000_000, 0, 64, "made up"))
    yield
    emulation.use(before)


@pytest.fixture
def during_wait(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sends this process signals when the next wait for a checkpoint is some seconds old."""
    wait = Job.wait

    def send(seconds: float, *numbers: int) -> None:
        def begins(self: Job, *args: Any, **options: Any) -> bool:
            monkeypatch.setattr(Job, "wait", wait)
            threading.Timer(seconds, lambda: [os.kill(os.getpid(), number) for number in numbers]).start()
            return wait(self, *args, **options)

        monkeypatch.setattr(Job, "wait", begins)

    return send
