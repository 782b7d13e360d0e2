"""The demo: its verdict, its kill plan, and one small run through the command line."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from module_at import module_at
from rich.console import Console

from lightck import cli
from lightck.demo import compare, place, plan, process, report, run

pytestmark = pytest.mark.long

STEPS = 3
EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = run.SIZES["tiny"]


def a_record(**changed):
    """The record of a run of ``STEPS`` updates without faults."""
    digests = {"weights/a": "1", "optimizer/state/0/exp_avg": "2", "rng/torch": "3"}
    recovered = {"step": STEPS, "digests": {name: digests[name] for name in list(digests)[:2]}}
    losses = {update: [float(update).hex()] for update in range(1, STEPS + 1)}
    record = {"losses": losses, "digests": digests, "imported_lightck": True, "recovered": recovered}
    return compare.Record(**copy.deepcopy({**record, **changed}))


REFERENCE = a_record(imported_lightck=False, recovered=None)


def found(survived, kills=()):
    return compare.differences(REFERENCE, survived, kills, STEPS)


# ---- the verdict ---------------------------------------------------------------------------------------------------


def test_equal_runs_have_no_differences():
    survived = a_record()
    survived.losses[2] *= 2  # computed again after a kill
    assert found(survived, (compare.Kill("timed", 2, 1, 0.1), compare.Kill("timed", 2, 2, 0.1))) == ()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"digests": {**REFERENCE.digests, "weights/a": "9"}}, "at the end: weights/a differs"),
        ({"digests": {**REFERENCE.digests, "rng/torch": "9"}}, "at the end: rng/torch differs"),
        ({"digests": {}}, "only one run has rng/torch"),
        ({"losses": {**REFERENCE.losses, 2: ["0x1p+1", "0x1.1p+1"]}}, "update 2: loss 2.0 in the reference run"),
        ({"losses": {1: ["0x1p+0"], 2: ["0x1p+1"]}}, "update 3: the killed run never reported it"),
        ({"recovered": None}, "did not read its pool"),
        ({"recovered": {"step": 2, "digests": {}}}, "the pool holds step 2"),
        ({"recovered": {"step": 3, "digests": {"weights/a": "1"}}}, "in the pool: only one run has optimizer"),
        ({"imported_lightck": False}, "did not import lightck"),
    ],
)
def test_each_difference_is_named(changed, said):
    assert said in "\n".join(found(a_record(**changed)))


@pytest.mark.parametrize("recovered", [0, 3])
def test_more_than_one_lost_update_is_a_difference(recovered):
    [difference] = found(a_record(), (compare.Kill("timed", 2, recovered, 0.1),))
    assert "finished updates lost" in difference


def test_a_difference_gives_exit_status_1(monkeypatch):
    kills = (compare.Kill("timed", 2, 1, 0.1),)
    wrong = found(a_record(digests={**REFERENCE.digests, "weights/a": "9"}), kills)
    result = run.Result(1, STEPS, "/p", "room", False, 1, kills, wrong, 1.0, 0.1, 0.0, 0.0, 10, 3, {"process": True})
    monkeypatch.setattr(run, "run_demo", lambda options, watch: result)
    for flags in ([], ["--json"]):
        answer = CliRunner().invoke(cli.main, ["demo", *flags])
        assert answer.exit_code == 1
        assert "weights/a differs" in answer.stdout
    assert json.loads(answer.stdout)["identical"] is False


def test_a_demo_that_cannot_be_done_gives_exit_status_2(monkeypatch, tmp_path):
    """If its training process fails, nothing was compared, so the exit status is not 1."""
    monkeypatch.setenv("LIGHTCK_BACKEND", "nonsense")
    words = ["demo", "--size", "tiny", "--kills", "1", "--steps", "10", "--pool-dir", str(tmp_path), "--json"]
    answer = CliRunner().invoke(cli.main, words)
    assert answer.exit_code == 2
    assert "'nonsense' is not known" in answer.stderr
    assert answer.stderr.splitlines()[-1].startswith("error: the training process ended")
    error = json.loads(answer.stdout)["error"]
    assert error["class"] == "DemoError"
    assert "This happened in the killed run" in error["message"]
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_never_killed_is_not_a_success():
    result = run.Result(1, STEPS, "/p", "room", False, 1, (), (), 1.0, 0.1, 0.0, 0.0, 10, 3, {})
    assert not result.ok


# ---- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [1, 2, 6, 20])
@pytest.mark.parametrize("seed", range(5))
def test_kills_lie_apart_inside_the_run_half_of_them_at_sites(kills, seed):
    steps = plan.fewest_steps(kills) + seed
    drawn = plan.draw(kills, steps, seed)
    after = [each.after for each in drawn]
    assert len(drawn) == kills
    assert after[0] >= 1
    assert after[-1] <= steps - plan.TAIL
    assert all(b - a >= plan.GAP for a, b in itertools.pairwise(after))
    assert sum(each.site is not None for each in drawn) == kills // 2
    assert all(0 <= each.delay <= plan.DELAY_STEPS_MAX for each in drawn)
    assert drawn == plan.draw(kills, steps, seed)


def test_fourteen_kills_pass_every_site():
    assert {each.site for each in plan.draw(14, 80, 0)} == {*plan.SITES, None}


def test_kill_settings_count_checkpoints_from_the_life_s_start():
    assert plan.kill_setting(plan.PlannedKill(9, "word", 0.0), position=5, blocks=10, seed=1) == "word:5"
    assert plan.kill_setting(plan.PlannedKill(9, "word", 0.0), position=11, blocks=10, seed=1) == "word:2"
    assert plan.kill_setting(plan.PlannedKill(9, None, 0.5), position=5, blocks=10, seed=1) is None
    site, count = plan.kill_setting(plan.PlannedKill(9, "block", 0.0), position=5, blocks=10, seed=1).split(":")
    assert site == "block"
    assert 30 < int(count) <= 40


# ---- the place -----------------------------------------------------------------------------------------------------


def test_the_pool_goes_where_there_is_room(monkeypatch, tmp_path):
    monkeypatch.setattr(place, "SHARED_MEMORY", tmp_path)
    assert place.temporary_parent(1)[0] == tmp_path
    folder, why = place.temporary_parent(1 << 60)
    assert folder != tmp_path
    assert "MiB free" in why


def test_the_temporary_folder_is_removed_and_the_kept_one_stays(tmp_path):
    with place.open_place(1, None, tmp_path) as temporary:
        temporary.pool.write_bytes(b"pool")
    assert not temporary.folder.exists()
    with place.open_place(1, tmp_path / "kept", None) as kept:
        kept.pool.write_bytes(b"pool")
    assert kept.pool.exists()


# ---- the children --------------------------------------------------------------------------------------------------


def plain(options):
    return options.arguments("none")


@pytest.mark.parametrize(
    ("steps", "said"), [(14, "15 updates (14, rounded up to 3 whole epochs)"), (15, "two runs of 15 updates, one")]
)
def test_rounding_of_steps_is_reported(tmp_path, steps, said):
    console = Console(file=io.StringIO())
    options = run.Options(kills=1, steps=steps, seed=7, size=TINY)
    report.Lines(console).opened(place.Place(tmp_path, "requested"), options)
    assert said in console.file.getvalue()


def test_the_plain_run_is_deterministic_and_never_imports_lightck(tmp_path):
    options = run.Options(kills=1, steps=6, seed=7, size=TINY)
    records = []
    for _ in range(2):
        with open(tmp_path / "log", "w+b", buffering=0) as log:
            reference = run._ReferenceRun(options, run.Watch(), log)
            reference.run()
            records.append(reference.record)
    assert records[0] == records[1]
    assert sorted(records[0].losses) == list(range(1, 7))
    assert not records[0].imported_lightck
    assert {name.partition("/")[0] for name in records[0].digests} == {"weights", "optimizer", "scheduler", "rng"}


def test_what_was_reported_before_a_kill_is_read_after_it(tmp_path):
    options = run.Options(kills=1, steps=300, seed=7, size=TINY)
    seen = []
    with open(tmp_path / "log", "wb") as log, process.Child(plain(options), log) as child:
        while (message := child.read(time.monotonic() + 60)) is not None:
            seen += [message["update"]] if "update" in message else []
            if len(seen) == 3:
                child.kill()
        assert child.status() == -signal.SIGKILL
        group = child._process.pid
    assert seen == list(range(1, len(seen) + 1))
    assert group_is_gone(group, time.monotonic() + 10)  # the loader's workers too


def test_a_child_that_fails_is_an_error_with_its_last_words(tmp_path):
    options = run.Options(kills=1, steps=6, seed=7, size=run.Size(1, 30, 4, 8, 2))  # 30 is no multiple of 4 heads
    with open(tmp_path / "log", "w+b", buffering=0) as log, pytest.raises(run.DemoError, match="reference run") as info:
        run._ReferenceRun(options, run.Watch(), log).run()
    assert "RuntimeError" in str(info.value)


# ---- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kills", "30", "--steps", "20"], "30 kills need at least"),
        (["--kills", "0"], "not in the range"),
        (["--size", "huge"], "not one of"),
        (["--keep", "{tmp}/a", "--pool-dir", "{tmp}"], "pass only one"),
        (["--keep", "{tmp}"], "exists already"),
        (["--pool-dir", "{tmp}/none"], "does not exist"),
        (["surplus"], "unexpected extra argument"),
    ],
)
def test_usage_errors_exit_2(tmp_path, arguments, said):
    (tmp_path / "gpt.pool").touch()
    answer = CliRunner().invoke(cli.main, ["demo", *(word.format(tmp=tmp_path) for word in arguments)])
    assert answer.exit_code == 2
    assert said in answer.stderr


def lightck_demo(*arguments):
    return [sys.executable, "-m", "lightck", "demo", "--size", "tiny", *map(str, arguments)]


def test_the_demo_survives_its_kills_bit_identically(tmp_path):
    command = lightck_demo("--steps", 18, "--kills", 3, "--seed", 4, "--pool-dir", tmp_path, "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] is True
    assert result["differences"] == []
    assert len(result["kills"]) == 3
    assert all(0 <= kill["lost"] <= 1 for kill in result["kills"])
    assert result["durability"]["process"] is True
    assert result["bytes_per_checkpoint"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.campaign
def test_a_kept_pool_is_recovered_by_the_printed_lines(tmp_path):
    command = lightck_demo("--steps", 12, "--kills", 1, "--seed", 4, "--keep", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    read, train_on = [line.strip() for line in done.stdout.splitlines()[-2:]]
    shown = subprocess.run(read, shell=True, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60)
    assert shown.stdout.startswith("12 ['tokens.weight'")
    more = subprocess.run(train_on, shell=True, capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60)
    assert "resumed at step 12" in more.stdout
    assert "epoch    4" in more.stdout


def test_a_terminated_demo_leaves_nothing_behind(tmp_path):
    demo = subprocess.Popen(lightck_demo("--steps", 300, "--pool-dir", tmp_path), stdout=subprocess.PIPE, text=True)
    assert "pool:" in demo.stdout.readline()
    demo.stdout.readline()
    deadline = time.monotonic() + 30
    while not (children := children_of(demo.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    demo.terminate()
    assert demo.wait(timeout=30) == 128 + signal.SIGTERM
    demo.stdout.close()
    assert children
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 30  # they end with the demo, and the kernel takes its time on a busy machine
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in children)


def test_children_do_not_outlive_a_killed_demo(tmp_path):
    demo = subprocess.Popen(lightck_demo("--steps", 300, "--pool-dir", tmp_path), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (log := list(tmp_path.glob("*/train.log"))) or not log[0].stat().st_size:  # it trains
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = children_of(demo.pid)
    demo.kill()
    demo.wait()
    assert children
    while any(alive(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children_of(pid):
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def group_is_gone(group, deadline):
    """Whether no running process is left in this process group."""
    while time.monotonic() < deadline:
        pids = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
        if not any(group_of(pid) == group and alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def group_of(pid):
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return None


def alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_report_says_what_the_pool_survives():
    assert report.survives({"process": True, "os": True}) == (
        "a killed process, a crash of the OS; not a power cut, a media error"
    )


# ---- the example ---------------------------------------------------------------------------------------------------


def test_the_size_s_arithmetic_counts_the_example_s_parameters():
    train_gpt = module_at(EXAMPLES / "train_gpt.py")
    for size in run.SIZES.values():
        model = train_gpt.GPT(size.layers, size.width, size.heads, size.context, 0.0)
        parameters = list(model.parameters())
        assert sum(p.numel() for p in parameters) == size.parameters
        assert 3 * len(parameters) == size.blocks
        assert max(p.numel() for p in parameters) * torch.float32.itemsize <= 1 << 20
