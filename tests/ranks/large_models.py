"""The largest groups under the rule: ``python -m ranks.large_models``, in the folder ``tests/`` (some fifteen minutes).

Only a change of the rule or of its model can change what comes out. So these rows are run by hand, and the result is
kept with a digest of the sources. ``test_large_models.py`` fails when the sources are others than those of the result.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ranks.copying import Copies
from ranks.rows import Row, check, safe
from ranks.topology import Topology, data_parallel, mesh_2x2, no_collective, pipeline

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "evidence" / "ranks" / "large-models.json"
SOURCES = ("lightck/ranks/rule.py", *(f"tests/ranks/{name}.py" for name in ("copying", "explore", "model", "topology")))
DP = data_parallel
HOSTS_2_1, HOSTS_3 = ((0, 1), (2,)), ((0,), (1,), (2,))


def _copies(
    name: str, n: int, states: int, lost: int, host: int | None, topology: Topology | None = None, **options: Any
) -> Row:
    """A row with peer copies. ``host``: the most steps that a crash costs which takes a host with it; None: not
    counted, as in ``test_copying.py``."""
    return safe(f"copies, {name}", n, topology or DP(n), states, lost, lost_with_host=host, model=Copies, **options)


ROWS = [
    safe("2 ranks, 3 given up, 2 crashes", 2, DP(2), 83_489, 1, give_ups=3, crashes=2),
    safe("mesh 2 x 2, 1 crash, news come late", 4, mesh_2x2(), 21_923, 2, crashes=1, reads="earlier"),
    safe("2 ranks, 2 left out in a row, 1 crash", 2, DP(2), 87_420, 6, skips=2, crashes=1, horizon=5),
    safe("3 ranks, 2 given up, 1 crash", 3, DP(3), 119_752, 1, give_ups=2, crashes=1),
    safe("3 ranks, 3 given up, 1 crash", 3, DP(3), 283_943, 1, give_ups=3, crashes=1),
    safe("4 ranks, 1 given up, 1 crash", 4, DP(4), 213_455, 1, give_ups=1, crashes=1),
    safe("3 stages, 1 given up, 1 crash", 3, pipeline(3), 270_315, 2, give_ups=1, crashes=1),
    safe("relayouts, 2 ranks, 2 given up", 2, DP(2), 215_207, 1, files=1, give_ups=2),
    safe("relayouts, 2 ranks, 1 given up", 2, DP(2), 58_266, 1, files=1, give_ups=1),
    safe("4 ranks, 2 given up", 4, DP(4), 39_733, 1, give_ups=2),
    safe("3 stages, 2 given up", 3, pipeline(3), 45_461, 2, give_ups=2),
    safe("2 hosts, 3 given up", 3, DP(3), 62_504, 1, give_ups=3, hosts=((0, 1), (2,))),
    safe("3 stages, 2 crashes", 3, pipeline(3), 89_223, 2, crashes=2),
    safe("a collective every third step, 2 given up", 2, DP(2, every=3), 30_046, 3, give_ups=2, crashes=1),
    safe("3 ranks, 1 left out in a row", 3, DP(3), 37_323, 6, skips=1, horizon=5),
    safe("mesh 2 x 2, 1 given up", 4, mesh_2x2(), 23_506, 2, give_ups=1),
    safe("relayouts, 3 ranks", 3, DP(3), 15_929, 1, files=1),
    safe("2 ranks, 1 left out in a row, 1 crash", 2, DP(2), 46_782, 7, skips=1, crashes=1, horizon=6),
    safe("2 ranks, 5 given up, 1 crash", 2, DP(2), 30_033, 1, give_ups=5, crashes=1),
    _copies("3 slots, each publishes late, 1 crash", 2, 172_048, 1, 4, slots=3, publishes_late=True, crashes=1),
    _copies("2 ranks, 2 crashes", 2, 143_593, 1, 6, crashes=2),
    _copies("2 ranks, each publishes late", 2, 131_862, 1, 6, publishes_late=True),
    _copies("3 slots, 2 hosts with 3 ranks, 1 crash", 3, 208_847, 1, 4, slots=3, hosts=HOSTS_2_1, crashes=1),
    _copies("2 hosts with 3 ranks", 3, 147_151, 1, 6, hosts=HOSTS_2_1),
    _copies("2 ranks, news come late", 2, 32_191, 1, 6, reads="earlier"),
    _copies("3 slots, 1 given up, 1 crash", 2, 38_712, 1, None, slots=3, give_ups=1, crashes=1),
    _copies("2 ranks, last gate alone, 1 crash", 2, 31_995, 2, 6, DP(2, early=False), crashes=1),
    _copies("2 ranks, the number is learnt late, 1 crash", 2, 56_592, 1, None, learns_number_late=True, crashes=1),
    _copies("2 ranks, the number is learnt late, 1 given up", 2, 54_057, 1, None, learns_number_late=True, give_ups=1),
    _copies("no collective, 1 crash", 2, 46_929, 4, 6, no_collective(2), crashes=1),
    _copies("no collective, 1 given up", 2, 95_871, 4, None, no_collective(2), give_ups=1),
    _copies("every third step, 1 crash", 2, 34_227, 1, 8, copy_every=3, crashes=1),
    _copies("every third step, 1 given up", 2, 78_154, 1, None, copy_every=3, give_ups=1),
    _copies("3 hosts", 3, 49_111, 1, 6, hosts=HOSTS_3),
    _copies("3 slots, 3 hosts, 1 crash", 3, 88_994, 1, 4, slots=3, hosts=HOSTS_3, crashes=1),
    _copies("2 ranks, 1 crash", 2, 22_241, 1, 6, crashes=1),
    _copies("2 ranks, 1 given up", 2, 48_454, 1, None, give_ups=1),
    _copies("3 slots, 2 crashes", 2, 30_796, 1, 4, slots=3, crashes=2),
]


def digest(sources: Iterable[str] = SOURCES) -> str:
    """Of the lines of the sources, without docstrings, empty lines and lines of comments. (A dump of the syntax tree
    would be another one in each version of Python.)"""
    found = blake2b(digest_size=16)
    for path in sources:
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
