"""The examples as a user runs them: killed in the middle, run again, and compared with a run that never was."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import every_second

import lightck

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL_GPT = ["--layers", "2", "--width", "64", "--heads", "2", "--context", "32"]


def run(example: str, *arguments: str | Path, kill: str | None = None, cwd: Path) -> str:
    """Standard output of one run; ``kill`` is a site and its number (``LIGHTCK_KILL``), where it dies."""
    environment = {**os.environ, "PYTHONPATH": str(Path(lightck.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    if kill:
        environment["LIGHTCK_KILL"] = kill
    command = [sys.executable, EXAMPLES / example, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
    return done.stdout


@pytest.mark.parametrize("kill", every_second(["word:7", "block:60"]))
def test_digits_end_with_the_same_bits_after_a_kill(folder, kill):
    arguments = ["--epochs", "2", "--batch", "128"]
    reference = run("train_digits.py", *arguments, "--pool", "none", cwd=folder)
    run("train_digits.py", *arguments, kill=kill, cwd=folder)
    resumed = run("train_digits.py", *arguments, cwd=folder)
    assert re.search(r"resumed at step [1-9]", resumed)
    assert resumed.splitlines()[-2:] == reference.splitlines()[-2:]  # the last pass' loss and accuracy; the weights


def test_digits_go_on_behind_a_pass_that_was_finished(folder):
    """12 steps make a pass: the kill comes when the 12th is committed, and nothing of the 13th."""
    arguments = ["--epochs", "2", "--batch", "128"]
    run("train_digits.py", *arguments, kill="ack:12", cwd=folder)
    resumed = run("train_digits.py", *arguments, cwd=folder)
    assert re.search(r"resumed at step 12\nepoch +1 +finished before .*\nepoch +2 +loss ", resumed)


def test_ranks_that_torchrun_starts_again_in_place_end_with_the_same_bits(folder):
    def launched(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(Path(lightck.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "3", EXAMPLES / "train_ranks.py", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        print(done.stderr)
        assert done.returncode == 0
        return done.stdout

    def ends(text: str) -> set[str]:
        """The last line of each rank. It may be there twice: a thread of gloo can abort a process that is ending, with
        lightck and without it, and then torchrun starts all ranks again."""
        return set(re.findall(r"rank \d ended at step 64 with weights -?0x1\.[0-9a-f]+p[+-]\d+", text))

    reference = launched("--pools", "none")
    restarted = launched("--crash-at", "20")
    steps = re.findall(r"begins at step (\d+)", restarted)  # the lines of two ranks may be joined
    assert steps[:4] in (["0", "0", "19", "19"], ["0", "0", "20", "20"])
    assert len(ends(reference)) == 2
    assert ends(restarted) == ends(reference)


def test_fine_tuning_writes_little_and_its_pool_needs_no_base(folder):
    run(
        "train_gpt.py",
        "--pool",
        "base.pool",
        "--epochs",
        "1",
        "--updates",
        "4",
        "--batch",
        "2",
        *SMALL_GPT,
        "--bytes",
        "60000",
        "--workers",
        "0",
        cwd=folder,
    )
    arguments = ["--base", "base.pool", "--updates", "12", "--batch", "2", "--rank", "2", "--print-every", "4"]
    arguments += SMALL_GPT
    run("finetune_lora.py", *arguments, kill="ack:5", cwd=folder)
    out = run("finetune_lora.py", *arguments, cwd=folder)
    assert "base: step 4 of base.pool" in out
    assert re.search(r"resumed at step [45]\n", out)
    parameters = float(re.search(r"([\d.]+) MB of parameters", out)[1])
    each = float(re.findall(r"([\d.]+) MB per checkpoint", out)[-1])
    assert 0 < each < 0.3 * parameters

    base = lightck.recover(folder / "base.pool").model
    tuned = lightck.recover(folder / "lora.pool")
    assert tuned.step == 12
    assert tuned.model["blocks.0.qkv.base.weight"].equal(base["blocks.0.qkv.weight"])
    assert tuned.model["blocks.0.qkv.up"].abs().sum() > 0


def test_saves_of_dcp_are_gone_on_from_by_one_process_and_by_another_number_of_ranks(folder):
    reference = run("train_dcp.py", "--steps", "20", "--path", "reference.pool", cwd=folder)

    def launched(n_ranks: int, *arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(Path(lightck.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
        command += [EXAMPLES / "train_dcp.py", "--steps", "20", "--path", "pools", *arguments]
        for attempt in range(3):
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
            # A thread of gloo's aborts a process now and then while its group ends, also without lightck.
            if done.returncode == 0 or "terminate called without an active exception" not in done.stderr:
                break
            shutil.rmtree(folder / "pools", ignore_errors=True)
            if (folder / "before").exists():
                shutil.copytree(folder / "before", folder / "pools")
            print(f"attempt {attempt}: gloo has aborted a rank")
        assert (done.returncode == 0) == (not arguments), done.stderr
        shutil.rmtree(folder / "before", ignore_errors=True)
        shutil.copytree(folder / "pools", folder / "before")
        return done.stdout

    alone = [sys.executable, EXAMPLES / "train_dcp.py", "--steps", "20", "--crash-at", "13"]
    environment = {**os.environ, "PYTHONPATH": str(Path(lightck.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(alone, cwd=folder, env=environment, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    resumed = run("train_dcp.py", "--steps", "20", cwd=folder)
    assert resumed.splitlines() == ["goes on after step 10", reference.strip()]
    launched(2, "--crash-at", "8")
    of_ranks = launched(3)
    assert of_ranks.count("goes on after step 5") == 3  # ranks that print at once may share a line
    assert of_ranks.count("step 20, loss ") == 1
