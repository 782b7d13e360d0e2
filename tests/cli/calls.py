"""Calls of ``lightck`` as a user makes them: in this process, or as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from toys import flip

from lightck.cli import main
from lightck.pool.reader import open_pool

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "lightck"]


def call(*args: Any) -> Result:
    """Run a command in this process, and check that its output is harmless to a terminal."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert_harmless(result.stdout + result.stderr)
    return result


def call_json(*args: Any) -> tuple[int, dict[str, Any]]:
    result = call(*args, "--json")
    facts = json.loads(result.stdout)
    assert isinstance(facts, dict)
    return result.exit_code, facts


def overwrite(pool: Path, offset: int, data: bytes) -> None:
    """Write bytes at an offset of the pool, for any backend."""
    reader = open_pool(str(pool))
    old = reader.read(offset, len(data))
    reader.close()
    for at, (was, wanted) in enumerate(zip(old, data, strict=True)):
        if was != wanted:
            flip(pool, offset + at, was ^ wanted)


def environment(**more: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**plain, "PYTHONPATH": path, **more}


def run(*args: Any, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``lightck`` as a process, with its output in pipes."""
    words = [*PROGRAM, *map(str, args)]
    done = subprocess.run(words, env=environment(**env), text=True, capture_output=True, timeout=300, check=False)
    assert_harmless(done.stdout + done.stderr)
    return done


def assert_harmless(text: str) -> None:
    """Check that there is no traceback and no character that a terminal would act on."""
    assert "Traceback" not in text
    odd = {c for c in text if not c.isprintable() and c != "\n"}
    assert not odd, odd
