"""Whatever a manifest in a tier says, ``recover`` returns what was sent, or raises an error of lightck."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_changed_manifests_end_in_the_checkpoint_or_in_an_error_of_ours():
    """In a process of its own, whose memory is limited."""
    done = subprocess.run(
        [sys.executable, "-m", "tiers.fuzz_manifests", "--rounds", "600", "--seed", "2"],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "seed 2: 600 manifests" in done.stdout
    assert "'refused by recover'" in done.stdout
    assert "'recovered as it was sent'" in done.stdout
