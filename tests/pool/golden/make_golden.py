"""Make the golden pool anew: ``python tests/pool/golden/make_golden.py``, from the top of the repository.

Only for a change of the format that nobody's pools have seen yet. Once a release has it, its golden pool is kept as
it is, for ever, and a new format gets a new one beside it (docs/format.md).

What is in it: three slots, four checkpoints of a small training, an adoption, two checkpoints after it. Parameters in
float32 and bfloat16, one of them tied, one frozen and left out, one transposed, one empty; SGD with momentum; an
object in ``state`` with a tensor that grew out of its place. Uuid, seeds and values are fixed, so that a second run
under the same torch gives the same bytes. ``v1.json`` holds what a recovery has to give, bytes in hex.

``v1-pmdk.pool.xz`` is the same pool in the arenas of a PMDK pool, as libpmemobj 1.12.1 made it (its own identities are
random). These two are from before there were next-batch records, and are kept as they are; ``v1-next.pool.xz`` and
``v1-next-pmdk.pool.xz`` have them, and are what is made here.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

import lightck
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.pool.storage import backends
from lightck.pool.storage.pmdk import PmdkBackend

HERE = Path(__file__).parent
POOL, PMDK_POOL, EXPECTED = HERE / "v1-next.pool.xz", HERE / "v1-next-pmdk.pool.xz", HERE / "v1.json"
STEPS = 4, 2
"""Updates of the first and of the second process."""


class Golden(nn.Module):
    """The model of the golden pool. Its parameters are set, not drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.inner = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.tied = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.turned = nn.Parameter(torch.zeros(3, 2).t())
        self.register_buffer("seen", torch.tensor(0))
        with torch.no_grad():
            for p in self.parameters():
                if p.requires_grad:
                    p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        y = self.tied(self.inner(self.first(x).to(torch.bfloat16))).float()
        return y.square().sum() + (self.turned * x[0, 0]).square().sum() + self.empty.sum()


class Extra:
    """An object in ``state``."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {"numbers": (1, 2**70, -1.5), "names": ["a", b"b", None, True]}
        self.rows = 0

    def state_dict(self) -> dict[str, Any]:
        return {**self.value, "average": torch.full((1100 + self.rows,), 0.25)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = {k: v for k, v in state.items() if k != "average"}
        self.rows = len(state["average"]) - 1100


def build() -> tuple[Golden, torch.optim.Optimizer, Extra]:
    model = Golden()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.01, momentum=0.9), Extra()


def train(path: Path, steps: int, **options: Any) -> None:
    model, optimizer, extra = build()
    with lightck.attach(model, path, optimizer=optimizer, state={"extra": extra}, **options) as session:
        start = session.step
        for number in range(start, start + steps):
            optimizer.zero_grad()
            model(torch.tensor([[1.0, number, -1.0]])).backward()
            optimizer.step()
            extra.rows = 64 if number >= 2 else 0


def plain(value: Any) -> Any:
    """Any value as JSON: tensors by their bytes, sequences with their type, what JSON lacks by its repr."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes().hex() if flat.numel() else ""
        return {"dtype": str(value.dtype), "shape": list(value.shape), "stride": list(value.stride()), "bytes": raw}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    return value if value is None or type(value) in (str, bool) else repr(value)


def expected(path: Path) -> dict[str, Any]:
    """What a recovery gives, and what lies in the pool."""
    checkpoint = lightck.recover(path)
    reader = open_pool(str(path))
    lines = sorted(reader.commit_log().records.items())
    checkpoints = [v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint)]
    reader.close()
    return {
        "uuid": reader.superblock.uuid.hex(),
        "nbytes": reader.superblock.nbytes,
        "step": checkpoint.step,
        "iteration": checkpoint.iteration,
        "model": plain(dict(checkpoint.model)),
        "optimizer": plain(checkpoint.optimizer),
        "state": plain(checkpoint.state),
        "lines": [
            [at, line.generation, line.incarnation, line.step, line.payload_generation, line.kind, line.slot]
            for at, line in lines
        ],
        "versions": [[v.step, v.record.generation, sorted(v.entries)] for v in checkpoints],
    }


def make_in_lives(path: Path, train: Callable[..., object], lives: Sequence[int], **first: Any) -> None:
    """Train in so many processes, as it were, each with its number of updates: the same bytes at each run. ``first``:
    options of the first ``attach``."""
    with patch("os.urandom", lambda n: bytes(range(n))):
        for number, steps in enumerate(lives):
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)
            train(path, steps, **(first if number == 0 else {"resume": True}))


def make(path: Path) -> None:
    make_in_lives(path, train, STEPS, slots=3)


def make_pmdk(path: Path) -> Path:
    small = {"pmdk": PmdkBackend(arena_nbytes=4 << 20)}
    with patch.dict(backends.BACKENDS, small), patch.dict(os.environ, {"LIGHTCK_BACKEND": "pmdk"}):
        make(path)
    return path


def packed(path: Path) -> bytes:
    return lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME)


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "golden.pool"
        make(path)
        POOL.write_bytes(packed(path))
        EXPECTED.write_text(json.dumps(expected(path), indent=1) + "\n")
        path = make_pmdk(Path(folder) / "golden-pmdk.pool")
        PMDK_POOL.write_bytes(packed(path))
    print(f"{POOL}: {POOL.stat().st_size} bytes; {EXPECTED}: {EXPECTED.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
