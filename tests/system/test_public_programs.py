"""The parts of the public programs' driver that need none of the programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from public_programs import report
from public_programs.edits import PatchError, after, apply, at_end, before, patched, sub

SOURCE = "for a in b:\n    one()\n    two()\n"


def test_a_rule_puts_lines_of_ours_beside_the_line_that_it_fits() -> None:
    assert patched(SOURCE, after("one", "x()\ny()")) == "for a in b:\n    one()\n    x()\n    y()\n    two()\n"
    assert patched(SOURCE, before("two", "x()")) == "for a in b:\n    one()\n    x()\n    two()\n"
    assert patched(SOURCE, sub(r"in (b)", r"in wrap(\1)")) == "for a in wrap(b):\n    one()\n    two()\n"
    assert patched(SOURCE, at_end("x()")) == SOURCE + "x()\n"


def test_a_rule_that_fits_no_line_or_several_is_an_error() -> None:
    for at in ("three", r"\(\)"):
        with pytest.raises(PatchError, match="must fit"):
            patched(SOURCE, after(at, "x()"))
    assert patched(SOURCE, after(r"\(\)", "x()", place=(2, 2))) == SOURCE + "    x()\n"


def test_a_patch_says_how_many_lines_are_ours(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(SOURCE)
    assert apply([after("one", "x()\ny()"), sub("two", "three")], tmp_path, "main.py") == 3
    assert "x()" in (tmp_path / "main.py").read_text()


def test_a_difference_that_nobody_was_reported_of_is_silent() -> None:
    chain = {"error": None, "error_in": None, "differs": ["weights/a"], "warnings": []}
    assert report.outcome(chain) == report.SILENT
    assert report.outcome({**chain, "warnings": ["loader"]}) == report.WARNED
    assert report.outcome({**chain, "differs": []}) == report.IDENTICAL
    assert report.outcome({**chain, "differs": None}).startswith(report.FAILED)
    assert report.outcome({**chain, "error": "ValueError: no", "error_in": "restart"}).endswith("restart")
