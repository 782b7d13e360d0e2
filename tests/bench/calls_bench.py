"""Calls of ``lightck`` in this process; ``lightck bench`` runs the bench of this checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from lightck.cli import main

ROOT = Path(__file__).resolve().parents[2]


def call(*words: Any) -> Result:
    first, *others = [str(word) for word in words]
    with_bench = ["--checkout", str(ROOT)] if first == "bench" else []
    return CliRunner().invoke(main, [first, *with_bench, *others], prog_name="lightck")
