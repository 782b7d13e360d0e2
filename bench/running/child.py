"""One row, in the process that ``rows.run`` starts for it: reads its order from stdin, writes its result to a file.

It ends when the process that started it does, however that ends: what it measures would be nobody's.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from bench.measures import NAMES, measure
from lightck.errors import BenchError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    order = json.loads(sys.stdin.read())
    if os.getppid() != order["parent"]:
        sys.exit("The process that started this one is gone.")  # before the kernel was asked to tell
    if order["measure"] not in NAMES:
        raise BenchError(f"Nothing is called {order['measure']!r}; there are {', '.join(NAMES)}.")
    import torch

    torch.set_num_threads(order["threads"])
    from bench.running import machine

    found = measure(order["measure"], order["options"], order["folder"])
    result = {"machine": machine.facts(order["folder"]), "result": found}
    Path(order["out"]).write_text(json.dumps(result, allow_nan=False))


if __name__ == "__main__":
    main()
