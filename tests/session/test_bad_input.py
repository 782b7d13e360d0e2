"""Bad input: each has its own error, the error says fact, reason and cure, and nothing was harmed.

``refused`` is the one check for all of them: class and natural builtin, a message in at least three parts that names
what it is about, every file in the folder as it was, the model as it was, and a pool whose lock is free again.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import gc
import os
import re
import socket
import stat
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LinearLR, StepLR
from toys import (
    adam,
    alive,
    child_that_holds,
    content,
    damage,
    everything,
    flip,
    forward,
    in_child,
    is_pmdk,
    left_since,
    net,
    on_small_tmpfs,
    poke,
    pool_with,
    same,
    train,
)

import lightck
from lightck import errors
from lightck.pool.format.structures import SUPERBLOCK_NBYTES, crc64
from lightck.pool.storage import temporary
from lightck.pool.storage.file import FileBackend
from lightck.pool.storage.lock import PoolLock
from lightck.pool.storage.pmdk import PmdkBackend
from lightck.strategy.gradients import Gradients


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file but lock files, which stay by design."""
    return {p.name: without_run(p.read_bytes()) for p in folder.iterdir() if p.is_file() and p.suffix != ".lock"}


def without_run(data: bytes) -> bytes:
    """All of it, but for the part of a PMDK pool where libpmemobj keeps what it knows of this run: opening writes
    there."""
    if not data.startswith(b"PMEMOBJ\0"):
        return data
    return data[:6152] + bytes(8) + data[6160:6184] + bytes(8192 - 6184) + data[8192:]


def check_message(error: BaseException, *about: str) -> None:
    text = str(error)
    parts = [part for part in re.split(r"[.;:](?:\s+|$)", text) if part]
    assert len(parts) >= 3, f"no fact, reason and cure: {text}"
    for word in about:
        assert str(word) in text, f"{word!r} is not named: {text}"


def check_kind(error: BaseException, kind: type, builtin: type) -> None:
    assert type(error) is kind
    assert isinstance(error, lightck.LightckError)
    assert isinstance(error, builtin)


@contextmanager
def refused(
    kind: type,
    builtin: type,
    *about: Any,
    folder: Path | None = None,
    path: Path | None = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
) -> Iterator[None]:
    """The block raises exactly this error, and nothing is harmed."""
    files = files_of(folder) if folder is not None else {}
    seen = everything(model, *([optimizer] if optimizer is not None else [])) if model is not None else None
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    caught = None
    check_kind(error, kind, builtin)
    check_message(error, *about)
    error.__traceback__ = error.__cause__ = error.__context__ = None
    if folder is not None:
        assert files_of(folder) == files
    if model is not None:
        assert same(everything(model, *([optimizer] if optimizer is not None else [])), seen)
    if path is not None and path.parent.is_dir():
        PoolLock(str(path)).release()


def anything() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, adam(model)


# -- the path --------------------------------------------------------------------------------------------------------


def test_folder_that_is_missing(folder):
    path = folder / "nowhere" / "run.pool"
    model, optimizer = anything()
    with refused(errors.PoolNotFoundError, FileNotFoundError, path, "folder", folder=folder, model=model):
        lightck.attach(model, path, optimizer=optimizer)
    with refused(errors.PoolNotFoundError, FileNotFoundError, path, folder=folder):
        lightck.recover(path)


def test_folder_that_is_a_file(folder):
    (folder / "file").write_bytes(b"x")
    path = folder / "file" / "run.pool"
    model, optimizer = anything()
    with refused(errors.PoolNotFoundError, FileNotFoundError, path, folder=folder):
        lightck.attach(model, path, optimizer=optimizer)


def test_recovery_of_a_pool_that_is_missing(folder, pool):
    with refused(errors.PoolNotFoundError, FileNotFoundError, pool, folder=folder, path=pool):
        lightck.recover(pool)


def test_path_that_is_a_directory(folder):
    path = folder / "checkpoints"
    path.mkdir()
    model, optimizer = anything()
    for overwrite in (False, True):
        with refused(errors.PoolPathError, IsADirectoryError, path, folder=folder, path=path, model=model):
            lightck.attach(model, path, optimizer=optimizer, overwrite=overwrite)
    with refused(errors.PoolPathError, IsADirectoryError, path, folder=folder):
        lightck.recover(path)


def test_path_that_is_a_special_file(folder, pool):
    os.mkfifo(pool)
    model, optimizer = anything()
    with refused(errors.PoolPathError, IsADirectoryError, pool, "is a pipe", folder=folder, path=pool, model=model):
        lightck.attach(model, pool, optimizer=optimizer)
    with refused(errors.PoolPathError, IsADirectoryError, pool, "is a pipe"):
        lightck.recover(pool)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("content", [b"", b"print('hello')\n", b"\x80\x02PK" * 20000], ids=["empty", "short", "long"])
def test_foreign_file_is_neither_read_nor_overwritten(folder, pool, content, overwrite):
    pool.write_bytes(content)
    model, optimizer = anything()
    with refused(errors.NotAPoolError, ValueError, pool, folder=folder, path=pool, model=model):
        lightck.attach(model, pool, optimizer=optimizer, overwrite=overwrite)
    with refused(errors.NotAPoolError, ValueError, pool, folder=folder):
        lightck.recover(pool)


@pytest.mark.parametrize("keep", [4 << 20, 100_000, 10_000, 600], ids=str)
def test_truncated_pool(folder, pool, keep):
    model, optimizer = pool_with(pool)
    os.truncate(pool, keep)
    with refused(errors.PoolTruncatedError, EOFError, pool, folder=folder, path=pool, model=model):
        lightck.attach(model, pool, optimizer=optimizer, resume=True)
    with refused(errors.PoolTruncatedError, EOFError, pool, folder=folder):
        lightck.recover(pool)
    if keep < 4096 + 8 and is_pmdk(pool):  # PMDK's signature is left, and nothing that says whose pool it was
        with refused(errors.PoolTruncatedError, EOFError, pool, folder=folder, path=pool, model=model):
            lightck.attach(model, pool, optimizer=optimizer, overwrite=True)
    else:
        lightck.attach(model, pool, optimizer=optimizer, overwrite=True).close()


def test_pool_that_became_longer_names_the_command_that_mends_it(folder, pool):
    model, optimizer = pool_with(pool)
    nbytes = pool.stat().st_size
    os.truncate(pool, nbytes + 4096)
    cut = f"truncate --size={nbytes} {pool}"
    with pytest.raises(errors.PoolTruncatedError, match=re.escape(cut)):
        lightck.attach(model, pool, optimizer=optimizer, resume=True)
    subprocess.run(cut.split(), check=True)
    lightck.attach(model, pool, optimizer=optimizer, resume=True).close()


def rewrite_superblocks(pool: Path, change: dict[int, bytes]) -> None:
    """Put bytes into both superblocks, with a check that fits."""
    for copy_at in (0, SUPERBLOCK_NBYTES):
        body = bytearray(content(pool)[copy_at : copy_at + SUPERBLOCK_NBYTES - 8])
        for at, new in change.items():
            body[at : at + len(new)] = new
        poke(pool, copy_at, bytes(body) + struct.pack("<Q", crc64(bytes(body))))


@pytest.mark.parametrize("change", [{12: b"\x02\0"}, {39: b"\x80"}], ids=["major", "feature"])
def test_newer_format(folder, pool, change):
    model, optimizer = pool_with(pool)
    rewrite_superblocks(pool, change)
    for call in (lambda: lightck.attach(model, pool, optimizer=optimizer, resume=True), lambda: lightck.recover(pool)):
        with refused(errors.FormatError, ValueError, pool, "newer lightck", folder=folder, path=pool, model=model):
            call()


def test_both_superblocks_damaged(folder, pool):
    model, optimizer = pool_with(pool)
    flip(pool, 600)
    flip(pool, SUPERBLOCK_NBYTES + 600)
    with refused(errors.CorruptPoolError, ValueError, pool, folder=folder, path=pool, model=model):
        lightck.attach(model, pool, optimizer=optimizer, resume=True)


# -- permissions -----------------------------------------------------------------------------------------------------


_CLONE_NEWUSER, _PR_SET_DUMPABLE = 0x10000000, 4


def as_nobody(work: Any) -> Any:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")

    def drop() -> Any:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            work()
        except lightck.LightckError as error:
            return type(error).__name__, isinstance(error, PermissionError), str(error)
        return "nothing was raised"

    return in_child(drop)


def check_denied(answer: Any, *about: str) -> None:
    name, is_builtin, text = answer
    assert (name, is_builtin) == ("PoolPermissionError", True)
    check_message(Exception(text), *about)


def test_folder_that_is_not_writable(folder, pool):
    folder.chmod(0o755)
    model, optimizer = anything()
    check_denied(as_nobody(lambda: lightck.attach(model, pool, optimizer=optimizer)), str(folder))
    assert list(folder.iterdir()) == []


def test_pool_that_is_not_writable_or_not_readable(folder, pool):
    model, optimizer = pool_with(pool)
    folder.chmod(0o1777)
    Path(f"{pool}.lock").unlink()
    before = files_of(folder)
    for options in ({"resume": True}, {"overwrite": True}):
        check_denied(as_nobody(lambda o=options: lightck.attach(model, pool, optimizer=optimizer, **o)), str(folder))
        Path(f"{pool}.lock").unlink(missing_ok=True)
    check_denied(as_nobody(lambda: lightck.recover(pool)), str(pool))
    pool.chmod(0o644)
    assert as_nobody(lambda: lightck.recover(pool)) == "nothing was raised"
    check_denied(as_nobody(lambda: lightck.attach(model, pool, optimizer=optimizer, overwrite=True)), str(pool))
    assert files_of(folder) == before


def test_folder_in_which_others_can_swap_the_pool(folder, pool):
    folder.chmod(0o777)
    model, optimizer = anything()
    check_denied(as_nobody(lambda: lightck.attach(model, pool, optimizer=optimizer)), str(folder), "sticky")


def test_own_folder_in_which_others_can_swap_the_pool(folder, pool):
    folder.chmod(0o777)
    model, optimizer = anything()
    with pytest.raises(errors.PoolPermissionError) as caught:
        lightck.attach(model, pool, optimizer=optimizer)
    check_message(caught.value, str(folder), "chmod o-w")
    assert list(folder.iterdir()) == []
    folder.chmod(0o775)
    pool_with(pool)
    folder.chmod(0o777)
    assert lightck.recover(pool).step == 3, "reading makes nothing there"


def test_folder_for_all_in_a_container_that_does_not_know_its_owner(folder, pool):
    """A user namespace without the system's root: its /tmp belongs to nobody in particular there."""
    folder.chmod(0o1777)
    model, optimizer = anything()

    def work() -> None:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # or /proc/self is root's, after the change of user
        if libc.unshare(_CLONE_NEWUSER):
            raise lightck.LightckError("no user namespaces here")
        assert folder.stat().st_uid == os.geteuid() == 65534  # nobody is mapped
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text("1000 65534 1")
        assert (os.geteuid(), folder.stat().st_uid) == (1000, 65534)
        lightck.attach(model, pool, optimizer=optimizer).close()

    answer = as_nobody(work)
    if "no user namespaces" in str(answer):
        pytest.skip(str(answer))
    assert answer == "nothing was raised"
    assert pool.stat().st_uid == 65534


def test_lock_that_its_holder_gave_up_while_we_asked_who_that_is(pool, monkeypatch):
    """As a dying process does: nobody could be named, and the pool is free."""
    real, answers = fcntl.fcntl, [BlockingIOError(errno.EAGAIN, "held")]

    def asked(fd: int, what: int, *more: Any) -> Any:
        if what == fcntl.F_OFD_SETLK and answers:
            raise answers.pop()
        return real(fd, what, *more)

    monkeypatch.setattr(fcntl, "fcntl", asked)
    lock = PoolLock(str(pool))
    assert not answers
    lock.release()


def test_lock_file_of_another_user(folder, pool):
    folder.chmod(0o1777)
    model, optimizer = anything()
    lock = Path(f"{pool}.lock")
    lock.write_bytes(b"")
    lock.chmod(0o666)
    check_denied(as_nobody(lambda: lightck.attach(model, pool, optimizer=optimizer)), str(lock))


def test_symbolic_link_is_refused_where_it_would_be_written(folder, pool):
    model, optimizer = pool_with(pool)
    link = folder / "link.pool"
    link.symlink_to(pool)
    for overwrite in (False, True):
        with refused(errors.PoolPathError, IsADirectoryError, link, "link", folder=folder, path=link, model=model):
            lightck.attach(model, link, optimizer=optimizer, overwrite=overwrite)
    assert lightck.recover(link).step == 3, "what is only read may be reached by a link"
    assert link.is_symlink()
    link.unlink()
    link.symlink_to(folder / "nothing")
    with refused(errors.PoolNotFoundError, FileNotFoundError, folder / "nothing"):
        lightck.recover(link)


def test_symbolic_link_in_the_middle_is_resolved_once(folder):
    """The pool and its lock are those of the real folder, whatever becomes of the link."""
    (folder / "real").mkdir()
    (folder / "link").symlink_to(folder / "real")
    pool_with(folder / "link" / "run.pool")
    assert lightck.recover(folder / "real" / "run.pool").step == 3
    model, optimizer = anything()
    with lightck.attach(model, folder / "link" / "run.pool", optimizer=optimizer, resume=True):
        (folder / "link").unlink()
        with refused(errors.PoolLockedError, BlockingIOError, folder / "real" / "run.pool"):
            pool_with(folder / "real" / "run.pool", resume=True)
        train(model, optimizer, 1)
    assert lightck.recover(folder / "real" / "run.pool").step == 4


def test_pool_of_another_user_is_read_and_never_written(folder, pool):
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    model, optimizer = pool_with(pool)
    os.chown(pool, 65534, 65534)
    for resume in (True, False):
        with refused(errors.PoolPermissionError, PermissionError, pool, "65534", folder=folder, path=pool, model=model):
            lightck.attach(model, pool, optimizer=optimizer, resume=resume)
    assert lightck.recover(pool).step == 3


@pytest.mark.parametrize("kind", ["socket", "device"])
def test_path_that_is_a_socket_or_a_device(folder, pool, kind):
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(pool))
    else:
        try:
            os.mknod(pool, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # zeros without end
            os.close(os.open(pool, os.O_RDONLY))
        except OSError:
            pytest.skip("making a device is not permitted here")
    model, optimizer = anything()
    for call in (lambda: lightck.attach(model, pool, optimizer=optimizer), lambda: lightck.recover(pool)):
        with refused(errors.PoolPathError, IsADirectoryError, pool, folder=folder, path=pool, model=model):
            call()


@pytest.mark.parametrize("by", ["link", "hard link", "others' file", "directory", "fifo"])
def test_file_that_is_replaced_after_it_was_looked_at(folder, pool, by, monkeypatch):
    """What counts is what the descriptor says, not what the path said before."""
    pool_with(pool)
    os.rename(pool, folder / "aside")
    pool_with(pool)
    real = FileBackend.open

    def swapped(backend, path, **options):
        os.unlink(pool)
        if by == "link":
            pool.symlink_to(folder / "aside")
        elif by == "hard link":
            os.link(folder / "aside", pool)
        elif by == "others' file":
            pool.write_bytes((folder / "aside").read_bytes())
            pool.chmod(0o666)
        elif by == "directory":
            pool.mkdir()
        else:
            os.mkfifo(pool)
        return real(backend, path, **options)

    if is_pmdk(pool):
        real = PmdkBackend.open
        monkeypatch.setattr(PmdkBackend, "open", swapped)
    else:
        monkeypatch.setattr(FileBackend, "open", swapped)
    with pytest.raises((errors.PoolPathError, errors.PoolPermissionError)):
        lightck.recover(pool)


@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_lock_file_that_is_none(folder, pool, kind):
    lock = Path(f"{pool}.lock")
    if kind == "fifo":
        os.mkfifo(lock)
    elif kind == "directory":
        lock.mkdir()
    else:
        lock.symlink_to(folder / "elsewhere")
    model, optimizer = anything()
    with refused(errors.PoolPermissionError, PermissionError, lock, folder=folder, model=model):
        lightck.attach(model, pool, optimizer=optimizer)
    assert not (folder / "elsewhere").exists()
    assert not pool.exists()


def test_hard_link_is_refused(folder, pool):
    model, optimizer = pool_with(pool)
    os.link(pool, folder / "second.pool")
    for call in (lambda: lightck.attach(model, pool, optimizer=optimizer, resume=True), lambda: lightck.recover(pool)):
        with refused(errors.PoolPermissionError, PermissionError, pool, "link", folder=folder, path=pool, model=model):
            call()


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_pool_that_others_can_write_is_refused(folder, pool, mode):
    model, optimizer = pool_with(pool)
    pool.chmod(mode)
    for call in (lambda: lightck.attach(model, pool, optimizer=optimizer, resume=True), lambda: lightck.recover(pool)):
        with refused(errors.PoolPermissionError, PermissionError, pool, "chmod", folder=folder, path=pool, model=model):
            call()


# -- space and medium ------------------------------------------------------------------------------------------------


def test_no_space_for_the_pool_is_a_clean_error():
    def work(where: Path) -> Any:
        model, optimizer = anything()
        with refused(
            errors.NoSpaceError, OSError, "/mnt/run.pool", "MB", folder=where, path=where / "run.pool", model=model
        ):
            lightck.attach(model, where / "run.pool", optimizer=optimizer)
        return True

    assert on_small_tmpfs(2 << 20, work) is True


def test_no_space_for_gradient_records_names_the_base_every_that_fits():
    def work(where: Path) -> Any:
        model, optimizer = anything()
        path = where / "run.pool"
        with pytest.raises(errors.NoSpaceError, match=r"With Gradients\(base_every=\d+\) it fits") as raised:
            lightck.attach(model, path, optimizer=optimizer, strategy=Gradients(base_every=12))
        fits = int(str(raised.value).rpartition("base_every=")[2].partition(")")[0])
        with pytest.raises(errors.NoSpaceError):
            lightck.attach(model, path, optimizer=optimizer, strategy=Gradients(base_every=fits + 1))
        with lightck.attach(model, path, optimizer=optimizer, strategy=Gradients(base_every=fits)):
            train(model, optimizer, 2)
        return lightck.recover(path).step

    if is_pmdk("/mnt/run.pool"):
        pytest.skip("a PMDK pool needs some space beside the pool inside it")
    assert on_small_tmpfs(40 << 20, work) == 2


def test_no_space_when_the_pool_has_to_grow_leaves_the_old_one_intact():
    def work(where: Path) -> Any:
        model, optimizer = anything()
        replay = Growing()
        session = lightck.attach(model, where / "run.pool", optimizer=optimizer, state={"replay": replay})
        train(model, optimizer, 2)
        session.flush()
        replay.value = torch.ones(3 << 20, dtype=torch.uint8)
        train(model, optimizer, 1, start=2)
        try:
            session.flush()
        except errors.NoSpaceError as error:
            check_message(error, str(where / "run.pool"), "MB")
            text = "NoSpaceError"
        del session
        gc.collect()
        held = lightck.recover(where / "run.pool")
        return text, held.step, sorted(files_of(where))

    container_nbytes = (13 << 20) if is_pmdk("/mnt/run.pool") else 0
    assert on_small_tmpfs((9 << 20) + container_nbytes, work) == ("NoSpaceError", 2, ["run.pool"])


class Growing:
    """An object for ``state`` that holds one value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Growing()"  # without an address, which would be in the name of a test

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("level", ["os", "power"])
def test_medium_that_falls_short_of_require(folder, pool, level):
    model, optimizer = anything()
    if str(folder).startswith("/dev/shm"):
        with refused(errors.MediumError, OSError, level, "tmpfs", folder=folder, path=pool, model=model):
            lightck.attach(model, pool, optimizer=optimizer, require=level)
    else:
        pytest.skip("/dev/shm is not writable")
    assert list(folder.iterdir()) == [Path(f"{pool}.lock")]  # ours, from looking whether it is free


def test_medium_that_suffices_is_accepted(pool):
    model, optimizer = anything()
    lightck.attach(model, pool, optimizer=optimizer, require="process").close()


# -- in use ----------------------------------------------------------------------------------------------------------


def test_pool_open_in_this_process(folder, pool):
    model, optimizer = anything()
    with lightck.attach(model, pool, optimizer=optimizer):
        other = net(seed=1)
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with refused(errors.PoolLockedError, BlockingIOError, pool, "close", folder=folder, model=other):
                lightck.attach(other, pool, optimizer=adam(other), **options)
        train(model, optimizer, 2)
    assert lightck.recover(pool).step == 2


def test_pool_open_in_another_process(folder, pool):
    model, optimizer = anything()
    with child_that_holds(lambda: lightck.attach(model, pool, optimizer=optimizer)) as pid:
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with refused(errors.PoolLockedError, BlockingIOError, pool, f"pid {pid}", folder=folder, model=model):
                lightck.attach(model, pool, optimizer=optimizer, **options)
    lightck.attach(model, pool, optimizer=optimizer).close()


def test_second_session_of_one_model(folder, pool):
    model, optimizer = anything()
    with (
        lightck.attach(model, pool, optimizer=optimizer),
        refused(errors.SessionError, RuntimeError, "close", model=model),
    ):
        lightck.attach(model, folder / "second.pool", optimizer=optimizer)
    assert not (folder / "second.pool").exists()


# -- what the pool holds ---------------------------------------------------------------------------------------------


def test_checkpoint_is_never_loaded_or_overwritten_unasked(folder, pool):
    pool_with(pool, steps=3)
    model, optimizer = anything()
    with refused(
        errors.CheckpointExistsError,
        FileExistsError,
        pool,
        "step 3",
        "resume=True",
        "overwrite=True",
        folder=folder,
        path=pool,
        model=model,
        optimizer=optimizer,
    ):
        lightck.attach(model, pool, optimizer=optimizer)


def test_no_checkpoint_yet(folder, pool):
    model, optimizer = anything()
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        with refused(errors.NoCheckpointError, LookupError, pool, folder=folder):
            lightck.recover(pool)
        assert session.committed is None


def test_step_that_is_not_held(folder, pool):
    model, optimizer = pool_with(pool, steps=4)
    for step in (17, 2):
        with refused(errors.NoCheckpointError, LookupError, pool, f"step {step}", "3, 4", folder=folder, model=model):
            lightck.recover(pool, model, optimizer, step=step)


def test_all_checkpoints_damaged(folder, pool):
    pool_with(pool)
    damage(pool, "model/0.weight")
    model, optimizer = anything()
    with refused(
        errors.CorruptPoolError, ValueError, pool, "model/0.weight", "overwrite=True", folder=folder, path=pool
    ):
        lightck.recover(pool)
    with refused(errors.CorruptPoolError, ValueError, pool, "step 3", "step 2", folder=folder, path=pool):
        lightck.attach(model, pool, optimizer=optimizer, resume=True)
    fresh = net(seed=1)
    with lightck.attach(fresh, pool, optimizer=adam(fresh), overwrite=True) as session:
        assert session.step == 0


class Other(nn.Module):
    """Like ``net`` but with one tensor each missing, extra, reshaped and retyped."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(4, 8))
        self.add_module("2", nn.Linear(8, 2))
        self.get_submodule("0").weight = nn.Parameter(torch.zeros(8, 5))
        self.get_submodule("0").bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        self.get_submodule("2").bias = None
        self.more = nn.Parameter(torch.zeros(3))


def test_model_that_differs_names_every_tensor(folder, pool):
    pool_with(pool)
    model = Other()
    optimizer = adam(model)
    for call in (
        lambda: lightck.recover(pool, model, optimizer),
        lambda: lightck.attach(model, pool, optimizer=optimizer, resume=True),
    ):
        with refused(
            errors.DriftError,
            ValueError,
            "model/more",
            "model/2.bias",
            "model/0.weight",
            "model/0.bias",
            "[8, 4]",
            "[8, 5]",
            "float64",
            folder=folder,
            path=pool,
            model=model,
        ):
            call()
    with pytest.raises(errors.DriftError) as caught:
        lightck.recover(pool, model)
    drift = caught.value.drift
    assert drift.missing == ("model/more",)
    assert drift.extra == ("model/2.bias",)
    assert [d.split(":")[0] for d in drift.reshaped] == ["model/0.weight"]
    assert [d.split(":")[0] for d in drift.retyped] == ["model/0.bias"]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}])


def fewer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(model.parameters())[:-1])


@pytest.mark.parametrize(("build", "named"), [(sgd, "SGD"), (two_groups, "groups"), (fewer, "2.bias")])
def test_optimizer_that_differs(folder, pool, build, named):
    pool_with(pool)
    model = net(seed=1)
    optimizer = build(model)
    for call in (
        lambda: lightck.recover(pool, model, optimizer),
        lambda: lightck.attach(model, pool, optimizer=optimizer, resume=True),
    ):
        with refused(
            errors.DriftError, ValueError, "AdamW", named, folder=folder, path=pool, model=model, optimizer=optimizer
        ):
            call()


def test_state_that_the_checkpoint_holds_and_nobody_takes(folder, pool):
    pool_with(pool, state={"ema": Growing(1)})
    model, optimizer = anything()
    with refused(errors.DriftError, ValueError, "'ema'", folder=folder, path=pool, model=model, optimizer=optimizer):
        lightck.attach(model, pool, optimizer=optimizer, resume=True)


def test_state_object_that_refuses_what_was_saved(pool, monkeypatch):
    def refuse(self: Growing, state: dict[str, Any]) -> None:
        raise KeyError("momentum")

    pool_with(pool, state={"ema": Growing(1)})
    model, optimizer = anything()
    with refused(errors.DriftError, ValueError, "'ema'", "KeyError", "momentum", path=pool):
        monkeypatch.setattr(Growing, "load_state_dict", refuse)
        lightck.attach(model, pool, optimizer=optimizer, state={"ema": Growing(1)}, resume=True)


# -- values that cannot be stored ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"deep": [1, {2: object()}]}, "state/replay/value/deep/1/2"),
        ([lambda: 0], "state/replay/value/0"),
        (torch.zeros(2).to_sparse(), "state/replay/value"),
        (type("Vector", (list,), {})(), "state/replay/value"),
    ],
    ids=["object", "function", "sparse", "subclass"],
)
def test_value_in_state_that_cannot_be_stored_is_named_by_its_path(folder, pool, value, path):
    model, optimizer = anything()
    with refused(errors.StateValueError, TypeError, path, folder=folder, path=pool, model=model):
        lightck.attach(model, pool, optimizer=optimizer, state={"replay": Growing(value)})
    assert files_of(folder) == {}


def test_object_in_state_without_state_dict(folder, pool):
    model, optimizer = anything()
    with refused(errors.StateValueError, TypeError, "'counter'", "int", folder=folder, path=pool, model=model):
        lightck.attach(model, pool, optimizer=optimizer, state={"counter": 5})
    with refused(errors.StateValueError, TypeError, "'a/b'", folder=folder, path=pool, model=model):
        lightck.attach(model, pool, optimizer=optimizer, state={"a/b": Growing()})


@pytest.mark.parametrize("tensor", [torch.zeros(3).to_sparse(), torch.zeros(3, device="meta")], ids=["sparse", "meta"])
def test_model_tensor_that_cannot_be_stored_is_named(folder, pool, tensor):
    model, optimizer = anything()
    model.register_buffer("odd", tensor)
    with refused(errors.StateValueError, TypeError, "model/odd", "persistent=False", folder=folder, path=pool):
        lightck.attach(model, pool, optimizer=optimizer)
    assert files_of(folder) == {}


# -- too late, or two of them ----------------------------------------------------------------------------------------


def test_scheduler_that_came_after_attach_is_an_error_at_the_first_step(pool):
    model, optimizer = anything()
    with lightck.attach(model, pool, optimizer=optimizer):
        scheduler = StepLR(optimizer, 1)
        forward(model).backward()
        before = everything(model, optimizer)
        with refused(errors.LateError, RuntimeError, "StepLR", "before attach", 'state={"scheduler": scheduler}'):
            optimizer.step()
        assert same(everything(model, optimizer), before)
    del scheduler


def test_scheduler_that_came_after_a_resume_is_an_error_at_the_first_step(pool):
    model, optimizer = anything()
    scheduler = ExponentialLR(optimizer, 0.5)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
        scheduler.step()
    model, optimizer = anything()
    scheduler = None
    gc.collect()
    with refused(errors.DriftError, ValueError, "'scheduler'", "before attach", path=pool, model=model):
        lightck.attach(model, pool, optimizer=optimizer, resume=True)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, state={"scheduler": None}):
        pass


def test_scheduler_built_after_a_resume_reset_the_learning_rate(pool):
    model, optimizer = anything()
    scheduler = ExponentialLR(optimizer, 0.5)
    with lightck.attach(model, pool, optimizer=optimizer, state={"scheduler": None}):
        for number in range(2):
            train(model, optimizer, 1, start=number)
            scheduler.step()
    model, optimizer = anything()
    scheduler = None
    gc.collect()
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, state={"scheduler": None}):
        assert optimizer.param_groups[0]["lr"] == 0.0125
        scheduler = LinearLR(optimizer)
        forward(model).backward()
        with refused(errors.LateError, RuntimeError, "0.0125", "before attach"):
            optimizer.step()
    del scheduler


class Decay:
    """Not torch's, and like those of others: it notes where each group began."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * 0.5**self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.mark.parametrize("make", [Decay, lambda o: ChainedScheduler([ExponentialLR(o, 0.5)])], ids=["other", "chained"])
def test_scheduler_that_steps_before_the_first_update_after_a_resume_passes(pool, make):
    """As where an epoch ended just before the crash."""
    model, optimizer = anything()
    with lightck.attach(model, pool, optimizer=optimizer, state={"scheduler": make(optimizer)}):
        train(model, optimizer, 2)
    model, optimizer = anything()
    scheduler = make(optimizer)
    lr = optimizer.param_groups[0]["lr"]
    with lightck.attach(model, pool, optimizer=optimizer, state={"scheduler": scheduler}, resume=True) as session:
        scheduler.step()
        train(model, optimizer, 1, start=session.step)
        assert optimizer.param_groups[0]["lr"] == lr / 2


def test_scheduler_beside_the_one_that_was_passed_is_reported(pool, caplog):
    model, optimizer = anything()
    one, two = StepLR(optimizer, 1), ExponentialLR(optimizer, 0.9)
    with lightck.attach(model, pool, optimizer=optimizer, state={"mine": one}):
        assert "ExponentialLR drives AdamW" in caplog.text
        assert "is not saved" in caplog.text
    caplog.clear()
    with lightck.attach(model, pool, optimizer=optimizer, state={"mine": one, "other": two}, resume=True):
        assert "is not saved" not in caplog.text


def test_learning_rate_set_by_hand_after_a_resume_passes(pool):
    pool_with(pool)
    model, optimizer = anything()
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        optimizer.param_groups[0]["lr"] = 0.001
        train(model, optimizer, 1, start=session.step)


def test_optimizer_and_scheduler_that_both_came_after_attach(pool):
    model = net()
    with lightck.attach(model, pool):
        optimizer = adam(model)
        scheduler = StepLR(optimizer, 1)
        forward(model).backward()
        with refused(errors.LateError, RuntimeError, "StepLR", "before attach"):
            optimizer.step()
    del scheduler


def test_optimizer_that_comes_after_a_resume_is_too_late(folder, pool):
    pool_with(pool)
    gc.collect()
    model = net(seed=1)
    with refused(errors.LateError, RuntimeError, pool, "AdamW", "optimizer=", folder=folder, path=pool, model=model):
        lightck.attach(model, pool, resume=True)


def test_second_optimizer_for_the_same_parameters_after_attach(pool):
    model, optimizer = anything()
    with lightck.attach(model, pool, optimizer=optimizer):
        second = sgd(model)
        forward(model).backward()
        with refused(errors.LateError, RuntimeError, "SGD", "attach again", "another path"):
            second.step()


def test_two_optimizers_for_one_model(folder, pool):
    model, one = anything()
    two = sgd(model)
    with refused(
        errors.AmbiguousError, ValueError, "AdamW", "SGD", "optimizer=", folder=folder, path=pool, model=model
    ):
        lightck.attach(model, pool)
    lightck.attach(model, pool, optimizer=one).close()
    del two


def test_two_schedulers_for_one_optimizer(folder, pool):
    model, optimizer = anything()
    one, two = StepLR(optimizer, 1), ExponentialLR(optimizer, 0.9)
    with refused(errors.AmbiguousError, ValueError, "StepLR", "ExponentialLR", "state=", folder=folder, path=pool):
        lightck.attach(model, pool, optimizer=optimizer)
    lightck.attach(model, pool, optimizer=optimizer, state={"warmup": one, "decay": two}).close()


def test_two_gradient_scalers(folder, pool):
    model, optimizer = anything()
    one, two = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    with refused(errors.AmbiguousError, ValueError, "GradScaler", "state=", folder=folder, path=pool):
        lightck.attach(model, pool, optimizer=optimizer)
    lightck.attach(model, pool, optimizer=optimizer, state={"scaler": one}).close()
    del two


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ({"interval": 0}, ValueError, "interval=0"),
        ({"interval": True}, ValueError, "interval=True"),
        ({"interval": 1.5}, ValueError, "interval=1.5"),
        ({"interval": "often"}, ValueError, "interval='often'"),
        ({"slots": 1}, ValueError, "slots=1"),
        ({"slots": 9}, ValueError, "slots=9"),
        ({"slots": "3"}, ValueError, "slots='3'"),
        ({"resume": True, "overwrite": True}, ValueError, "overwrite=True"),
        ({"strategy": "full"}, TypeError, "strategy"),
        ({"backend": "tape"}, ValueError, "backend='tape'"),
        ({"require": "flood"}, ValueError, "require='flood'"),
        ({"optimizer": "adam"}, TypeError, "optimizer="),
        ({"state": {1: Growing()}}, TypeError, "1"),
        ({"state": [Growing()]}, TypeError, "state="),
        ({"overwrite": "no"}, TypeError, "overwrite='no' is a str"),
        ({"resume": None}, TypeError, "resume=None is a NoneType"),
        ({"pause_on_nonfinite": 1}, TypeError, "pause_on_nonfinite=1 is a int"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_argument(folder, pool, options, kind, named):
    model, optimizer = anything()
    with pytest.raises(kind) as caught:
        lightck.attach(model, pool, **{"optimizer": optimizer, **options})
    assert named in str(caught.value)
    assert files_of(folder) == {}
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("path", [7, b"/tmp/run.pool", None], ids=repr)
def test_path_of_a_wrong_type(path):
    model, optimizer = anything()
    with pytest.raises(TypeError):
        lightck.attach(model, path, optimizer=optimizer)
    with pytest.raises(TypeError):
        lightck.recover(path)


def test_a_flag_that_is_neither_true_nor_false_discards_nothing(pool):
    model, optimizer = pool_with(pool)
    with pytest.raises(TypeError, match="overwrite='no' is a str"):
        lightck.attach(model, pool, optimizer=optimizer, overwrite="no")  # type: ignore[arg-type]
    assert lightck.recover(pool).step == 3
    with pytest.raises(TypeError, match="strict='no'"):
        lightck.recover(pool, model, strict="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="strict=0"):
        lightck.recover(pool).restore(model, strict=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("what", ["directory", "text"])
def test_nothing_is_made_beside_what_is_no_pool(folder, what, overwrite):
    path = folder / "there"
    if what == "directory":
        path.mkdir()
    else:
        path.write_text("mine\n" * 4000)
    model, optimizer = anything()
    with pytest.raises(errors.PoolPathError if what == "directory" else errors.NotAPoolError):
        lightck.attach(model, path, optimizer=optimizer, overwrite=overwrite)
    assert [p.name for p in folder.iterdir()] == ["there"]


def test_path_with_a_nul(pool):
    model, optimizer = anything()
    path = f"{pool}\0.pool"
    with refused(errors.PoolPathError, IsADirectoryError, "NUL"):
        lightck.attach(model, path, optimizer=optimizer)
    with refused(errors.PoolPathError, IsADirectoryError, "NUL"):
        lightck.recover(path)


def test_name_that_is_too_long(folder, pool):
    """A file system takes 255 bytes, and ``.lock`` is put behind it."""
    model, optimizer = anything()
    for path in (folder / ("n" * 300), folder / ("n" * 252), folder / ("n" * 300) / "run.pool"):
        with refused(errors.PoolPathError, IsADirectoryError, "too long", "shorter", folder=folder, model=model):
            lightck.attach(model, path, optimizer=optimizer)
    with refused(errors.PoolPathError, IsADirectoryError, "too long", "shorter"):
        lightck.recover(folder / ("n" * 300))
    lightck.attach(model, folder / ("n" * 250), optimizer=optimizer).close()


def test_folder_that_takes_no_files():
    model, optimizer = anything()
    with refused(errors.PoolNotFoundError, FileNotFoundError, "/proc/run.pool", "another folder", model=model):
        lightck.attach(model, "/proc/run.pool", optimizer=optimizer)


def test_a_class_in_state_is_none_of_its_objects(folder, pool):
    model, optimizer = anything()
    with refused(errors.StateValueError, TypeError, "state['ema']", "the class Linear", folder=folder, path=pool):
        lightck.attach(model, pool, optimizer=optimizer, state={"ema": nn.Linear})


@pytest.mark.parametrize(
    ("device", "kind", "named"),
    [
        ("foo", ValueError, "device='foo' cannot be used here"),
        ("cuda:99", ValueError, "device='cuda:99' cannot be used here"),
        (torch.device("meta"), ValueError, "device='meta'"),
        (None, TypeError, "device=None is a NoneType"),
        (True, TypeError, "device=True is a bool"),
    ],
    ids=str,
)
def test_device_on_which_no_tensor_can_be_made(pool, device, kind, named):
    pool_with(pool)
    with pytest.raises(kind) as caught:
        lightck.recover(pool, device=device)
    assert named in str(caught.value)


@pytest.mark.parametrize(("timeout", "kind"), [("soon", TypeError), (True, TypeError), (float("nan"), ValueError)])
def test_time_that_is_none_leaves_the_session_as_it_is(pool, timeout, kind):
    model, optimizer = anything()
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        with pytest.raises(kind, match="Pass a number of seconds, or None to wait for ever"):
            session.flush(timeout)
        assert session.flush(float("inf")) == 2
        train(model, optimizer, 1, start=2)
        assert session.flush(30) == 3


def test_model_of_a_wrong_type(pool):
    with pytest.raises(TypeError, match="not a torch"):
        lightck.attach({"weight": torch.zeros(2)}, pool)
    pool_with(pool)
    with pytest.raises(TypeError, match="not a torch"):
        lightck.recover(pool, {"weight": torch.zeros(2)})


# -- the tree --------------------------------------------------------------------------------------------------------


def test_every_error_is_also_the_builtin_that_the_tree_names():
    for line in errors.__doc__.splitlines():
        found = re.match(r".*── (\w+)\s+\((\w+)", line)
        if found:
            kind, builtin = getattr(errors, found[1]), getattr(builtins, found[2])
            assert issubclass(kind, errors.LightckError)
            assert issubclass(kind, builtin)
    named = set(re.findall(r"── (\w+)", errors.__doc__)) | {"LightckError"}
    kinds = {n for n, k in vars(errors).items() if isinstance(k, type) and issubclass(k, Exception)}
    assert named == {name for name in kinds if not name.startswith("_")}


def test_stale_temporary_is_removed_by_who_holds_the_lock(folder, pool):
    model, optimizer = pool_with(pool)
    stale = Path(temporary.path_of(str(pool)))
    stale.write_bytes(b"left behind by a kill while a pool was being made")
    lightck.attach(model, pool, optimizer=optimizer, resume=True).close()
    assert not stale.exists()


def test_failed_attach_leaves_no_thread_and_no_descriptor(folder, pool):
    pool_with(pool)
    model, optimizer = anything()

    def attempt() -> None:
        with pytest.raises(errors.CheckpointExistsError):
            lightck.attach(model, pool, optimizer=optimizer)

    attempt()
    before = alive()
    attempt()
    assert not left_since(before)
