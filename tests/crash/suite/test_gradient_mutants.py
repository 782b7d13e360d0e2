"""Bugs that were planted into how pools with gradient records are written: each must be found, or the simulator and the
recovery prove nothing.

Most change the program while it trains; then the power is cut at every point of what it wrote, and a recovery must
break the promise. Two change the trace: they are about the order of stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bugs
import numpy as np
import pytest
import torch
from crash.cuts import Limits
from crash.gradient_workloads import feedback, seeded, train, with_momentum
from crash.oracle import Recovered, recovery, truth
from crash.persistence import Adversary, BlockDevice, Model, PersistentCaches, PersistentMemory
from crash.recorded import Pair, Workload, record
from crash.recording import Recorder, Recording
from crash.simulator import Effort, Simulator, Transform
from crash.trace import Event, Flush, Store
from torch import nn

import lightck
from lightck.hooks.captured_update import CopyResult, GradientClass, HeldGradient
from lightck.hooks.compression import Residuals
from lightck.hooks.consumed import ConsumedGradients
from lightck.hooks.gradient_classes import GradientHistories, GradientHistory
from lightck.pool.gradient_log import Bases, GradientLog, GradientRecord, Homes, Mask, RecordPlan
from lightck.state.selection import keep_largest
from lightck.state.unit_update import update_unit
from lightck.state.update_record import UpdatePacker
from lightck.strategy.gradients import Gradients
from lightck.strategy.topk import TopK

PM, EADR, ADVERSARY, DISK = PersistentMemory(), PersistentCaches(), Adversary(), BlockDevice()
LIMITS = Limits(budget=64, metadata=4, payload=4, contents=4, prefixes=2, masks=4)
FIRST = Effort(LIMITS, again_every=1 << 30, violations_max=1)
"""Enough to find one violation."""
FEW = replace(FIRST, limits=Limits(budget=4, metadata=1, payload=1, contents=1, prefixes=1, masks=1))
SMALLEST = Gradients(3, 3)
"""As many records as are needed, and none that stands in for damage."""


def plain(
    steps: int = 6, strategy: Gradients = SMALLEST, build: Callable[[], Pair] = with_momentum
) -> Callable[[Recorder], None]:
    def run(recorder: Recorder) -> None:
        model, optimizer = build()
        with recorder.attach(model, optimizer, strategy=strategy):
            train(recorder, model, optimizer, steps)

    return run


def recorded(run: Callable[[Recorder], None], folder: Path) -> Recording:
    """A bug may show at the end of the training itself: what was written up to there counts."""

    def as_far_as_it_goes(recorder: Recorder) -> None:
        with suppress(AssertionError):
            run(recorder)

    return record(Workload(as_far_as_it_goes), folder / "run.pool")


def assert_found(recording: Recording, folder: Path, models: Sequence[Model], bug: Transform | None = None) -> None:
    simulator = Simulator(recording, str(folder), effort=FIRST)
    for model in models:
        report = simulator.check(model, bug)
        print(report)
        assert report.violations, str(report)


# -- the order of stores -----------------------------------------------------------------------------------------------


def in_home(event: Event, homes: Sequence[tuple[int, int]]) -> bool:
    return isinstance(event, (Store, Flush)) and any(begin <= event.offset < end for begin, end in homes)


def homes_not_fenced(homes: Sequence[tuple[int, int]], events: Sequence[Event]) -> list[Event]:
    """Who writes a unit to its home does not fence it, and the commit record follows."""
    return [replace(event, thread=1000) if in_home(event, homes) else event for event in events]


def homes_after_the_record(homes: Sequence[tuple[int, int]], events: Sequence[Event]) -> list[Event]:
    """A unit is written to its home after the commit record that names it."""
    changed: list[Event] = []
    late: list[Event] = []
    for event in events:
        if in_home(event, homes):
            late.append(event)
            continue
        changed.append(event)
        if bugs.is_word(event):
            changed += late
            late = []
    return [*changed, *late]


@pytest.mark.parametrize(
    ("bug", "models"),
    [(homes_not_fenced, (PM, ADVERSARY)), (homes_after_the_record, (PM, EADR, ADVERSARY, DISK))],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_commit_record_that_does_not_wait_for_the_homes_is_found(
    bug: Any, models: tuple[Model, ...], folder: Path
) -> None:
    recording = recorded(plain(), folder)
    (tape,) = recording
    assert len(tape.homes) == 2
    assert_found(recording, folder, models, partial(bug, tape.homes))


# -- where the writer writes -------------------------------------------------------------------------------------------


def base_to_the_named_home() -> Any:
    """A unit is written to the home that the newest checkpoint names as its base."""

    def named(log: GradientLog, bases: Bases) -> tuple[Homes, Mask]:
        homes = np.where(bases.generation > 0, bases.home, 0).astype(np.uint8)
        return homes, np.ones(len(homes), np.bool_)

    return patch.object(GradientLog, "_free_homes", named)


def record_freed_one_too_early() -> Any:
    """The slot of the oldest record that the newest checkpoint needs counts as free."""
    right = GradientLog._free_slot

    def early(log: GradientLog, low: int) -> int | None:
        needed = [one for checkpoint in log.protected for one in checkpoint.needed_records]
        return min(needed).slot if len(needed) > 1 else right(log, low)

    return patch.object(GradientLog, "_free_slot", early)


def hole_without_a_full_checkpoint() -> Any:
    """After a step without a record the log goes on as if it had one."""

    def ignored(log: GradientLog, step: int, changed: Mask) -> GradientLog:
        return replace(log, step=step)

    return patch.object(GradientLog, "with_hole", ignored)


def chain_without_its_oldest_record() -> Any:
    """The oldest record that a base needs is not named."""

    def shorter(plan: RecordPlan) -> tuple[GradientRecord, ...]:
        before = plan.checkpoint.records[:-1]
        return tuple(one for one in before if one.step > plan.checkpoint.oldest_base_step + 1)

    return patch.object(RecordPlan, "chain", property(shorter))


@pytest.mark.parametrize(
    "bug",
    [base_to_the_named_home, record_freed_one_too_early, chain_without_its_oldest_record],
    ids=lambda bug: bug.__name__,
)
def test_a_bug_in_the_log_is_found(bug: Callable[[], Any], folder: Path) -> None:
    with bug():
        recording = recorded(plain(), folder)
    assert_found(recording, folder, (PM, DISK))


def test_a_hole_without_a_full_checkpoint_is_found(folder: Path) -> None:
    def run(recorder: Recorder) -> None:
        model, optimizer = with_momentum()
        with recorder.attach(model, optimizer, strategy=SMALLEST) as session:
            train(recorder, model, optimizer, 4)
            session.flush()
            with hole_without_a_full_checkpoint():
                with torch.no_grad():
                    next(model.parameters()).clamp_(-0.1, 0.1)
                train(recorder, model, optimizer, 2, 4)

    assert_found(recorded(run, folder), folder, (PM, DISK))


# -- what the update consumed ------------------------------------------------------------------------------------------


@contextmanager
def options_after_the_scheduler() -> Iterator[None]:
    """The options are those that the optimizer has when the checkpoint closes."""
    value, attach = UpdatePacker.value, lightck.attach
    optimizers: list[torch.optim.Optimizer] = []

    def attached(model: Any, path: Any, *, optimizer: Any, **options: Any) -> Any:
        optimizers[:] = [optimizer]
        return attach(model, path, optimizer=optimizer, **options)

    def late(packer: UpdatePacker, update: Any) -> Any:
        (step,) = update.optimizer_steps
        groups = tuple(
            replace(group, options={key: now[key] for key in group.options})
            for group, now in zip(step.groups, optimizers[0].param_groups, strict=True)
        )
        return value(packer, replace(update, optimizer_steps=(replace(step, groups=groups),)))

    with patch.object(UpdatePacker, "value", late), patch.object(lightck, "attach", attached):
        yield


def with_nesterov() -> Pair:
    """Without weight decay, its foreach step writes the momentum into the gradient."""
    seeded()
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def with_fused_adam() -> Pair:
    seeded()
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    return model, torch.optim.Adam(model.parameters(), lr=0.1, fused=True)


@contextmanager
def copied_late() -> Iterator[None]:
    """Every gradient counts as one that nothing writes to, and every copy as right."""
    observe = GradientHistories.observe

    def owned(classes: GradientHistories, *arguments: Any, is_written: bool, **options: Any) -> GradientHistory:
        history = observe(classes, *arguments, is_written=False, **options)
        history.kind = GradientClass.OWNED
        return history

    def believed(consumed: ConsumedGradients, gradient: HeldGradient, checksums: object) -> bool:
        if gradient in consumed._held:
            consumed._let_go(consumed._held[gradient], CopyResult.VALIDATED)
        return True

    with ExitStack() as stack:
        stack.enter_context(patch.object(GradientHistories, "observe", owned))
        stack.enter_context(patch.object(ConsumedGradients, "copied", believed))
        stack.enter_context(patch.object(ConsumedGradients, "_find_writes_of_step", lambda *_: None))
        stack.enter_context(patch.object(ConsumedGradients, "find_overwritten", lambda *_: None))
        yield


def scaled(recorder: Recorder) -> None:
    """A GradScaler lets the fused step divide the gradients by the scale, in place."""
    model, optimizer = with_fused_adam()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with recorder.attach(model, optimizer, strategy=SMALLEST, state={"scaler": scaler}):
        for number in range(6):
            optimizer.zero_grad()
            loss = model(torch.tensor([[1.0, number], [0.5, -1.0]])).square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            recorder.note(model, optimizer, scaler=scaler)


def test_the_workloads_of_these_bugs_are_recovered_without_them(folder: Path) -> None:
    for number, run in enumerate((plain(), plain(build=with_nesterov), scaled)):
        (folder / str(number)).mkdir()
        recording = record(Workload(run), folder / str(number) / "run.pool")
        report = Simulator(recording, str(folder), effort=FEW).check(DISK)
        assert not report.violations, str(report)


def test_options_that_the_scheduler_has_moved_are_found(folder: Path) -> None:
    with options_after_the_scheduler():
        recording = recorded(plain(), folder)
    assert_found(recording, folder, (PM, DISK))


@pytest.mark.parametrize("run", [plain(build=with_nesterov), scaled], ids=["nesterov, foreach", "fused, scaled"])
def test_a_gradient_that_the_step_writes_and_that_is_copied_late_is_found(
    run: Callable[[Recorder], None], folder: Path
) -> None:
    with copied_late():
        recording = recorded(run, folder)
    assert_found(recording, folder, (PM, DISK))


@contextmanager
def residuals_of_the_step_before() -> Iterator[None]:
    """What is left out of a gradient is not in what the session saves of this step."""
    keep, state_dict = keep_largest, Residuals.state_dict
    before: dict[int, torch.Tensor] = {}

    def noted(gradient: torch.Tensor, k: int, residual: torch.Tensor | None = None) -> None:
        if residual is not None:
            before[id(residual)] = residual.clone()
        keep(gradient, k, residual)

    def late(residuals: Residuals) -> dict[str, Any]:
        ((key, tensors),) = state_dict(residuals).items()
        return {key: {name: before.get(id(one), one) for name, one in tensors.items()}}

    with patch("lightck.hooks.compression.keep_largest", noted), patch.object(Residuals, "state_dict", late):
        yield


@pytest.mark.parametrize("residual", ["step", "base"])
def test_residuals_of_another_step_are_found(residual: str, folder: Path) -> None:
    strategy = Gradients(3, compress=TopK(0.05, error_feedback=True, residual=residual))
    with residuals_of_the_step_before():
        recording = recorded(lambda recorder: feedback(recorder, strategy), folder)
    assert_found(recording, folder, (PM,))


def with_bfloat16() -> Pair:
    """A parameter that two threads update, in chunks whose lengths no vector divides."""
    seeded()
    model = nn.Linear(233, 149, bias=False, dtype=torch.bfloat16)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False)


@contextmanager
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@contextmanager
def another_number_of_threads() -> Iterator[None]:
    """Updates are made again by one thread, however many made them."""

    def by_one(*arguments: Any, threads: int, **options: Any) -> None:
        update_unit(*arguments, threads=1, **options)

    with patch("lightck.restore.replay.update_unit", by_one):
        yield


def test_updates_that_another_number_of_threads_makes_again_are_found(folder: Path) -> None:
    """Below float32 they give other bits, or what is recovered is older."""
    path, generator = folder / "run.pool", torch.Generator().manual_seed(1)
    with two_threads():
        model, optimizer = with_bfloat16()
        with lightck.attach(model, path, optimizer=optimizer, strategy=Gradients(8)):
            for _ in range(6):  # the base is that of step 1
                optimizer.zero_grad()
                model(torch.zeros(1, 233, dtype=torch.bfloat16)).sum().backward()
                for p in model.parameters():
                    p.grad = (torch.randn(p.shape, generator=generator) * 0.1).bfloat16()
                optimizer.step()
    right = truth(model, optimizer)
    outcome = recovery(str(path))
    assert isinstance(outcome, Recovered)
    assert (outcome.step, outcome.digest) == (6, right)
    with another_number_of_threads():
        outcome = recovery(str(path))
    assert not isinstance(outcome, Recovered) or outcome.digest != right
