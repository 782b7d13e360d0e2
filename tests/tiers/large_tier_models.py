"""The largest models of a tier: ``python -m tiers.large_tier_models``, in the folder ``tests/`` (about twenty minutes).

Only a change of the rules or of the model can change what comes out. So these rows, and the many random runs, are run
by hand, and the result is kept with a digest of the sources. ``test_large_tier_models.py`` fails when the sources are
others than those of the result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from ranks.large_models import ROOT, digest

from tiers.test_tier_model import RANDOM
from tiers.tier_explore import forget, walk
from tiers.tier_rows import Row, safe

RESULT = ROOT / "docs" / "evidence" / "tiers" / "large-models.json"
MODEL_FILES = ("tier_explore", "tier_model", "tier_rows")
SOURCES = (
    "lightck/tiers/decisions.py",
    "lightck/tiers/names.py",
    *(f"tests/tiers/{name}.py" for name in MODEL_FILES),
)
N_RANDOM, N_CHUNKS = 100_000, 100

ROWS = [
    safe("2 ranks, 2 claims, 3 steps", 663_755, n=2, claims=2, steps=3, is_fine=False),
    safe("2 ranks, 2 claims, 2 steps, a fast reader", 202_440, n=2, claims=2, steps=2, is_fine=False, fast_readers=1),
    safe("2 ranks, 2 claims, 2 steps, a slow reader", 249_406, n=2, claims=2, steps=2, is_fine=False, slow_readers=1),
    safe("2 ranks, 2 claims, 2 steps, gc", 371_788, n=2, claims=2, steps=2, is_fine=False, collects=True),
    safe("1 rank, 2 trainings claim at once, 2 steps", 122_189, claims=3, steps=2, is_fine=False),
    safe("1 rank, 2 claims, 3 steps, each request apart", 115_152, claims=2, steps=3),
]


def kept(row: Row) -> dict[str, object]:
    """What the result keeps of a row that was checked."""
    return {"row": row.name, "states": row.states}


def _checked(number: int) -> dict[str, object]:
    ROWS[number].check()
    return kept(ROWS[number])


def _walked(chunk: int) -> int:
    """Make one part of the random runs, and return the number of moves in it."""
    n, moves = N_RANDOM // N_CHUNKS, 0
    for seed in range(chunk * n, (chunk + 1) * n):
        found = walk(RANDOM, seed)
        assert found.problem is None, str(found)
        moves += found.states
        if seed % 100 == 0:
            forget()
    return moves


def main() -> None:
    began, sources = time.monotonic(), digest(SOURCES)
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        rows = list(executor.map(_checked, range(len(ROWS))))
        moves = sum(executor.map(_walked, range(N_CHUNKS)))
    found = {"sources": sources, "rows": rows, "random": {"runs": N_RANDOM, "moves": moves}}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    states = sum(row.states for row in ROWS)
    print(f"{states:,} states, {moves:,} random moves in {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
