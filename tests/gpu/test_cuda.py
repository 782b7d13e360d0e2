"""Trainings on a CUDA device: what is saved, what comes back, and that a restart goes on with the same bits."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import BIG, adam, batch, everything, is_step, net, same

import lightck
from lightck.state import rng
from lightck.state.derived_rng import derive_states
from lightck.state.device_transfers import transfer_of

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import lightck

path, upto, kill_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3000), nn.Dropout(0.2), nn.Tanh(), nn.Linear(3000, 2)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session = lightck.attach(model, path, resume=True)
for number in range(session.step, upto):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).cuda()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    if number + 1 == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
session.close()
torch.save([p.detach().cpu() for p in model.parameters()], path + ".end")
"""


def step(model: Any, optimizer: Any, number: int, device: str = "cuda") -> None:
    optimizer.zero_grad()
    model(batch(number).to(device)).square().sum().backward()
    optimizer.step()


def on_cpu(seen: Any) -> Any:
    """The same values in memory."""
    if isinstance(seen, torch.Tensor):
        return seen.cpu()
    if isinstance(seen, dict):
        return {key: on_cpu(value) for key, value in seen.items()}
    if isinstance(seen, (list, tuple)):
        return type(seen)(map(on_cpu, seen))
    return seen


KINDS = pytest.mark.parametrize("kind", [None, lightck.Host(), lightck.Direct(), lightck.Device()], ids=str)


@KINDS
@pytest.mark.parametrize("width", [8, BIG])
@pytest.mark.parametrize("slots", [2, 3])
def test_every_step_is_exact(pool, width, slots, kind):
    model = net(width).cuda()
    optimizer = adam(model)
    session = lightck.attach(model, pool, slots=slots, staging=kind)
    for number in range(6):
        step(model, optimizer, number)
        seen = on_cpu(everything(model, optimizer))
        session.flush()
        assert is_step(lightck.recover(pool), seen)
    session.close()


def test_a_checkpoint_is_loaded_onto_the_device(pool):
    model = net(BIG).cuda()
    optimizer = adam(model)
    with lightck.attach(model, pool):
        step(model, optimizer, 0)
    held = lightck.recover(pool, device="cuda")
    assert {tensor.device.type for tensor in held.model.values()} == {"cuda"}
    assert same(on_cpu(dict(held.model)), on_cpu(everything(model, optimizer)["model"]))


def test_live_tensors_on_the_device_are_filled_in_place(pool):
    model = net(BIG).cuda()
    optimizer = adam(model)
    with lightck.attach(model, pool):
        for number in range(3):
            step(model, optimizer, number)
    other = net(BIG, seed=9).cuda()
    optimizer_of_other = adam(other)
    step(other, optimizer_of_other, 77)
    places = [p.data_ptr() for p in other.parameters()]
    lightck.recover(pool, other, optimizer_of_other)
    assert [p.data_ptr() for p in other.parameters()] == places
    assert same(everything(other, optimizer_of_other), everything(model, optimizer))


@KINDS
def test_updates_that_are_still_queued_are_in_the_checkpoint(pool, kind):
    """The boundary comes while the device is far behind."""
    model = net(BIG).cuda()
    optimizer = adam(model)
    session = lightck.attach(model, pool, staging=kind)
    for number in range(4):
        optimizer.zero_grad()
        model(batch(number).cuda()).square().sum().backward()
        torch.cuda._sleep(50_000_000)
        optimizer.step()
        session.end_step()
    seen = on_cpu(everything(model, optimizer))
    session.close()
    assert is_step(lightck.recover(pool), seen)


class Changing(torch.nn.Module):
    """Buffers that each forward changes, weights in the order of channels last, half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 64, 3).to(memory_format=torch.channels_last)
        self.norm, self.out = torch.nn.BatchNorm2d(64), torch.nn.Linear(64, 2000).to(torch.bfloat16)
        self.register_buffer("history", torch.zeros(1 << 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history += 1
        return self.out(self.norm(self.conv(x)).mean((2, 3)).to(torch.bfloat16))


def each_checkpoint_is_exact(
    pool: Path,
    finish: Callable[[lightck.Session, Callable[[], None]], None],
    make: Callable[[Any], Any] = adam,
    **options: Any,
) -> None:
    """Train ``Changing`` for eight steps. Nothing but lightck ever waits for the device, so it is as far behind as it
    may be. ``finish(session, update)`` is all of a step after the backward pass; it calls ``update`` once."""
    torch.manual_seed(0)
    model = Changing().cuda()
    optimizer = make(model)
    images = torch.randn(8, 3, 32, 32, device="cuda")
    states: dict[int, Any] = {}

    def update() -> None:
        optimizer.step()
        states[len(states) + 1] = everything(model, optimizer)  # copies on the device, in the order of its work

    with lightck.attach(model, pool, **options) as session:
        for number in range(1, 9):
            optimizer.zero_grad()
            model(images * number).float().square().mean().backward()
            finish(session, update)
            if session.committed is not None:
                found = lightck.recover(pool)
                assert is_step(found, on_cpu(states[found.step]))
    assert is_step(lightck.recover(pool), on_cpu(states[8]))


@KINDS
@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_no_step_waits_for_the_device_and_each_is_exact(pool, slots, fused, kind):
    """Buffers change right after each boundary, and updates come as soon as the gate opens."""

    def finish(session: lightck.Session, update: Callable[[], None]) -> None:
        torch.cuda._sleep(20_000_000)
        update()
        session.end_step()

    def make(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)

    each_checkpoint_is_exact(pool, finish, make, slots=slots, staging=kind)


@KINDS
@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_boundary_while_another_stream_is_current_comes_after_the_update(pool, device, kind):
    """As where a prefetcher fetches the next batch; with another default device, as some scripts have it."""
    model = Changing().cuda()
    optimizer = adam(model)
    images = torch.randn(8, 3, 32, 32, device="cuda")
    aside = torch.cuda.Stream()
    torch.set_default_device(device)
    try:
        with lightck.attach(model, pool, staging=kind) as session:
            for number in range(1, 6):
                optimizer.zero_grad()
                model(images * number).float().square().mean().backward()
                torch.cuda._sleep(50_000_000)
                optimizer.step()
                with torch.cuda.stream(aside):
                    session.end_step()
                seen = everything(model, optimizer)
                session.flush()
                assert is_step(lightck.recover(pool), on_cpu(seen))
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("kind", [lightck.Host(), lightck.Direct()], ids=str)
def test_a_write_beside_the_loop_drops_the_checkpoint(pool, kind):
    model = net(BIG).cuda()
    optimizer = adam(model)
    with lightck.attach(model, pool, staging=kind) as session:
        for number in range(3):
            step(model, optimizer, number)
        seen = on_cpu(everything(model, optimizer))
        session.flush()
        step(model, optimizer, 3)
        session.end_step()
        with torch.no_grad():
            model[0].weight.mul_(1.5)
        step(model, optimizer, 4)
        assert session.stats().skipped == 1
        assert is_step(lightck.recover(pool, step=3), seen)


def test_under_check_the_same_is_saved(pool, monkeypatch):
    monkeypatch.setenv("LIGHTCK_CHECK", "1")
    model = net(BIG).cuda()
    optimizer = adam(model)
    with lightck.attach(model, pool):
        for number in range(3):
            step(model, optimizer, number)
    assert is_step(lightck.recover(pool), on_cpu(everything(model, optimizer)))


def test_fused_steps_that_a_scaler_skips_make_no_checkpoint(pool):
    model = net(BIG).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    session = lightck.attach(model, pool)
    for number in range(6):
        optimizer.zero_grad()
        loss = model(batch(number).cuda()).square().sum()
        scaler.scale(loss * (float("inf") if number == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        session.end_step()
    assert session.step == 5
    session.close()
    assert is_step(lightck.recover(pool), on_cpu(everything(model, optimizer)))


def test_random_states_of_the_device_come_back(pool):
    model = net().cuda()
    optimizer = adam(model)
    with lightck.attach(model, pool):
        step(model, optimizer, 0)
        torch.cuda.manual_seed(5)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(6)
    with lightck.attach(model, pool, resume=True):
        assert torch.equal(torch.rand(4, device="cuda"), expected)


def test_a_derived_random_state_of_the_device_follows_from_its_key():
    torch.rand(1, device="cuda")
    with rng.preserved() as state:
        found = []
        for key in (b"one", b"other", b"one"):
            derive_states(state, key).restore()
            found.append(torch.rand((), device="cuda").item())
    assert found[0] == found[2] != found[1]


def test_tensors_on_both_sides(pool):
    model = torch.nn.Sequential(net(BIG)[0], torch.nn.Linear(BIG, 2).cuda())
    optimizer = adam(model)
    session = lightck.attach(model, pool)
    for number in range(4):
        optimizer.zero_grad()
        model[1](model[0](batch(number)).cuda()).square().sum().backward()
        optimizer.step()
        session.end_step()
    seen = on_cpu(everything(model, optimizer))
    session.close()
    assert is_step(lightck.recover(pool), seen)


@pytest.mark.parametrize("kill_at", [1, 4, 7])
def test_a_killed_training_goes_on_with_the_same_bits(pool, kill_at):
    def run(path: Path, upto: int, kill: int = 0) -> int:
        paths = [str(Path(lightck.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return subprocess.run(
            [sys.executable, "-c", SCRIPT, str(path), str(upto), str(kill)], env=environment, check=False
        ).returncode

    whole = pool.with_name("whole.pool")
    assert run(whole, 9) == 0
    assert run(pool, 9, kill_at) == -signal.SIGKILL
    assert run(pool, 9) == 0
    ends = [torch.load(str(path) + ".end", weights_only=True) for path in (pool, whole)]
    assert same(*ends)


@pytest.mark.parametrize("kind", [lightck.Host(), lightck.Direct(), lightck.Device()], ids=str)
def test_the_method_that_was_named_is_gone(pool, kind):
    if kind == lightck.Direct() and (why := why_not_registered(pool.with_name("registered"))):
        pytest.skip(f"this driver registers no memory of this kind: {why}")
    model = net(BIG).cuda()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, staging=kind) as session:
        for number in range(3):
            step(model, optimizer, number)
        session.end_step()
        assert session.stats().staging == str(kind)
    assert is_step(lightck.recover(pool), on_cpu(everything(model, optimizer)))


def why_not_registered(path: Path) -> str:
    """Whether the driver lets a device write to a mapped file of this folder."""
    path.write_bytes(bytes(1 << 20))
    transfer = transfer_of(torch.zeros(1, device="cuda"))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        try:
            transfer.register(memory)
        except RuntimeError as err:
            return str(err)
        else:
            transfer.unregister(memory)
            return ""
        finally:
            del memory


def test_memory_that_cannot_be_registered_leaves_no_error_behind():
    """The runtime keeps the last error of a thread for whoever looks next."""
    transfer = transfer_of(torch.zeros(1, device="cuda"))
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    transfer.register(memory)
    with pytest.raises(RuntimeError, match=r"cudaHostRegister: .*already"):
        transfer.register(memory[4096:])
    assert torch.ones(8, device="cuda").sum().item() == 8
    transfer.unregister(memory)


@KINDS
def test_buffers_are_taken_before_the_next_forward_also_where_another_stream_is_current(pool, kind):
    """The boundary comes on a prefetcher's stream, and the next forward is queued at once on the training's own."""
    aside = torch.cuda.Stream()

    def finish(session: lightck.Session, update: Callable[[], None]) -> None:
        update()
        with torch.cuda.stream(aside):
            torch.cuda._sleep(20_000_000)
            session.end_step()

    each_checkpoint_is_exact(pool, finish, slots=3, staging=kind)


@KINDS
def test_a_forward_on_another_stream_than_the_update_waits_for_what_is_taken_before_it(pool, kind):
    """As in a warm-up for CUDA graphs: updates on a stream beside, boundary (by the forward) on the default one."""
    aside = torch.cuda.Stream()

    def finish(session: lightck.Session, update: Callable[[], None]) -> None:
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            update()
            torch.cuda._sleep(20_000_000)
        torch.cuda.current_stream().wait_stream(aside)

    each_checkpoint_is_exact(pool, finish, slots=3, staging=kind)


def test_a_fused_training_of_the_cpu_goes_on_on_the_device(pool):
    """Its counts of steps were on the CPU, and a fused optimizer wants them beside its parameters."""
    model = net(BIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with lightck.attach(model, pool):
        step(model, optimizer, 0, "cpu")
        step(model, optimizer, 1, "cpu")
    other = net(BIG, seed=9).cuda()
    optimizer_of_other = torch.optim.AdamW(other.parameters(), lr=0.01, fused=True)
    with lightck.attach(other, pool, resume=True) as session:
        assert session.step == 2
        assert same(on_cpu(everything(other)["model"]), everything(model)["model"])
        step(other, optimizer_of_other, 2)
    assert {state["step"].device.type for state in optimizer_of_other.state.values()} == {"cuda"}


def test_tensors_that_share_memory_on_the_device_and_were_saved_apart_are_refused(pool):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
    with lightck.attach(model, pool):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
    shared = torch.zeros(64, device="cuda")
    model[0].weight.data = model[1].weight.data = shared.view(8, 8)
    before = shared.clone()
    with pytest.raises(lightck.errors.DriftError, match="share memory now"):
        lightck.recover(pool, model)
    assert torch.equal(shared, before)


def ready_to_capture(session: lightck.Session, model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """Three steps were made and are committed, and gradients will be made anew."""
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        model(x).square().sum().backward()
        optimizer.step()
    session.flush()
    optimizer.zero_grad(set_to_none=True)


def test_a_whole_step_is_not_captured_in_a_graph(pool):
    """Its replays run no hook: lightck would save nothing, and say nothing."""
    model = net(BIG).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
    x = batch(0).cuda()
    with lightck.attach(model, pool) as session:
        ready_to_capture(session, model, optimizer, x)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(lightck.errors.SessionError, match="captured in a CUDA graph"), torch.cuda.graph(graph):
            model(x).square().sum().backward()
            optimizer.step()
        assert session.committed == 3


def test_forward_and_backward_in_a_graph_and_each_step_is_exact(pool):
    model = net(BIG).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
    x = batch(0).cuda()
    with lightck.attach(model, pool) as session:
        ready_to_capture(session, model, optimizer, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x).square().sum().backward()
        for number in range(4, 9):
            graph.replay()
            optimizer.step()
            session.end_step()
            seen = on_cpu(everything(model, optimizer))
            session.flush()
            found = lightck.recover(pool)
            assert found.step == number
            assert is_step(found, seen)
