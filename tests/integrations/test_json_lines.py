"""What lightck logs as JSON lines: each line is one object with the documented fields, and nothing else."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from toys import adam, net, train

import lightck
from lightck.integrations.json_lines import JsonFormatter, log_commits, log_to

PAGE = Path(__file__).resolve().parents[2] / "docs" / "watching.md"
ALWAYS = {"time", "level", "logger", "event", "message"}


@pytest.fixture(autouse=True)
def _logger_as_before() -> Iterator[None]:
    logger = logging.getLogger("lightck")
    handlers, level = list(logger.handlers), logger.level
    yield
    for each in set(logger.handlers) - set(handlers):
        logger.removeHandler(each)
        each.close()
    logger.setLevel(level)


def attached(pool: Path, **options: Any) -> tuple[Any, Any, lightck.Session]:
    model = net()
    optimizer = adam(model)
    return model, optimizer, lightck.attach(model, pool, optimizer=optimizer, **options)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_messages_and_every_nth_commit_are_lines(pool, tmp_path):
    log_to(tmp_path / "run.jsonl", run="gpt-7")
    model, optimizer, session = attached(pool)
    log_commits(session, every=3)
    train(model, optimizer, 7)
    session.close()
    lines = lines_of((tmp_path / "run.jsonl").read_text())
    commits = [line for line in lines if line["event"] == "commit"]
    assert [line["step"] for line in commits] == [3, 6]
    assert [line["commits"] for line in commits] == [3, 6]
    assert {line["run"] for line in lines} == {"gpt-7"}
    assert all(line.keys() >= ALWAYS for line in lines)
    starts = [line for line in lines if line["event"] == "message" and "fresh start" in line["message"]]
    assert len(starts) == 1
    assert starts[0].keys() == ALWAYS | {"run"}
    then = datetime.fromisoformat(commits[0]["time"].replace("Z", "+00:00"))
    assert abs((datetime.now(timezone.utc) - then).total_seconds()) < 60


def test_a_commit_says_what_the_page_says(pool, tmp_path):
    stream = io.StringIO()
    handler = log_to(stream)
    model, optimizer, session = attached(pool, tiers=[lightck.Tier(tmp_path / "tier", every="1h")])
    handle = log_commits(session, every=1)
    train(model, optimizer, 3)
    session.close()
    handle.remove()
    logging.getLogger("lightck").removeHandler(handler)
    commits = [line for line in lines_of(stream.getvalue()) if line["event"] == "commit"]
    assert [line["step"] for line in commits] == [1, 2, 3]
    last = commits[-1]
    assert (last["pool"], last["rank"], last["lag_steps"]) == (str(pool), 0, 0)
    assert last["written_bytes"] > 0
    (tier,) = last["tiers"]
    assert tier["tier"] == str(tmp_path / "tier")
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    documented = {name.strip().strip("`") for names, _ in rows for name in names.split(",")}
    assert last.keys() | tier.keys() | {"error", "traceback"} <= documented


def test_only_known_fields_of_a_record_are_written():
    record = logging.LogRecord("lightck", logging.WARNING, "f.py", 1, "the tier %r\nis\x1b[31m full", ("a",), None)
    record.password = "hunter2"
    line = JsonFormatter(rank=1).format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    assert "hunter2" not in line
    facts = json.loads(line)
    assert facts["message"] == "the tier 'a'\nis\x1b[31m full"
    assert facts["rank"] == 1
    assert facts["level"] == "WARNING"


def test_an_exception_has_its_class_and_its_traceback():
    stream = io.StringIO()
    log_to(stream)
    try:
        raise RuntimeError("no room")
    except RuntimeError:
        logging.getLogger("lightck").exception("lightck: it failed")
    (line,) = lines_of(stream.getvalue())
    assert line["error"] == "RuntimeError"
    assert line["traceback"].endswith("RuntimeError: no room")


def test_level_says_what_is_written(pool):
    stream = io.StringIO()
    log_to(stream, level=logging.WARNING)
    model, optimizer, session = attached(pool)
    log_commits(session, every=1)
    train(model, optimizer, 3)
    session.close()
    assert stream.getvalue() == ""


def test_a_number_of_commits_below_1_is_refused(pool):
    _, _, session = attached(pool)
    with pytest.raises(ValueError, match="1 or more"):
        log_commits(session, every=0)
    session.close()
