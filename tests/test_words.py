"""Words that only this project used are gone, from names, files, docstrings, messages and pages."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from messages import messages

ROOT = Path(__file__).parent.parent
GONE = re.compile(
    r"\b(flights?|lanes?|drafts?|doubts?|doubted|rosters?|nests?|noting|patience(?!=)|told|commit lines?)\b|CommitLine",
    re.IGNORECASE,
)
"""Nowhere, in prose or in names."""
GONE_IN_NAMES = {
    "flight",
    "flights",
    "lane",
    "lanes",
    "draft",
    "drafts",
    "doubt",
    "doubted",
    "roster",
    "nest",
    "nests",
    "noting",
    "patience",
    "told",
}
"""Parts of names. ``in_flight`` is the field's own word, and ``in_flight_checkpoint`` too."""
NAMES_OF_BYTES = {"docs/format.md": ("commit line", "commit lines")}
KEPT_ROW = re.compile(r"\| [a-z-]+ \| (file|pmdk) \| [\d,]+ \|")
"""A row of docs/guarantees.md that shows kept results of a campaign, in the words of its time."""
THIS = {"tests/test_words.py", "tests/messages.py"}
SKIPPED = ("docs/evidence/", "bench/results/", "tests/system/public_programs/catalog/", "tests/pool/golden/")


def files(*patterns: str) -> list[str]:
    """Tracked files, without kept results and what belongs to others."""
    run = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in run.stdout.split() if name not in THIS and not name.startswith(SKIPPED)]


def is_checkout() -> bool:
    return (ROOT / ".git").exists()


pytestmark = pytest.mark.skipif(not is_checkout(), reason="the files of a checkout are listed by git")


def names_in(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def source_of(name: str) -> str:
    """The text of a file, without the option ``patience`` of a scheduler of torch, and the attributes of a callback of
    transformers that have this word in their names."""
    return (ROOT / name).read_text().replace("patience=", "").replace("early_stopping_patience", "")


def parts_of(name: str) -> list[str]:
    """``InFlightCheckpoint`` and ``in_flight_checkpoint`` alike: in, flight, checkpoint."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def old_part(name: str) -> str | None:
    parts = parts_of(name)
    for before, part in zip(["", *parts], parts, strict=False):
        if part in GONE_IN_NAMES and not (part == "flight" and before == "in"):
            return part
    return None


def prose_of(name: str) -> str:
    """The text of a file, without the field's own "in flight"."""
    return re.sub(r"\bin[- _]flight\b", "under way", (ROOT / name).read_text(), flags=re.IGNORECASE)


def old_words(name: str) -> list[str]:
    allowed = NAMES_OF_BYTES.get(name, ())
    found = []
    for number, line in enumerate(prose_of(name).splitlines(), 1):
        if KEPT_ROW.match(line):
            continue
        found += [f"{name}:{number}: {m[0]}" for m in GONE.finditer(line) if m[0].lower() not in allowed]
    return found


@pytest.mark.parametrize("folder", ["lightck", "tests", "bench", "examples"])
def test_no_name_has_an_old_word(folder):
    found = []
    for name in files(f"{folder}/*.py"):
        found += [f"{name}:{line}: {token}" for line, token in names_in(source_of(name)) if old_part(token) is not None]
    assert not found, "\n".join(found)


def test_no_file_is_named_by_an_old_word():
    found = [name for name in files("*") if old_part(re.sub(r"[/.-]", "_", name)) is not None]
    assert not found


@pytest.mark.parametrize("pattern", ["lightck/*.py", "native/*.c", "native/*.h", "tests/*.py", "bench/*.py", "*.md"])
def test_no_text_has_an_old_word(pattern):
    found = [word for name in files(pattern) for word in old_words(name)]
    assert not found, "\n".join(found)


def test_no_message_calls_a_checkpoint_a_version():
    allowed = re.compile(
        r"version (counter|number)|version=|--version|Stats\.versions|software version|newer lightck|older lightck"
        r"|lightck, version|Print the version of lightck|root object of version|small state has version"
        r"|script depends on the version of"
    )
    found = [
        f"{m.file}:{m.line}: {m.text}"
        for m in messages()
        if re.search(r"\bversions?\b", m.text) and not allowed.search(m.text) and not _is_of_software(m.file)
    ]
    assert not found, "\n".join(found)


def _is_of_software(file: str) -> bool:
    return file.startswith(
        ("cli/checks", "cli/bench", "cli/machine", "_native", "state/fingerprint", "pool/storage/pmemobj")
    )


def test_the_words_are_looked_for():
    """A line with an old word is found, one with the field's own is not."""
    assert old_part("take_flight") == "flight"
    assert old_part("InFlightCheckpoint") is None
    assert old_part("test_it_is_told_once") == "told"
    assert GONE.search("the draft of a slot")
    assert not GONE.search("a plane")
    assert any("Put the pool" in m.text for m in messages())
