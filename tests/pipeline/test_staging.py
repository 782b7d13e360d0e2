"""Tensors on a device: they are sent while the computation goes on, and checkpoints are exact nevertheless.

The device is a simulated one, made of CPU tensors (``slow_transfers.py``): copies arrive late, and nothing else is
simulated. ``tests/gpu`` checks that CUDA does what a ``DeviceTransfer`` asks of it.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import slow_transfers
import torch
from slow_transfers import SlowTransfer
from torch import nn
from toys import BIG, adam, batch, everything, is_step, killed_child, net, train

import lightck
from lightck.errors import BackgroundError, NoCheckpointError
from lightck.pipeline.staging import groups, parts, sending
from lightck.pipeline.staging.transfer_thread import TransferThread
from lightck.pipeline.submission import Submission
from lightck.pipeline.trial import Trial
from lightck.pool.engine import COPIED
from lightck.pool.storage import emulation
from lightck.pool.storage.emulation import Profile
from lightck.pool.storage.lock import holder_of

SEED = 20261121


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> SlowTransfer:
    """All tensors are on one device."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)  # then they are copied at the boundary
    print("seed", SEED)
    slow = SlowTransfer(SEED)
    slow_transfers.install(monkeypatch, lambda tensor: slow)
    return slow


HOST, DIRECT, DEVICE = lightck.Host(), lightck.Direct(), lightck.Device()


@pytest.fixture(params=[HOST, DIRECT, DEVICE], ids=str)
def kind(request: pytest.FixtureRequest) -> Any:
    """Each transfer method."""
    return request.param


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many groups as possible, even of small tensors."""
    monkeypatch.setattr(parts, "PART_NBYTES_MIN", 1024)


class Normed(nn.Module):
    """A model with buffers that every forward changes, a tied weight, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, BIG), nn.BatchNorm1d(BIG), nn.Linear(BIG, 4)
        self.back = nn.Linear(4, BIG, bias=False)
        self.back.weight = self.one.weight
        self.frozen = nn.Parameter(torch.arange(float(BIG)), requires_grad=False)
        self.register_buffer("history", torch.zeros(BIG))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.one(x) + self.frozen)
        self.history += x.detach().mean(0)
        return self.back(self.two(x))


def normed() -> Normed:
    torch.manual_seed(0)
    return Normed()


@pytest.mark.parametrize("model", [net, lambda: net(BIG), normed], ids=["small", "big", "buffers"])
@pytest.mark.parametrize("slots", [2, 3])
def test_every_step_is_exact(pool, transfer, small_groups, model, slots, kind):
    model = model()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, slots=slots, staging=kind) as session:
        for number in range(8):
            train(model, optimizer, 1, start=number)
            seen = everything(model, optimizer)
            session.flush()
            assert is_step(lightck.recover(pool), seen)
    assert transfer.sent >= 8


@pytest.mark.parametrize("model", [lambda: net(BIG), normed], ids=["big", "buffers"])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_kill_at_any_time_leaves_a_step_of_the_training(folder, transfer, small_groups, model, slots, kind):
    states = states_of(model, 40)
    chosen = random.Random(SEED + slots)
    for number in range(4):
        pool, seen = folder / f"{number}.pool", mmap.mmap(-1, 8)
        killed_child(partial(dies, pool, model(), slots, kind, chosen.uniform(0, 0.3), seen))
        found = lightck.recover(pool)
        assert seen[0] <= found.step
        assert is_step(found, states[found.step])


def states_of(model: Callable[[], nn.Module], steps: int) -> list[dict[str, Any]]:
    """The state after each step of a training without lightck."""
    trained = model()
    optimizer = adam(trained)
    states: list[dict[str, Any]] = [{}]
    for number in range(steps):
        train(trained, optimizer, 1, start=number)
        states.append(everything(trained, optimizer))
    return states


def dies(pool: Path, model: nn.Module, slots: int, kind: Any, seconds: float, seen: mmap.mmap) -> None:
    """Train for 40 steps, or until SIGKILL comes ``seconds`` after the first commit. ``seen[0]``: the newest committed
    step that the training saw."""
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, slots=slots, staging=kind)
    killer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    for number in range(40):
        train(model, optimizer, 1, start=number)
        seen[0] = session.committed or 0
        if seen[0] and not killer.is_alive():
            killer.start()
    signal.pause()


def test_the_training_is_not_changed(pool, transfer, kind):
    plain, saved = normed(), normed()
    with lightck.attach(saved, pool, optimizer=(optimizer := adam(saved)), staging=kind):
        train(saved, optimizer, 6)
    train(plain, other := adam(plain), 6)
    assert is_step(lightck.recover(pool), everything(plain, other))


def test_host_memory_is_filled_again_only_after_it_was_copied(pool, transfer, small_groups, slow_memory, monkeypatch):
    """The engine is slower than the device. Without the wait, wrong bytes are found in one of several trainings (not
    always in the first, because it is a race)."""
    exact = _steps_that_are_exact(pool, transfer)
    assert exact == 4

    def never(segment: groups.Segment) -> None:
        segment.arrivals = []

    monkeypatch.setattr(groups.Segment, "wait_free", never)
    assert any(_steps_that_are_exact(pool.with_name(f"broken-{number}.pool"), transfer) < 4 for number in range(20))


def _steps_that_are_exact(pool, transfer) -> int:
    model = net(BIG)
    optimizer = adam(model)
    exact = 0
    with lightck.attach(model, pool, optimizer=optimizer, slots=3, staging=lightck.Host()) as session:
        for number in range(4):
            train(model, optimizer, 1, start=number)
            seen = everything(model, optimizer)
            session.flush()
            with suppress(NoCheckpointError):  # wrong bytes that are noticed: the checkpoint is given up
                exact += is_step(lightck.recover(pool), seen)
    return exact


@pytest.mark.parametrize("kind", [lightck.Host(), lightck.Direct()], ids=str)
def test_what_is_written_while_it_is_under_way_drops_the_checkpoint(pool, monkeypatch, kind):
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    slow = SlowTransfer(SEED, seconds=0.2)
    slow_transfers.install(monkeypatch, lambda tensor: slow)
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, staging=kind) as session:
        train(model, optimizer, 2)
        seen = everything(model, optimizer)
        session.flush()
        train(model, optimizer, 1, start=2)
        session.end_step()
        with torch.no_grad():
            model[0].weight.mul_(1.5)
        train(model, optimizer, 1, start=3)  # the gate sees it
        assert session.stats().skipped == 1
        assert is_step(lightck.recover(pool), seen)
        session.end_step()
        seen = everything(model, optimizer)
        session.flush()
        assert is_step(lightck.recover(pool), seen)
        with torch.no_grad():
            model[0].weight.mul_(1.5)  # now it is sent in order
        train(model, optimizer, 1, start=4)
        assert session.stats().skipped == 1
        assert is_step(lightck.recover(pool), seen)


def begun(pool: Path, steps: int, model: nn.Module, kind: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A session whose newest step is committed, the optimizer, and the state of that step."""
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, staging=kind)
    train(model, optimizer, steps)
    seen = everything(model, optimizer)
    session.flush()
    return session, optimizer, seen


def grow(model: nn.Module, optimizer: Any) -> None:
    """Add tensors for which the pool has no space."""
    model.more = nn.Linear(4, 40 * BIG)
    optimizer.add_param_group({"params": model.more.parameters()})


def train_grown(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    (model.more(batch(number)).square().mean() + model[:3](batch(number)).square().sum()).backward()
    optimizer.step()


class Small(nn.Module):
    """Many small tensors, and one that is sent while the next step computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, BIG)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(40))
        self.register_buffer("sums", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.first(x)


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("kind", [HOST, DIRECT], ids=str)
def test_small_tensors_are_packed_on_their_device_and_sent_as_one(pool, monkeypatch, kind, n_devices, has_room):
    """Each is exact, although the next forward changes some at once. Without room they are sent one by one."""
    devices = [SlowTransfer(SEED + i) for i in range(n_devices)]
    slow_transfers.install(monkeypatch, lambda tensor: devices[(tensor.numel() % 16 > 7) * (n_devices - 1)])
    torch.manual_seed(0)
    model = Small()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, staging=kind) as session:
        for number in range(4):
            for device in devices:
                device.room = 1 << 30 if has_room else 0
                device.sent = 0
            train(model, optimizer, 1, start=number)
            session.end_step()
            seen = everything(model, optimizer)
            with torch.no_grad():
                model.sums.fill_(-1.0)
            session.flush()
            assert is_step(lightck.recover(pool), seen)
            with torch.no_grad():
                model.sums.copy_(seen["model"]["sums"])
    n = sum(device.sent for device in devices)
    n_small = 4 * 2 * len(model.layers) + 1
    assert n < 20 if has_room else n > n_small


def test_a_device_that_fails_is_reported_and_older_checkpoints_stay(pool, transfer, kind):
    model = net(BIG)
    session, optimizer, seen = begun(pool, 3, model, kind)
    train(model, optimizer, 1, start=3)
    transfer.fails_beside = RuntimeError("lost")
    session.end_step()
    with pytest.raises(BackgroundError, match=r"could not be read from their device \(RuntimeError: lost\)") as caught:
        session.flush()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert is_step(lightck.recover(pool), seen)
    with pytest.raises(BackgroundError):
        session.close()
    assert lightck.recover(pool).step == 3


def test_a_device_that_fails_at_the_boundary_is_reported(pool, transfer, kind):
    model = normed()
    session, optimizer, seen = begun(pool, 2, model, kind)
    transfer.fails = RuntimeError("lost")
    train(model, optimizer, 1, start=2)
    with pytest.raises(BackgroundError, match=r"did not leave their device \(lost\)"):
        session.end_step()
    with pytest.raises(BackgroundError):
        session.close()
    assert is_step(lightck.recover(pool), seen)


def test_tensors_that_need_a_relayout(pool, transfer, kind):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, staging=kind) as session:
        train(model, optimizer, 2)
        grow(model, optimizer)
        for number in range(2, 5):
            train_grown(model, optimizer, number)
            seen = everything(model, optimizer)
            session.flush()
            assert is_step(lightck.recover(pool), seen)


def test_some_tensors_on_a_device_and_others_not(pool, monkeypatch, kind):
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    slow, other = SlowTransfer(SEED), SlowTransfer(SEED + 1)
    model = normed()
    optimizer = adam(model)
    of = {id(model.one.weight): slow, id(model.two.weight): other, id(model.norm.running_mean): other}
    slow_transfers.install(monkeypatch, lambda tensor: of.get(id(tensor)))
    with lightck.attach(model, pool, optimizer=optimizer, staging=kind) as session:
        for number in range(4):
            train(model, optimizer, 1, start=number)
            seen = everything(model, optimizer)
            session.flush()
            assert is_step(lightck.recover(pool), seen)
    assert slow.sent
    assert other.sent


def test_memory_that_cannot_be_pinned(pool, transfer, monkeypatch, caplog):
    def refused(nbytes: int) -> torch.Tensor:
        raise RuntimeError("no more")

    monkeypatch.setattr(transfer, "memory", refused)
    model = net(BIG)
    optimizer = adam(model)
    with caplog.at_level("INFO"), lightck.attach(model, pool, optimizer=optimizer, staging=lightck.Host()):
        train(model, optimizer, 3)
    assert is_step(lightck.recover(pool), everything(model, optimizer))
    assert "cannot be pinned (no more)" in caplog.text


def test_under_check_nothing_is_sent(pool, transfer, monkeypatch, kind):
    monkeypatch.setenv("LIGHTCK_CHECK", "1")
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, staging=kind):
        train(model, optimizer, 3)
    assert is_step(lightck.recover(pool), everything(model, optimizer))
    assert transfer.sent == 0


def test_checkpoints_one_after_the_other_without_an_update_between_them_and_the_next(
    pool, transfer, small_groups, kind
):
    """Boundaries without a gate: each waits for the memory that in-order transfers use."""
    model = normed()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, slots=4, staging=kind) as session:
        for number in range(6):
            train(model, optimizer, 1, start=number)
            session.end_step()
        seen = everything(model, optimizer)
    assert is_step(lightck.recover(pool), seen)


@pytest.mark.parametrize("change", ["swapped and back", "half"])
def test_memory_that_is_exchanged_is_read_as_it_was(pool, transfer, change, kind):
    """The memory of the boundary is sent, not the memory that the tensor has when the transfer begins."""
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, staging=kind) as session:
        for number in range(8):
            train(model, optimizer, 1, start=number)
            seen = everything(model, optimizer)
            session.end_step()
            held = {p: p.data for p in model.parameters()}
            for p in held:
                p.data = torch.zeros_like(p.data) if change != "half" else p.data.half()
            time.sleep(0.02)
            for p, data in held.items():
                p.data = data
            session.flush()
            assert is_step(lightck.recover(pool), seen)
        assert session.stats().skipped == 0


def test_a_device_that_fails_during_a_relayout(pool, transfer, small_groups, kind):
    """Some groups arrive, one does not: no transfer of the checkpoint is under way when the new file is removed."""
    model = net(BIG)
    session, optimizer, seen = begun(pool, 2, model, kind)
    grow(model, optimizer)
    train_grown(model, optimizer, 2)
    transfer.fails_once = RuntimeError("lost")
    with pytest.raises(BackgroundError, match=r"RuntimeError: lost"):
        session.flush()
    time.sleep(0.1)  # the groups that follow it arrive
    with pytest.raises(BackgroundError):
        session.close()
    assert is_step(lightck.recover(pool), seen)


def test_a_session_that_is_collected_on_the_thread_that_waits_for_devices(pool, transfer, kind):
    model = net(BIG)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, staging=kind)
    train(model, optimizer, 2)
    seen = everything(model, optimizer)
    collected = threading.Event()

    def collect() -> None:
        assert threading.current_thread().name == "lightck-staging"
        gc.collect()
        collected.set()

    transfer.before_send = collect
    session.end_step()
    model.itself = [model]  # a cycle, so that only the garbage collector frees them
    del session, model, optimizer
    assert collected.wait(30)
    transfer.before_send = None
    gc.collect()
    deadline = time.monotonic() + 30
    while holder_of(str(pool)) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert is_step(lightck.recover(pool), seen)
    lightck.attach(other := net(BIG), pool, optimizer=adam(other), overwrite=True, staging=kind).close()


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), torch.inference_mode], ids=["device", "inference"])
def test_a_checkpoint_that_is_closed_where_other_tensors_are_made(pool, transfer, mode, kind):
    """Under another default device, or inside an evaluation."""
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, staging=kind) as session:
        for number in range(3):
            train(model, optimizer, 1, start=number)
            seen = everything(model, optimizer)
            with mode():
                session.flush()
            assert is_step(lightck.recover(pool), seen)


# -- what is reported about each transfer method, and what only one of them does ---------------------------------------


def test_the_method_that_was_named_is_used(pool, transfer, kind):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, staging=kind) as session:
        assert session.stats().staging is None
        train(model, optimizer, 2)
        session.end_step()
        assert session.stats().staging == str(kind)
        assert bool(transfer.registered) == (kind == lightck.Direct())
    assert not transfer.registered
    assert transfer.is_idle


@pytest.mark.parametrize("wrong", ["Host", lightck.Host, 3])
def test_a_value_that_is_no_transfer_method_is_refused(pool, wrong):
    model = net()
    with pytest.raises(TypeError, match=r"staging is .*Pass lightck\.Host\(\)"):
        lightck.attach(model, pool, optimizer=adam(model), staging=wrong)
    assert not pool.exists()


def test_with_a_copy_on_the_device_an_update_does_not_wait_for_the_transfer(pool, transfer, slow_memory):
    """Only this method lets an update begin while the last checkpoint is still being sent."""
    behind = {kind: _updates_behind(pool.with_name(f"{kind}.pool"), kind) for kind in (HOST, DIRECT, DEVICE)}
    assert behind == {HOST: 0, DIRECT: 0, DEVICE: 1}


def _updates_behind(pool: Path, kind: Any) -> int:
    """How many checkpoints are not copied yet after an update."""
    model = net(10 * BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, slots=3, staging=kind) as session:
        train(model, optimizer, 3)
        checkpoints = session._pipeline._in_flight
        return sum(checkpoint.pending.job.info().state < COPIED for checkpoint in checkpoints)


def test_what_is_written_after_the_boundary_is_not_in_a_copy_on_the_device(pool, transfer):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, staging=lightck.Device()) as session:
        for number in range(4):
            train(model, optimizer, 1, start=number)
            session.end_step()
            seen = everything(model, optimizer)
            with torch.no_grad():
                model[0].weight.mul_(1.5)
            session.flush()
            assert is_step(lightck.recover(pool), seen)
        assert session.stats().skipped == 0


def test_a_device_without_room_for_a_copy_and_a_pool_that_cannot_be_registered(pool, transfer, kind, caplog):
    transfer.room, transfer.refuses = 1000, RuntimeError("refused")
    model = net(BIG)
    optimizer = adam(model)
    with caplog.at_level("WARNING"), lightck.attach(model, pool, optimizer=optimizer, staging=kind) as session:
        train(model, optimizer, 3)
        session.end_step()
        assert session.stats().staging == "Host()"
    assert is_step(lightck.recover(pool), everything(model, optimizer))
    reported = "\n".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    reasons = {
        "Host()": "",
        "Device()": "no room for a copy",
        "Direct()": "cannot be given access to the pool's memory: refused",
    }
    assert reasons[str(kind)] in reported
    assert ("lightck.Host() is used" in reported) == (kind != lightck.Host())


def test_a_pool_on_a_disk_is_never_written_by_a_device(tmp_path, transfer, caplog):
    """The kernel would not know that its pages are dirty."""
    model = net(BIG)
    optimizer = adam(model)
    with (
        caplog.at_level("WARNING"),
        lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer, staging=lightck.Direct()) as session,
    ):
        train(model, optimizer, 2)
        session.end_step()
        assert session.stats().staging == "Host()"
    assert "the pool is on a disk" in caplog.text
    assert is_step(lightck.recover(tmp_path / "run.pool"), everything(model, optimizer))


def test_a_new_pool_file_is_registered_in_the_place_of_the_old_one(pool, transfer):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, staging=lightck.Direct()) as session:
        train(model, optimizer, 2)
        session.end_step()
        before = list(transfer.registered)
        grow(model, optimizer)
        train_grown(model, optimizer, 2)
        session.flush()
        assert len(transfer.registered) == 1
        assert transfer.registered != before
        assert session.stats().staging == "Direct()"


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_checkpoint_that_was_given_up_does_not_reach_the_next_one_in_its_slot(
    pool, transfer, monkeypatch, is_waited_for
):
    """A device may still be writing into its slot. Without the wait, wrong bytes are found."""
    monkeypatch.setattr(parts, "PACKED_NBYTES_MAX", 0)  # what is packed does not go into the slot by the device
    model = net(BIG)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, staging=DIRECT)
    train(model, optimizer, 2)
    session.flush()
    transfer.flows_beside.clear()
    train(model, optimizer, 1, start=2)
    session.end_step()
    while not transfer.is_sending:
        time.sleep(0.001)
    with torch.no_grad():
        model[0].weight.mul_(1.5)  # the checkpoint is given up; the weight is sent in order from now on
    train(model, optimizer, 1, start=3)
    seen = everything(model, optimizer)
    if is_waited_for:
        threading.Timer(0.1, transfer.flows_beside.set).start()
    else:
        monkeypatch.setattr(TransferThread, "wait_idle", lambda self, pause=None: None)
    session.end_step()
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    while transfer.is_computing:
        time.sleep(0.001)
    transfer.flows_beside.set()
    session.flush()
    assert session.stats().skipped == 1
    assert is_step(lightck.recover(pool), seen) == is_waited_for


def test_a_send_that_fails_half_way_leaves_nothing_under_way(pool, monkeypatch):
    """One device has begun to write into the pool when the other one fails; then the pool is unmapped."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    slow, failing = SlowTransfer(SEED, seconds=0.3), SlowTransfer(SEED + 1)
    model = net(BIG)
    optimizer = adam(model)
    slow_transfers.install(monkeypatch, lambda tensor: failing if tensor is model[2].weight else slow)
    session = lightck.attach(model, pool, optimizer=optimizer, staging=DIRECT)
    train(model, optimizer, 2)
    seen = everything(model, optimizer)
    session.flush()
    train(model, optimizer, 1, start=2)
    failing.fails_beside = RuntimeError("lost")
    session.end_step()
    with pytest.raises(BackgroundError):
        session.close()
    assert slow.is_idle  # unregistering asserts it too
    assert not slow.registered
    assert is_step(lightck.recover(pool), seen)


@pytest.mark.parametrize("slots", [3, 4, 6, 8])
def test_with_many_checkpoints_under_way_there_is_room_for_each(pool, transfer, small_groups, monkeypatch, kind, slots):
    """The engine has a limited number of jobs. Tensors without a job would be copied at the boundary, which would wait
    for the device."""
    read_at_once = []
    monkeypatch.setattr(Submission, "copy_at_boundary", lambda self, tensors: read_at_once.extend(tensors))
    before = emulation.active_profile()
    emulation.use(Profile("slow to fence", 1_000_000_000, 1_000_000_000, 15_000_000, 64, "made up"))
    try:
        model = net(BIG)
        optimizer = adam(model)
        with lightck.attach(model, pool, optimizer=optimizer, slots=slots, staging=kind):
            train(model, optimizer, slots + 4)
    finally:
        emulation.use(before)
    assert not read_at_once
    assert is_step(lightck.recover(pool), everything(model, optimizer))


@pytest.mark.parametrize("parts_max", [1, 2, 3])
def test_a_checkpoint_has_no_more_parts_than_jobs_are_left_for_it(pool, transfer, monkeypatch, parts_max):
    """Also if all tensors are sent in the order of the computation: the small ones packed, the large ones alone."""
    staged = []
    monkeypatch.setattr(
        sending, "split", lambda tensors, *rest, **how: staged.extend(tensors) or split(tensors, *rest, **how)
    )
    monkeypatch.setattr(parts, "PACKED_NBYTES_MAX", 100)
    split = parts.split
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, staging=HOST):
        train(model, optimizer, 1)
    in_order = [replace(one, in_order=True) for one in staged]
    assert {one.record.nbytes > parts.PACKED_NBYTES_MAX for one in in_order} == {True, False}
    found = split(in_order, parts_max, reads_during_step=True)
    assert len(found.parts) <= parts_max
    assert sum(len(part.tensors) for part in found.parts) + len(found.left) == len(in_order)


def test_ctrl_c_ends_the_wait_for_a_device_that_hangs(pool, transfer, during_wait):
    model = net(BIG)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, slots=3, staging=DEVICE)
    train(model, optimizer, 2)
    seen = everything(model, optimizer)
    session.flush()
    transfer.flows_beside.clear()
    train(model, optimizer, 2, start=2)
    during_wait(0.3, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        session.end_step()
    assert is_step(lightck.recover(pool), seen)
    transfer.flows_beside.set()
    session.close()


# -- the trial of transfer methods -------------------------------------------------------------------------------------


def test_memory_is_released_before_the_next_checkpoint_is_sent(pool, transfer, monkeypatch):
    """It is not released under copies that the chosen method has begun."""
    monkeypatch.setattr(Trial, "medians", lambda self, method: [0.0 if method.kind == DEVICE else 1.0])
    copy_on_device, calls = transfer.copy_on_device, []

    def noted(pairs):
        calls.append((len(pairs), bool(transfer.registered)))
        copy_on_device(pairs)

    monkeypatch.setattr(transfer, "copy_on_device", noted)
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, slots=3) as session:
        train(model, optimizer, 24)
        session.flush()
        assert session.stats().staging == "Device()"
    registered = [was for n, was in calls if n == max(calls)[0]]  # without calls of Host() and Direct(), which pack
    assert registered == [True] * 6 + [False] * (len(registered) - 6), "two checkpoints in each round, then chosen"
    assert len(registered) > 7


@pytest.mark.parametrize("has_room", [True, False])
def test_without_staging_each_transfer_method_is_tried_and_one_stays(pool, transfer, caplog, has_room):
    """The others release their memory."""
    transfer.room = 1 << 30 if has_room else 100_000
    model = net(BIG)
    optimizer = adam(model)
    used, in_trial = [], []
    with caplog.at_level("INFO"), lightck.attach(model, pool, optimizer=optimizer, slots=3) as session:
        for number in range(24):
            train(model, optimizer, 1, start=number)
            seen = everything(model, optimizer)
            session.flush()
            used.append(session.stats().staging)
            in_trial.append(session.stats().staging_trial)
            assert is_step(lightck.recover(pool), seen)
        last = used[-1]
        assert bool(transfer.registered) == (last == "Direct()")
        held = {
            str(method.kind): bool(method._ring._segments)
            for method in session._pipeline.staging._trial.alternatives
            if method.kind != DIRECT and str(method.kind) != last
        }
        assert not any(held.values()), held
    assert {"Direct()", "Host()", *(["Device()"] if has_room else [])} == set(used)
    assert set(used[-4:]) == {last}
    assert (in_trial[:6], in_trial[-4:]) == ([True] * 6, [False] * 4)
    assert f"from now on tensors leave their device by {last}" in caplog.text
