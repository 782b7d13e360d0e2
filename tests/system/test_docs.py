"""The documentation is true: its Python runs, its links lead somewhere, its errors exist."""

from __future__ import annotations

import builtins
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lightck

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
REFERENCES = ("format.md", "guarantees.md")
"""Pages to look something up in, which may be long."""
WORDS_MAX = 1500
WITH_CODE = [page for page in PAGES if "```python\nimport" in page.read_text()]


def script_of(page: Path) -> str:
    """The page's Python, one block after the other as a reader would run it; excerpts begin without an import."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    first = next(i for i, block in enumerate(blocks) if block.startswith("import"))
    return "\n".join(blocks[first:] if page.parent.name == "docs" else blocks[first : first + 1])


def run(script: Path, expected: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(lightck.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, script.name], cwd=script.parent, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == expected, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, folder):
    script = folder / "page.py"
    script.write_text(script_of(page))
    if page.name == "README.md":  # its script kills itself in the first run
        run(script, -signal.SIGKILL)
        assert "starts at step 69" in run(script) or "starts at step 70" in run(script)
    else:
        run(script)


def test_pages_with_code_are_found():
    names = {page.name for page in WITH_CODE}
    assert names >= {"README.md", "start.md", "resume.md", "medium.md", "migrate.md", "backups.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_of_the_project(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_has_one_title(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, re.M)) == 1


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.name)
def test_a_page_to_read_is_short(page):
    assert page.name in REFERENCES or len(page.read_text().split()) <= WORDS_MAX


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_errors_that_a_page_names_exist(page):
    for name in set(re.findall(r"\b[A-Z]\w+Error\b", page.read_text())) - set(dir(builtins)):
        assert hasattr(lightck.errors, name), name
