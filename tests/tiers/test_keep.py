"""``keep=``: exports of committed checkpoints; each file is compared with the state of the training at its step."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from toys import (
    BIG,
    adam,
    alive,
    crashed,
    damage,
    everything,
    in_child,
    is_step,
    killed_child,
    left_since,
    net,
    same,
    train,
    weights,
)

import lightck
from lightck import export
from lightck.errors import KeepError, StateValueError
from lightck.export.tensors import write_tensors
from lightck.tiers import keep as keep_module


@pytest.fixture
def to(folder: Path) -> Path:
    return folder / "history"


def names(to: Path) -> list[str]:
    return sorted(path.name for path in to.iterdir())


def file(to: Path, step: int) -> Path:
    return to / f"step-{step:08d}.safetensors"


def started(pool: Path, keep: Any, width: int = 8, **options: Any) -> tuple[Any, Any, Any]:
    model = net(width)
    optimizer = adam(model)
    return model, optimizer, lightck.attach(model, pool, optimizer=optimizer, keep=keep, **options)


def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.001)


def exported() -> None:
    """Wait until no export runs."""
    until(lambda: not any(thread.name == "lightck-keep" for thread in threading.enumerate()))


def run(model: Any, optimizer: Any, session: Any, steps: int, start: int = 0, *, wait: bool = True) -> dict[int, Any]:
    """Train, and let each checkpoint commit and its export end. Returns the state of every step."""
    seen = {}
    for number in range(start, start + steps):
        train(model, optimizer, 1, start=number)
        seen[number + 1] = everything(model, optimizer)
        session.flush()
        if wait:
            exported()
    return seen


@pytest.mark.parametrize("width", [8, BIG])
def test_every_nth_checkpoint_is_exported(pool, to, width):
    model, optimizer, session = started(pool, lightck.Keep(every=3, to=to), width)
    seen = run(model, optimizer, session, 10)
    session.close()
    assert names(to) == [file(to, step).name for step in (3, 6, 9)]
    for step in (3, 6, 9):
        assert same(safetensors.torch.load_file(file(to, step)), seen[step]["model"])
    assert session.stats().kept == 3
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_last_bounds_the_number_of_files(pool, to):
    model, optimizer, session = started(pool, lightck.Keep(every=2, last=2, to=to))
    run(model, optimizer, session, 9)
    session.close()
    assert names(to) == [file(to, step).name for step in (6, 8)]


@pytest.mark.parametrize("are_numbered", [True, False])
def test_the_files_that_were_written_last_stay_though_the_clock_was_ahead_before(pool, to, are_numbered):
    keep = lightck.Keep(every=2, last=2, to=to)
    model, optimizer, session = started(pool, keep)
    run(model, optimizer, session, 4)
    session.close()
    for path in to.iterdir():
        if not are_numbered:  # as an older release writes them
            with safe_open(path, "pt") as there:
                metadata = {key: value for key, value in there.metadata().items() if key != "lightck_kept_number"}
            safetensors.torch.save_file(safetensors.torch.load_file(path), path, metadata)
        os.utime(path, (time.time() + 3600,) * 2)
    model = net(seed=1)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, keep=keep) as session:
        run(model, optimizer, session, 6, start=4)
    assert names(to) == [file(to, step).name for step in (8, 10)]


def test_all_has_the_optimizer_too(pool, to):
    model, optimizer, session = started(pool, lightck.Keep(every=2, to=to, what="all"))
    train(model, optimizer, 2)
    session.close()
    loaded = safetensors.torch.load_file(file(to, 2))
    moment = optimizer.state[model[0].weight]["exp_avg"]
    assert same(loaded["optimizer/0.weight/exp_avg"], moment)


def test_close_finishes_the_export_that_is_due(pool, to):
    model, optimizer, session = started(pool, lightck.Keep(every=2, to=to), BIG)
    train(model, optimizer, 2)
    seen = weights(model)
    session.close()
    assert same(safetensors.torch.load_file(file(to, 2)), seen)


def test_interval_between_checkpoints_is_respected(pool, to):
    """There are checkpoints at 3, 6, 9 and 12: the exports due at 5 and 10 are made of the next ones."""
    model, optimizer, session = started(pool, lightck.Keep(every=5, to=to), interval=3)
    with session:
        for number in range(12):
            train(model, optimizer, 1, start=number)
            session.end_step()
            if number + 1 in (6, 12):
                session.flush()
                exported()
    assert names(to) == [file(to, step).name for step in (6, 12)]


class Gate:
    """Holds every export at its start until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        real = keep_module.parse

        def parse(checkpoint: Any) -> Any:
            self.reached.set()
            assert self.open.wait(30)
            return real(checkpoint)

        patch.setattr(keep_module, "parse", parse)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


@pytest.mark.parametrize("width", [8, BIG])
def test_training_goes_on_while_an_export_takes_its_time(pool, to, gate, width):
    """The slot is not overwritten while it is read, and each step commits without waiting, as without ``keep``."""
    model, optimizer, session = started(pool, lightck.Keep(every=4, to=to), width)
    seen = run(model, optimizer, session, 4, wait=False)
    assert gate.reached.wait(30)
    for number in range(4, 16):
        train(model, optimizer, 1, start=number)
        assert lightck.recover(crashed(pool)).step >= number
        session.flush()
        assert session.committed == number + 1
    gate.open.set()
    exported()
    assert same(safetensors.torch.load_file(file(to, 4)), seen[4]["model"])
    train(model, optimizer, 1, start=16)  # due since 8: made of the first checkpoint after the last export
    seen[17] = everything(model, optimizer)
    session.close()
    assert names(to) == [file(to, step).name for step in (4, 17)]
    assert same(safetensors.torch.load_file(file(to, 17)), seen[17]["model"])


def test_relayout_waits_for_the_export(pool, to, gate):
    model, optimizer, session = started(pool, lightck.Keep(every=2, to=to))
    seen = run(model, optimizer, session, 2, wait=False)
    assert gate.reached.wait(30)
    threading.Timer(0.2, gate.open.set).start()
    pin = session.pin()  # needs a fourth slot and so a new file
    assert file(to, 2).exists()
    assert same(safetensors.torch.load_file(file(to, 2)), seen[2]["model"])
    pin.release()
    session.close()


def test_counting_goes_on_after_a_restart(pool, to):
    model, optimizer, session = started(pool, lightck.Keep(every=4, to=to))
    run(model, optimizer, session, 6)
    session.close()
    assert names(to) == [file(to, 4).name]
    model = net(seed=1)
    optimizer = adam(model)
    keep = lightck.Keep(every=4, last=1, to=to)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, keep=keep) as session:
        run(model, optimizer, session, 1, start=6)
        assert names(to) == [file(to, 4).name]
        run(model, optimizer, session, 1, start=7)
    assert names(to) == [file(to, 8).name]


def test_export_that_a_crash_prevented_is_made_after_the_restart(pool, to):
    def work() -> None:
        model, optimizer, session = started(pool, lightck.Keep(every=4, to=to))

        def die(*args: Any) -> None:
            os.kill(os.getpid(), 9)

        keep_module.load_tensor = die  # in the child
        run(model, optimizer, session, 4, wait=False)
        time.sleep(30)

    killed_child(work)
    assert not any(name.endswith(".safetensors") for name in names(to)), "no incomplete file has the final name"
    (left,) = names(to)
    model = net(seed=1)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, keep=lightck.Keep(every=4, to=to)) as session:
        assert session.step == 4
        seen = run(model, optimizer, session, 1, start=4)
    assert same(safetensors.torch.load_file(file(to, 5)), seen[5]["model"])
    assert left in names(to), "a pool with this path on another host may be exported to it"
    os.utime(to / left, (0, 0))
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, keep=lightck.Keep(every=4, to=to)):
        assert names(to) == [file(to, 5).name], "what the kill left is removed"


def test_pools_with_one_path_on_two_hosts_have_temporary_files_of_their_own(pool, to, monkeypatch):
    seen: list[str] = []

    def written(*args: Any) -> None:
        (name,) = [name for name in names(to) if name.endswith(".tmp")]
        seen.append(name)
        write_tensors(*args)

    monkeypatch.setattr(export, "write_tensors", written)
    for _ in range(2):
        model = net()
        tier = lightck.Tier(to, every=1, format="safetensors")
        with lightck.attach(model, pool, optimizer=(optimizer := adam(model)), tiers=[tier], overwrite=True):
            train(model, optimizer, 1)
    assert len(set(seen)) == 2


def test_keep_can_be_added_to_an_existing_pool(pool, to):
    model, optimizer, session = started(pool, None)
    train(model, optimizer, 3)
    session.close()
    again = net(seed=1)
    again_optimizer = adam(again)
    keep = lightck.Keep(every=2, to=to)
    with lightck.attach(again, pool, optimizer=again_optimizer, resume=True, keep=keep) as session:
        run(again, again_optimizer, session, 3, start=3)
    assert names(to) == [file(to, step).name for step in (4, 6)]


# -- the folder ------------------------------------------------------------------------------------------------------


def test_files_of_others_are_never_touched(pool, folder, to):
    to.mkdir()
    mine = ["step-00000001.safetensors", "step-00000099.safetensors", "step-1.safetensors", "notes.txt"]
    for name in mine[1:]:
        (to / name).write_text("mine")
    safetensors.torch.save_file({"a": torch.ones(2)}, to / mine[0])
    (to / "step-00000098.safetensors").symlink_to(to / "notes.txt")
    before = {path.name: path.read_bytes() for path in to.iterdir()}
    other = folder / "other.pool"
    model, optimizer, session = started(other, lightck.Keep(every=3, last=1, to=to))  # trainings that share a folder
    run(model, optimizer, session, 3)
    session.close()
    model, optimizer, session = started(pool, lightck.Keep(every=2, last=1, to=to))
    run(model, optimizer, session, 4)
    session.close()
    assert {name: (to / name).read_bytes() for name in before} == before
    assert file(to, 3).exists(), "the other training's"
    assert file(to, 4).exists()
    assert not file(to, 2).exists()


def test_keep_is_deprecated_and_the_tier_that_the_warning_names_writes_the_same_files(pool, to, folder):
    with pytest.warns(FutureWarning, match="will be removed") as warned:
        model, optimizer, session = started(pool, lightck.Keep(every=2, to=to, last=1, what="all"))
    assert warned[0].filename == started.__code__.co_filename
    train(model, optimizer, 4)
    session.close()
    tiers = eval(str(warned[0].message).split("tiers=")[1].removesuffix("."), {"lightck": lightck})
    other = folder / "other.pool"
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, other, optimizer=optimizer, tiers=[dataclasses.replace(tiers[0], root=folder / "tier")]):
        train(model, optimizer, 4)
    assert tiers[0].path == str(to)
    assert names(to) == names(folder / "tier")
    assert same(safetensors.torch.load_file(file(to, 4)), safetensors.torch.load_file(file(folder / "tier", 4)))


def test_name_that_is_taken_by_a_file_of_others_is_reported(pool, to):
    to.mkdir()
    file(to, 2).write_text("mine")
    model, optimizer, session = started(pool, lightck.Keep(every=2, to=to))
    train(model, optimizer, 2)
    with pytest.raises(KeepError, match=r"step 2 could not be exported.*was not exported by a training of this pool"):
        session.close()
    assert file(to, 2).read_text() == "mine"


def test_older_training_in_the_folder_does_not_displace_the_new_one(pool, to):
    model, optimizer, session = started(pool, lightck.Keep(every=2, last=2, to=to))
    run(model, optimizer, session, 8)
    session.close()
    assert names(to) == [file(to, step).name for step in (6, 8)]
    keep = lightck.Keep(every=2, last=2, to=to)
    model, optimizer, session = started(pool, keep, overwrite=True)
    run(model, optimizer, session, 4)
    session.close()
    assert names(to) == [file(to, step).name for step in (2, 4)]


def test_file_says_where_it_comes_from_and_no_path(pool, to):
    model, optimizer, session = started(pool, lightck.Keep(every=1, to=to))
    train(model, optimizer, 1)
    session.close()
    with safe_open(file(to, 1), "pt") as opened:
        found = opened.metadata()
    assert found["lightck_step"] == "1"
    assert found["format"] == "pt"
    assert str(pool) not in str(found)


def test_folder_that_cannot_be_made_is_refused_at_attach(pool, folder):
    model = net()
    with pytest.raises(KeepError, match="No such file or directory"):
        lightck.attach(model, pool, optimizer=adam(model), keep=lightck.Keep(every=1, to=folder / "no" / "where"))
    lightck.attach(model, pool, optimizer=adam(model)).close()  # the lock was released


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 1.5}, {"every": 1, "last": 0}, {"every": 1, "what": "x"}])
def test_wrong_options_are_refused(options, to):
    with pytest.raises(ValueError, match=r"every|last|what"):
        lightck.Keep(to=to, **options)


def test_wrong_arguments_are_refused(pool, to):
    model = net()
    with pytest.raises(TypeError, match="pass tiers="):
        lightck.attach(model, pool, keep=1000)
    with pytest.raises(ValueError, match="needs 1 in addition to slots="):
        lightck.attach(model, pool, slots=8, keep=lightck.Keep(every=1, to=to))


# -- errors ----------------------------------------------------------------------------------------------------------


def test_full_folder_is_reported_at_the_next_step_and_training_can_go_on(pool, to):
    def work() -> None:
        if not mount_small(to):
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        model, optimizer, session = started(pool, lightck.Keep(every=2, to=to), BIG)
        train(model, optimizer, 2)
        session.flush()
        exported()
        with pytest.raises(
            KeepError, match=r"step 2 could not be exported.*pool and its checkpoints are intact"
        ) as caught:
            train(model, optimizer, 1, start=2)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
        optimizer.step()  # once: the loop that caught it goes on
        session.flush()
        assert session.committed == 3
        assert list(to.iterdir()) == []
        with pytest.raises(KeepError):  # raised again at close, because no later export succeeded
            session.close()

    to.mkdir()
    in_child(work)
    assert lightck.recover(pool).step == 3


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
def test_a_dtype_that_cannot_be_kept_is_reported_with_what_can_be_done(pool, to, dtype):
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, keep=lightck.Keep(every=1, to=to))
    model.register_buffer("wide", torch.ones(2).to(dtype))
    train(model, optimizer, 1)
    with pytest.raises(KeepError, match=r"step 1 .*'wide' has dtype complex.*safetensors does not have") as caught:
        session.close()
    said = str(caught.value)
    assert "Export with" not in said, "Keep has no format"
    assert "Check the folder" not in said
    assert ".." not in said
    cure = 'lightck.export_checkpoint(lightck.recover(pool_path), file, format="torch")'
    assert cure in said
    eval(cure, {"lightck": lightck, "pool_path": pool, "file": to / "by hand.pt"})
    assert torch.load(to / "by hand.pt", weights_only=True)["wide"].dtype is dtype


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_dtype_that_cannot_be_kept_is_reported_before_the_training(pool, to):
    model = net()
    model.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(StateValueError, match="'model/wide' has dtype complex128, which safetensors") as caught:
        lightck.attach(model, pool, optimizer=adam(model), keep=lightck.Keep(every=1000, to=to))
    assert 'format="torch"' in str(caught.value)
    assert not pool.exists()
    assert not to.exists()
    with lightck.attach(model, pool, optimizer=adam(model)):
        pass


def mount_small(at: Path) -> bool:
    """A real file system of 64 KiB, in a mount namespace of this child. False where that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, private, recursive = 0x20000, 1 << 18, 1 << 14
    if libc.unshare(new_namespace) != 0 or libc.mount(b"none", b"/", None, private | recursive, None) != 0:
        return False
    return bool(libc.mount(b"tmpfs", str(at).encode(), b"tmpfs", 0, b"size=64k,mode=700") == 0)


def test_loader_does_not_raise_the_error_of_an_export(pool, to):
    """An error in next() would end the loop, so it is raised by step(), where the loop can catch it."""
    to.mkdir()
    file(to, 1).write_text("mine")
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, keep=lightck.Keep(every=1, last=1, to=to))
    caught = []
    for x in session.loader(torch.utils.data.DataLoader(torch.ones(4, 4))):
        optimizer.zero_grad()
        model(x).sum().backward()
        try:
            optimizer.step()
        except KeepError as err:
            caught.append(str(err))
            optimizer.step()
        session.flush()  # without it, a slow disk may commit step 1 only together with step 2, which is exported well
        exported()
    assert len(caught) == 1
    assert "step 1 " in caught[0]
    session.close()
    assert lightck.recover(pool).step == 4


def test_error_is_forgotten_after_an_export_that_went_well(pool, to):
    to.mkdir()
    file(to, 2).mkdir()
    model, optimizer, session = started(pool, lightck.Keep(every=2, to=to))
    train(model, optimizer, 2)
    session.flush()
    exported()
    with pytest.raises(KeepError):
        train(model, optimizer, 1, start=2)
    train(model, optimizer, 2, start=2)
    session.close()
    assert file(to, 4).exists()


def test_only_an_error_that_a_loop_can_catch_says_that_it_may_go_on(pool, to):
    words = "if the loop catches this error"
    to.write_text("a file")
    with pytest.raises(KeepError) as at_attach:
        started(pool, lightck.Keep(every=1, to=to))
    to.unlink()
    model, optimizer, session = started(pool, lightck.Keep(every=2, to=to))
    to.rmdir()
    train(model, optimizer, 2)
    session.flush()
    exported()
    with pytest.raises(KeepError) as at_step:
        train(model, optimizer, 1, start=2)
    with pytest.raises(KeepError) as at_close:
        session.close()
    assert [words in str(each.value) for each in (at_attach, at_step, at_close)] == [False, True, False]
    assert at_step.value.errno == at_close.value.errno == errno.ENOENT


def test_damaged_checkpoint_is_not_exported(pool, to, gate):
    model, optimizer, session = started(pool, lightck.Keep(every=2, to=to), BIG)
    run(model, optimizer, session, 2, wait=False)
    assert gate.reached.wait(30)
    damage(pool, "model/0.weight", [2])
    gate.open.set()
    with pytest.raises(KeepError, match="checksum"):
        session.close()
    assert names(to) == []


def test_nothing_is_left_after_close(pool, to):
    before = alive()
    model, optimizer, session = started(pool, lightck.Keep(every=1, to=to), BIG)
    run(model, optimizer, session, 3)
    session.close()
    assert not left_since(before)


def test_exception_of_the_loop_leaves_no_thread(pool, to):
    before = alive()
    model, optimizer, session = started(pool, lightck.Keep(every=1, to=to), BIG)
    with pytest.raises(ZeroDivisionError), session:
        train(model, optimizer, 2)
        raise ZeroDivisionError
    assert not left_since(before)
    assert names(to)


def test_a_session_that_is_collected_on_the_thread_of_an_export_ends_after_it(pool, to, monkeypatch):
    """The garbage collector can run on any thread."""
    goes, choose = threading.Event(), keep_module.choose

    def collecting(*args):
        assert goes.wait(60)
        gc.collect()
        return choose(*args)

    def trains():
        model = net()
        optimizer = adam(model)
        session = lightck.attach(model, pool, optimizer=optimizer, keep=lightck.Keep(every=2, to=to))
        train(model, optimizer, 4)
        assert session.committed >= 2

    monkeypatch.setattr(keep_module, "choose", collecting)
    gc.disable()
    try:
        trains()
        goes.set()
        deadline = time.monotonic() + 60
        while str(pool) in Path("/proc/self/maps").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        gc.enable()
    assert str(pool) not in Path("/proc/self/maps").read_text()
    assert [path.name for path in to.iterdir()] == ["step-00000002.safetensors"]
    assert lightck.recover(pool).step == 3
