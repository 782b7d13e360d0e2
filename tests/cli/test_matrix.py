"""Every command on every kind of path: the exit status, the stream of the output, and that no file was changed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from calls import call
from toys import adam, child_that_holds, net, pool_with, running_child, train

import lightck

OK, BAD, FAILED = 0, 1, 2
COMMANDS = ("inspect", "verify", "verify --deep", "diff", "export", "compact", "watch --count 1")
EXPECTED = {
    "good": (OK, OK, OK, OK, OK, OK, OK),
    "newest damaged": (OK, BAD, BAD, FAILED, OK, OK, OK),
    "all damaged": (OK, BAD, BAD, FAILED, BAD, BAD, OK),
    "truncated": (BAD, BAD, BAD, FAILED, BAD, BAD, BAD),
    "foreign": (FAILED,) * 7,
    "empty file": (FAILED,) * 7,
    "folder": (FAILED,) * 7,
    "link": (OK,) * 7,
    "missing": (FAILED,) * 7,
    "no checkpoint yet": (OK, OK, OK, FAILED, FAILED, FAILED, OK),
    # ``diff`` compares with another step of the same training.
    "gradients": (OK, OK, OK, BAD, OK, OK, OK),
    "gradients, base damaged": (OK, BAD, BAD, BAD, OK, OK, OK),
    "gradients, newest damaged": (OK, BAD, BAD, FAILED, OK, OK, OK),
}
CELLS = [(kind, command, row[i]) for kind, row in EXPECTED.items() for i, command in enumerate(COMMANDS)]


def words(command: str, pool: Path, other: Path, out: Path) -> list[str]:
    more = {"diff": [str(other)], "export": [str(out)], "compact": [str(out)]}
    return [*command.split(), str(pool), *more.get(command, [])]


def fingerprint(folder: Path) -> dict[str, tuple[str, int]]:
    """Name -> (content, time of the last write) of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = content, path.lstat().st_mtime_ns
    return found


def contents(folder: Path) -> dict[str, str]:
    """Contents without times: allocating an open pool's pages in the background changes the time of its file."""
    return {name: content for name, (content, _) in fingerprint(folder).items()}


@pytest.mark.parametrize(("kind", "command", "status"), CELLS, ids=[f"{kind}-{command}" for kind, command, _ in CELLS])
def test_each_command_on_each_kind_of_path(kind, command, status, made, good, folder, tmp_path):
    pool, out = made(kind), tmp_path / "out.safetensors"
    before = fingerprint(folder)
    result = call(*words(command, pool, good, out))
    assert result.exit_code == status, result.output
    assert fingerprint(folder) == before, "a command wrote beside or into the pool"
    assert bool(result.stderr) == (result.stdout == "")
    if result.stderr:
        [line] = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert str(pool) in line or str(good) in line
        assert line.count(". ") >= 1, "a fact and a cure"


@pytest.mark.parametrize(("kind", "command", "status"), CELLS, ids=[f"{kind}-{command}" for kind, command, _ in CELLS])
def test_each_command_gives_one_json_object(kind, command, status, made, good, tmp_path):
    result = call(*words(command, made(kind), good, tmp_path / "out.safetensors"), "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == status
    assert isinstance(facts, dict)
    if result.stderr:
        assert set(facts) == {"error"}
        assert f"error: {facts['error']['message']}\n" == result.stderr
        assert isinstance(facts["error"]["reasons"], list)
    else:
        assert "error" not in facts


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_on_a_pool_that_is_open_elsewhere(command, pool, good, tmp_path):
    def hold():
        model = net()
        optimizer = adam(model)
        session = lightck.attach(model, pool, optimizer=optimizer)
        train(model, optimizer, 3)
        session.flush()
        return session

    with child_that_holds(hold) as pid:
        before = contents(pool.parent)
        result = call(*words(command, pool, pool, tmp_path / "out.safetensors"))
        assert result.exit_code == OK, result.output
        assert contents(pool.parent) == before
        if command == "inspect":
            assert f"pid {pid}: " in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_drops_the_lock_of_a_session_in_this_process(command, pool, good, tmp_path):
    """The kernel drops a record lock when the process closes any descriptor of the file."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        result = call(*words(command, pool, pool, tmp_path / "out.safetensors"))
        assert result.exit_code == OK, result.output
        if command == "inspect":
            assert f"pid {os.getpid()}: " in result.stdout
        with running_child(lambda: refused(pool)):
            pass


def refused(pool: Path) -> None:
    with pytest.raises(lightck.LightckError, match="open in another process"):
        pool_with(pool, resume=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_on_a_pool_that_is_written_all_the_time(command, pool, tmp_path):
    stop = tmp_path / "stop"

    def work():
        model = net()
        optimizer = adam(model)
        with lightck.attach(model, pool, optimizer=optimizer, slots=3):
            train(model, optimizer, 5)
            (tmp_path / "ready").touch()
            while not stop.exists():
                train(model, optimizer, 1)
                time.sleep(0.02)  # the step time of a fast training

    with running_child(work):
        try:
            while not (tmp_path / "ready").exists():
                time.sleep(0.01)
            for number in range(5):
                result = call(*words(command, pool, pool, tmp_path / f"{number}.safetensors"))
                # diff reads its two sides one after the other, so they may be two checkpoints.
                assert result.exit_code in ((OK, BAD) if command == "diff" else (OK,)), result.output
        finally:
            stop.touch()
