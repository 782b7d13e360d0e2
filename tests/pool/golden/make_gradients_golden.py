"""Make the golden pool with gradient records anew, from the top of the repository: ``PYTHONPATH=tests python
tests/pool/golden/make_gradients_golden.py``. What ``make_golden.py`` says of when this may be done holds here too.

``v1-gradients.pool.xz`` was written through ``attach(strategy=Gradients(base_every=3))``: four steps of a small
training, and three more after a resume, which adopts the fourth. SGD with momentum. Parameters in float32 and
bfloat16, one of them tied, one frozen and left out, one transposed, one empty, one that is without a gradient in some
steps, one with sparse gradients; a buffer; an object in ``state``.

All values are small multiples of powers of two, so that every update is exact: no implementation, thread or processor
computes other bits, and the state of each step must come back for ever. ``v1-gradients.json`` holds what a recovery of
each step gives, bytes in hex, and what lies where in the pool.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from module_at import module_at
from torch import nn

import lightck
from lightck.pool.commit_log import candidates
from lightck.pool.gradient_reader import GradientCheckpoint, StoredTensor, chain_entry_of, checkpoint_of
from lightck.pool.reader import PoolReader, open_pool
from lightck.strategy.gradients import Gradients

HERE = Path(__file__).parent
POOL, EXPECTED = HERE / "v1-gradients.pool.xz", HERE / "v1-gradients.json"
STEPS = 4, 3
"""Updates of the first and of the second process."""
_golden = module_at(HERE / "make_golden.py")
plain, make_in_lives = _golden.plain, _golden.make_in_lives


class Golden(nn.Module):
    """The model of the golden pool. Its parameters are set, not drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(12.0).reshape(3, 4) / 8)
        self.turned = nn.Parameter((torch.arange(6.0) / 4).reshape(3, 2).t())
        self.narrow = nn.Parameter(torch.arange(5.0).to(torch.bfloat16) / 2)
        self.inner, self.tied = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.tied.weight = self.inner.weight
        self.sleeper = nn.Parameter(torch.tensor([1.0, -2.0]))
        self.table = nn.Embedding(6, 2, sparse=True)
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.register_buffer("seen", torch.tensor(0))
        with torch.no_grad():
            self.inner.weight.copy_(torch.tensor([[1.0, 0.5], [-0.25, 2.0]]))
            self.table.weight.copy_(torch.arange(12.0).reshape(6, 2) / 2)

    def forward(self, number: int) -> torch.Tensor:
        """Return the sum of parameters, each multiplied by a number: the gradients are these numbers."""
        self.seen += 1
        x = 1.0 + number
        total = (self.first * x).sum() + (self.turned * -x).sum() + (self.tied.weight * (x / 2)).sum()
        total = total + (self.narrow * 2).float().sum() + self.empty.sum()
        if number in (1, 2, 5):
            total = total + (self.sleeper * (x / 4)).sum()
        return total + self.table(torch.tensor([number % 3, 4, 4])).sum()


class Counter:
    """An object in ``state``."""

    def __init__(self) -> None:
        self.value = {"seen": 0, "names": ["a", b"b", None, True], "average": torch.full((3,), 0.5)}

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = dict(state)


def build() -> tuple[Golden, torch.optim.Optimizer, Counter]:
    model = Golden()
    table = [model.table.weight]
    others = [p for p in model.parameters() if p.requires_grad and p is not table[0]]
    groups = [{"params": others, "momentum": 0.5}, {"params": table, "momentum": 0.0}]
    return model, torch.optim.SGD(groups, lr=0.5), Counter()


def train(path: Path, steps: int, **options: Any) -> None:
    model, optimizer, counter = build()
    state, strategy = {"counter": counter}, Gradients(base_every=3)
    with lightck.attach(model, path, optimizer=optimizer, state=state, strategy=strategy, **options) as session:
        start = session.step
        for number in range(start, start + steps):
            optimizer.zero_grad()
            model(number).backward()
            optimizer.step()
            counter.value = {**counter.value, "seen": number + 1}


def recovered(path: Path, step: int | None) -> dict[str, Any]:
    """What a recovery gives."""
    checkpoint = lightck.recover(path, step=step)
    return {
        "step": checkpoint.step,
        "iteration": checkpoint.iteration,
        "model": plain(dict(checkpoint.model)),
        "optimizer": plain(checkpoint.optimizer),
        "state": plain(checkpoint.state),
    }


def in_pool(reader: PoolReader, checkpoint: GradientCheckpoint) -> dict[str, Any]:
    """What a manifest says of the places of its tensors."""

    def places(tensors: Any) -> list[list[Any]]:
        return [[one.entry.name, one.generation, one.step, one.offset] for one in tensors]

    def bytes_of(one: StoredTensor) -> str:
        return reader.read(one.offset, one.entry.nbytes).hex()

    gradients = {name: bytes_of(one) for name, one in checkpoint.in_record.items() if name.startswith("gradient/")}
    return {
        "step": checkpoint.step,
        "generation": checkpoint.header.generation,
        "incarnation": checkpoint.header.incarnation,
        "bases": places(checkpoint.bases()),
        "older": places(checkpoint.older_bases()),
        "whole": checkpoint.bases_in_record(),
        "chain": [[one.step, one.generation, one.slot, one.flags] for one in checkpoint.part.chain],
        "sentinels": checkpoint.part.sentinels.tolist(),
        "gradients": gradients,
    }


def expected(path: Path) -> dict[str, Any]:
    """What a recovery of the newest steps gives, and what lies in the pool."""
    with closing(open_pool(str(path), gradients=True)) as reader:
        records = candidates(reader.commit_log())
        newest = checkpoint_of(reader, chain_entry_of(records[0]))
        chain = [checkpoint_of(reader, entry) for entry in newest.part.chain]
        return {
            "uuid": reader.superblock.uuid.hex(),
            "nbytes": reader.superblock.nbytes,
            "slots": [list(one) for one in reader.superblock.slots],
            "homes": [list(one) for one in reader.superblock.homes],
            "entries": [[one.name, one.role, one.place, one.dtype, one.offset, one.nbytes] for one in reader.entries],
            "lines": [[one.generation, one.step, one.payload_generation, one.kind, one.slot] for one in records],
            "records": [in_pool(reader, one) for one in (newest, *reversed(chain))],
            "steps": [recovered(path, step) for step in (newest.step, newest.step - 1, newest.step - 2)],
        }


def make(path: Path) -> None:
    make_in_lives(path, train, STEPS)


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "golden.pool"
        make(path)
        POOL.write_bytes(lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
        EXPECTED.write_text(json.dumps(expected(path), indent=1) + "\n")
    print(f"{POOL}: {POOL.stat().st_size} bytes; {EXPECTED}: {EXPECTED.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
