"""Which calls a device gets, and in which order. A device executes them later, on several streams.

The device is a simulated one, made of CPU tensors (``slow_transfers.py``), which records its calls. ``tests/gpu``
checks that CUDA streams keep this order.
"""

from __future__ import annotations

from typing import Any

import pytest
import slow_transfers
import torch
from slow_transfers import SlowTransfer
from test_staging import normed
from torch import nn
from toys import BIG, adam, batch, copied, everything, is_step, net, train

import lightck
from lightck.errors import BackgroundError, CorruptPoolError, NoCheckpointError, SessionError
from lightck.pool.format.layout import Entry
from lightck.restore.contents import Contents, OptimizerContents
from lightck.restore.optimizer import device_of, params_with_count_on_device

SEED = 20261122


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> SlowTransfer:
    """All tensors are on one device."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    print("seed", SEED)
    slow = SlowTransfer(SEED)
    slow_transfers.install(monkeypatch, lambda tensor: slow)
    return slow


class RecordsReads:
    """A piece of state that records when it is read."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def state_dict(self) -> dict[str, Any]:
        self._events.append("state read")
        return {"scale": 2.0}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_the_first_update_is_noted_and_joined_before_tensors_and_state_are_read(pool, transfer):
    model = normed()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, state={"scale": RecordsReads(transfer.events)}) as session:
        transfer.events.clear()
        train(model, optimizer, 1)
        session.end_step()
        after = transfer.events[transfer.events.index("noted") :]
        assert after[:2] == ["noted", "joined"]
        assert {"state read", "sent in order"} < set(after)


def test_a_model_that_is_moved_after_attach_is_noted_too(pool, transfer, monkeypatch):
    model = net(BIG)
    optimizer = adam(model)
    slow_transfers.install(monkeypatch, lambda tensor: None)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        slow_transfers.install(monkeypatch, lambda tensor: transfer)
        train(model, optimizer, 1)
        assert "noted" in transfer.events
        session.flush()
        assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_session_does_not_call_the_device_of_another_session(folder, transfer, monkeypatch):
    """In a forked child a call would fail: CUDA cannot start in a child of a process that used it."""
    one, other = net(BIG), net(BIG, seed=1)
    optimizers = adam(one), adam(other)
    on_device = {id(p) for p in one.parameters()}
    slow_transfers.install(monkeypatch, lambda tensor: transfer if id(tensor) in on_device else None)
    with lightck.attach(one, folder / "one.pool", optimizer=optimizers[0]):
        train(one, optimizers[0], 2)
        transfer.events.clear()
        with lightck.attach(other, folder / "other.pool", optimizer=optimizers[1]):
            train(other, optimizers[1], 2)
        assert not transfer.events


def test_a_forward_that_is_captured_is_no_boundary(pool, transfer):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        transfer.events.clear()
        transfer.captures = True
        model(batch(7))
        transfer.captures = False
        assert not transfer.events
        assert (session.step, session.committed) == (2, 2)
        train(model, optimizer, 1)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


@pytest.mark.parametrize("closes", [False, True])
def test_a_forward_is_not_captured_while_a_checkpoint_is_due_or_under_way(pool, transfer, closes):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        transfer.flows_beside.clear()
        train(model, optimizer, 1)
        if closes:
            session.end_step()
        transfer.captures = True
        with pytest.raises(SessionError, match=r"Call session\.flush\(\) right before the capture"):
            model(batch(7))
        transfer.captures = False
        transfer.flows_beside.set()
        train(model, optimizer, 1)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_an_update_that_is_captured_is_refused_and_changes_nothing(pool, transfer):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        seen = everything(model, optimizer)
        transfer.captures = True
        with pytest.raises(SessionError, match="Replays of a graph run no Python"):
            optimizer.step()
        transfer.captures = False
        assert session.step == 2
        assert is_step(lightck.recover(pool), seen)
        train(model, optimizer, 1)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_device_that_does_not_say_what_is_free_gets_no_copy(pool, transfer, monkeypatch, caplog):
    def refuses() -> int:
        raise RuntimeError("getDeviceStats is not supported")

    monkeypatch.setattr(transfer, "free_nbytes", refuses)
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, slots=3):
        train(model, optimizer, 14)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_host_memory_of_a_method_that_is_left_is_given_back(pool, transfer):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, slots=3) as session:
        train(model, optimizer, 3)
        session.flush()
        assert "given back" not in transfer.events
        train(model, optimizer, 20)
        assert "given back" in transfer.events


@pytest.mark.parametrize("method", [lightck.Direct(), lightck.Host()])
def test_an_unannounced_write_on_a_device_strikes_every_older_checkpoint(pool, transfer, caplog, method):
    """Of sources on a device one block is read for each checkpoint, so no older one is known to be right."""
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, slots=5, staging=method) as session:
        for _ in range(4):
            train(model, optimizer, 1)
            session.flush()
        train(model, optimizer, 1)
        session.end_step()
        copied(session)
        for tensor in [*model.state_dict().values(), *(s["exp_avg"] for s in optimizer.state.values())]:
            tensor.detach().numpy()[...] += 1.0
        train(model, optimizer, 1)
        assert "something wrote to a tensor while it was copied" in caplog.text
        session.flush()
        assert session.step == 6
        assert is_step(lightck.recover(pool), everything(model, optimizer))
        for step in range(2, 6):
            with pytest.raises((NoCheckpointError, CorruptPoolError)):
                lightck.recover(pool, step=step)


def test_a_device_that_fails_after_some_were_sent_leaves_nothing_under_way(pool, transfer, monkeypatch):
    def fails() -> Any:
        raise RuntimeError("no event can be made")

    model = normed()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, staging=lightck.Host())
    train(model, optimizer, 1)
    monkeypatch.setattr(transfer, "mark", fails)
    with pytest.raises(BackgroundError, match="no event can be made"):
        session.end_step()
    assert not transfer.is_computing
    with pytest.raises(BackgroundError):
        session.close()


@pytest.mark.parametrize("option", ["fused", "capturable", "foreach"])
def test_steps_are_counted_where_the_optimizer_counts_them(option):
    """A fused optimizer that was saved on the CPU resumes on a device, with its step counts there too."""
    options = {"lr": 0.1, option: True}
    saved = OptimizerContents("AdamW", [["weight"]], [options], b"", b"")
    count = Entry("optimizer/weight/step", "optimizer", "float32", (), (), 4, "cpu")
    weight = Entry("model/weight", "param", "float32", (3,), (1,), 12, "cpu")
    contents = _with({entry.name: entry for entry in (count, weight)})
    live = torch.empty(3, device="meta")
    on_device = params_with_count_on_device(saved)
    assert on_device == ({"weight"} if option != "foreach" else set())
    found = device_of(count, contents, "weight", live, is_cpu_count="weight" not in on_device)
    assert found == (torch.device("cpu") if option == "foreach" else live.device)


def _with(entries: dict[str, Entry]) -> Contents:
    contents = object.__new__(Contents)
    object.__setattr__(contents, "entries", entries)
    return contents


def test_modules_beside_each_other_share_one_device(pool, transfer):
    """A device gets one call for an update, however many tensors are on it."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        transfer.events.clear()
        train(model, optimizer, 1)
        assert transfer.events.count("noted") == 1
