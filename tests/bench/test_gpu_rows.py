"""Rows for a CUDA device: planned if the machine has one, and reported as missing if not."""

from __future__ import annotations

import pytest
import slow_transfers
import torch
from click.testing import CliRunner
from slow_transfers import SlowTransfer

from bench.command import command
from bench.measures import loop, measure
from bench.measures.savers import STAGING, Lightck
from bench.measures.training import Training
from bench.tables import METHODS, NAMES, STAGED, TABLES, Plan
from bench.workloads import workload
from lightck.errors import BenchError

pytestmark = pytest.mark.long


def test_rows_follow_the_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = TABLES["gpu"].rows(Plan())
    assert {row.options["workload"] for row in rows} == set(NAMES)
    assert {row.options["device"] for row in rows} == {"cuda"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert TABLES["gpu"].rows(Plan()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_without_a_device_nothing_is_measured_and_nothing_fails(folder):
    result = CliRunner().invoke(command, ["gpu", "--results", str(folder)])
    assert result.exit_code == 0, result.output
    assert "skipped gpu: this machine lacks the hardware for it" in result.output
    with pytest.raises(BenchError, match="no CUDA device"):
        measure("gpu", {"workload": "vgg16", "size": "small", "saver": "lightck", "pairs": 1, "device": "cuda"}, "")


def test_each_transfer_method_has_its_rows_and_a_saver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert set(METHODS) == set(STAGING)
    keys = [row.key for row in TABLES["gpu"].rows(Plan())]
    assert len(set(keys)) == len(keys)
    assert {f"{name} lightck {method}" for name in STAGED for method in METHODS} <= set(keys)
    assert {f"{name} torch.save" for name in STAGED} <= set(keys)


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> SlowTransfer:
    """A fake device that holds all tensors (they are CPU tensors), and whose copies take longer than a step."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    slow = SlowTransfer(1, seconds=0.2)
    slow_transfers.install(monkeypatch, lambda tensor: slow)
    return slow


class _Watched(Lightck):
    """Records at each window's end whether the saved checkpoint was committed."""

    def __init__(self, staging: str) -> None:
        super().__init__("file", staging)
        self.noted: list[tuple[bool, int | None]] = []

    def window_ends(self, saved: bool) -> None:
        super().window_ends(saved)
        self.noted.append((saved, self._session.committed))


@pytest.mark.parametrize("method", METHODS)
def test_nothing_of_a_checkpoint_falls_on_the_plain_window_after_it(method, folder, transfer, monkeypatch):
    """With one more slot a checkpoint may outlast the update."""
    monkeypatch.setattr(loop, "WARM_UP", 1)
    training, saver = Training(workload("vgg16", "small")), _Watched(method)
    found = loop.run(training, saver, str(folder), 3)
    assert [committed for saved, committed in saver.noted if saved] == [2, 4, 6, 8]
    assert any(w.costs.end_seconds > 0 for w in found.saved)
    assert not any(w.costs.end_seconds > 0 for w in found.plain)
    loop.check(training, saver, str(folder))


def test_a_row_of_three_slots_counts_the_bytes_of_its_checkpoints(folder, transfer):
    options = {"workload": "vgg16", "size": "small", "saver": "lightck", "pairs": 3, "staging": "device"}
    found = measure("steps", options, str(folder))
    assert found["nbytes"] <= found["written_bytes"] < 1.2 * found["nbytes"]


def test_windows_count_once_the_transfer_method_is_chosen(folder, transfer):
    """The choice is made after nine checkpoints, later than the warm-up of five."""
    settled: list[bool] = []

    class Saver(Lightck):
        @property
        def is_settled(self) -> bool:
            settled.append(super().is_settled)
            return settled[-1]

    found = loop.run(Training(workload("vgg16", "small")), Saver(), str(folder), 1)
    assert settled[0] is False
    assert settled[-3:] == [True] * 3
    assert found.unsettled == 0
