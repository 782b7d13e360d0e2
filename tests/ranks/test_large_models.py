"""The largest searches of the rule were run with the sources as they are now."""

from __future__ import annotations

import json

from ranks.large_models import RESULT, ROWS, digest


def test_kept_result_is_of_these_sources_and_rows() -> None:
    kept = json.loads(RESULT.read_text())
    assert kept["sources"] == digest(), "run python -m ranks.large_models, in the folder tests/, and commit the result"
    assert kept["rows"] == [{"row": row.name, "states": row.states, "lost": row.lost} for row in ROWS]
