"""The bars' file, and how kept results are held to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from calls_bench import call

from lightck.bench.bars import METRICS, bars, reached
from lightck.bench.results import Results
from lightck.bench.tables import NAMES, TABLES, Plan


def step_row(stall: float = 0.001, own: float = 0.1, cpu: float = 0.1, share: float = 0.01,
             **options: Any) -> dict[str, Any]:  # fmt: skip
    difference = {"share": share, "share_low": 0.0, "share_high": 2 * share, "same_low": -0.02, "same_high": 0.02,
                  "resolved": False, "median": share, "high": 2 * share}  # fmt: skip
    return {"options": options, "result": {
        "direct": 1.2, "difference": difference, "cpu_difference": {**difference, "median": cpu},
        "own_cpu_seconds": own, "step": {"median": 1.0}, "stall": {"median": stall, "share": stall, "share_p99": 0.5},
    }}  # fmt: skip


def filled(folder: Any) -> Results:
    """Results that reach every bar."""
    kept = Results(folder)
    for name in NAMES:
        kept.keep("steps", f"{name} lightck", step_row())
        for rival in ("torch.save", "dcp.save", "dcp.async_save"):
            kept.keep("steps", f"{name} {rival}", step_row(stall=0.1, cpu=1.0))
        faster = {"torch.load": 5.0, "torch.load mmap": 4.0}
        kept.keep("recovery", name, {"result": {"of_memcpy": 0.9, "faster_than": faster}})
        for saver, nbytes in (("nothing", 100), ("lightck", 200)):
            memory = {"settled_bytes": nbytes, "peak_with_files_bytes": 300}
            kept.keep("memory", f"{name} {saver}", {"options": {"saver": saver}, "result": memory})
    for key in ("gpt2 file", "vgg16 file", "gpt2 pmdk", "vgg16 pmdk"):
        kept.keep("bandwidth", key, {"result": {"write_of_nt": 0.85}})
    for saver in ("lightck", "nothing"):
        growth = {"memory_growth_bytes": 50, "descriptor_growth": 0, "thread_growth": 0}
        kept.keep("flat", f"alexnet {saver}", {"result": growth})
    kept.keep("many", "full", {"result": {"seconds_per_tensor": 1e-6, "tensors": 100_000, "layers": 1000}})
    return kept


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
    """What the bars need is what the tables measure: each ``over`` finds its result among keys of planned rows."""
    plan = Plan(rivals=("torch.save", "dcp.save", "dcp.async_save"))
    planned = {(row.measure, row.key) for table in TABLES.values() for row in table.rows(plan)}
    kept = filled(None)
    used = {(m, key) for m in ("steps", "recovery", "bandwidth", "memory", "flat", "many") for key in kept.rows(m)}
    assert used <= planned
    assert all(one.value is not None for bar in bars() for one in reached(bar, kept))


def test_what_was_not_measured_is_not_reached(tmp_path):
    assert all(one.value is None for bar in bars() for one in reached(bar, Results(tmp_path)))
    done = call("bench", "--check", "--results", tmp_path)
    assert done.exit_code == 1
    assert "not measured" in done.stdout


def test_check_holds_the_results_to_the_bars(tmp_path):
    kept = filled(tmp_path)
    done = call("bench", "--check", "--results", tmp_path)
    assert (done.exit_code, done.stdout.splitlines()[-1].split()[0]) == (0, "All"), done.stdout
    assert "not resolved" in done.stdout
    kept.keep("steps", "vgg16 lightck", step_row(stall=0.02))
    done = call("bench", "--check", "--results", tmp_path, "--json")
    assert done.exit_code == 1
    missed = [(b["bar"], b["of"]) for b in json.loads(done.stdout)["bars"] if not b["ok"]]
    assert missed == [("stall", "vgg16"), ("stall-of-rivals", "torch.save"), ("stall-of-rivals", "dcp.save")]


def test_what_equal_steps_differ_by_too_reaches_no_bar(tmp_path):
    """On a busy machine a difference of 1 % says nothing where equal steps differ by 12 %."""
    kept = filled(tmp_path)
    row = step_row(share=0.01)
    row["result"]["difference"] |= {"same_low": -0.07, "same_high": 0.05}
    kept.keep("steps", "gpt2 lightck", row)
    done = call("bench", "--check", "--results", tmp_path, "--json")
    assert [(b["bar"], b["of"]) for b in json.loads(done.stdout)["bars"] if not b["ok"]] == [("difference", "gpt2")]


def test_the_row_with_a_short_step_counts_for_no_bar(tmp_path):
    kept = filled(tmp_path)
    kept.keep("steps", "resnet18-batch1 lightck", step_row(stall=9.0, batch=1))
    kept.keep("steps", "resnet18-batch1 torch.save", step_row(stall=1e-9, batch=1))
    assert call("bench", "--check", "--results", tmp_path).exit_code == 0


def test_added_cpu_is_never_less_than_what_our_threads_used():
    kept = Results(None)
    kept.keep("steps", "gpt2 lightck", step_row(own=0.2, cpu=-0.3))
    kept.keep("steps", "gpt2 torch.save", step_row(cpu=1.0))
    bar = next(bar for bar in bars() if bar.name == "cpu-of-rivals")
    assert reached(bar, kept)[0].value == pytest.approx(5.0)
