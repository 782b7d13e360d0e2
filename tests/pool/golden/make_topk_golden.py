"""Make the golden pool with compressed gradients anew, from the top of the repository: ``PYTHONPATH=tests python
tests/pool/golden/make_topk_golden.py``. What ``make_golden.py`` says of when this may be done holds here too.

``v1-topk.pool.xz`` was written through ``attach(strategy=Gradients(3, compress=TopK(0.02, error_feedback=True)))``:
four steps of a small training, and three more after a resume, which adopts the fourth. SGD with momentum. One gradient
lies in its indexed form, another is too small for it and dense; one residual lies with the bases, another in the small
state. All values are small multiples of powers of two, so that every update is exact, as in
``make_gradients_golden.py``. ``v1-topk.json`` holds what a recovery of each step gives, and what lies where.
"""

from __future__ import annotations

import json
import lzma
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from module_at import module_at
from torch import nn

import lightck

HERE = Path(__file__).parent
POOL, EXPECTED = HERE / "v1-topk.pool.xz", HERE / "v1-topk.json"
STEPS = 4, 3
"""Updates of the first and of the second process."""
of_pool = module_at(HERE / "make_gradients_golden.py").expected
make_in_lives = module_at(HERE / "make_golden.py").make_in_lives


class Golden(nn.Module):
    """The model of the golden pool. Its parameters are set, not drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter((torch.arange(1200.0) % 7).reshape(30, 40) / 4)
        self.small = nn.Parameter(torch.arange(6.0) / 2)

    def forward(self, number: int) -> torch.Tensor:
        """The gradients are the numbers with which the parameters are multiplied. Many have equal magnitudes."""
        factors = ((torch.arange(1200) * 5 + number) % 13 - 6).float().reshape(30, 40) / 2
        return (self.large * factors).sum() + (self.small * torch.arange(-3.0, 3.0)).sum()


def build() -> tuple[Golden, torch.optim.Optimizer]:
    model = Golden()
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def train(path: Path, steps: int, **options: Any) -> tuple[Golden, torch.optim.Optimizer]:
    model, optimizer = build()
    strategy = lightck.Gradients(3, compress=lightck.TopK(0.02, error_feedback=True))
    with lightck.attach(model, path, optimizer=optimizer, strategy=strategy, **options) as session:
        for number in range(session.step, session.step + steps):
            optimizer.zero_grad()
            model(number).backward()
            optimizer.step()
    return model, optimizer


def expected(path: Path) -> dict[str, Any]:
    """What ``make_gradients_golden.py`` says of its pool, and whether each step is exact."""
    found: dict[str, Any] = of_pool(path)
    checkpoints = [lightck.recover(path, step=one["step"]) for one in found["steps"]]
    return found | {"exact": [[one.exact, one.reason] for one in checkpoints]}


def make(path: Path) -> None:
    make_in_lives(path, train, STEPS)


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "golden.pool"
        make(path)
        POOL.write_bytes(lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
        EXPECTED.write_text(json.dumps(expected(path)) + "\n")
    print(f"{POOL}: {POOL.stat().st_size} bytes; {EXPECTED}: {EXPECTED.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
