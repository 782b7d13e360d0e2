"""The process that ``rows.run`` starts for one row: reads its order from stdin, writes its result to a file.

The kernel kills it when its parent dies, since nobody would read the result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.measures import NAMES, measure
from bench.running.elsewhere import die_with
from lightck.errors import BenchError


def main() -> None:
    order = json.loads(sys.stdin.read())
    die_with(order["parent"])
    if order["measure"] not in NAMES:
        raise BenchError(f"There is no measure {order['measure']!r}; there are {', '.join(NAMES)}.")
    import torch

    torch.set_num_threads(order["threads"])
    from bench.running import machine

    found = measure(order["measure"], order["options"], order["folder"])
    result = {"machine": machine.facts(order["folder"]), "result": found}
    Path(order["out"]).write_text(json.dumps(result, allow_nan=False))


if __name__ == "__main__":
    main()
