"""The table ``gradients``: its rows, what they need, what the algebra says of them, and how they are shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightck
from bench.measures import gradients as measure
from bench.measures.savers import strategy_of
from bench.measures.turns import Spec, compared
from bench.running.elsewhere import Elsewhere
from bench.running.rows import Place, run
from bench.tables import TABLES, Plan
from bench.tables import gradients as table
from bench.workloads import SMALL, checkpoint_nbytes, gpt2_of
from lightck.errors import BenchError

GB = 10**9


def row(name: str, layers: int = 4, rivals: tuple[str, ...] = ("torch.save",)) -> dict[str, Any]:
    """The options of the row of this name."""
    found = {row.key: row.options for row in table.rows(False, layers, None, rivals)}
    return found[f"gpt2-{layers} {name}"]


def test_the_rows_sweep_over_base_every_and_the_interval():
    found = [row for row in table.rows(False, 4, None, ()) if row.options["saver"] == "lightck"]
    dense = [
        (row.options["strategy"], row.options["interval"]) for row in found if "topk" not in row.options["strategy"]
    ]
    assert dense == [
        *((f"gradients {n}", 1) for n in (2, 3, 6, 12, 24)),
        *((f"gradients {n}", i) for n in (6, 12) for i in (2, 4)),
    ]
    for one in found:
        assert one.options["rounds"] * one.options["window"] % int(one.options["strategy"].split()[1]) == 0
        assert one.options["window"] % one.options["interval"] == 0


def test_rivals_that_cannot_be_used_here_have_no_row():
    savers = {row.options["saver"] for row in table.rows(False, 4, None, ("torch.save", "CheckFreq", "dcp.save"))}
    assert savers == {"lightck", "torch.save", "CheckFreq", *(["LowDiff", "LowDiff+"])} | {
        "LowDiff (one by one)",
        "LowDiff (top-k)",
    }


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("full", lightck.FullState()),
        ("gradients 6", lightck.Gradients(6)),
        ("gradients 6 topk 0.01", lightck.Gradients(6, compress=lightck.TopK(0.01))),
    ],
)
def test_a_row_names_its_strategy(text, strategy):
    assert strategy_of(text) == strategy


@pytest.mark.parametrize("text", ["", "gradients", "gradients many", "full 3", "gradients 6 topk much"])
def test_a_strategy_that_cannot_be_read_is_an_error(text):
    with pytest.raises(BenchError, match="strategy"):
        strategy_of(text)


def test_the_algebra_of_bytes_and_pools():
    sizes = 3 * GB, GB
    spec = Spec(4, "full", "", "lightck", "gradients 6")
    assert measure.predicted(spec, 6, sizes) == {"predicted_bytes": 0.5, "predicted_pool": 17 * GB}
    full = Spec(4, "full", "", "lightck", "full", interval=2)
    assert measure.predicted(full, None, sizes) == {"predicted_bytes": 0.5, "predicted_pool": 6 * GB}
    lowdiff = Spec(4, "full", "", "LowDiff", rival={"base_every": 12, "batch": 4})
    assert measure.predicted(lowdiff, None, sizes)["predicted_bytes"] == pytest.approx(1 / 6)
    assert measure.predicted(Spec(4, "full", "", "torch.save"), None, sizes) == {"predicted_bytes": 1.0}


@pytest.mark.long
def test_all_of_gpt2_needs_the_pools_that_the_pages_say():
    of = gpt2_of(12)
    state, gradient = checkpoint_nbytes(of), measure.gradient_nbytes(of)
    assert state == pytest.approx(1.493 * GB, rel=0.01)
    pools = {
        n: measure.predicted(Spec(12, "full", "", "lightck", f"gradients {n}"), n, (state, gradient))["predicted_pool"]
        for n in (6, 12)
    }
    assert pools == {6: pytest.approx(8.5 * GB, rel=0.02), 12: pytest.approx(14.5 * GB, rel=0.02)}


def test_a_row_for_which_memory_is_short_is_an_error_that_says_so(folder):
    needed = measure.needed_bytes(row("Gradients(12)", layers=12), 1_500_000_000, 500_000_000)
    assert sum(needed) > measure.needed_bytes(row("Gradients(6)", layers=12), 1_500_000_000, 500_000_000)[1]
    measure.check_memory(needed, 40 * GB, str(folder), "lightck")
    with pytest.raises(
        BenchError, match=r"Memory is short .* 8\.0 GB are free\. Take the row with a smaller base_every"
    ):
        measure.check_memory(needed, 8 * GB, str(folder), "lightck")


def test_a_difference_of_one_bit_is_not_exact():
    live = [("weight", torch.tensor([1.0, 0.0])), ("weight.step", torch.tensor(3.0))]
    assert compared(live, dict(live), {"weight"})["exact"]
    minus = {"weight": torch.tensor([1.0, -0.0]), "weight.step": torch.tensor(3.0)}
    found = compared(live, minus, {"weight"})
    assert (found["exact"], found["differing"], found["max_difference"]) == (False, 1, 0.0)
    found = compared(live, {"weight": torch.tensor([1.5, 0.0]), "weight.step": torch.tensor(1.0)}, {"weight"})
    assert (found["differing"], found["max_difference"], found["max_relative_difference"]) == (2, 0.5, 0.5)


def test_only_steps_in_which_most_is_written_count_as_those_of_the_largest_parameter():
    windows = [
        {"seconds": 4.0, "step_seconds": [1.0] * 4, "step_stalls": [0.1, 0.4, 0.1, 0.4], "step_bytes": [5, 9, 5, 9]}
    ]
    found = measure._stalls(windows)
    assert (found["stall"], found["stall_of_largest"], found["largest_steps"]) == (0.25, 0.4, 2.0)
    assert found["stall_mean"] == pytest.approx(0.25)


class Other:
    def twice(self, number: int) -> int:
        return 2 * number

    def fails(self) -> None:
        raise LookupError("not there")

    def dies(self) -> None:
        import os

        os._exit(7)


def test_an_object_elsewhere_answers_and_its_errors_come_here():
    with Elsewhere("other", Other) as other, Elsewhere("another", Other) as another:
        assert (other.call("twice", 4), another.call("twice", 5)) == (8, 10)
        with pytest.raises(BenchError, match="other failed in 'fails': LookupError: not there"):
            other.call("fails")
        with pytest.raises(BenchError, match="other ended with status 7 while it ran 'dies'"):
            other.call("dies")
        assert another.call("twice", 6) == 12


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [pytest.param(0, id="Gradients"), pytest.param(1, id="LowDiff", marks=pytest.mark.campaign)]
)
def test_a_small_row(number, folder):
    pytest.importorskip("transformers")
    one = TABLES["gradients"].rows(Plan(quick=True))[number]
    found = run(one, Place(str(folder), str(folder), threads=1))
    result = found["result"]
    assert result["state_bytes"] == checkpoint_nbytes(SMALL["gpt2"])
    assert result["full"]["exact"]
    assert result["full"]["bytes"] == pytest.approx(1, rel=0.02)
    ours = result["saver"]
    assert ours["bytes"] == pytest.approx(ours["predicted_bytes"], rel=0.15)
    assert ours["exact"] == (number == 0), "a step from a sum of gradients gives other bits"
    assert 0 < ours["replayed"] < 3
    assert not list(folder.iterdir())
    shown = table.view({one.key: found})
    assert "bit for bit" in shown
    assert ("tensors differ" in shown) == (number == 1)
