"""Small stand-ins of ``sbatch --wait``, ``srun`` and ``scontrol`` on one machine, which do what Slurm's manual says.

A job is a folder in ``$SLURM_STAND_IN``. The process of ``sbatch`` is the controller and the only node: it runs the
batch script in a session of its own, and ends and starts it again if ``scontrol requeue`` has left a mark in the
folder. The job is then started as the same job, with ``SLURM_RESTART_COUNT`` one higher. Without ``--requeue`` a job is
not requeued.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

JOBS = Path(os.environ.get("SLURM_STAND_IN", "."))
PAUSE_SECONDS = 0.02
KILL_WAIT_SECONDS = 2.0
"""Slurm's ``KillWait``: between SIGTERM and SIGKILL."""


def options_of(script: str) -> dict[str, str]:
    """The ``#SBATCH`` lines that come before the first command."""
    found = {}
    for line in script.splitlines()[1:]:
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            for word in shlex.split(line.removeprefix("#SBATCH"), comments=True):
                name, _, value = word.partition("=")
                found[name] = value
    return found


def sbatch(arguments: list[str]) -> int:
    assert arguments[0] == "--wait", "the stand-in waits for the job"
    script = Path(arguments[1])
    options = options_of(script.read_text())
    job = 1 + len(list(JOBS.glob("job-*")))
    folder = JOBS / f"job-{job}"
    folder.mkdir()
    (folder / "script").write_text(script.read_text())  # Slurm runs a copy of the script
    print(f"Submitted batch job {job}", flush=True)
    for restarts in range(100):
        environment = {
            **os.environ,
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_NTASKS": options.get("--ntasks", "1"),
        }
        if restarts > 0:
            environment["SLURM_RESTART_COUNT"] = str(restarts)
        command = ["bash", folder / "script", *arguments[2:]]
        with open(f"slurm-{job}.out", "a" if options.get("--open-mode") == "append" else "w") as out:
            batch = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
            is_requeued = _wait(batch, folder / "requeue")
        if not (is_requeued and "--requeue" in options):
            return batch.returncode
        (folder / "requeue").unlink()
    raise AssertionError("requeued a hundred times")


def _wait(batch: subprocess.Popen[bytes], mark: Path) -> bool:
    """Wait for the end of the job. Returns whether it is to be started again; it was ended for that."""
    while batch.poll() is None:
        if mark.exists():
            for number in (signal.SIGTERM, signal.SIGKILL):
                _signal_session(batch.pid, number)
                end = time.monotonic() + KILL_WAIT_SECONDS
                while _session(batch.pid) and time.monotonic() < end:
                    batch.poll()
                    time.sleep(PAUSE_SECONDS)
            batch.wait()
        time.sleep(PAUSE_SECONDS)
    while _session(batch.pid):  # a job that is completing ends when its last process has ended
        _signal_session(batch.pid, signal.SIGKILL)
        time.sleep(PAUSE_SECONDS)
    return mark.exists()


def _session(leader: int) -> list[int]:
    """The processes of a session: what Slurm has in the cgroup of a job."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *rest = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(rest[2]) == leader and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def _signal_session(leader: int, number: int) -> None:
    for pid in _session(leader):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def srun(arguments: list[str]) -> int:
    kills = "--kill-on-bad-exit=1" in arguments
    command = [word for word in arguments if word != "--kill-on-bad-exit=1"]
    tasks = [
        subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
        for task in range(int(os.environ["SLURM_NTASKS"]))
    ]
    signal.signal(signal.SIGTERM, lambda *_: None)  # the tasks get it too
    ended_at = None
    while any(task.poll() is None for task in tasks):
        time.sleep(PAUSE_SECONDS)
        if kills and ended_at is None and any(task.poll() for task in tasks):
            ended_at = time.monotonic()
            for task in tasks:
                task.terminate()
        if ended_at is not None and time.monotonic() > ended_at + KILL_WAIT_SECONDS:
            for task in tasks:
                task.kill()
    return max(128 - task.returncode if task.returncode < 0 else task.returncode for task in tasks)


def scontrol(arguments: list[str]) -> int:
    if arguments[:2] == ["show", "hostnames"]:
        print(*arguments[2].split(","), sep="\n")
        return 0
    verb, job = arguments
    assert verb == "requeue"
    assert re.fullmatch(r"\d+", job)
    (JOBS / f"job-{job}" / "requeue").touch()
    return 0


def install(folder: Path) -> None:
    """Make the three commands in ``folder``."""
    for name in ("sbatch", "srun", "scontrol"):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        path.chmod(0o755)


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
