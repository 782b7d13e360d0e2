"""One row, in the process that ``rows.run`` starts for it: reads its order from stdin, writes its result to a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lightck.bench.measures import NAMES, measure
from lightck.errors import BenchError


def main() -> None:
    order = json.loads(sys.stdin.read())
    if order["measure"] not in NAMES:
        raise BenchError(f"Nothing is called {order['measure']!r}; there are {', '.join(NAMES)}.")
    import torch

    torch.set_num_threads(order["threads"])
    from lightck.bench import machine

    found = measure(order["measure"], order["options"], order["folder"])
    result = {"machine": machine.facts(order["folder"]), "result": found}
    Path(order["out"]).write_text(json.dumps(result, allow_nan=False))


if __name__ == "__main__":
    main()
