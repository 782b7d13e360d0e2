"""Rule 4: no update begins before the checkpoint that needs its tensors is safe.

``Table`` makes an iteration almost free and its copy expensive: an embedding of 64 MB of which each batch touches one
row. Without the gate every update here would be long over before the copy of the checkpoint before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import BIG, adam, net, same, settled, train

import lightck
from lightck.errors import FlushTimeoutError
from lightck.pool.engine import Job

ROWS, WIDTH = 1 << 18, 64


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.arange(float(ROWS)).unsqueeze(1).expand(ROWS, WIDTH).contiguous()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True, _weight=weight)

    def forward(self, number: int) -> torch.Tensor:
        rows = torch.tensor([0, ROWS // 2 + number, ROWS - 1])
        return self.table(rows).sum()


def table() -> tuple[Table, torch.optim.Optimizer]:
    model = Table()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def update(model: Table, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    model(number).backward()
    optimizer.step()


def test_update_waits_for_the_commit(pool):
    model, optimizer = table()
    seen = []
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        # Registered later than lightck's own hook, so it runs when the gate has opened.
        optimizer.register_step_pre_hook(lambda *_: seen.append(session.committed))
        for number in range(4):
            update(model, optimizer, number)
        stats = session.stats()
    assert seen == [None, 1, 2, 3]
    assert stats.skipped == stats.recopied == 0
    assert stats.wait_seconds > 0


def test_copies_begin_at_the_boundary_and_do_not_hold_up_the_forward(pool):
    model, optimizer = table()
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        early = []
        for number in range(4):
            update(model, optimizer, number)
            model(number)
            early.append(session.committed == number + 1)
        assert not all(early)  # a forward that waited for the copies would have committed each


def test_checkpoint_has_the_bytes_of_its_boundary_whatever_comes_after(pool):
    model, optimizer = table()
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(4):
            seen = model.table.weight.detach().clone()
            update(model, optimizer, number)
            if number:
                held = lightck.recover(pool)
                assert held.step == number
                assert same(held.model["table.weight"], seen)
        assert session.stats().checkpoints == 3


def test_closure_runs_before_the_gate_and_the_update_after_it(pool):
    model, optimizer = table()
    inside, after = [], []

    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(5):

            def closure(number: int = number) -> torch.Tensor:
                inside.append(session.committed)
                optimizer.zero_grad()
                loss = model(number)
                loss.backward()
                return loss

            seen = model.table.weight.detach().clone()
            optimizer.step(closure)
            after.append(session.committed)
            if number:
                assert same(lightck.recover(pool, step=number).model["table.weight"], seen)
    assert after == [None, 1, 2, 3, 4]
    assert inside != after, "the closure waited for the gate"


class Custom(torch.optim.Optimizer):
    """An optimizer of somebody else's, which updates before it calls the closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p[0] -= 1.0
        with torch.enable_grad():
            return closure() if closure is not None else None


def test_closure_of_a_foreign_optimizer_waits_before_step(pool):
    model = Table()
    optimizer = Custom(model.parameters())
    inside = []
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(4):
            seen = model.table.weight.detach().clone()
            optimizer.step(lambda: inside.append(session.committed))
            if number:
                assert same(lightck.recover(pool, step=number).model["table.weight"], seen)
    assert inside == [None, 1, 2, 3]


@pytest.mark.parametrize("keyword", [True, False])
def test_closure_keeps_its_value_and_its_exceptions(pool, keyword):
    model, optimizer = table()
    with lightck.attach(model, pool, optimizer=optimizer) as session:

        def closure() -> torch.Tensor:
            loss = model(0)
            loss.backward()
            return loss.detach()

        def broken() -> torch.Tensor:
            raise ZeroDivisionError("in the closure")

        optimizer.step(closure)
        with pytest.raises(ZeroDivisionError, match="in the closure"):
            optimizer.step(closure=broken) if keyword else optimizer.step(broken)
        expected = model(0).item()
        optimizer.zero_grad()
        assert float(optimizer.step(closure=closure) if keyword else optimizer.step(closure)) == expected
        assert session.step == 2


def test_three_slots_keep_the_copies_in_time_and_let_the_commit_follow(pool):
    model, optimizer = table()
    seen = []
    with lightck.attach(model, pool, optimizer=optimizer, slots=3) as session:
        optimizer.register_step_pre_hook(lambda *_: seen.append(session.committed))
        weights = {}
        for number in range(5):
            update(model, optimizer, number)
            weights[number + 1] = model.table.weight.detach().clone()
        settled(session, 4)
        for step in (3, 4):
            assert same(lightck.recover(pool, step=step).model["table.weight"], weights[step])
    assert all((now or 0) >= number - 1 for number, now in enumerate(seen))
    assert lightck.recover(pool).step == 5
    assert lightck.recover(pool, step=3).step == 3


def test_nothing_is_skipped_where_the_pool_cannot_keep_up(pool):
    model, optimizer = table()
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(6):
            update(model, optimizer, number)
        session.flush()
        assert (session.stats().checkpoints, session.stats().skipped) == (6, 0)


def test_flush_in_no_time_is_a_timeout_and_the_copies_go_on(pool, slow_memory):
    model = net(20 * BIG)  # a second of copies
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 1)
        with pytest.raises(FlushTimeoutError, match=r"Step 1 .* 0 seconds\. .*\. Pass a larger timeout=") as caught:
            session.flush(timeout=0)
        assert isinstance(caught.value, TimeoutError)
        assert session.flush(timeout=60) == 1
        assert lightck.recover(pool).step == 1


def test_all_waits_of_a_flush_share_its_timeout(pool, monkeypatch):
    waits, wait = [], Job.wait

    def waited(self: Job, until: int, timeout: float | None = None, **more: Any) -> bool:
        if timeout is not None:  # those that have ended are asked without
            waits.append(timeout)
        return wait(self, until, timeout, **more)

    model, optimizer = table()
    with lightck.attach(model, pool, optimizer=optimizer, slots=4) as session:
        update(model, optimizer, 0)
        monkeypatch.setattr(Job, "wait", waited)
        assert session.flush(timeout=60) == 1
        monkeypatch.undo()
    assert len(waits) > 1
    assert all(later < earlier for earlier, later in zip([60.0, *waits], waits, strict=False))


def test_waiting_thread_helps(pool, slow_memory):
    model = net(5 * BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 3)
        assert session.stats().bytes_helped > 0


def test_copy_threads_are_named(pool):
    model, optimizer = table()
    with lightck.attach(model, pool, optimizer=optimizer):
        names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    assert any(name.startswith("lightck-copy") for name in names)
