"""The command as a process: pipes, terminals, signals, encodings, and which modules it imports."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys

import pytest
from calls import PROGRAM, ROOT, assert_harmless, call, environment, run
from click.testing import CliRunner
from toys import child_that_holds

import lightck
from lightck.cli import NAMES, inspect, main

pytestmark = pytest.mark.long

TRAIN = """
import sys, time, torch, lightck
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = lightck.attach(model, sys.argv[1], optimizer=optimizer)
for _ in range(3):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
session.flush()
print("ready", flush=True)
time.sleep(600)
"""


def test_a_closed_pipe_is_silent(good):
    read, write = os.pipe()
    os.close(read)
    for words in (["inspect", str(good), "--tensors"], ["inspect", str(good), "--json"], ["doctor"], ["--help"]):
        done = subprocess.run([*PROGRAM, *words], env=environment(), stdout=write, stderr=subprocess.PIPE, check=False)
        assert (done.returncode, done.stderr) == (141, b""), words
    os.close(write)


def closed(*descriptors):
    """A preexec function that closes these descriptors, as ``>&-`` and ``2>&-`` do in a shell."""
    return lambda: [os.close(each) for each in descriptors]


@pytest.mark.parametrize("words", [["inspect", "POOL"], ["verify", "POOL"], ["diff", "POOL", "POOL"], ["--help"]])
def test_a_closed_standard_output_is_an_error_and_no_damage(good, words):
    words = [*PROGRAM, *(str(good) if word == "POOL" else word for word in words)]
    done = subprocess.run(
        words, env=environment(), stderr=subprocess.PIPE, text=True, preexec_fn=closed(1), check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: No answer can be given: the standard output is closed.")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("buffering", ["0", "1"])
@pytest.mark.parametrize("words", [["inspect", "POOL"], ["inspect", "POOL", "--json"], ["doctor"], ["--help"]])
def test_an_output_without_room_is_reported_as_such(good, tmp_path, words, buffering):
    """A write beyond RLIMIT_FSIZE fails as on a full disk, after a part of it was written."""
    words = [*PROGRAM, *(str(good) if word == "POOL" else word for word in words)]
    env = {**environment(), "PYTHONUNBUFFERED": "" if buffering == "0" else "1"}
    with open(tmp_path / "out", "wb") as out:
        done = subprocess.run(
            words,
            env=env,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: The answer could not be printed whole: File too large. Make room")
    assert done.stderr.count("\n") == 1


def test_a_closed_standard_error_changes_no_status(good):
    """Not even where the progress bar checks whether stderr is a terminal."""
    code = (
        "import sys; from lightck.cli import main, output\n"
        "output.LONG_NBYTES = 0\n"
        "main(sys.argv[1:], prog_name='lightck')\n"
    )
    for command, status in ((["verify", str(good)], 0), (["frobnicate"], 2), (["verify", "/nowhere"], 2)):
        words = [sys.executable, "-c", code, *command]
        done = subprocess.run(words, env=environment(), stdout=subprocess.PIPE, preexec_fn=closed(2), check=False)
        assert done.returncode == status, command
        assert (b"OK: step 4" in done.stdout) == (status == 0)


def test_what_keeps_the_commands_from_loading_is_one_line():
    wrong = {**environment(), "LIGHTCK_ISA": "mmx"}
    done = subprocess.run([*PROGRAM, "inspect", "POOL"], env=wrong, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: LIGHTCK_ISA='mmx' cannot be used")
    assert done.stderr.count("\n") == 1


def test_text_in_a_pipe_is_whole_and_has_no_colours(good):
    done = run("inspect", good, "--tensors", COLUMNS="20", TERM="xterm-256color")
    assert done.stdout == call("inspect", good, "--tensors").stdout
    assert run("doctor", FORCE_COLOR="1").returncode == 0


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_for_terminals_that_want_them(good, env, coloured):
    terminal, ours = os.openpty()
    words = [*PROGRAM, "verify", str(good)]
    done = subprocess.run(words, env=environment(**env), stdout=ours, stderr=ours, check=False)
    os.close(ours)
    text = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert done.returncode == 0
    assert ("\x1b[32m" in text) == coloured
    assert "OK: step 4 can be recovered." in text


def test_a_terminal_that_lacks_letters_is_no_failure(folder, good):
    good = good.rename(folder / "größe→.pool")
    env = environment(PYTHONIOENCODING="latin-1")
    done = subprocess.run([*PROGRAM, "inspect", str(good)], env=env, capture_output=True, check=False)
    assert done.returncode == 0
    assert "größe\\u2192.pool" in done.stdout.decode("latin-1")


def test_a_path_that_is_no_text_is_no_failure(folder, good):
    path = os.path.join(os.fsencode(folder), b"\xff\xfe.pool")
    os.rename(good, path)
    done = subprocess.run([*PROGRAM, "inspect", path], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert_harmless(done.stdout + done.stderr)


def test_an_interrupt_ends_quietly_with_130(good, monkeypatch):
    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(inspect, "pool_facts", interrupted)
    result = call("inspect", good)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "\ninterrupted\n")


def test_a_bug_in_lightck_says_nothing_about_the_pool(good, monkeypatch):
    def mistaken(*_):
        raise ZeroDivisionError("in our code")

    monkeypatch.setattr(inspect, "pool_facts", mistaken)
    result = CliRunner().invoke(main, ["inspect", str(good)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "ZeroDivisionError: in our code" in result.stderr
    assert "\nerror: This is a bug in lightck, and says nothing about the pool." in result.stderr


def test_the_process_that_has_the_pool_is_named_without_its_tricks(pool):
    """A process can put escapes into its command line; they are shown as text."""
    words = [sys.executable, "-c", TRAIN, str(pool), "\x1b]0;title\x07evil"]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as training:
        try:
            assert training.stdout.readline() == "ready\n"
            done = run("inspect", pool)
            assert done.returncode == 0
            assert f"pid {training.pid}: " in done.stdout
            assert run("verify", "--deep", pool).returncode == 0
        finally:
            training.kill()
    assert "open in  no process" in run("inspect", pool).stdout


def test_nobody_is_named_where_only_the_lock_file_is_left(good):
    with open(f"{good}.lock", "w"):
        pass
    assert "open in  no process" in call("inspect", good).stdout


def test_a_child_that_reads_is_not_taken_for_the_writer(good):
    with child_that_holds(lambda: lightck.recover(good)):
        assert "open in  no process" in call("inspect", good).stdout


# -- help, usage, completion -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [None, *NAMES])
def test_help_says_what_it_is(command):
    result = call(*filter(None, [command]), "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.stdout
    for word in ("inspect", "verify", "diff", "export", "doctor", "completion", "demo", "bench"):
        assert command or word in result.stdout


def test_lightck_alone_prints_its_help_as_it_is():
    result = call()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == call("--help").stdout


@pytest.mark.parametrize(
    "words",
    [
        ["frobnicate"],
        ["inspect"],
        ["inspect", "a", "b"],
        ["inspect", "a", "--step", "-1"],
        ["verify", "--nope", "a"],
        ["export", "a"],
        ["export", "a", "b", "--format", "zip"],
        ["diff", "a"],
        ["completion", "csh"],
        ["demo", "--kills", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_error_line_and_status_2(words):
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "--help'" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["doctor"],
        ["completion", "zsh"],
        ["inspect", "/nowhere"],
        ["bench", "--help"],
        ["bench", "machine", "--help"],
    ],
    ids=" ".join,
)
def test_torch_is_loaded_only_where_it_is_needed(words):
    code = (
        "import sys\nfrom lightck.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    words = [sys.executable, "-c", code]  # in the checkout, where `bench` is its bench
    done = subprocess.run(words, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_what_they_were_although_they_come_late():
    code = (
        "import sys, lightck\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(lightck.__all__) <= set(dir(lightck))\n"
        "import lightck.restore.recover, lightck.session.attach\n"
        "assert callable(lightck.attach) and callable(lightck.recover)\n"
        "from lightck import *\n"
        "assert attach is lightck.attach and issubclass(lightck.errors.PoolError, LightckError)\n"
        "assert not hasattr(lightck, 'nothing')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    [["inspect"], ["verify", "POOL", "--step", "x"], ["frobnicate"], ["inject", "POOL", "COPY"], ["inspect", "--nope"]],
    ids=" ".join,
)
def test_wrong_usage_is_an_object_too_where_one_was_asked_for(words):
    result = call(*words, "--json")
    assert result.exit_code == 2
    facts = json.loads(result.stdout)
    assert set(facts) == {"error"}
    assert facts["error"]["class"] == "UsageError"
    assert f"error: {facts['error']['message']}" in result.stderr
    assert call(*words).stdout == ""
    assert call(*words, "--", "--json").stdout == ""


def test_what_keeps_a_command_from_loading_is_an_object_too():
    done = run("inspect", "POOL", "--json", LIGHTCK_ISA="mmx")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["message"].startswith("LIGHTCK_ISA='mmx' cannot be used")


@pytest.mark.parametrize("words", [["trace", "PATH/no.json"], ["demo", "--keep", "PATH/file/it"]], ids=" ".join)
def test_what_the_system_refuses_has_a_cure_too(tmp_path, words):
    (tmp_path / "file").write_text("mine")
    result = call(*(word.replace("PATH", str(tmp_path)) for word in words))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: '{tmp_path}/")
    assert "cannot be used: No" in result.stderr
    assert "Check the path" in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_script_of_a_shell(shell):
    result = call("completion", shell)
    assert result.exit_code == 0
    assert "_LIGHTCK_COMPLETE" in result.stdout


def completed(*words: str, cwd: str) -> list[str]:
    code = "import sys; sys.argv = ['lightck']; from lightck.cli import main; main(prog_name='lightck')"
    env = environment(_LIGHTCK_COMPLETE="bash_complete", COMP_WORDS=" ".join(words), COMP_CWORD=str(len(words) - 1))
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_commands_and_pools_are_completed(good, folder):
    (folder / "notes.txt").write_text("no pool")
    (folder / ".hidden").write_text("no pool")
    here = str(folder)
    assert completed("lightck", "ins", cwd=here) == ["plain,inspect"]
    assert completed("lightck", "inspect", "", cwd=here) == ["plain,good.pool"]
    assert completed("lightck", "verify", f"{folder}/g", cwd="/") == [f"plain,{folder}/good.pool"]
    assert completed("lightck", "verify", "no", cwd=here) == ["file,no"], "no pool fits: as the shell does it"
    (folder / "sub").mkdir()
    assert completed("lightck", "verify", "", cwd=here) == ["file,"], "the pool may lie in the folder"
    assert completed("lightck", "export", "good.pool", "x", "--format", "t", cwd=here) == ["plain,torch"]


def test_a_program_that_calls_a_command_can_print_afterwards(tmp_path, monkeypatch):
    """As ``runpy`` and notebooks do: afterwards they get their standard output back."""
    path = tmp_path / "out"
    with open(path, "w") as out, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", out)
        with pytest.raises(SystemExit):
            main(["--version"])
        print("and on")
    assert path.read_text().splitlines()[-1] == "and on"
    assert len(path.read_text().splitlines()) == 2
