"""The largest searches of the rule were run with the sources as they are now."""

from __future__ import annotations

import json

from ranks.large_models import RESULT, ROWS, digest, kept


def test_kept_result_is_of_these_sources_and_rows() -> None:
    result = json.loads(RESULT.read_text())
    assert result["sources"] == digest(), (
        "run python -m ranks.large_models, in the folder tests/, and commit the result"
    )
    assert result["rows"] == [kept(row) for row in ROWS]
