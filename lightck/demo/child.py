"""The demo's training process: runs ``train_gpt.py`` and reports each event to its parent as a line of JSON.

    python child.py FD PARENT_PID LIGHTCK_ROOT [arguments of train_gpt.py]

This file runs as a script, so that a run without a pool (``--pool none``) does not import lightck. The report at the
end of the training says whether lightck was imported. A line is written as soon as its update has returned. A line that
was written before a kill is in the pipe, where the parent reads it after the death of this process.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the parent process dies. ``parent``: the pid of the parent."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def train_gpt_folder() -> Path:
    """Return the folder of train_gpt.py: the folder of this file if lightck is installed, ``examples`` in a source
    tree."""
    here = Path(__file__).resolve().parent
    for folder in (here, here.parents[1] / "examples"):
        if (folder / "train_gpt.py").is_file():
            return folder
    raise SystemExit(f"train_gpt.py is neither in {here} nor in {here.parents[1] / 'examples'}: reinstall lightck")


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for every leaf of nested dicts, lists and tuples. Keys of dicts are sorted. ``path``: the path
    of ``value``."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, value


def digest(leaf: Any) -> str:
    """Return the SHA-256 of the dtype, shape and bytes of a tensor or array, or of the type and repr of another
    value."""
    import numpy
    import torch

    if isinstance(leaf, torch.Tensor):
        head = f"{leaf.dtype} {tuple(leaf.shape)}"
        body = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(leaf, numpy.ndarray):
        head, body = f"{leaf.dtype} {leaf.shape}", leaf.tobytes()
    else:
        head, body = type(leaf).__name__, repr(leaf).encode()
    return hashlib.sha256(head.encode() + b"\0" + body).hexdigest()


def digests(root: str, value: Any) -> dict[str, str]:
    """Return path -> digest of every leaf of a nested value; ``root`` is the first part of each path."""
    return {path: digest(leaf) for path, leaf in leaves(value, root)}


def final_digests(model: Any, optimizer: Any, scheduler: Any) -> dict[str, str]:
    """Return path -> digest of all state that must be bit-identical in the two runs."""
    import numpy
    import torch

    rng = {
        "torch": torch.get_rng_state(),
        "python": digest(random.getstate()),  # one digest for its 625 integers
        "numpy": numpy.random.get_state(legacy=False),
    }
    return {
        **digests("weights", model.state_dict()),
        **digests("optimizer", optimizer.state_dict()),
        **digests("scheduler", scheduler.state_dict()),
        **digests("rng", rng),
    }


def durability(session: Any) -> dict[str, Any]:
    found = session.durability
    names = ("process", "os", "power", "media", "medium")
    return {**{name: getattr(found, name) for name in names}, "evidence": list(found.evidence)}


def counters(session: Any) -> dict[str, Any]:
    stats = session.stats()
    names = ("stall_seconds", "wait_seconds", "bytes_written", "checkpoints")
    return {name: getattr(stats, name) for name in names}


class Reporter:
    """The argument ``watch`` of ``train_gpt.main``. It sends each event to the parent, through the pipe with the
    descriptor ``fd``. (It is not related to the class ``Watch`` in ``run.py``.) The session is None in a run without a
    pool."""

    def __init__(self, fd: int) -> None:
        self.pipe = os.fdopen(fd, "w", encoding="ascii")
        self.session: Any = None

    def send(self, **message: Any) -> None:
        self.pipe.write(json.dumps(message) + "\n")
        self.pipe.flush()

    def started(self, session: Any, seconds: float) -> None:
        self.session = session
        if session is None:
            self.send(start=0)
        else:
            self.send(start=session.step, recovery_seconds=seconds, durability=durability(session))

    def updated(self, step: int, loss: float) -> None:
        stats = counters(self.session) if self.session else None
        self.send(update=step, loss_bits=loss.hex(), stats=stats)

    def ended(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        imported = any(name.partition(".")[0] == "lightck" for name in sys.modules)
        self.send(digests=final_digests(model, optimizer, scheduler), imported_lightck=imported)


def recovered_digests(pool: str) -> dict[str, Any]:
    """Return the step, and the digests of weights and optimizer, of the checkpoint that ``recover`` returns. Called
    after the training has ended."""
    import lightck

    checkpoint = lightck.recover(pool)
    found = {**digests("weights", checkpoint.model), **digests("optimizer", checkpoint.optimizer)}
    return {"step": checkpoint.step, "digests": found}


def main() -> None:
    fd, parent, root = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with(parent)
    if root not in sys.path:  # a source tree; an installed lightck is on the path already
        sys.path.append(root)
    sys.path[0] = str(train_gpt_folder())
    train_gpt = importlib.import_module("train_gpt")
    reporter = Reporter(fd)
    arguments = sys.argv[4:]
    train_gpt.main(arguments, reporter)
    pool = train_gpt.parse_args(arguments).pool
    reporter.send(done=True, recovered=None if pool == "none" else recovered_digests(pool))


if __name__ == "__main__":
    main()
