"""Results as files and as Markdown, and runs that continue from them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from calls_bench import call

import lightck
from bench import command, wire
from bench.running import folders, machine, rows
from bench.running.machine import descendants, fingerprint
from bench.running.rows import Place, Row
from bench.tables import TABLES, Plan, cost
from bench.tables.results import Results, markdown, megabytes, milliseconds, percent
from bench.tables.views import smallest_within
from lightck.errors import BenchError

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]

MANY = Row("many", "tiny", {"tensors": 20, "steps": 3, "layers": 3})


def made(seconds: float = 1e-6) -> dict[str, object]:
    """A kept row of the measure ``many``."""
    result = {
        "tensors": 20,
        "seconds_per_tensor": seconds,
        "seconds_per_tensor_p99": seconds,
        "stall_seconds": 0.1,
        "layers": 3,
        "layers_stall_seconds": 0.2,
    }
    machine = {
        "cores": 2,
        "cpu": "some",
        "torch": "2",
        "threads": 1,
        "kernels": "sse2",
        "medium": "tmpfs",
        "survives": ["process"],
    }
    return {"options": {}, "machine": machine, "result": result, "took_seconds": 1.0}


def test_a_row_is_kept_when_it_is_done(tmp_path):
    Results(tmp_path).keep("many", "one", made())
    kept = Results(tmp_path)
    kept.keep("many", "two", made())
    assert list(Results(tmp_path).rows("many")) == ["one", "two"]
    assert [path.name for path in tmp_path.iterdir()] == ["many.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": {}}', '{"format": 99, "rows": {}}', '{"format": 1, "rows": []}'])
def test_a_file_that_holds_no_results_is_refused(text, tmp_path):
    (tmp_path / "many.json").write_text(text)
    with pytest.raises(BenchError, match="Move the file away"):
        Results(tmp_path).rows("many")


def test_another_measure_s_file_is_refused(tmp_path):
    Results(tmp_path).keep("many", "one", made())
    (tmp_path / "many.json").rename(tmp_path / "flat.json")
    with pytest.raises(BenchError, match="results of 'many' and not of 'flat'"):
        Results(tmp_path).rows("flat")
    assert call("bench", "flat", "--show", "--results", tmp_path).exit_code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("overhead --check", "--check measures nothing and takes no TABLE"),
        ("--check --small", "no --small"),
        ("--show --check", "--check measures nothing and takes no --show"),
        ("many --show --only x", "no --only"),
        ("--plots . --pairs 4 --threads 2", "no --pairs, --threads"),
    ],
)
def test_what_would_be_passed_over_is_refused(words, said, tmp_path):
    done = call("bench", *words.split(), "--results", tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{said}. Leave one or the other out." in done.stderr


@pytest.mark.parametrize("row", [None, 7, {}, {"options": {}, "result": {}}, {**made(), "result": []}])
def test_what_is_no_row_is_refused(row, tmp_path):
    (tmp_path / "many.json").write_text(json.dumps({"format": 1, "measure": "many", "rows": {"one": row}}))
    done = call("bench", "many", "--show", "--results", tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "holds a row 'one' that is not from lightck bench. Move the file away." in done.stderr


def test_a_row_of_other_numbers_is_an_error_where_it_is_shown(tmp_path):
    Results(tmp_path).keep("many", "one", {**made(), "result": {"tensors": "many"}})
    done = call("bench", "many", "--show", "--results", tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "A kept row for 'many' has missing or wrong values (ValueError" in done.stderr


def test_a_number_that_is_none_is_not_kept(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        Results(tmp_path).keep("many", "one", made(float("nan")))
    assert not list(tmp_path.glob("*.json"))


def test_markdown_is_straight_and_escaped():
    assert markdown(("row", "a"), [("x|y", "1"), ("z", "12 ms")]).splitlines() == [
        "| row  |     a |",
        "| ---- | ----: |",
        "| x\\|y |     1 |",
        "| z    | 12 ms |",
    ]


def test_a_row_is_measured_in_a_process_of_its_own_and_leaves_nothing(folder):
    found = rows.run(MANY, Place(tmpfs=str(folder), threads=1))
    assert found["result"]["tensors"] == 20
    assert found["machine"]["threads"] == 1
    assert {"cores", "cpu", "kernels", "medium", "survives"} <= found["machine"].keys()
    assert found["code"] == fingerprint()
    assert str(folder) not in json.dumps(found)
    assert not list(folder.iterdir())


def test_a_row_is_measured_with_the_environment_that_it_names(folder):
    row = replace(MANY, options={**MANY.options, "env": {"LIGHTCK_ISA": "portable"}})
    assert rows.run(row, Place(tmpfs=str(folder), threads=1))["machine"]["kernels"] == "portable"


def test_another_byte_of_a_source_is_other_code(tmp_path, monkeypatch):
    package = tmp_path / "lightck"
    for path in ("lightck/pool", "native/include", "bench/measures"):
        (tmp_path / path).mkdir(parents=True)
    monkeypatch.setattr(lightck, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(machine, "_BENCH", tmp_path / "bench")
    found = [fingerprint()]
    paths = (
        "lightck/__init__.py",
        "lightck/pool/new.py",
        "bench/measures/new.py",
        "native/include/lck.h",
        "native/new.c",
    )
    for path in paths:
        (tmp_path / path).write_text("x")
        found.append(fingerprint())
    (tmp_path / "native" / "new.c").write_text("y")
    assert len({*found, fingerprint()}) == 7
    (package / "_lck_ffi.py").write_text("made when it is built")
    (package / "notes.txt").write_text("no code")
    assert fingerprint() not in found


def test_a_row_that_fails_says_why(folder):
    wrong = Row("nonsense", "wrong", {})
    with pytest.raises(BenchError, match=r"The row 'wrong' of nonsense failed: .*There is no measure 'nonsense'"):
        rows.run(wrong, Place(tmpfs=str(folder), threads=1))
    assert not list(folder.iterdir())


@contextlib.contextmanager
def running(folder: Path, *before: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run, and wait until it has begun its row."""
    bench = ["-m", "lightck", "bench", "--checkout", str(ROOT), "many", "--small", "--pool-dir", str(folder)]
    words = [*before, sys.executable, *bench]
    environment = {**os.environ, "PYTHONPATH": str(Path(str(lightck.__file__)).parents[1])}
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        while not list(folder.glob("*/*")):
            assert child.poll() is None
            time.sleep(0.01)
        yield child


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_that_is_ended_leaves_nothing(by, folder):
    with running(folder) as child:
        measuring = descendants(child.pid)
        child.send_signal(by)
        assert child.wait(60) == 130
    assert not list(folder.iterdir())
    assert measuring
    assert not any(map(runs, measuring))


def runs(pid: int) -> bool:
    """Whether the process runs: a dead one may still be a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_is_measured_ends_with_the_run_and_its_folder_goes_with_the_next(folder, tmp_path):
    with running(folder) as child:
        measuring = descendants(child.pid)
        child.kill()
    assert measuring
    deadline = time.monotonic() + 60
    while any(map(runs, measuring)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(runs, measuring))
    assert list(folder.iterdir()), "nobody was left to remove it"
    Results(tmp_path).keep("many", "full", made())  # all rows are kept, so none is measured
    done = call("bench", "many", "--pool-dir", folder, "--disk-dir", tmp_path, "--results", tmp_path)
    assert "of runs that were killed" in done.stderr
    assert not list(folder.iterdir())


def test_a_row_whose_run_is_gone_is_not_measured(folder):
    order = {"measure": "many", "options": {}, "folder": str(folder), "threads": 1, "out": "", "parent": 2**22 + 1}
    status, errors = rows._ran(json.dumps(order), str(folder), rows._environment())
    assert (status, errors.strip()) == (1, "The parent process of this row has ended. Start the bench again.")


def test_only_what_is_surely_stale_is_removed(folder):
    with folders.temporary(str(folder)) as living:
        here, number = "-".join(os.path.basename(living).split("-")[:3]), os.getpid()
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        others = [
            f"{here}-{number}-abc",
            f"{here}-1-abc",
            f"lightck-bench-00000000-{child}-abc",
            "lightck-bench-abc",
            f"{here}-{child}",
            f"{here}-{child}-a b",
            f"x{here}-{child}-abc",
        ]
        for other in others:
            (folder / other).mkdir()
        (folder / f"{here}-{child}-file").touch()
        (folder / f"{here}-{child}-link").symlink_to(folder / others[0])
        stale = folder / f"{here}-{child}-stale"
        stale.mkdir()
        (stale / "bench.pool").touch()
        assert folders.remove_stale([str(folder), str(folder)]) == 1
        assert not stale.exists()
        assert len(list(folder.iterdir())) == len(others) + 3


def test_a_folder_of_another_user_stays(folder, monkeypatch):
    with folders.temporary(str(folder)) as living:
        monkeypatch.setattr(folders, "_lives", lambda pid: False)
        monkeypatch.setattr(os, "getuid", lambda: os.stat(living).st_uid + 1)
        assert folders.remove_stale([str(folder)]) == 0
        monkeypatch.undo()
        assert Path(living).exists()


def test_a_run_that_is_to_outlive_its_terminal_does(folder):
    with running(folder, "nohup") as child:
        child.send_signal(signal.SIGHUP)
        assert child.wait(60) == 0
    assert not list(folder.iterdir())


def test_a_run_that_was_cut_off_goes_on(tmp_path, monkeypatch):
    measured: list[str] = []

    def run(row: Row, place: Place) -> dict[str, object]:
        measured.append(row.key)
        if len(measured) == 2:
            raise BenchError("The second one failed.")
        return made()

    monkeypatch.setattr(rows, "run", run)
    first = call("bench", "bandwidth", "many", "--results", tmp_path, "--only", "full")
    assert (first.exit_code, measured) == (0, ["full"])
    second = call("bench", "many", "--results", tmp_path)
    assert (second.exit_code, measured) == (0, ["full"]), "it is kept"
    assert "0.00 us" not in second.stdout
    assert "1.00 us" in second.stdout
    third = call("bench", "many", "--results", tmp_path, "--again")
    assert third.exit_code == 1
    assert "The second one failed." in third.stderr
    assert list(Results(tmp_path).rows("many")) == ["full"], "what there was stays"


@pytest.mark.parametrize("words", ["bench many flat --small", "bench many flat --small --json"])
def test_an_interrupted_look_shows_the_rows_that_it_has(tmp_path, monkeypatch, words):
    """These results are kept in no file and took minutes."""
    measured: list[str] = []

    def run(row: Row, place: Place) -> dict[str, object]:
        measured.append(row.key)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return made()

    monkeypatch.setattr(rows, "run", run)
    monkeypatch.chdir(tmp_path)
    done = call(*words.split())
    assert done.exit_code not in (0, None)
    assert len(measured) == 2
    assert "interrupted" in done.stderr
    shown = json.loads(done.stdout)["rows"]["many"] if "--json" in words else done.stdout
    assert measured[0] in shown if "--json" in words else "1.00 us" in shown


def test_a_row_that_was_measured_with_other_options_is_no_row_that_is_done(tmp_path):
    kept = {"options": {"tensors": 100_000, "steps": 15, "layers": 1_000}}
    Results(tmp_path).keep("many", "full", {**made(), **kept})
    done = call("bench", "many", "--results", tmp_path)
    message = (
        "not measured again without --again: the kept row many 'full' has steps 15 and not 30, threads 1 and not 2"
    )
    assert (done.exit_code, message in done.stderr) == (0, True), done.stderr
    Results(tmp_path).keep("many", "full", {**made(), "options": {**kept["options"], "steps": 30}})
    done = call("bench", "many", "--results", tmp_path, "--threads", 1)
    assert "0 rows to measure, 1 kept already" in done.stderr
    assert "not measured again" not in done.stderr


def test_a_name_that_no_row_has_is_an_error(tmp_path):
    done = call("bench", "many", "flat", "--results", tmp_path, "--only", "nosuch")
    assert done.exit_code == 2
    assert "no row has 'nosuch' in its name; there are: full, alexnet lightck, alexnet nothing, alexnet" in done.stderr


def test_a_quick_look_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "run", lambda row, place: made())
    monkeypatch.chdir(tmp_path)
    assert call("bench", "many", "--small").exit_code == 0
    assert not list(tmp_path.iterdir())


def test_the_command_knows_the_tables():
    assert tuple(TABLES) == command.NAMES


def test_ranks_are_measured_by_a_program_for_each_load_beside_the_rivals(tmp_path):
    loads = command.commands_of_ranks(False, None, tmp_path)
    assert [each[each.index("--load") + 1] for each in loads] == list(wire.LOADS)
    (vgg16,) = command.commands_of_ranks(False, "vgg16", tmp_path)
    assert vgg16[vgg16.index("--ways") + 1 :] == [way for way in wire.WAYS if way != "nothing"]
    assert vgg16[vgg16.index("--out") + 1] == str(tmp_path)
    (small,) = command.commands_of_ranks(True, None, None)
    assert small[2:] == ["--small"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ranks", "many"], "ranks is measured alone"),
        (["ranks", "--pairs", "7"], "ranks is measured alone"),
        (["ranks", "--only", "nosuch"], "ranks has the loads alexnet, balanced"),
    ],
)
def test_what_ranks_does_not_take_is_refused(words, text):
    done = call("bench", *words)
    assert done.exit_code == 2
    assert text in done.stderr


def test_quick_rows_are_few_and_apart_from_the_projects():
    quick = {(row.measure, row.key) for table in TABLES.values() for row in table.rows(Plan(quick=True))}
    full = {(row.measure, row.key) for table in TABLES.values() for row in table.rows(Plan())}
    assert not quick & full
    assert len(quick) <= 11


def test_background_work_that_outlasts_a_step_counts_by_longer_windows():
    result = {"step": {"median": 1.0}, "difference": {"median": 1.0, "high": 1.1}}
    assert smallest_within(result, "median", "seconds") == 20
    longer = {**result, "spread_out": {"span": 4, "seconds": 0.1, "high": 0.4}}
    assert smallest_within(longer, "median", "seconds") == 4
    assert smallest_within(longer, "high", "high") == 8


@pytest.mark.parametrize(
    ("place", "title"),
    [
        (".", "# The last result of each row, as `lightck bench --show` shows them"),
        ("xeon", "# lightck's rows on another kind of machine, as `lightck bench --show` shows them"),
    ],
)
def test_the_project_s_results_are_written_out_beside_them(place, title):
    """``lightck bench --show`` under the heading of a README.md."""
    folder = ROOT / "bench" / "results" / place
    heading, _, shown = (folder / "README.md").read_text().partition("\n\n")
    assert heading == title
    assert shown == call("bench", "--show", "--results", folder).stdout


def test_the_readme_tells_what_was_measured():
    readme = (ROOT / "README.md").read_text()
    assert table_of(ROOT / "bench" / "results") in readme


def test_the_readme_s_picture_shows_what_was_measured():
    drawn = cost.svg(Results(ROOT / "bench" / "results"))
    assert (ROOT / "docs" / "cost.svg").read_text() == drawn, "python -m bench.tables.cost docs/cost.svg"


def table_of(kept: Path) -> str:
    """The text of the table in a README.md."""
    steps, recovery = (Results(kept).rows(measure) for measure in ("steps", "recovery"))
    lines = []
    for name, title in cost.TITLES.items():
        ours, rival = (steps[f"{name} {saver}"]["result"] for saver in ("lightck", "torch.save"))
        load = recovery[name]["result"]
        lines.append(
            (
                title,
                megabytes(load["nbytes"]),
                milliseconds(ours["step"]["median"]),
                percent(ours["difference"]["share"]),
                percent(rival["difference"]["share"]),
                milliseconds(ours["stall"]["median"]),
                milliseconds(load["lightck"]["load"]["median"]),
                milliseconds(load["torch.load"]["load"]["median"]),
            )
        )
    return markdown(
        (
            "every step",
            "state",
            "a step",
            "lightck adds",
            "torch.save adds",
            "lightck holds it up",
            "recovered in",
            "torch.load",
        ),
        lines,
    )
