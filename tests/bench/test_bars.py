"""The file of the bars, and how kept results are compared with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from calls_bench import call

from bench.bars import METRICS, bars, reached
from bench.running.machine import fingerprint
from bench.tables import NAMES, TABLES, Plan
from bench.tables.results import Results

MACHINE = {"cpu": "some", "cores": 2, "threads": 2}


def row(result: dict[str, Any], machine: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {"options": options, "machine": machine or MACHINE, "result": result}


def step_row(
    stall: float = 0.001, own: float = 0.1, cpu: float = 0.1, share: float = 0.01, step: float = 1.0, **more: Any
) -> dict[str, Any]:
    difference = {
        "share": share,
        "share_low": 0.0,
        "share_high": 2 * share,
        "same_low": -0.02,
        "same_high": 0.02,
        "resolved": False,
        "median": share,
        "high": 2 * share,
    }
    return row(
        {
            "direct": 1.2,
            "difference": difference,
            "own_cpu_seconds": own,
            "pairs": 30,
            "step": {"median": step},
            "cpu_difference": {**difference, "median": cpu, "low": 0.9 * cpu, "high": 1.1 * cpu},
            "stall": {"median": stall, "share": stall, "share_p99": 0.5},
            **more,
        }
    )


def filled(folder: Any) -> Results:
    """Results that reach every bar."""
    kept = Results(folder)
    for name in NAMES:
        kept.keep("steps", f"{name} lightck", step_row())
        for rival in ("torch.save", "dcp.save", "dcp.async_save"):
            kept.keep("steps", f"{name} {rival}", step_row(stall=0.1, cpu=1.0))
        faster = {"torch.load": 5.0, "torch.load mmap": 4.0}
        kept.keep("recovery", name, row({"of_memcpy": 0.9, "faster_than": faster}))
        for saver, nbytes in (("nothing", 100), ("lightck", 200)):
            memory = {"settled_bytes": nbytes, "peak_with_files_bytes": 300}
            kept.keep("memory", f"{name} {saver}", row(memory, saver=saver))
    for key in ("gpt2 file", "vgg16 file", "gpt2 pmdk", "vgg16 pmdk"):
        kept.keep("bandwidth", key, row({"write_of_nt": 0.85}))
    for saver in ("lightck", "nothing"):
        kept.keep("flat", f"alexnet {saver}", row(grown()))
    kept.keep("many", "full", row({"seconds_per_tensor": 1e-6, "tensors": 100_000, "layers": 1000}))
    for key in ("half-ms", "5-ms", "50-ms"):
        kept.keep("short", key, row(short_steps()))
    return kept


def short_steps(
    *, idle: float = 50e-6, every: float = 200e-6, auto: float = 0.02, warned: bool = False
) -> dict[str, Any]:
    loops = {
        name: {"added": {"median": added}, "stats_share": 0.95} for name, added in (("idle", idle), ("every", every))
    }
    same = {"median": 0.0, "low": -0.004, "high": 0.001}
    return {**loops, "auto": {"share": auto}, "same": same, "budget": 0.03, "warned": warned}


def grown(**more: Any) -> dict[str, Any]:
    return {"memory_growth_bytes": 50, "descriptor_growth": 0, "thread_growth": 0, **more}


def checked(folder: Any) -> dict[str, dict[str, Any]]:
    """``--check --json`` as a map: "bar of" -> its entry."""
    done = call("bench", "--check", "--results", folder, "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == (0 if facts["ok"] else 1)
    return {f"{bar['bar']} {bar['of']}": bar for bar in facts["bars"]}


def missed(folder: Any) -> list[str]:
    return [name for name, bar in checked(folder).items() if not bar["ok"]]


def test_the_file_parses_and_every_metric_has_a_bar():
    found = bars()
    assert {bar.metric for bar in found} == set(METRICS)
    assert len({bar.name for bar in found}) == len(found)
    assert all(bar.over for bar in found)


@pytest.mark.parametrize("change", [{"metric": "no such"}, {"unit": "miles"}, {"at_least": 1}, {"at_most": None}])
def test_a_bar_that_says_nothing_is_refused(change, tmp_path):
    facts = {"name": "x", "says": "x", "metric": "direct", "over": ["gpt2"], "at_most": 1.5, "unit": "times", **change}
    (tmp_path / "bars.json").write_text(json.dumps([facts]))
    with pytest.raises(ValueError, match="'x'"):
        bars(tmp_path / "bars.json")


def test_every_row_that_a_bar_asks_for_is_in_a_table():
    """The tables measure what the bars need: each ``over`` has a result among the planned rows."""
    plan = Plan(rivals=("torch.save", "dcp.save", "dcp.async_save"))
    planned = {(row.measure, row.key) for table in TABLES.values() for row in table.rows(plan)}
    kept = filled(None)
    used = {
        (m, key) for m in ("steps", "recovery", "bandwidth", "memory", "flat", "many", "short") for key in kept.rows(m)
    }
    assert used <= planned
    assert all(one.value is not None for bar in bars() for one in reached(bar, kept))


def test_interval_auto_keeps_its_budget_or_warns(tmp_path):
    """The A/A line counts in its favour."""
    kept = filled(tmp_path)
    kept.keep("short", "5-ms", row(short_steps(auto=0.033)))
    assert missed(tmp_path) == []
    kept.keep("short", "5-ms", row(short_steps(auto=0.035)))
    assert missed(tmp_path) == ["short-auto 5-ms"]
    kept.keep("short", "5-ms", row(short_steps(auto=0.2, warned=True)))
    assert missed(tmp_path) == []
    kept.keep("short", "half-ms", row(short_steps(idle=61e-6, every=301e-6)))
    assert missed(tmp_path) == ["short-idle half-ms", "short-every half-ms"]


def test_what_was_not_measured_is_not_reached(tmp_path):
    assert all(one.value is None for bar in bars() for one in reached(bar, Results(tmp_path)))
    done = call("bench", "--check", "--results", tmp_path)
    assert done.exit_code == 1
    assert "not measured" in done.stdout


def test_check_holds_the_results_to_the_bars(tmp_path):
    kept = filled(tmp_path)
    done = call("bench", "--check", "--results", tmp_path)
    assert (done.exit_code, f"All {len(checked(tmp_path))} hold." in done.stdout) == (0, True), done.stdout
    assert "not resolved" in done.stdout
    kept.keep("steps", "vgg16 lightck", step_row(stall=0.02))
    assert missed(tmp_path) == ["stall vgg16", "stall-of-rivals torch.save", "stall-of-rivals dcp.save"]


def test_what_equal_steps_differ_by_too_reaches_no_bar(tmp_path):
    """A difference of 1 % means nothing on a busy machine where equal steps differ by 12 %."""
    kept = filled(tmp_path)
    one = step_row(share=0.01)
    one["result"]["difference"] |= {"same_low": -0.07, "same_high": 0.05}
    kept.keep("steps", "gpt2 lightck", one)
    assert missed(tmp_path) == ["difference gpt2"]


def test_the_row_with_a_short_step_counts_for_no_bar(tmp_path):
    kept = filled(tmp_path)
    kept.keep("steps", "resnet18-batch1 lightck", step_row(stall=9.0))
    kept.keep("steps", "resnet18-batch1 torch.save", step_row(stall=1e-9))
    assert missed(tmp_path) == []


def test_added_cpu_is_never_less_than_what_our_threads_used(tmp_path):
    kept = filled(tmp_path)
    kept.keep("steps", "gpt2 lightck", step_row(own=0.2, cpu=-0.3))
    assert checked(tmp_path)["cpu-of-rivals torch.save"]["reached"] == pytest.approx(5.0)


@pytest.mark.parametrize("saver", ["torch.save", "lightck"])
def test_a_rival_is_measured_on_every_workload_or_not_at_all(saver, tmp_path):
    kept = filled(tmp_path)
    del kept.rows("steps")[f"gpt2 {saver}"]
    kept.keep("steps", "of no matter", step_row())
    assert {"stall-of-rivals torch.save", "cpu-of-rivals torch.save"} <= set(missed(tmp_path))
    bar = checked(tmp_path)["stall-of-rivals torch.save"]
    assert bar["reached"] is None
    assert f"no row gpt2 {saver}; resnet18 100.00 x" in bar["note"]


@pytest.mark.parametrize("saver", ["lightck", "nothing"])
def test_what_fits_is_of_lightck_and_of_the_loop_alone_at_least(saver, tmp_path):
    kept = filled(tmp_path)
    assert checked(tmp_path)["fits bert_large"]["note"] == "measured: nothing 0.0 MB, lightck 0.0 MB"
    kept.keep("memory", "bert_large torch.save", row({"peak_with_files_bytes": 30e9, "settled_bytes": 1}))
    assert missed(tmp_path) == ["fits bert_large"], "a rival that was measured counts"
    del kept.rows("memory")["bert_large torch.save"], kept.rows("memory")[f"bert_large {saver}"]
    kept.keep("memory", "of no matter", row({}))
    assert checked(tmp_path)["fits bert_large"]["reached"] is None


def test_a_memcpy_on_as_many_threads_as_lightck_s_stands_beside_the_bar(tmp_path):
    kept = filled(tmp_path)
    assert checked(tmp_path)["recovery gpt2"]["note"] == ""
    result = {**kept.rows("recovery")["gpt2"]["result"], "of_memcpy_on_threads": 0.4}
    kept.keep("recovery", "gpt2", row({**result, "memcpy_on_threads": {"threads": 2}}))
    bar = checked(tmp_path)["recovery gpt2"]
    assert (bar["ok"], bar["note"]) == (True, "of one on 2 threads 0.40 x")
    assert "on all processors (8 at most), over memcpy on one" in bar["says"]


def test_memory_is_that_with_a_checkpoint_in_flight_where_it_is_known(tmp_path):
    kept = filled(tmp_path)
    for saver, nbytes in (("nothing", 0), ("lightck", 100 << 20)):
        flying = {"forward begins": 1000, "before update": 2000 + nbytes}
        result = {**kept.rows("memory")[f"gpt2 {saver}"]["result"], "in_flight_bytes": flying}
        kept.keep("memory", f"gpt2 {saver}", row(result, saver=saver))
        assert missed(tmp_path) == ([] if saver == "nothing" else ["memory gpt2"]), "both rows have to know"
    assert checked(tmp_path)["memory gpt2"]["note"] == "0.0 MB, with an in-flight checkpoint 104.9 MB"


def test_a_row_that_lacks_something_is_an_error_and_no_bar_that_is_missed(tmp_path):
    """If one load was not measured, the worst of the loads is unknown."""
    kept = filled(tmp_path)
    kept.keep("recovery", "gpt2", row({"of_memcpy": 0.9, "faster_than": {"torch.load": 5.0}}))
    done = call("bench", "--check", "--results", tmp_path)
    assert done.exit_code == 2
    assert "A kept row for 'recovery-of-torch' has missing or wrong values (KeyError: 'torch.load mmap')" in (
        done.stderr
    )


@pytest.mark.parametrize(("fact", "why"), [("cpu", "processors"), ("threads", "numbers of threads")])
def test_rows_of_different_machines_are_not_combined(fact, why, tmp_path):
    kept = filled(tmp_path)
    elsewhere = {**MACHINE, fact: "other"}
    for measure, key in (("steps", "gpt2 lightck"), ("memory", "gpt2 nothing"), ("flat", "alexnet nothing")):
        kept.keep(measure, key, {**kept.rows(measure)[key], "machine": elsewhere})
    assert missed(tmp_path) == [
        "stall-of-rivals torch.save",
        "stall-of-rivals dcp.save",
        "cpu-of-rivals torch.save",
        "cpu-of-rivals dcp.save",
        "cpu-of-rivals dcp.async_save",
        "memory gpt2",
        "flat alexnet",
    ]
    assert checked(tmp_path)["cpu-of-rivals dcp.save"]["note"].startswith(f"gpt2: rows of different {why} (")


def test_what_the_windows_were_is_said(tmp_path):
    kept = filled(tmp_path)
    assert "pairs" not in checked(tmp_path)["stall gpt2"]["note"]
    kept.keep("steps", "gpt2 lightck", step_row(pairs=20, unsettled=3))
    kept.keep("steps", "gpt2 torch.save", step_row(stall=0.1, cpu=1.0, pairs=10, step=1.2))
    for name in ("direct", "difference", "stall"):
        assert checked(tmp_path)[f"{name} gpt2"]["note"].endswith("20 pairs; 3 windows unsettled")
    note = checked(tmp_path)["stall-of-rivals torch.save"]["note"]
    note_text = "(20 and 10 pairs; 3 and 0 windows unsettled; plain steps 1.00 s and 1.20 s)"
    assert f"gpt2 100.00 x {note_text}" in note
    kept.keep("steps", "gpt2 torch.save", step_row(stall=0.1, cpu=1.0, step=1.09))
    assert "plain steps" not in checked(tmp_path)["stall-of-rivals torch.save"]["note"]


def test_a_bar_that_the_worse_ends_of_its_intervals_miss_holds_and_is_not_shown(tmp_path):
    """5 seconds over 0.5, and at the ends 2 over 1: at least 5."""
    kept = filled(tmp_path)
    assert all(bar["shown"] for bar in checked(tmp_path).values())
    ours, theirs = step_row(share=0.03), step_row(stall=0.1)
    ours["result"]["cpu_difference"] |= {"median": 0.5, "low": 0.4, "high": 1.0}
    theirs["result"]["cpu_difference"] |= {"median": 5.0, "low": 2.0, "high": 9.0}
    kept.keep("steps", "gpt2 lightck", ours)
    for rival in ("torch.save", "dcp.save", "dcp.async_save"):
        kept.keep("steps", f"gpt2 {rival}", theirs)
    assert missed(tmp_path) == []
    found = checked(tmp_path)
    names = ["difference gpt2", *(f"cpu-of-rivals {rival}" for rival in ("torch.save", "dcp.save", "dcp.async_save"))]
    assert [name for name, bar in found.items() if not bar["shown"]] == names
    assert "gpt2 10.00 x (2.00 x at the intervals' ends; not resolved)" in found["cpu-of-rivals torch.save"]["note"]
    assert found["difference gpt2"]["end"] == 0.06
    done = call("bench", "--check", "--results", tmp_path)
    assert done.exit_code == 0
    assert f"4 hold by their values, but not at the worse ends of their intervals: {', '.join(names)}." in done.stdout


def test_the_worse_end_is_never_over_less_than_our_own_cpu(tmp_path):
    kept = filled(tmp_path)
    ours = step_row(own=0.1)
    ours["result"]["cpu_difference"] |= {"median": -0.3, "low": -0.5, "high": 0.05}
    kept.keep("steps", "gpt2 lightck", ours)
    assert "gpt2 10.00 x (9.00 x at" in checked(tmp_path)["cpu-of-rivals torch.save"]["note"]


@pytest.mark.parametrize("things", ["descriptors", "threads"])
def test_what_grows_beside_memory_is_not_flat(things, tmp_path):
    kept = filled(tmp_path)
    name = f"{things.removesuffix('s')}_growth"
    kept.keep("flat", "alexnet lightck", row(grown(**{name: 2})))
    bar = checked(tmp_path)["flat alexnet"]
    assert (missed(tmp_path), bar["note"].split(";")[0]) == (["flat alexnet"], f"{things} grew by 2")
    kept.keep("flat", "alexnet nothing", row(grown(**{name: 2})))
    assert missed(tmp_path) == [], "the loop alone does so too"


def test_check_says_how_many_rows_are_of_other_code(tmp_path):
    kept = filled(tmp_path)
    for name, code in (("gpt2", fingerprint()), ("vgg16", "another"), ("of no matter", "another")):
        kept.keep("recovery", name, {**kept.rows("recovery").get(name, row({})), "code": code})
    facts = json.loads(call("bench", "--check", "--results", tmp_path, "--json").stdout)
    assert (facts["rows_looked_at"], facts["other_code"], facts["unknown_code"]) == (52, 1, 50)
    assert call("bench", "--check", "--results", tmp_path).stdout.splitlines()[-1] == (
        "Of the 52 rows used, 1 were measured with other code than this, 50 with unknown code."
    )
