"""The largest searches, and the random runs, of the rules of a tier were run with the sources as they are now."""

from __future__ import annotations

import json

from ranks.large_models import digest

from tiers.large_tier_models import N_RANDOM, RESULT, ROWS, SOURCES, kept


def test_kept_result_is_of_these_sources_and_rows() -> None:
    result = json.loads(RESULT.read_text())
    assert result["sources"] == digest(SOURCES), (
        "run python -m tiers.large_tier_models, in the folder tests/, and commit the result"
    )
    assert result["rows"] == [kept(row) for row in ROWS]
    assert result["random"]["runs"] == N_RANDOM
