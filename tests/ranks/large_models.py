"""The largest groups under the rule: ``python -m ranks.large_models``, in the folder ``tests/`` (some ten minutes).

Only a change of the rule or of its model can change what comes out. So these rows are run by hand, and the result is
kept with a digest of the sources. ``test_large_models.py`` fails when the sources are others than those of the result.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from pathlib import Path

from ranks.copying import Copies
from ranks.rows import Row, check, safe
from ranks.topology import data_parallel, pipeline

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "evidence" / "ranks" / "large-models.json"
SOURCES = ("lightck/ranks/rule.py", *(f"tests/ranks/{name}.py" for name in ("copying", "explore", "model", "topology")))
DP, HOSTS_2_1 = data_parallel, ((0, 1), (2,))


def _copies(name: str, n: int, states: int, lost: int, host: int, **options: object) -> Row:
    """A row with peer copies. ``host``: the most steps that a crash costs which takes a host with it."""
    return safe(name, n, DP(n), states, lost, lost_with_host=host, model=Copies, **options)


ROWS = [
    safe("3 ranks, 2 given up, 1 crash", 3, DP(3), 119_752, 1, give_ups=2, crashes=1),
    safe("3 ranks, 3 given up, 1 crash", 3, DP(3), 283_943, 1, give_ups=3, crashes=1),
    safe("4 ranks, 1 given up, 1 crash", 4, DP(4), 213_455, 1, give_ups=1, crashes=1),
    safe("3 stages, 1 given up, 1 crash", 3, pipeline(3), 270_315, 2, give_ups=1, crashes=1),
    safe("relayouts, 2 ranks, 2 given up", 2, DP(2), 215_207, 1, files=1, give_ups=2),
    _copies("copies, 3 slots, each publishes late, 1 crash", 2, 172_048, 1, 4, slots=3, publishes_late=True, crashes=1),
    _copies("copies, 2 ranks, 2 crashes", 2, 143_593, 1, 6, crashes=2),
    _copies("copies, 2 ranks, each publishes late", 2, 131_862, 1, 6, publishes_late=True),
    _copies("copies, 3 slots, 2 hosts with 3 ranks, 1 crash", 3, 208_847, 1, 4, slots=3, hosts=HOSTS_2_1, crashes=1),
    _copies("copies, 2 hosts with 3 ranks", 3, 147_151, 1, 6, hosts=HOSTS_2_1),
]


def digest() -> str:
    """Of the lines of the sources, without docstrings, empty lines and lines of comments. (A dump of the syntax tree
    would be another one in each version of Python.)"""
    found = blake2b(digest_size=16)
    for path in SOURCES:
        text = (ROOT / path).read_text()
        lines = dict(enumerate(text.splitlines(), start=1))
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    lines.pop(number, None)
        kept = [line for line in lines.values() if line.strip() and not line.lstrip().startswith("#")]
        found.update("\n".join(kept).encode())
    return found.hexdigest()


def _checked(number: int) -> dict[str, object]:
    row = ROWS[number]
    check(row)
    return kept(row)


def kept(row: Row) -> dict[str, object]:
    """What the result keeps of a row that was checked."""
    return {"row": row.name, "states": row.states, "lost": row.lost}


def main() -> None:
    began, sources = time.monotonic(), digest()
    with ProcessPoolExecutor(os.cpu_count()) as executor:
        found = list(executor.map(_checked, range(len(ROWS))))
    RESULT.write_text(json.dumps({"sources": sources, "rows": found}, indent=1) + "\n")
    print(f"{sum(row.states for row in ROWS):,} states in {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
