"""The ``lightck`` command in this process."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from lightck.cli import main


def call(*words: Any) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="lightck")
