"""The conformance test of strategies: every tensor has one place in the plan, no tensor is left out that the slot does
not hold, and planning changes nothing. A new strategy is one more item of ``STRATEGIES``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import BIG, adam, everything, is_step, net, train

import lightck
from lightck.errors import SessionError
from lightck.pipeline import eager_copies
from lightck.pipeline.plan import Strategy, TargetSlot, WritePlan
from lightck.pipeline.write_table import TensorRecord, WriteTable
from lightck.state.inventory import Live
from lightck.state.signatures import ClosedStep


class RecordingStrategy:
    """Records and checks the plans of another strategy."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.plans: list[WritePlan] = []
        self.stored: list[set[int]] = []

    def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
        recording = RecordingSlot(slot)
        before = copy.deepcopy([numbers(table) for table in tables])
        plan = self.strategy.plan(closed_step, tables, recording)
        again = self.strategy.plan(closed_step, tables, recording)
        assert described(plan) == described(again), "it made two different plans for the same step"
        assert [numbers(table) for table in tables] == before, "it changed what it was given"
        self.plans.append(plan)
        self.stored.append(recording.stored)
        return plan


class RecordingSlot:
    """A slot that records what it reported to a strategy."""

    def __init__(self, slot: TargetSlot) -> None:
        self.slot, self.index = slot, slot.index
        self.stored: set[int] = set()
        """Records that the plan may leave out."""

    def is_stored(self, live: Live, record: TensorRecord) -> bool:
        if self.slot.is_stored(live, record):
            self.stored.add(record.number)
        return record.number in self.stored

    def generation_of(self, record: TensorRecord) -> int | None:
        generation = self.slot.generation_of(record)
        if generation is not None:
            self.stored.add(record.number)
        return generation


class SameBytes:
    """Leaves out tensors whose bytes an update could have changed but did not: it remembers the bytes of each step."""

    def __init__(self) -> None:
        self.given: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        """(slot, record) -> step -> bytes."""

    def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
        full = lightck.FullState().plan(closed_step, tables, slot)
        written = [one for table in tables for one in table.in_host_memory]
        for live, record in written:
            self.given.setdefault((slot.index, record.number), {})[closed_step.step] = live.tensor.detach().clone()
        same = tuple((live, record) for live, record in written if self._is_same(record, closed_step.step, slot))
        rest = tuple(table.without({record.number for _, record in same}) for table in tables)
        return WritePlan(closed_step, rest, full.at_boundary, full.unchanged + same)

    def _is_same(self, record: TensorRecord, step: int, slot: TargetSlot) -> bool:
        given = self.given[slot.index, record.number]
        before = max((one for one in given if one < step), default=None)
        is_stored = slot.generation_of(record) is not None and before is not None
        return is_stored and torch.equal(given[before], given[step])


def numbers(table: WriteTable) -> list[int]:
    """The records of a table, without the undecided ones."""
    late = [record.number for _, record in table.late]
    return [*table.numbers.tolist(), *table.without_bytes, *(one.record.number for one in table.staged), *late]


def described(plan: WritePlan) -> tuple[Any, ...]:
    """Record numbers of a plan: in its tables, at the boundary, left out."""
    in_tables = sorted(number for table in plan.tables for number in numbers(table))
    return in_tables, sorted(r.number for _, r in plan.at_boundary), sorted(r.number for _, r in plan.unchanged)


STRATEGIES = [lightck.FullState, lightck.Replica, SameBytes]


@pytest.fixture(params=STRATEGIES)
def run(request: pytest.FixtureRequest, pool: Path) -> tuple[RecordingStrategy, nn.Module, torch.optim.Optimizer]:
    """Twelve steps of a model with a large layer, a frozen one, a buffer and an empty tensor."""
    torch.manual_seed(0)
    model = net(BIG)
    model.append(nn.BatchNorm1d(2))
    model.register_buffer("empty", torch.zeros(0))
    model[0].weight.requires_grad_(False)
    optimizer = adam(model)
    watched = RecordingStrategy(request.param())
    with lightck.attach(model, pool, optimizer=optimizer, strategy=watched):
        train(model, optimizer, 12)
    return watched, model, optimizer


def test_every_tensor_has_one_place(run):
    watched, _, _ = run
    assert len(watched.plans) == 12
    for plan in watched.plans:
        in_tables, now, unchanged = described(plan)
        undecided = {record.number for table in plan.tables for _, record in table.undecided}
        assert set(now) <= undecided <= set(now + unchanged)
        everywhere = in_tables + now + unchanged
        assert len(everywhere) == len(set(everywhere)) == len(plan.closed_step.lives)


def test_what_is_left_out_lies_in_the_slot(run):
    watched, _, _ = run
    for plan, stored in zip(watched.plans, watched.stored, strict=True):
        assert {record.number for _, record in plan.unchanged} <= stored
    assert any(plan.unchanged for plan in watched.plans), "the frozen layer is left out; otherwise nothing is tested"


def test_a_plan_is_frozen(run):
    (plan, *_), _, _ = run[0].plans, *run[1:]
    with pytest.raises(AttributeError):
        plan.at_boundary = ()


def test_what_is_recovered_is_the_state(run, pool):
    _, model, optimizer = run
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_strategy_decides_what_is_written(pool):
    """A strategy that leaves nothing out."""

    class Whole:
        def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
            return WritePlan(closed_step, tuple(tables), tuple(one for table in tables for one in table.undecided), ())

    model = net(BIG)
    model[0].weight.requires_grad_(False)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Whole()) as session:
        train(model, optimizer, 8)
        session.flush()
        assert session.stats().left_out == 0
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_value_that_is_no_strategy_is_refused(pool):
    for strategy in ("full", lightck.FullState):
        with pytest.raises(TypeError, match=r"Pass lightck.FullState\(\), lightck.Gradients"):
            lightck.attach(net(), pool, strategy=strategy)


def test_a_plan_that_leaves_out_what_the_slot_lacks_is_refused(pool):
    class Lies:
        def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
            return WritePlan(closed_step, tuple(tables), (), tuple(one for table in tables for one in table.undecided))

    model = net(BIG)
    model[0].weight.requires_grad_(False)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, strategy=Lies())
    with pytest.raises(SessionError, match=r"left out 'model/0.weight'"):
        train(model, optimizer, 2)
    session.abandon()


def test_tensors_that_updates_do_not_change_can_be_left_out(pool):
    """The gradient of one layer is zero, so SGD does not change its bytes."""
    model = net(BIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.register_hook(torch.zeros_like)
    watched = RecordingStrategy(SameBytes())
    with lightck.attach(model, pool, optimizer=optimizer, strategy=watched):
        train(model, optimizer, 8)
    left_out = [{live.name for live, _ in plan.unchanged} for plan in watched.plans]
    assert ["model/0.weight" in names for names in left_out] == [False] * 2 + [True] * 6, (
        "it is written once into each of the two slots"
    )
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_plan_that_forgets_a_tensor_is_refused(pool):
    class Forgets:
        def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
            plan = lightck.FullState().plan(closed_step, tables, slot)
            return plan._replace(tables=tuple(table.without({0}) for table in plan.tables))

    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, strategy=Forgets())
    with pytest.raises(SessionError, match=r"covers 15 tensors, and the training has 16"):
        train(model, optimizer, 2)
    session.abandon()


def test_a_tensor_that_was_copied_eagerly_is_not_left_out(pool, monkeypatch):
    """The eager copy has replaced the bytes and checksums of the slot, whatever the plan knows of the older ones."""

    class SameBytesInTheGivenTables(SameBytes):
        def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
            plan = super().plan(closed_step, tables, slot)
            return plan if plan.unchanged else plan._replace(tables=tuple(tables))

    monkeypatch.setattr(eager_copies, "EAGER_JOB_NBYTES_MIN", 1)
    model = net(BIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.register_hook(torch.zeros_like)
    lightck.layerwise(model, optimizer)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=SameBytesInTheGivenTables()) as session:
        for number in range(8):
            train(model, optimizer, 1, start=number)
            session.flush()
            assert is_step(lightck.recover(pool, step=number + 1), everything(model, optimizer))


def test_eager_copies_are_for_plans_that_write_all(pool):
    """Eager copies begin before the plan, so there are none if the plan may leave tensors out."""

    class Parts:
        def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
            plan = lightck.FullState().plan(closed_step, tables, slot)
            return plan._replace(tables=tuple(copy.copy(table) for table in plan.tables))

    model = net(BIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lightck.layerwise(model, optimizer)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Parts()) as session:
        for number in range(6):
            train(model, optimizer, 1, start=number)
            assert session._pipeline.eager.reservation is None
    assert is_step(lightck.recover(pool), everything(model, optimizer))
