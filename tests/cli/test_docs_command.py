"""``lightck docs`` prints the pages that messages point to."""

from __future__ import annotations

import re

import pytest
from calls import ROOT, call
from messages import messages

PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


def test_every_page_is_listed_with_its_title():
    result = call("docs")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.split("\n\n")[0].splitlines()] == PAGES
    assert re.search(r"^loops +\S.*", result.stdout, re.M)


@pytest.mark.parametrize("page", ["loops", "loops.md"])
def test_a_page_is_printed_as_it_is_written(page):
    result = call("docs", page)
    assert result.exit_code == 0
    assert result.stdout == (ROOT / "docs" / "loops.md").read_text()


def test_an_unknown_page_is_refused_with_the_names_of_all():
    result = call("docs", "../README")
    assert result.exit_code == 2
    assert f"There is no page '../README'. The pages are: {', '.join(PAGES)}." in result.stderr


def test_messages_point_to_pages_by_this_command_only():
    texts = [message.text for message in messages()]
    assert not [text for text in texts if re.search(r"docs/[a-z-]+\.md", text)]
    named = {page for text in texts for page in re.findall(r"lightck docs ([a-z-]+)", text)}
    assert named
    assert named <= {*PAGES, "[page]"}
