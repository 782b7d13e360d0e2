"""Ranks whose models are on a device: DDP and FSDP2, over gloo with two ranks on one device and over NCCL with one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightck

PROGRAM = Path(__file__).with_name("ranks_on_device.py")


@pytest.mark.parametrize("training", ["ddp-gloo", "fsdp-gloo", "ddp-nccl", "fsdp-nccl"])
def test_killed_ranks_go_on_with_the_same_bits(training: str, folder: Path) -> None:
    paths = [str(Path(lightck.__file__).parents[1]), str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), training, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
