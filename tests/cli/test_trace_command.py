"""``lightck trace``: the numbers and the picture of a recording, and errors for other files."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from calls import call, call_json
from toys import BIG, adam, net, train

import lightck

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recording of the steps 2 to 5, as JSON."""
    folder = tmp_path_factory.mktemp("trace")
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, folder / "run.pool", optimizer=optimizer) as session:
        train(model, optimizer, 1)
        with session.trace(folder / "run.json", steps=4):
            train(model, optimizer, 6, start=1)
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


@pytest.fixture
def file(recorded: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(recorded))
    return path


def texts(svg: Path) -> list[str]:
    root = ET.parse(svg).getroot()
    assert root.tag == f"{SVG}svg"
    assert {e.tag.removeprefix(SVG) for e in root.iter()} <= {"svg", "title", "rect", "text", "path", "line"}
    return [e.text or "" for e in root.iter() if e.tag in (f"{SVG}text", f"{SVG}title")]


def test_numbers_of_each_step(file):
    result = call("trace", file)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert [line.split()[0] for line in lines[1:]] == ["step", "2", "3", "4", "5", "median"]
    status, facts = call_json("trace", file)
    assert (status, [each["step"] for each in facts["steps"]]) == (0, [2, 3, 4, 5])
    assert facts["about"]["dropped"] == 0
    for each in facts["steps"]:
        assert 0 < each["forward_ms"] < each["time_ms"]
        assert each["stall_ms"] > 0
        assert each["copied_nbytes"] >= 3 * 4 * 7 * BIG


@pytest.mark.parametrize("chosen", [[], ["--step", 3], ["--from", 0, "--to", 1], ["--to", 1e9]])
def test_a_picture_of_a_step_or_a_range(file, tmp_path, chosen):
    out = tmp_path / "out.svg"
    assert call("trace", file, "--svg", out, *chosen).exit_code == 0
    words = texts(out)
    assert {"forward", "backward", "update", "commit"} <= set(words)
    if chosen[:1] == ["--step"]:
        assert "step 3" in words


def test_a_picture_that_is_there_is_kept_unless_asked(file, tmp_path):
    out = tmp_path / "out.svg"
    out.write_text("precious")
    refused = call("trace", file, "--svg", out)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.endswith("Name another path, or pass --overwrite.\n")
    assert out.read_text() == "precious"
    assert call("trace", file, "--svg", out, "--overwrite").exit_code == 0
    assert texts(out)


def test_a_pool_is_not_replaced_by_a_picture(file, good):
    before = good.read_bytes()
    status, facts = call_json("trace", file, "--svg", good, "--overwrite")
    assert (status, facts["error"]["class"]) == (2, "ExportExistsError")
    assert good.read_bytes() == before


@pytest.mark.parametrize(
    "options",
    [
        ["--step", 2],
        ["--from", 1],
        ["--svg", "o", "--step", 99],
        ["--svg", "o", "--step", 2, "--to", 3],
        ["--svg", "o", "--from", 5, "--to", 4],
        ["--svg", "o", "--from", 1e9],
        ["--svg", "o", "--to", "nan"],
    ],
)
def test_what_cannot_be_drawn_is_said(file, tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    result = call("trace", file, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert not Path("o").exists()


def damaged(recorded: dict[str, Any], kind: str) -> Any:
    found = json.loads(json.dumps(recorded))
    first = next(e for e in found["traceEvents"] if e["ph"] == "X")
    step = next(e for e in found["traceEvents"] if e["ph"] == "X" and e["cat"] == "step")
    copied = next(e for e in found["traceEvents"] if e["ph"] == "X" and "bytes" in e["args"])
    changes: dict[str, Any] = {
        "an array": lambda: found["traceEvents"],
        "another program's": lambda: found.pop("otherData") and found,
        "a newer format": lambda: found["otherData"].update(lightck_trace=2),
        "no events": lambda: found.pop("traceEvents") and found,
        "events of numbers": lambda: found.update(traceEvents=[1, 2]),
        "no row": lambda: first.update(tid=999),
        "a row of text": lambda: first.update(tid="1"),
        "a negative time": lambda: first.update(ts=-1),
        "an endless time": lambda: first.update(dur=1e300),
        "a time of text": lambda: first.update(ts="0"),
        "a time that is a bool": lambda: first.update(ts=True),
        "a huge step": lambda: step["args"].update(step=1 << 70),
        "a step that is none": lambda: step.update(args={}),
        "bytes of text": lambda: copied["args"].update(bytes="many"),
        "args of text": lambda: first.update(args="x"),
        "a long name": lambda: first.update(name="x" * 20_000),
        "a name that is none": lambda: first.update(name=[1]),
        "many rows": lambda: found["traceEvents"].extend(
            {"ph": "M", "name": "thread_name", "tid": 1000 + i, "args": {"name": "r"}} for i in range(300)
        ),
    }
    changed = changes[kind]()
    return changed if changed is not None else found


@pytest.mark.parametrize(
    "kind",
    [
        "an array",
        "another program's",
        "a newer format",
        "no events",
        "events of numbers",
        "no row",
        "a row of text",
        "a negative time",
        "an endless time",
        "a time of text",
        "a time that is a bool",
        "a huge step",
        "a step that is none",
        "bytes of text",
        "args of text",
        "a long name",
        "a name that is none",
        "many rows",
    ],
)
def test_a_damaged_trace_is_refused(recorded, tmp_path, kind):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(damaged(recorded, kind)))
    status, facts = call_json("trace", file, "--svg", tmp_path / "o.svg")
    assert (status, facts["error"]["class"]) == (2, "TraceFormatError")
    assert not (tmp_path / "o.svg").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"null",
        b'{"otherData": {"lightck_trace": 1}, "traceEvents": [NaN]}',
        b'{"otherData": ' + b"9" * 10_000 + b"}",
    ],
    ids=["empty", "cut", "not text", "deep", "null", "nan", "a huge number"],
)
def test_what_is_no_json_is_refused(tmp_path, data):
    file = tmp_path / "run.json"
    file.write_bytes(data)
    assert call_json("trace", file)[1]["error"]["class"] == "TraceFormatError"


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert call("trace", tmp_path / "missing").exit_code == 2
    assert call("trace", tmp_path / "pipe").exit_code == 2
    assert call("trace", tmp_path).exit_code == 2


def test_text_of_a_trace_is_only_text(recorded, tmp_path):
    """In the picture, and on a terminal (``call`` checks that)."""
    found = json.loads(json.dumps(recorded))
    evil = "</text><script>alert(1)</script>&\"'\x1b[31m\x00\ud800\u202e]]>"
    found["otherData"].update(model=evil, medium=evil, compiled=[evil, 3], dropped=-5)
    for event in found["traceEvents"]:
        if event["name"] == "thread_name" and event["tid"] == 2:
            event["args"]["name"] = evil
        elif event["ph"] == "X":
            event["name"] = evil
            event["args"].update(module=evil, cpu_ms=evil, whole=evil, helped=evil)
    file, out = tmp_path / "run.json", tmp_path / "out.svg"
    file.write_text(json.dumps(found))
    assert call("trace", file, "--svg", out, "--to", 1e6).exit_code == 0
    assert call_json("trace", file)[0] == 0
    assert any("<script>" in text for text in texts(out))
    assert "<script>" not in out.read_text()


def test_a_picture_of_many_events_is_bounded(recorded, tmp_path):
    found = json.loads(json.dumps(recorded))
    tid = next(e["tid"] for e in found["traceEvents"] if e["name"] == "thread_name" and e["args"]["name"] == "forward")
    found["traceEvents"] += [
        {"ph": "X", "name": f"layer {i}", "tid": tid, "ts": i / 10, "dur": 0.05, "args": {"module": str(i), "layer": i}}
        for i in range(100_000)
    ]
    file, out = tmp_path / "run.json", tmp_path / "out.svg"
    file.write_text(json.dumps(found))
    assert call("trace", file, "--svg", out, "--to", 10).exit_code == 0
    assert out.stat().st_size < 1_000_000


def test_a_trace_without_a_whole_step(pool, tmp_path):
    with lightck.attach(net(), pool) as session:
        session.trace(tmp_path / "run.json").close()
    result = call("trace", tmp_path / "run.json", "--svg", tmp_path / "out.svg")
    assert result.exit_code == 0
    assert "no whole step" in result.stdout
    assert texts(tmp_path / "out.svg")
