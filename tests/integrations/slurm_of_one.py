"""Slurm itself on this machine alone: a controller and a node, without a service manager, as root.

It needs Debian's packages slurmctld and slurmd (``apt-get install slurmctld slurmd``); or unpacked in a folder that
``LIGHTCK_TEST_SLURM`` names (``dpkg -x``, with libhwloc15).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIBRARIES = "usr/lib/x86_64-linux-gnu"
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
PluginDir={root}/{libraries}/slurm-wlm
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
KillWait=2
SchedulerParameters=sched_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
"""A requeued job may start after ``cred_expire`` seconds: 120 where nothing is set."""


def root() -> Path | None:
    """Where Slurm's files are; None if they are not there, or if this is not root."""
    named = Path(os.environ.get("LIGHTCK_TEST_SLURM", "/"))
    has_all = all(_daemon(named, name) is not None for name in ("slurmctld", "slurmd", "slurmstepd"))
    return named if has_all and os.geteuid() == 0 else None


def _daemon(root: Path, name: str) -> str | None:
    folder = str(root / "usr" / "sbin")
    return shutil.which(name, path=folder) or shutil.which(f"{name}-wlm", path=folder)


@contextmanager
def running(root: Path, folder: Path) -> Iterator[dict[str, str]]:
    """Start Slurm in an empty folder. Yields the environment variables with which its commands are called."""
    (folder / "state").mkdir(parents=True)
    (folder / "spool").mkdir()
    host = socket.gethostname().partition(".")[0]
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1], other.getsockname()[1]]
    settings = {"host": host, "root": root, "libraries": LIBRARIES, "folder": folder, "ports": ports}
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(**settings, cpus=os.cpu_count()))
    variables = {
        "SLURM_CONF": str(configuration),
        "LD_LIBRARY_PATH": f"{root / LIBRARIES / 'slurm-wlm'}:{root / LIBRARIES}",
        "PATH": f"{root / 'usr' / 'bin'}:{os.environ['PATH']}",
    }
    stepd = ["-d", _daemon(root, "slurmstepd"), "-N", host]
    daemons = []
    try:
        for name, options in (("slurmctld", []), ("slurmd", stepd)):
            with open(folder / f"{name}.out", "w") as out:
                command = [_daemon(root, name), "-D", "-f", configuration, *options]
                daemons.append(subprocess.Popen(command, env={**os.environ, **variables}, stdout=out, stderr=out))
        _wait_for_idle_node({**os.environ, **variables}, folder)
        yield variables
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def _wait_for_idle_node(environment: dict[str, str], folder: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        node = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False)
        if node.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    raise AssertionError("\n".join(path.read_text() for path in folder.glob("*.log")))
