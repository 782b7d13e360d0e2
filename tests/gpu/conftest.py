"""Tests that need a CUDA device; without one they are skipped, and nothing here is imported by the others.

``LIGHTCK_TEST_DEVICE=cpu pytest tests/gpu`` runs the files in ``ON_CPU``, which need nothing of CUDA, on the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
ON_CPU = ("test_resume", "test_replay_on_device", "test_capture_on_device", "test_gradient_recovery_on_device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            on_cpu = item.path.stem in ON_CPU and os.environ.get("LIGHTCK_TEST_DEVICE") == "cpu"
            if not (on_cpu or torch.cuda.is_available()):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
