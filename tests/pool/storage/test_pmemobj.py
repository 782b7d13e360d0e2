"""What lightck asks of libpmemobj, and what it makes of the answers: with a stand-in that behaves like release 2.1.

libpmemobj is loaded once per process, so each test runs in one of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
POOL = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
from lightck.pool.storage.pmdk import PmdkBackend
backend = PmdkBackend()
path = sys.argv[1]
def make():
    container = backend.create(path, 3 << 20)
    container.publish()
    container.close()
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("fake") / "libpmemobj.so.1"
    source = str(HERE / "fake_pmemobj.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", str(library), source], check=True)
    return library


def run(code: str, folder: Path, library: Path | str, fails: str = "", **more: str) -> tuple[str, str, list[str]]:
    """What the script printed to stdout and stderr, and the calls that libpmemobj saw."""
    calls = folder / "calls"
    calls.write_text("")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "LIGHTCK_LIBPMEMOBJ": str(library),
        "FAKE_PMEMOBJ_CALLS": str(calls),
        "FAKE_PMEMOBJ_FAILS": fails,
        "PMEM_IS_PMEM_FORCE": "1",
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", POOL + code, str(folder / "run.pool")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, calls.read_text().split("\n")[:-1]


def raised(call: str) -> str:
    return f"""
try:
    {call}
except Exception as err:
    print(type(err).__name__, err)
else:
    print("nothing was raised")
"""


def test_its_messages_go_to_the_log_of_lightck_and_nowhere_else(folder: Path, fake: Path) -> None:
    out, err, calls = run("make(); backend.open(path, write=True).close()", folder, fake)
    assert calls[:2] == ["log_set_function", "log_set_threshold 0 2"]
    assert out == "lightck ERROR lightck: libpmemobj: something to say about this pool\n"
    assert err == ""


def test_it_is_called_to_make_and_to_hold_a_pool_and_not_in_between(folder: Path, fake: Path) -> None:
    _, _, calls = run("make()", folder, fake)
    setting = "ctl_set all sds.at_create 0"
    assert calls[2:] == [setting, "create", "root", "alloc", "persist", "close"]
    train = """
import toys
import lightck
for _ in range(2):
    model = toys.net(); optimizer = toys.adam(model)
    with lightck.attach(model, path, optimizer=optimizer, resume=True) as session:
        toys.train(model, optimizer, 5, session.step)
"""
    os.unlink(folder / "run.pool")
    _, _, calls = run(train, folder, fake, LIGHTCK_BACKEND="pmdk")
    assert calls[2:] == [setting, "create", "root", "alloc", "persist", "close", setting, "open", "close"]


@pytest.mark.parametrize(("flags", "reported"), [(2, 0), (6, 1)])
def test_it_is_reported_before_an_open_whether_the_pool_counts_shutdowns(
    folder: Path, fake: Path, flags: int, reported: int
) -> None:
    code = f"""
make()
with open(path, "r+b") as f:
    f.seek(16)
    f.write(bytes([{flags}]))
backend.open(path, write=True).close()
"""
    _, _, calls = run(code, folder, fake)
    assert calls[-3:] == [f"ctl_set all sds.at_create {reported}", "open", "close"]


def test_reading_does_not_call_it(folder: Path, fake: Path) -> None:
    run("make()", folder, fake)
    out, _, calls = run("print(backend.open(path, write=False).nbytes, backend.recognises(path))", folder, fake)
    assert (out, calls) == (f"{3 << 20} True\n", [])


@pytest.mark.parametrize(
    ("error", "kind", "about"),
    [
        ("11 flock: Resource temporarily unavailable", "PoolLockedError", "recover"),
        ("17 pool initialization failed", "PoolLockedError", "copy"),
        ("22 an ADR failure was detected, the pool might be corrupted", "MediumError", "SHUTDOWN_STATE"),
        ("13 cannot read unsafe shutdown count", "PoolPermissionError", "owner"),
        ("12 cannot map", "NoSpaceError", "memory"),
        ("22 heap is inconsistent", "CorruptPoolError", "pmempool check"),
    ],
)
def test_what_it_refuses_to_open_is_a_typed_error_with_its_reason(
    folder: Path, fake: Path, error: str, kind: str, about: str
) -> None:
    run("make()", folder, fake)
    out, err, _ = run(raised("backend.open(path, write=True)"), folder, fake, f"open:{error}")
    reported = out.splitlines()[-1]
    assert reported.startswith(f"{kind} ")
    assert error.partition(" ")[2] in reported
    assert about in reported
    assert str(folder / "run.pool") in reported
    assert err == ""


@pytest.mark.parametrize("where", ["create", "alloc"])
def test_what_it_cannot_make_leaves_nothing(folder: Path, fake: Path, where: str) -> None:
    out, _, calls = run(raised("make()"), folder, fake, f"{where}:28 No space left on device")
    assert "NoSpaceError" in out
    assert calls[-1] == ("create" if where == "create" else "close")
    assert os.listdir(folder) == ["calls"]


@pytest.mark.parametrize("library", ["/nowhere/libpmemobj.so.1", "libc.so.6"])
def test_without_it_a_pool_is_read_and_not_written(folder: Path, fake: Path, library: str) -> None:
    run("make()", folder, fake)
    out, _, _ = run(raised("backend.open(path, write=True)"), folder, library)
    assert out.startswith("LibraryMissingError ")
    assert "apt-get install libpmemobj1" in out
    assert "LIGHTCK_LIBPMEMOBJ" in out
    out, _, _ = run("print(backend.open(path, write=False).nbytes)", folder, library)
    assert out == f"{3 << 20}\n"
    out, _, _ = run(raised("make()"), folder, library)
    assert out.startswith("LibraryMissingError ")
    assert sorted(os.listdir(folder)) == ["calls", "run.pool"]


def test_a_release_that_is_too_old_is_as_good_as_none(folder: Path, fake: Path) -> None:
    out, _, calls = run(raised("make()"), folder, fake, "version:")
    assert out.startswith("LibraryMissingError ")
    assert "version mismatch" in out
    assert calls == []
