"""Measures a row of a table in a process of its own, in an empty folder that is removed afterwards.

So each row has a new heap and new threads, and a row that dies harms no other. A row that fails has an error and no
result; the next run measures it again.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightck
from bench.running.folders import temporary
from bench.running.machine import fingerprint
from lightck.errors import BenchError

TMPFS, DISK = "tmpfs", "disk"
_ERROR_MAX = 600


@dataclass(frozen=True, slots=True)
class Row:
    """One row. ``key`` is its name among the rows of the same measure."""

    measure: str
    key: str
    options: dict[str, Any]
    medium: str = TMPFS


MEMORY_DIR = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
DISK_DIR = "/var/tmp"


@dataclass(frozen=True, slots=True)
class Place:
    """The folders and threads of a run; they are not part of a row's options."""

    tmpfs: str = MEMORY_DIR
    disk: str = DISK_DIR
    threads: int = 2

    def folder(self, medium: str) -> str:
        return self.disk if medium == DISK else self.tmpfs


def run(row: Row, place: Place) -> dict[str, Any]:
    """Measure a row: its options, result, machine, code, and the time that it took."""
    began, code = time.perf_counter(), fingerprint()
    with temporary(place.folder(row.medium)) as folder, temporary(tempfile.gettempdir()) as beside:
        found = _in_child(row, place, folder, os.path.join(beside, "result.json"))
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {
        "options": row.options,
        **found,
        "code": code,
        "took_seconds": round(time.perf_counter() - began, 1),
        "date": today,
    }


def _in_child(row: Row, place: Place, folder: str, out: str) -> dict[str, Any]:
    order = {
        "measure": row.measure,
        "options": row.options,
        "folder": folder,
        "threads": place.threads,
        "out": out,
        "parent": os.getpid(),
    }
    status, errors = _ran(json.dumps(order), folder, _environment() | row.options.get("env", {}))
    if status != 0:
        last = errors.strip().splitlines()[-1:] or ["it printed no error"]
        how = f"was killed by signal {-status}" if status < 0 else "failed"
        raise BenchError(f"The row {row.key!r} of {row.measure} {how}: {last[0][:_ERROR_MAX]}")
    found: dict[str, Any] = json.loads(Path(out).read_text())
    return found


def _ran(order: str, folder: str, environment: dict[str, str]) -> tuple[int, str]:
    """Run the child: exit status and stderr. An interrupt kills the child before its folder is removed."""
    # Not in this folder: in the source tree Python would find the sources, and not the lightck that was installed.
    command, pipe = [sys.executable, "-m", "bench.running.child"], subprocess.PIPE
    with subprocess.Popen(
        command, text=True, cwd=folder, env=environment, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe
    ) as child:
        try:
            _, errors = child.communicate(order)
        except BaseException:
            child.kill()
            child.wait()
            raise
    return child.returncode, errors


def _environment() -> dict[str, str]:
    """The environment in which a child imports the same lightck and the same bench as this process. The checkout comes
    second, since its lightck need not be the installed one."""
    package, checkout = Path(str(lightck.__file__)).resolve().parents[1], Path(__file__).resolve().parents[2]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(package), str(checkout), *(os.path.abspath(path) for path in given if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
