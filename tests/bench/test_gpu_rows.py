"""Rows for a CUDA device: there where one is, and said to be missing where none is."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from lightck.bench.measures import measure
from lightck.bench.savers import STAGING
from lightck.bench.tables import NAMES, STAGED, TABLES, WAYS, Plan
from lightck.cli.bench import command
from lightck.errors import BenchError


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
    assert "without gpu: this machine has nothing to measure it on" in result.output
    with pytest.raises(BenchError, match="no CUDA device"):
        measure("gpu", {"workload": "vgg16", "size": "small", "saver": "lightck", "pairs": 1, "device": "cuda"}, "")


def test_each_way_out_of_a_device_has_its_rows_and_a_saver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert set(WAYS) == set(STAGING)
    keys = [row.key for row in TABLES["gpu"].rows(Plan())]
    assert len(set(keys)) == len(keys)
    assert {f"{name} lightck {way}" for name in STAGED for way in WAYS} <= set(keys)
    assert {f"{name} torch.save" for name in STAGED} <= set(keys)
