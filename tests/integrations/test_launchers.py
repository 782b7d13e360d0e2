"""Launchers start a training of two ranks again after a kill, and it ends with the bits of one that was never killed.

The examples are run as a user runs them, and killed from outside. Slurm is the stand-in of ``slurm_stand_in``.
"""

from __future__ import annotations

import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from . import slurm_of_one, slurm_stand_in

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
EPOCHS = 20
STEPS = EPOCHS * 16
SECONDS_MAX = 120.0
"""So long a test waits for a line."""
BEGINS = r"rank (\d) is process (\d+) and begins at step (\d+)"
FINISHED = r"epoch \d+: step (\d+)"
ENDED = r"rank \d ended at step \d+ with weights -?0x1\.[0-9a-f]+p[+-]\d+"


class Job:
    """A launcher and what it prints. ``log``: it prints there."""

    def __init__(self, command: Sequence[str | Path], folder: Path, log: Path | None = None, **variables: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **variables}
        self._log = folder / f"log-{time.monotonic_ns()}"
        with open(self._log, "w") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        self._log = log or self._log

    @property
    def text(self) -> str:
        """What was printed. Of submitit: by all tasks, one job after the other."""
        if not self._log.is_dir():
            return self._log.read_text() if self._log.exists() else ""
        logs = sorted(self._log.glob("*_log.out"), key=lambda path: [int(part) for part in path.name.split("_")[:2]])
        return "".join(path.read_text() for path in logs)

    def end(self, status: int | None = 0) -> None:
        """Wait for the end of the launcher. ``status``: of its exit; None for any."""
        try:
            self.process.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(self.text) from None
        assert status is None or self.process.returncode == status, self.text

    def kill(self) -> None:
        """Kill the launcher, and what it has started."""
        for pid in [self.process.pid, *(int(pid) for _, pid, _ in re.findall(BEGINS, self.text))]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def starts(self) -> list[dict[int, tuple[int, int]]]:
        """Of each start: rank -> process and first step. (Ray prints some lines twice.)"""
        found: list[dict[int, tuple[int, int]]] = []
        for rank, pid, step in dict.fromkeys(re.findall(BEGINS, self.text)):
            one = next((one for one in found if int(rank) not in one), None)
            if one is None:
                found.append(one := {})
            one[int(rank)] = (int(pid), int(step))
        return found

    def wait_for_start(self, number: int) -> int:
        """Wait until both ranks of the start with this number, counted from 1, have begun. Returns where they begin."""
        self._wait(lambda: len(self.starts()) >= number and len(self.starts()[number - 1]) == 2)
        begins = {step for _, step in self.starts()[number - 1].values()}
        assert len(begins) == 1
        return begins.pop()

    def wait_for_epochs(self, count: int) -> int:
        """Wait until so many more epochs are finished. Returns the step of the last one."""
        before = len(re.findall(FINISHED, self.text))
        self._wait(lambda: len(re.findall(FINISHED, self.text)) >= before + count)
        return max(map(int, re.findall(FINISHED, self.text)))

    def wait_for_text(self, pattern: str) -> None:
        self._wait(lambda: re.search(pattern, self.text) is not None)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS_MAX
        while not is_over():
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.01)


@pytest.fixture
def started() -> Iterator[list[Job]]:
    """Launchers that are ended with the test."""
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.kill()


def torchrun(*arguments: str, n_ranks: int = 2) -> list[str | Path]:
    command: list[str | Path] = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", str(n_ranks), *arguments]


def training(pools: Path | str = "pools") -> list[str | Path]:
    return [EXAMPLES / "train_ranks.py", "--pools", pools, "--epochs", str(EPOCHS)]


def ends(text: str) -> list[str]:
    return sorted(set(re.findall(ENDED, text)))


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """How a run ends that never was killed, and had no lightck."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ended = [forked(partial(run_without_lightck, rank, port)) for rank in range(2)]
    lines = sorted(line for text in ended for line in re.findall(ENDED, text()))
    assert len(lines) == 2
    return lines


def run_without_lightck(rank: int, port: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
    torch.distributed.init_process_group("gloo")
    runpy.run_path(str(EXAMPLES / "train_ranks.py"))["train"]("none", EPOCHS)


def forked(work: Callable[[], None]) -> Callable[[], str]:
    """Run this in a forked process, which need not import torch again. The result waits for what it printed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(write, 1)
            sys.stdout = os.fdopen(1, "w")
            work()
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(write)

    def printed() -> str:
        with os.fdopen(read) as source:
            text = source.read()
        os.waitpid(pid, 0)
        return text

    return printed


def until(is_over: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS_MAX
    while not is_over():
        assert time.monotonic() < end
        time.sleep(0.01)


def kill_one(job: Job, number: int, chosen: random.Random, spread: int = 6) -> None:
    """Kill one rank of the start with this number (from 1) somewhere in its passes, and look where the next one begins.
    ``spread``: in one of so many passes."""
    job.wait_for_start(number)
    finished = job.wait_for_epochs(chosen.randint(1, spread))
    time.sleep(chosen.random() * 0.03)
    os.kill(job.starts()[number - 1][chosen.randint(0, 1)][0], signal.SIGKILL)
    goes_on_behind(job, number + 1, finished)


def goes_on_behind(job: Job, number: int, finished: int) -> None:
    """Wait for the next start. It has lost at most one finished step."""
    begins = job.wait_for_start(number)
    print(f"ended behind step {finished}, and goes on at {begins}")
    assert finished - 1 <= begins < STEPS


@pytest.mark.parametrize("n_kills", [1, pytest.param(6, marks=pytest.mark.long)])
def test_torchrun_starts_the_group_again_and_the_bits_are_the_same(folder, started, expected, n_kills):
    chosen = random.Random(n_kills)
    job = Job([*torchrun("--max-restarts", str(n_kills)), *training()], folder)
    started.append(job)
    for number in range(1, n_kills + 1):
        kill_one(job, number, chosen, spread=6 if n_kills == 1 else 2)
    job.end()
    assert ends(job.text) == expected


@pytest.mark.long
@pytest.mark.parametrize("site", ["word", "ack", "block"])
def test_a_rank_that_is_killed_in_attach_holds_nobody_up(folder, started, expected, site):
    """In the first attempt while checkpoint 0 is made, in the next one, and in the adoption of a later one."""
    kill = f'[ "$RANK" = 1 ] && case $TORCHELASTIC_RESTART_COUNT in 0|1|3) export LIGHTCK_KILL={site}:1;; 2) export '
    kill += f'LIGHTCK_KILL={site}:40;; esac; exec "$@"'
    inner = ["bash", "-c", kill, "rank", sys.executable, *training()]
    job = Job([*torchrun("--max-restarts", "5", "--no-python"), *inner], folder)
    started.append(job)
    job.end()
    begins = [step for one in job.starts() for _, step in one.values()]
    print("begins at", begins)
    assert begins[-1] > 0
    assert ends(job.text) == expected


@pytest.mark.long
def test_a_world_of_one_goes_on_alone_and_with_a_second_host_again(folder, started):
    """``--nnodes 1:2``: two agents on this machine. One is lost with its rank, and later comes back."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,timeout=100"]
    command += [*training()[:-1], "100000"]
    first = Job(command, folder)
    started.append(first)
    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)  # it serves the rendezvous
    second = Job(command, folder)
    started.append(second)
    first.wait_for_text("rank 0 is process")
    second.wait_for_text("rank 1 is process")
    finished = first.wait_for_epochs(3)
    os.kill(second.process.pid, signal.SIGKILL)
    os.kill(second.starts()[0][1][0], signal.SIGKILL)

    until(lambda: len(first.starts()) == 2)
    assert first.starts()[1][0][1] >= finished - 1
    assert len(list((folder / "pools").glob("*.pool"))) == 1
    finished = first.wait_for_epochs(3)
    again = Job(command, folder)
    started.append(again)
    again.wait_for_text("rank 1 is process")
    assert again.starts()[0][1][1] >= finished - 1
    first.wait_for_epochs(1)
    assert len(list((folder / "pools").glob("*.pool"))) == 2


@pytest.mark.long
def test_ranks_that_outlive_torchrun_keep_a_second_group_out(folder, started):
    """A killed torchrun leaves its ranks behind. They go on, and the pools have one writer each."""
    arguments = [*training()[:-1], "100000"]
    first = Job([*torchrun(), *arguments], folder)
    started.append(first)
    first.wait_for_epochs(1)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    second = Job([*torchrun(), *arguments], folder)
    started.append(second)
    second.end(None)
    assert second.process.returncode != 0
    pids = [pid for pid, _ in first.starts()[0].values()]
    assert re.search(rf"PoolLockedError: .* is open in another process \(pid ({pids[0]}|{pids[1]}): ", second.text)
    assert not second.starts()
    before = len(first.text)
    until(lambda: len(first.text) > before)  # the first group is not disturbed

    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    finished = int(re.findall(FINISHED, first.text)[-1])
    third = Job([*torchrun(), *arguments], folder)  # at once: it waits until the killed ranks have ended
    started.append(third)
    assert third.wait_for_start(1) >= finished - 1


@pytest.mark.long
def test_a_smaller_world_takes_no_pool_of_a_rank_that_stands_still(folder, started):
    """One rank is stopped, not killed: when it wakes up, it would write. It keeps its pool until it has ended."""
    arguments = [*training()[:-1], "100000"]
    first = Job([*torchrun(), *arguments], folder)
    started.append(first)
    first.wait_for_epochs(2)
    stopped = first.starts()[0][1][0]
    os.kill(stopped, signal.SIGSTOP)
    os.kill(first.process.pid, signal.SIGKILL)
    os.kill(first.starts()[0][0][0], signal.SIGKILL)
    finished = max(map(int, re.findall(FINISHED, first.text)))

    before = sorted(path.name for path in (folder / "pools").glob("*.pool"))
    alone = Job([*torchrun(n_ranks=1), *arguments], folder)
    started.append(alone)
    alone.end(None)
    assert alone.process.returncode != 0
    assert re.search(rf"PoolLockedError: .* is open in another process \(pid {stopped}: ", alone.text)
    assert sorted(path.name for path in (folder / "pools").glob("*.pool")) == before

    os.kill(stopped, signal.SIGKILL)
    again = Job([*torchrun(n_ranks=1), *arguments], folder)
    started.append(again)
    until(lambda: bool(again.starts()))
    assert again.starts()[0][0][1] >= finished - 1


# -- Slurm -------------------------------------------------------------------------------------------------------------


def killed_and_requeued(job: Job, requeue: Callable[[], object], chosen: random.Random) -> None:
    """Kill a rank; let the batch script requeue the job; then requeue it from outside, as at a preemption."""
    kill_one(job, 1, chosen)
    finished = job.wait_for_epochs(2)
    requeue()
    goes_on_behind(job, 3, finished)
    job.end()


def slurm_job(folder: Path, **variables: str) -> Job:
    (folder / "examples").symlink_to(EXAMPLES)
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    command = ["sbatch", "--wait", EXAMPLES / "launch_slurm.sh", *training()[1:]]
    return Job(command, folder, folder / "slurm-1.out", **variables)


def test_slurm_queues_the_job_again_after_a_kill_and_after_a_requeue(folder, started, expected):
    """With stand-ins of Slurm's commands."""
    (folder / "bin").mkdir()
    slurm_stand_in.install(folder / "bin")
    variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_STAND_IN": str(folder)}
    job = slurm_job(folder, **variables)
    started.append(job)
    requeue = partial(subprocess.run, [folder / "bin" / "scontrol", "requeue", "1"], env=variables, check=True)
    killed_and_requeued(job, requeue, random.Random(2))
    assert ends(job.text) == expected


@pytest.mark.long
def test_slurm_itself_queues_the_job_again(folder, started, expected):
    root = slurm_of_one.root()
    if root is None:
        pytest.skip("Slurm is not here: see slurm_of_one")
    with slurm_of_one.running(root, folder / "slurm") as variables:
        job = slurm_job(folder, **variables)
        started.append(job)
        requeue = partial(subprocess.run, ["scontrol", "requeue", "1"], env={**os.environ, **variables}, check=True)
        killed_and_requeued(job, requeue, random.Random(3))
    assert ends(job.text) == expected


# -- submitit and Ray --------------------------------------------------------------------------------------------------


def test_submitit_submits_the_job_again(folder, started, expected):
    pytest.importorskip("submitit")
    job = Job([sys.executable, EXAMPLES / "launch_submitit.py", *training()[1:]], folder, folder / "jobs")
    started.append(job)
    kill_one(job, 1, random.Random(4))
    job.end()
    assert ends(job.text) == expected


@pytest.mark.long
def test_submitit_queues_a_preempted_job_again(folder, started, expected):
    """Each task gets the signal that Slurm sends before it takes a machine away."""
    pytest.importorskip("submitit")
    job = Job([sys.executable, EXAMPLES / "launch_submitit.py", *training()[1:]], folder, folder / "jobs")
    started.append(job)
    job.wait_for_start(1)
    finished = job.wait_for_epochs(2)
    for pid, _ in job.starts()[0].values():
        os.kill(pid, signal.SIGUSR2)
    goes_on_behind(job, 2, finished)
    job.end()
    assert ends(job.text) == expected
    assert len(list((folder / "jobs").glob("*_submitted.pkl"))) == 1, "it is one job"


@pytest.mark.long
def test_ray_starts_the_workers_again(folder, started, expected):
    pytest.importorskip("ray.train")
    job = Job([sys.executable, EXAMPLES / "launch_ray.py", *training()[1:]], folder, RAY_DEDUP_LOGS="0")
    started.append(job)
    for number in (1, 2):
        kill_one(job, number, random.Random(number), spread=3)
    job.end()
    assert ends(job.text) == expected
