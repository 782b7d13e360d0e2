"""What the system refuses reaches the user as an error of lightck's; nothing is skipped or left behind for it."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable
from typing import Any

import pytest
from crash.campaigns.truncations import Damage, inflict
from toys import adam, alive, checkpoints, everything, is_step, left_since, net, places, pool_with, train

import lightck
from lightck._native import lib
from lightck.errors import ExportError, FormatError, KeepError, NoSpaceError, PoolIOError
from lightck.pipeline import pipeline, pool_kind
from lightck.pool.storage import extents, pmdk, pmemobj


def failing(real: Callable[..., Any], code: int, when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    return call


def test_reads_that_give_less_are_continued(pool, monkeypatch):
    model, optimizer = pool_with(pool)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, nbytes, at: real(fd, max(1, nbytes // 3), at))
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_manifest_that_the_medium_cannot_read_is_passed_over(pool, monkeypatch):
    pool_with(pool)
    checkpoint = checkpoints(pool)[0]
    sb, line = checkpoint.reader.superblock, checkpoint.record
    at = sb.slots[line.slot][0] + sb.manifest_offset + line.manifest_index * sb.manifest_nbytes
    ((start, _),) = extents.runs(places(pool), at, 1)
    monkeypatch.setattr(extents, "_read_run", failing(extents._read_run, errno.EIO, lambda _, at, __: at == start))
    checkpoint = lightck.recover(pool)
    assert checkpoint.step == 2
    assert [rejected.step for rejected in checkpoint.rejected] == [3]


@pytest.mark.parametrize("copy", [0, 1])
def test_one_superblock_that_the_medium_can_read_is_enough(pool, monkeypatch, copy):
    pool_with(pool, backend="file")
    start = copy * 4096
    monkeypatch.setattr(os, "pread", failing(os.pread, errno.EIO, lambda _, __, at: at == start))
    assert lightck.recover(pool).step == 3
    monkeypatch.setattr(os, "pread", failing(os.pread, errno.EIO))
    with pytest.raises(PoolIOError, match=r"The beginning of the pool .* cannot be read"):
        lightck.recover(pool)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EMFILE])
def test_no_checkpoint_is_passed_over_because_the_process_is_short_of_something(pool, monkeypatch, code):
    pool_with(pool)
    real, calls, outcomes = extents._read_run, 0, set()
    for nth in range(1, 60):
        calls = 0

        def once(*arguments: Any, nth: int = nth) -> bytes:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise OSError(code, os.strerror(code))
            return real(*arguments)

        monkeypatch.setattr(extents, "_read_run", once)
        try:
            outcomes.add(lightck.recover(pool).step)
        except PoolIOError as err:
            outcomes.add(err.errno)
        if calls < nth:
            break
    assert nth > 10
    assert outcomes == {3, code}


@pytest.mark.parametrize("resume", [False, True])
def test_refused_attach_gives_everything_back(pool, monkeypatch, resume):
    if resume:
        pool_with(pool)
    model = net()
    optimizer = adam(model)
    before = alive()
    for module, name in ((pipeline, "Engine"), (pool_kind, "PoolWriter")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing(getattr(module, name), errno.ENOMEM))
            with pytest.raises(OSError):
                lightck.attach(model, pool, optimizer=optimizer, resume=resume)
        assert not left_since(before)
    lightck.attach(model, pool, optimizer=optimizer, resume=resume).close()


def test_export_that_cannot_begin_is_the_exports_failure(folder, pool, monkeypatch):
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, keep=lightck.Keep(every=2, to=folder / "kept"))
    real = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "lightck-keep":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    reported = set()
    while session.step < 6:
        try:
            train(model, optimizer, 1, start=session.step)
        except KeepError as err:
            reported.add("can't start new thread" in str(err))
    assert reported == {True}
    monkeypatch.undo()
    seen = everything(model, optimizer)
    session.close()
    assert is_step(lightck.recover(pool), seen)


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_export_beyond_the_limit_of_a_file_is_an_error_of_the_export(folder, pool, format):
    pool_with(pool)
    checkpoint = lightck.recover(pool)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(ExportError) as caught:
            lightck.export_checkpoint(checkpoint, folder / "out", format=format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert not [path for path in folder.iterdir() if path.name.startswith("out")]


def test_question_without_an_answer_does_not_make_a_pool_lost(pool, monkeypatch):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 1)
        real = os.stat
        monkeypatch.setattr(os, "stat", failing(real, errno.ENOMEM, lambda path, *_: str(path) == str(pool)))
        train(model, optimizer, 3, start=1)
        session.flush()
    assert lightck.recover(pool).step == 4


@pytest.mark.parametrize("backend", ["file", "pmdk"])
@pytest.mark.parametrize("field", ["major", "incompat", "ro_compat", "endianness"])
def test_refused_resume_changes_no_byte_of_a_pool_of_the_future(pool, backend, field, request):
    """Nor what libpmemobj keeps in it: it opens a pool only once that was looked at."""
    if backend == "pmdk":
        request.getfixturevalue("pmdk")
    pool_with(pool, backend=backend)
    inflict(str(pool), Damage("field", what=field))
    before = pool.read_bytes()
    model = net()
    with pytest.raises(FormatError):
        lightck.attach(model, pool, optimizer=adam(model), resume=True)
    assert pool.read_bytes() == before


def test_want_of_memory_is_not_taken_for_damage_of_a_pmdk_pool():
    with pytest.raises(pmemobj.PmemobjError) as caught:
        pmemobj._check(lib.LCK_ENOMEM)
    refused = pmdk._refused("/a/run.pool", caught.value)
    assert isinstance(refused, NoSpaceError)
    assert "out of memory" in str(refused)


def test_a_pool_above_the_limit_of_a_file_names_the_limit(pool):
    model = net()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
    try:
        with pytest.raises(NoSpaceError, match=r"more than the largest file that this process .*\(ulimit -f\)"):
            lightck.attach(model, pool, optimizer=adam(model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not pool.exists()
