"""The examples for Slurm and Kubernetes: ended by signals as the schedulers send them, started again, bits compared.

Slurm is the stand-in of ``slurm_stand_in``. Of Kubernetes there is what a kubelet does to a container: its command as
process 1 of a namespace, SIGTERM to that process alone, and SIGKILL to all after the grace period.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiers.kills import children_of

import lightck
from lightck.errors import LightckError
from lightck.tiers.rates import seconds_of

from . import slurm_stand_in

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
UNTIL, PAUSE = 150, 0.02
LENGTH = ["--until", str(UNTIL), "--pause", str(PAUSE)]
STOPPED = 75


def until(is_true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def step_in(place: Path) -> int:
    with suppress(LightckError):
        return lightck.recover(place).step
    return 0


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), *filter(None, [more.pop("path", "")]), os.environ["PATH"]]
    )
    imports = os.pathsep.join(each for each in sys.path if each)
    return {**os.environ, "PATH": path, "PYTHONPATH": imports, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """How the training ends that nothing interrupts."""
    folder = tmp_path_factory.mktemp("reference")
    words = [sys.executable, EXAMPLES / "train_preempted.py", "--pool", folder / "a.pool", "--tier", folder / "tier"]
    words += ["--until", str(UNTIL)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    return weights_of(done.stdout)


def weights_of(text: str) -> str:
    found = re.search(rf"ended at step {UNTIL} with weights (\S+)", text)
    assert found, text
    return found[1]


def starts(text: str) -> list[int]:
    return [int(each) for each in re.findall(r"begins at step (\d+)", text)]


# -- Slurm


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_signals_the_script_and_queues_the_job_again(folder, tmp_path, weights, number):
    (folder / "bin").mkdir()
    (folder / "examples").symlink_to(EXAMPLES)
    slurm_stand_in.install(folder / "bin")
    pool, tier, log = folder / "run.pool", tmp_path / "tier", folder / "slurm-1.out"
    words = [folder / "bin" / "sbatch", "--wait", EXAMPLES / "slurm" / "train.sbatch", "--pool", pool, "--tier", tier]
    variables = environment(path=str(folder / "bin"), SLURM_STAND_IN=str(folder))
    with subprocess.Popen([*words, *LENGTH], cwd=folder, env=variables) as job:
        try:
            until(lambda: step_in(pool) > 5)
            (script,) = children_of(job.pid)
            os.kill(script, number)
            until(lambda: len(starts(log.read_text())) == 2)
            assert job.wait(timeout=120) == 0
        finally:
            job.kill()
    text = log.read_text()
    assert 5 < starts(text)[1] < UNTIL
    assert "session.should_stop is True" in text
    assert weights_of(text) == weights
    assert step_in(tier) == UNTIL


def test_the_script_of_slurm_ends_with_the_status_of_a_training_that_fails(folder):
    (folder / "examples").symlink_to(EXAMPLES)
    words = [
        "bash",
        EXAMPLES / "slurm" / "train.sbatch",
        "--tier",
        folder / "no" / "folder",
        "--pool",
        folder / "a.pool",
    ]
    done = subprocess.run(
        words, cwd=folder, env=environment(SLURM_JOB_ID="1"), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "TierError" in done.stderr


def test_the_script_of_slurm_ends_with_the_status_of_a_command_that_ends_at_once(folder):
    """It has ended before the script looks at it: ``kill -0`` waits until then."""
    (folder / "bin").mkdir()
    (folder / "bin" / "lightck").write_text("#!/bin/sh\nexit 3\n")
    (folder / "bin" / "lightck").chmod(0o755)
    (folder / "early").write_text(
        'kill() { [ "$1" != -0 ] || while builtin kill -0 "$2"; do sleep 0.01; done; false; }\n'
    )
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    variables = environment(PATH=path, SLURM_JOB_ID="1", BASH_ENV=str(folder / "early"))
    words = ["bash", EXAMPLES / "slurm" / "train.sbatch"]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert "integer expression" not in done.stderr
    assert done.returncode == 3


# -- Kubernetes


class Pod:
    """The container of the manifest, with folders in place of its volumes."""

    def __init__(self, pool: Path, tier: Path, cwd: Path) -> None:
        self.spec = yaml.safe_load((EXAMPLES / "kubernetes" / "job.yaml").read_text())["spec"]
        (container,) = self.spec["template"]["spec"]["containers"]
        assert container["command"][0] == "lightck", "no shell"
        (sidecar,) = self.spec["template"]["spec"]["initContainers"]

        def here(words: list[str]) -> list[str]:
            return [re.sub("^/pool(?=/)", str(pool), re.sub("^/tier(?=/)", str(tier), word)) for word in words]

        self.words, self.words_of_sidecar = here([*container["command"], *container["args"]]), here(sidecar["command"])
        self.grace = self.words[self.words.index("--grace") + 1]
        self._is_first = subprocess.run([*_UNSHARE, "true"], check=False).returncode == 0
        self._process = subprocess.Popen(
            [*(_UNSHARE if self._is_first else ()), *self.words, *LENGTH],
            cwd=cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def terminate(self) -> None:
        (first,) = children_of(self._process.pid) if self._is_first else (self._process.pid,)
        os.kill(first, signal.SIGTERM)

    def kill(self) -> None:
        """All processes end with the first one of the namespace."""
        if self._process.poll() is None:
            until(lambda: not self._is_first or children_of(self._process.pid))  # it may have begun just now
            (first,) = children_of(self._process.pid) if self._is_first else (self._process.pid,)
            os.kill(first, signal.SIGKILL)
            self._process.communicate()

    def ended(self) -> tuple[int, str, str]:
        said, logged = self._process.communicate(timeout=120)
        return self._process.returncode, said, logged


_UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc")


@pytest.fixture
def node(folder: Path, tmp_path: Path) -> Iterator[Callable[[], Pod]]:
    """Starts the pod, each time on a node that has no pool."""
    pods: list[Pod] = []
    (folder / "train_preempted.py").symlink_to(EXAMPLES / "train_preempted.py")

    def begin() -> Pod:
        (folder / str(len(pods))).mkdir()
        pods.append(Pod(folder / str(len(pods)), tmp_path, folder))
        return pods[-1]

    yield begin
    for each in pods:
        each.kill()


def test_the_next_pod_goes_on_on_another_node(node, folder, tmp_path, weights):
    pod = node()
    until(lambda: step_in(folder / "0" / "run.pool") > 5)
    pod.terminate()
    status, _, logged = pod.ended()
    assert status == STOPPED, logged
    step = step_in(folder / "0" / "run.pool")
    assert step_in(tmp_path / "run7") == step
    status, said, logged = node().ended()
    assert status == 0, logged
    assert starts(said) == [step]
    assert weights_of(said) == weights


def test_a_pod_that_is_killed_goes_on_from_the_tier_all_the_same(node, folder, tmp_path, weights):
    pod = node()
    until(lambda: step_in(tmp_path / "run7") and step_in(folder / "0" / "run.pool") > 5)
    pod.kill()
    held = step_in(tmp_path / "run7")
    status, said, logged = node().ended()
    assert status == 0, logged
    assert starts(said) == [held]
    assert weights_of(said) == weights


def test_the_sidecar_sends_what_a_container_leaves_that_is_killed(node, folder, tmp_path, weights):
    pod = node()
    pipe = subprocess.PIPE
    with subprocess.Popen(pod.words_of_sidecar, env=environment(), stdout=pipe, stderr=pipe, text=True) as sidecar:
        try:
            until(lambda: step_in(folder / "0" / "run.pool") > 5)
            pod.kill()
            sidecar.terminate()  # as the kubelet does when the container has ended
            _, err = sidecar.communicate(timeout=120)
        finally:
            sidecar.kill()
    assert sidecar.returncode == 0, err
    held = step_in(folder / "0" / "run.pool")
    assert step_in(tmp_path / "run7") == held
    status, said, logged = node().ended()
    assert status == 0, logged
    assert starts(said) == [held]
    assert weights_of(said) == weights


def test_the_manifest_gives_enough_time_and_counts_no_stop_as_a_failure(node):
    pod = node()
    spec: dict[str, Any] = pod.spec["template"]["spec"]
    assert seconds_of(pod.grace) + 20 <= spec["terminationGracePeriodSeconds"]
    codes, conditions = pod.spec["podFailurePolicy"]["rules"]
    assert (codes["action"], codes["onExitCodes"]["values"]) == ("Ignore", [STOPPED])
    assert (conditions["action"], conditions["onPodConditions"]) == ("Ignore", [{"type": "DisruptionTarget"}])
    assert spec["restartPolicy"] == "Never", "podFailurePolicy needs it"
    names = {each["name"] for each in spec["volumes"]}
    (sidecar,) = spec["initContainers"]
    assert sidecar["restartPolicy"] == "Always", "else the training would wait for its end"
    for container in (*spec["containers"], sidecar):
        assert {each["name"] for each in container["volumeMounts"]} == names
