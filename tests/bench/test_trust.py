"""bench/trust.py with few trials: the faults hit, the outcomes are right, and lightck loads nothing wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import faults, trust

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Two rows, made by the command in a process of its own, since it forks."""
    out = tmp_path_factory.mktemp("trust")
    command = [
        sys.executable,
        "bench/trust.py",
        "--only",
        "lightck",
        "--only",
        "torch.save",
        "--kills",
        "4",
        "--flips",
        "40",
        "--cuts",
        "6",
        "--seed",
        "1",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (out / "trust.md").read_text() == trust.markdown(json.loads((out / "trust.json").read_text()))
    return {row["rival"]: row for row in json.loads((out / "trust.json").read_text())["rows"]}


def test_lightck_gives_nothing_wrong_and_loses_nothing_that_it_reported(result):
    row = result["lightck"]
    assert row["kills"]["outcomes"] == {"exact": 4}
    assert set(row["flips"]["outcomes"]) <= {"harmless", "fell back"}
    assert "fell back" in row["flips"]["outcomes"], "no flip hit the newest checkpoint"
    assert set(row["cuts"]["outcomes"]) <= {"harmless", "fell back", "refused"}


def test_the_same_flips_find_what_is_not_checked(result):
    """torch.load of torch 2.13 does not verify payload. If that changes, the table has to be made again."""
    row = result["torch.save"]
    assert row["flips"]["outcomes"]["wrong"] > 30
    example = row["flips"]["examples"]["wrong"][0]
    assert "checkpoint.pt" in example["damage"]
    assert "1 bytes" in example["differs"][0]


TALLY = {"trials": 1, "in_newest": None, "outcomes": {}, "examples": {}}


def facts(**other: object) -> dict[str, object]:
    of_old = {"machine": "old", "versions": {"torch": "1"}, "medium": "tmpfs", "state_bytes": 1, "date": "then"}
    return {**of_old, "seed": 1, **other}


def test_what_was_played_before_keeps_its_machine_and_date(tmp_path):
    """The oldest files hold the conditions once for all rows, and the seed in each row."""
    old = facts()
    seed = old.pop("seed")
    played = [
        {"rival": name, "use": name, "seed": seed, "kills": TALLY, "flips": TALLY} for name in ("lightck", "torch.save")
    ]
    kept = tmp_path / "trust.json"
    kept.write_text(json.dumps({**old, "rows": played, "not_run": {"gone": "no more", "safetensors": "then"}}))
    now = facts(machine="new", date="now", seed=2)
    new = {"rival": "lightck", "use": "otherwise", "kills": {**TALLY, "trials": 9}, "taken": {"kills": now}}
    for _ in range(2):  # as after each row
        trust.keep(tmp_path, {"rows": [new], "not_run": {}})
    lightck, other = json.loads(kept.read_text())["rows"]
    assert lightck["taken"] == {"kills": now, "flips": facts()}
    assert (lightck["kills"]["trials"], lightck["use"]) == (9, "otherwise")
    assert other["taken"] == {"kills": facts(), "flips": facts()}
    text = (tmp_path / "trust.md").read_text()
    where = "torch 1; files on tmpfs; 0.0 MB of state"
    assert f"lightck (kills): new; {where}; seed 2; now." in text
    assert f"lightck (flips), torch.save (kills, flips): old; {where}; seed 1; then." in text


def test_why_a_rival_was_not_run_is_asked_anew(tmp_path, monkeypatch):
    reasons = {"safetensors": "now"}
    monkeypatch.setattr(trust.rivals, "why_not", lambda name: reasons.get(name, ""))
    before = {"gone": "no more", "safetensors": "then", "CheckFreq": "then"}
    kept = tmp_path / "trust.json"
    kept.write_text(json.dumps({**facts(), "rows": [], "not_run": before}))
    trust.keep(tmp_path, {"rows": [], "not_run": {}})
    assert json.loads(kept.read_text())["not_run"] == {"safetensors": "now", "CheckFreq": "then"}


def test_a_result_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    kept = tmp_path / "trust.json"
    kept.write_text(json.dumps({**facts(), "rows": [], "not_run": {}}))
    before = kept.read_text()

    def full(path: Path, text: str) -> int:
        with path.open("w") as file:
            file.write(text[:10])
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        trust.keep(tmp_path, {"rows": [], "not_run": {}})
    assert kept.read_text() == before


def test_the_kept_table_is_that_of_the_kept_results():
    folder = ROOT / "bench" / "results"
    assert (folder / "trust.md").read_text() == trust.markdown(json.loads((folder / "trust.json").read_text()))


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
