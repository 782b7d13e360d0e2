"""Bugs that were planted into how records between two commits are written: each breaks the promise, and is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from crash.cuts import Limits
from crash.gradient_workloads import train, with_momentum
from crash.persistence import BlockDevice, Model, PersistentMemory
from crash.recorded import Workload, record
from crash.recording import Recorder
from crash.simulator import Effort, Simulator

from lightck._native import lib
from lightck.pool.engine import Medium, check
from lightck.pool.gradient_log import GradientLog, Mask
from lightck.pool.gradient_writer import GradientWriter
from lightck.pool.writer import Pending
from lightck.strategy.gradients import Gradients

PM, DISK = PersistentMemory(), BlockDevice()
LIMITS = Limits(budget=64, metadata=4, payload=4, contents=4, prefixes=2, masks=4)


NEEDED = Gradients(3, 5), 3
"""Strategy and interval: a checkpoint needs records from before it, which were not committed."""
TWICE = Gradients(2, 3), 5
"""Units are written more than once between two commits."""
How = tuple[Gradients, int]


def violations(folder: Path, bug: Any, model: Model, how: How) -> Sequence[object]:
    strategy, interval = how

    def as_far_as_it_goes(recorder: Recorder) -> None:
        built, optimizer = with_momentum()
        with suppress(AssertionError), recorder.attach(built, optimizer, strategy=strategy, interval=interval):
            train(recorder, built, optimizer, 13)

    with bug:
        recording = record(Workload(as_far_as_it_goes), folder / "run.pool")
    effort = Effort(LIMITS, again_every=1 << 30, violations_max=1)
    report = Simulator(recording, str(folder), effort=effort).check(model)
    print(report)
    return report.violations


def manifest_not_written_back() -> Any:
    """The manifest of a record stays in the caches of the processor."""
    recorded, store = GradientWriter.recorded, Medium.store

    def stored(medium: Medium, offset: int, data: bytes) -> None:
        check(lib.lck_m_store(medium.handle, offset, data, len(data)), "storing")

    def without(writer: GradientWriter, pending: Pending) -> None:
        writer.medium.store = stored.__get__(writer.medium)  # type: ignore[method-assign]
        try:
            recorded(writer, pending)
        finally:
            writer.medium.store = store.__get__(writer.medium)  # type: ignore[method-assign]

    return patch.object(GradientWriter, "recorded", without)


@contextmanager
def manifest_after_the_commit() -> Iterator[None]:
    """The manifest of a record is stored after the commit record of the checkpoint whose chain names it."""
    recorded, committed = GradientWriter.recorded, GradientWriter.committed
    late: list[tuple[int, bytes]] = []

    def kept(writer: GradientWriter, pending: Pending) -> None:
        with (
            patch.object(Medium, "store", lambda medium, offset, data: late.append((offset, data))),
            patch.object(Medium, "fence", lambda medium: None),
        ):
            recorded(writer, pending)

    def then(writer: GradientWriter, pending: Pending) -> None:
        committed(writer, pending)
        for offset, data in late:
            writer.medium.store(offset, data)
        late.clear()

    with patch.object(GradientWriter, "recorded", kept), patch.object(GradientWriter, "committed", then):
        yield


def record_counts_as_commit() -> Any:
    """What the newest commit needs may be overwritten as soon as a record is written."""
    recorded = GradientWriter.recorded

    def counted(writer: GradientWriter, pending: Pending) -> None:
        plan = writer._prepared
        recorded(writer, pending)
        writer.log = writer.log.with_commit(plan)

    return patch.object(GradientWriter, "recorded", counted)


def base_to_the_named_home() -> Any:
    """Between two commits a unit is written to the home that the newest commit names as its base."""

    def named(log: GradientLog, bases: Any) -> tuple[Any, Mask]:
        homes = np.where(bases.generation > 0, bases.home, 0).astype(np.uint8)
        return homes, np.ones(len(homes), np.bool_)

    return patch.object(GradientLog, "_free_homes", named)


@pytest.mark.parametrize(
    ("bug", "model", "how"),
    [
        (manifest_not_written_back, PM, NEEDED),
        (manifest_after_the_commit, PM, NEEDED),
        (manifest_after_the_commit, DISK, NEEDED),
        (record_counts_as_commit, DISK, TWICE),
        (base_to_the_named_home, PM, TWICE),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", "")),
)
def test_a_bug_between_two_commits_is_found(bug: Callable[[], Any], model: Model, how: How, folder: Path) -> None:
    assert violations(folder, bug(), model, how)


@pytest.mark.parametrize("how", [NEEDED, TWICE], ids=["needed", "twice"])
def test_without_a_bug_nothing_is_found(how: How, folder: Path) -> None:
    assert not violations(folder, nullcontext(), DISK, how)
