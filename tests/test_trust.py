"""The comparison of bench/trust.py, small: its injectors hit, its verdicts are right, and lightck stands them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: an installed lightck goes first

from bench import faults, trust

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Two rows, by the command itself: it forks, which a process that runs tests had better not."""
    import json

    out = tmp_path_factory.mktemp("trust")
    command = [sys.executable, "bench/trust.py", "--only", "lightck", "--only", "torch.save", "--kills", "4",
               "--flips", "40", "--cuts", "6", "--seed", "1", "--out", str(out)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (out / "trust.md").read_text() == trust.markdown(json.loads((out / "trust.json").read_text()))
    return {row["rival"]: row for row in json.loads((out / "trust.json").read_text())["rows"]}


def test_lightck_gives_nothing_wrong_and_loses_nothing_that_it_reported(result):
    row = result["lightck"]
    assert row["kills"]["outcomes"] == {"exact": 4}
    assert set(row["flips"]["outcomes"]) <= {"harmless", "fell back"}
    assert "fell back" in row["flips"]["outcomes"], "no flip hit the newest version"
    assert set(row["cuts"]["outcomes"]) <= {"harmless", "fell back", "refused"}


def test_the_same_flips_find_what_is_not_checked(result):
    """torch.load of torch 2.13 takes what it reads: were this to change, the table would be told anew."""
    row = result["torch.save"]
    assert row["flips"]["outcomes"]["wrong"] > 30
    example = row["flips"]["examples"]["wrong"][0]
    assert "checkpoint.pt" in example["damage"]
    assert "1 bytes" in example["differs"][0]


def test_verdicts():
    table = ["zero", "one", "two", "three"]
    assert faults.after_kill({"step": 2, "digest": "two"}, 2, table) == "exact"
    assert faults.after_kill({"step": 3, "digest": "three"}, 2, table) == "exact"
    assert faults.after_kill({"step": 1, "digest": "one"}, 2, table) == "older"
    assert faults.after_kill({"step": 3, "digest": "two"}, 2, table) == "wrong"
    assert faults.after_kill({"step": 9, "digest": "two"}, 2, table) == "wrong"
    assert faults.after_kill({"error": "EOFError"}, 2, table) == "nothing loads"
    assert faults.after_kill({"died": "died"}, 2, table) == "nothing loads"
    assert faults.after_damage({"step": faults.FINISHED, "differs": []}) == "harmless"
    assert faults.after_damage({"step": faults.FINISHED - 1, "differs": []}) == "fell back"
    assert faults.after_damage({"step": faults.FINISHED, "differs": ["model.0.bias"]}) == "wrong"
    assert faults.after_damage({"error": "no"}) == "refused"
    assert faults.after_damage({"died": "hung"}) == "crashed"


def test_differences_name_the_part_and_the_byte():
    assert faults.differences({"a": b"x1", "b": b"y"}, {"a": b"x1", "b": b"y"}) == []
    assert faults.differences({"a": b"x3"}, {"a": b"x1"}) == ["a: 1 bytes, first 31 -> 33"]
    assert faults.differences({}, {"a": b"x1"}) == ["a: 2 bytes, first 78 -> "]
