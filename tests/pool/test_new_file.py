"""A new pool is made in a file of its own beside its path: it leaves nothing behind, and takes nothing of others."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from toys import BIG, adam, everything, is_step, kill_at, killed_child, net, pool_with, train

import lightck
from lightck import _native
from lightck._native import lib
from lightck.errors import BackgroundError
from lightck.pool.storage import temporary


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}], ids=["resume", "overwrite"])
def test_files_of_others_beside_a_pool_are_not_touched(folder, pool, options):
    """Names that somebody may well choose: a backup, a note."""
    pool_with(pool)
    kept = {Path(f"{pool}.{ending}"): ending.encode() for ending in ("new", "tmp", "bak", "old", "1")}
    for path, content in kept.items():
        path.write_bytes(content)
    backup = folder / f"{pool.name}.backup.new"
    shutil.copy(pool, backup)
    before = backup.read_bytes()
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, **options) as session:
        train(model, optimizer, 2)
        with session.pin():  # moves to a new file
            train(model, optimizer, 1)
    assert {path: path.read_bytes() for path in kept} == kept
    assert backup.read_bytes() == before


def test_two_trainings_whose_pools_are_named_alike_live_beside_each_other(folder):
    one, other = folder / "exp.new", folder / "exp"
    first = net()
    its = adam(first)
    session = lightck.attach(first, one, optimizer=its)
    train(first, its, 2)
    pool_with(other, 3)
    train(first, its, 2, 2)
    session.close()
    assert lightck.recover(one).step == 4
    assert lightck.recover(other).step == 3


@pytest.mark.parametrize("site", ["header", "block", "manifest", "word", "ack"])
def test_a_crash_in_the_middle_of_a_move_leaves_what_the_next_attach_removes(folder, pool, site):
    pool_with(pool, 2)
    before = names(folder)

    def work() -> None:
        model = net(seed=1)
        optimizer = adam(model)
        session = lightck.attach(model, pool, optimizer=optimizer, resume=True)
        kill_at(site)
        session.pin()

    killed_child(work)
    assert names(folder) == before | {os.path.basename(temporary.path_of(str(pool)))}
    assert lightck.recover(pool).step == 2
    _goes_on(pool)
    assert names(folder) == before


def _goes_on(pool: Path, **options: Any) -> None:
    model = net(seed=3)
    with lightck.attach(model, pool, optimizer=adam(model), resume=True, **options) as session:
        assert session.step == 2


def test_the_temporary_file_is_found_where_the_folder_has_another_name(folder):
    (folder / "here").mkdir()
    pool = folder / "here" / "run.pool"
    pool_with(pool, 2)
    Path(temporary.path_of(str(pool))).write_bytes(b"left by a kill")
    (folder / "here").rename(folder / "there")
    _goes_on(folder / "there" / "run.pool")
    assert names(folder / "there") == {"run.pool", "run.pool.lock"}


def test_a_pool_with_the_longest_name_that_a_lock_file_permits(folder):
    pool = folder / ("x" * (255 - len(".lock")))
    pool_with(pool, 2)
    assert lightck.recover(pool).step == 2


@pytest.mark.parametrize(
    ("operation", "code"),
    [(_native.lib.LCK_OP_COPY, errno.ENOSPC), (_native.lib.LCK_OP_SYNC, errno.EIO)],
    ids=["copy", "sync"],
)
@pytest.mark.parametrize("width", [8, BIG], ids=["copied at once", "copied in the background"])
def test_a_failure_of_a_move_is_reported_as_what_it_is(folder, pool, operation, code, width):
    """And not as the loss of the old file, which is in its place. However far the move comes: each write fails once."""
    reported = []
    while (failure := _failure_of_a_pin(pool, operation, code, len(reported) + 1, width)) is not None:
        reported.append(failure)
        assert names(folder) == {pool.name, f"{pool.name}.lock"}
    assert len(reported) >= 3
    for failure in reported:
        assert failure.errno == code
        assert os.strerror(code) in str(failure)
        assert "checkpoints committed before are intact" in str(failure)


def _failure_of_a_pin(pool: Path, operation: int, code: int, nth: int, width: int) -> BackgroundError | None:
    """None where fewer operations than that are needed."""
    model = net(width)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, overwrite=True)
    train(model, optimizer, 3)
    session.flush()
    assert lib.lck_fault(operation, nth, code) == lib.LCK_OK
    try:
        session.pin().release()
    except BackgroundError as err:
        return err
    finally:
        lib.lck_fault(operation, 0, 0)
        with contextlib.suppress(BackgroundError):  # the error repeats at each step
            session.close()
        assert is_step(lightck.recover(pool), everything(model, optimizer))
    return None
