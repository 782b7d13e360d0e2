"""``lightck bench``: outside a checkout it measures this machine; in a checkout it runs the bench of the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from calls import PROGRAM, ROOT, assert_harmless, call, call_json, environment

import lightck
from lightck.cli.bench import verdict_on
from lightck.cli.machine_speed import Share, Speed

SMALL = """
import sys
from lightck.__main__ import run
from lightck.cli import machine_speed as it
it._COPY_NBYTES, it._COPY_ROUNDS, it._BATCH, it._WARM_UP, it._COUNTED = 4 << 20, 2, 16, (1, 1, 0.0), (5, 5, 0.0)
sys.argv[0] = "lightck"
run()
"""
"""A program that runs the command with a smaller measurement."""


def measured(cwd: Path, *words: Any) -> subprocess.CompletedProcess[str]:
    """Run ``lightck bench`` as a process in this working directory."""
    command = [sys.executable, "-c", SMALL, "bench", *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)
    assert_harmless(done.stdout + done.stderr)
    return done


def checkout(at: Path, version: str = lightck.__version__) -> Path:
    """Make a fake checkout, whose bench prints that it ran."""
    (at / "bench").mkdir(parents=True)
    (at / "pyproject.toml").write_text('[project]\nname = "lightck"\ndynamic = ["version"]\n\n[tool.x]\nname = "y"\n')
    if version == lightck.__version__:  # what a command that stands in it imports is the same lightck
        (at / "lightck").symlink_to(Path(lightck.__file__).parent)
    else:
        package_saying(at, f'"""It."""\n\n__version__ = "{version}"\n')
    (at / "bench" / "__init__.py").write_text("")
    (at / "bench" / "command.py").write_text(
        "import click\n"
        "print('code of the checkout')\n"
        "@click.command()\n"
        "@click.argument('words', nargs=-1)\n"
        "def command(words): print('with', *words)\n"
    )
    at.chmod(0o755)
    (at / "bench").chmod(0o755)
    return at


def package_saying(root: Path, text: str) -> None:
    (root / "lightck").mkdir()
    (root / "lightck" / "__init__.py").write_text(text)


def in_it(cwd: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process whose first folder on sys.path is ``cwd``, as with ``python -m``."""
    return subprocess.run(
        [*PROGRAM, "bench", *words], cwd=cwd, env=environment(**env), capture_output=True, text=True, check=False
    )


# -- this machine ----------------------------------------------------------------------------------------------------


def test_outside_a_checkout_this_machine_is_measured(tmp_path, folder):
    done = measured(tmp_path, "--pool-dir", folder)
    assert done.returncode == 0, done.stderr
    for word in ("memcpy in memory", "lightck into it, with checksums", "saves nothing, again", "torch.save"):
        assert word in done.stdout
    assert "at each step costs" in done.stdout.splitlines()[-2]
    assert done.stdout.splitlines()[-1].startswith("Medians of 5 rounds.")
    assert f"Measuring in {folder}: requested by --pool-dir." in done.stderr
    assert not list(folder.iterdir())
    assert not list(tmp_path.iterdir())


def test_in_a_checkout_too_where_it_is_asked_for_and_as_an_object(folder):
    done = measured(ROOT, "machine", "--json", "--threads", 1, "--pool-dir", folder)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["machine"]["threads"] == 1
    assert facts["rounds"] == 5
    assert len(facts["bytes_per_second"]) == 3
    assert min(*facts["bytes_per_second"].values(), *facts["step_seconds"].values()) > 0
    assert facts["step_seconds"].keys() - facts["added"].keys() == {"saves nothing"}
    assert facts["held_up_seconds"].keys() == {"lightck", "torch.save"}
    assert facts["state_nbytes"] > 40e6
    assert "at each step costs" in facts["verdict"]
    assert not list(folder.iterdir())


def test_a_folder_without_room_is_refused_before_anything_is_measured(folder, monkeypatch):
    monkeypatch.setattr("lightck.demo.place.free_nbytes", lambda _: 1 << 20)
    done = call("bench", "machine", "--pool-dir", folder)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"Nothing can be measured in {str(folder)!r}: the folder has 1.0 MB free" in done.stderr


def found(again: Share, ours: float, theirs: float, is_synced: bool = False) -> Speed:
    added = {"again": again, "lightck": Share(ours, ours, ours), "torch.save": Share(theirs, theirs, theirs)}
    return Speed({}, {}, {}, 0, is_synced, 5, {}, added, {})


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (0.034, 0.41, "costs 3.4 % of a step on this medium; torch.save at each step costs 41.0 %."),
        (0.09, 0.41, 'costs 41.0 %. interval="auto" saves less often, so that checkpoints cost at most 3 %.'),
        (
            0.02,
            0.41,
            "noise on this medium: 2.0 % of a step, where two equal trainings differ by up to 3.0 %; torch.save",
        ),
        (-0.2, 0.41, "is within the noise on this medium: -20.0 % of a step"),
        (0.02, 0.03, "too large to measure a cost: two equal trainings differ by up to 3.0 % of a step, and"),
    ],
)
def test_the_verdict_claims_no_more_than_equal_trainings_let_it(ours, theirs, said):
    assert said in verdict_on(found(Share(0.01, -0.03, 0.02), ours, theirs))


def test_a_cost_that_may_as_well_be_nothing_is_none():
    speed = found(Share(0, -0.01, 0.01), 0.09, 0.41)
    speed.added["lightck"] = Share(0.09, -0.04, 0.2)
    assert "is within the noise on this medium: 9.0 % of a step" in verdict_on(speed)
    speed.added["torch.save"] = Share(0.41, -0.04, 0.9)
    assert verdict_on(speed).startswith("The noise is too large")


def test_a_torch_save_that_is_made_durable_is_called_so():
    assert "torch.save and fsync at each step" in verdict_on(found(Share(0, 0, 0), 0.1, 0.2, is_synced=True))


# -- the bench of a checkout -----------------------------------------------------------------------------------------


def test_in_a_checkout_it_is_the_bench_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert "[TABLE]..." in call("bench", "--help").stdout
    done = call("bench", "many", "--show", "--results", tmp_path)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    monkeypatch.chdir(tmp_path)
    assert "[TABLE]..." not in call("bench", "--help").stdout
    assert "[TABLE]..." in call("bench", "--checkout", ROOT, "--help").stdout
    assert "[TABLE]..." not in call("bench", "--checkout", ROOT, "machine", "--help").stdout
    assert call_json("bench", f"--checkout={ROOT}", "--show", "many", "--results", tmp_path) == (0, {"many": {}})


@pytest.mark.parametrize("words", [["recovery"], ["--small"], ["--check", "--json"], ["machine", "--only", "x"]])
def test_outside_of_one_tables_and_their_options_say_where_they_are(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("bench", *words)
    assert done.exit_code == 2
    assert "in a checkout of lightck" in done.stderr


def test_code_of_a_checkout_runs_where_the_user_stands_in_its_root(tmp_path):
    root = checkout(tmp_path / "it")
    assert in_it(root, "a", "b").stdout == "code of the checkout\nwith a b\n"
    for elsewhere in (tmp_path, root / "bench"):
        assert "code of the checkout" not in in_it(elsewhere, "--help").stdout
    assert "code of the checkout" not in in_it(root, "machine", "--help").stdout


def test_shell_completion_runs_no_code_of_a_checkout(tmp_path):
    root = checkout(tmp_path / "it")
    asked = {"_LIGHTCK_COMPLETE": "bash_complete", "COMP_WORDS": "lightck bench --", "COMP_CWORD": "2"}
    code = "import sys; sys.argv = ['lightck']; from lightck.cli import main; main(prog_name='lightck')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment(**asked), capture_output=True, text=True, check=False
    )
    assert "plain,--pool-dir" in done.stdout
    assert "code of the checkout" not in done.stdout


def test_a_checkout_of_another_version_is_not_run(tmp_path, monkeypatch):
    other = checkout(tmp_path / "other", "9.9.9")
    done = call("bench", "--checkout", other)
    assert (done.exit_code, done.stdout) == (2, "")
    own = lightck.__version__
    assert f"{str(other)!r} is a checkout of lightck 9.9.9, and lightck {own} is installed" in done.stderr
    assert f"Check out lightck {own} in that folder, or install lightck 9.9.9." in done.stderr
    monkeypatch.chdir(other)
    done = call("bench", "--help")
    assert (done.exit_code, "[TABLE]..." in done.stdout) == (0, False)
    assert f"The bench of this checkout (lightck 9.9.9) is not run: the installed lightck is {own}." in done.stderr


@pytest.mark.parametrize("lacks", ["everything", "bench", "project", "name", "package", "version"])
def test_what_is_no_checkout_is_refused(lacks, tmp_path):
    root = tmp_path / "it"
    if lacks == "everything":
        root.mkdir()
    else:
        checkout(root)
    if lacks == "bench":
        (root / "bench" / "command.py").unlink()
    if lacks == "project":
        (root / "pyproject.toml").write_text('name = "lightck"\n')
    if lacks == "name":
        (root / "pyproject.toml").write_text('[project]\nname = "x"\n')
    if lacks in ("package", "version"):
        (root / "lightck").unlink()  # the link
    if lacks == "version":
        package_saying(root, "version = None\n")
    code, facts = call_json("bench", "--checkout", root, "many")
    assert code == 2
    assert facts["error"]["class"] == "BenchError"
    assert f"{str(root)!r} is no checkout of lightck: " in facts["error"]["message"]


@pytest.mark.parametrize("place", [".", "bench"])
def test_a_checkout_that_others_can_write_to_is_not_run(place, tmp_path):
    root = checkout(tmp_path / "it")
    (root / place).chmod(0o777)
    done = in_it(root)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"others can write to '{(root / place).resolve()}'" in done.stderr
    assert "code of the checkout" not in in_it(root, "machine", "--help").stdout


def test_another_package_of_that_name_is_not_taken_for_the_checkout_s(tmp_path):
    named, first = checkout(tmp_path / "named"), checkout(tmp_path / "first")
    done = in_it(tmp_path, "--checkout", str(named), PYTHONPATH=f"{ROOT}:{first}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Python finds another package named bench" in done.stderr
