"""What the pages cite of the campaigns is what the campaigns found."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash import campaigns, evidence

ROOT = Path(__file__).resolve().parents[2]
KEPT = sorted((ROOT / "docs" / "evidence").glob("*.json"))


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_a_kept_result_has_no_finding_left(path: Path):
    result = evidence.kept(path)
    assert path.stem == f"{result.campaign}-{result.backend}"
    assert result.campaign in campaigns.NAMES
    assert result.trials > 0
    assert result.counts
    assert result.findings == ()


def test_the_guarantees_cite_the_kept_results():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    assert KEPT
    assert "\n".join(evidence.table(ROOT / "docs" / "evidence")) in page, (
        "put into the page: PYTHONPATH=tests python -c 'from pathlib import Path; from crash import evidence; "
        'print(*evidence.table(Path("docs/evidence")), sep=chr(10))\''
    )
