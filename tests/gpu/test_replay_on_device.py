"""A replay on a device computes the bits of the training there."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from consumed_by_hand import SHAPES, Run, all_gradients, parameters
from toys import same

from lightck.restore.replay import replay
from lightck.state.torch_classes import TORCH_CLASSES

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("LIGHTCK_TEST_DEVICE", "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", sorted(set(TORCH_CLASSES) - {"LBFGS", "SparseAdam", "Muon"}))
def test_a_replay_has_the_bits_of_the_training(name, how, dtype):
    options: dict[str, Any] = {"momentum": 0.9, **how} if name == "SGD" else how
    kind = TORCH_CLASSES[name]

    def draw(ps, step):
        return {n: None if g is None else g.to(DEVICE) for n, g in all_gradients(ps, step).items()}

    ps = {n: torch.nn.Parameter(p.detach().to(DEVICE)) for n, p in parameters(dtype, SHAPES).items()}
    try:
        run = Run(lambda found: kind(found, lr=0.02, **options), ps, draw=draw)
    except (TypeError, RuntimeError):
        pytest.skip("torch does not take it there")
    if name == "SGD" and how == {"fused": True} and dtype != torch.float32:
        pytest.skip("refused")
    bases = run.bases()
    replay(bases, run.updates, run.partial, 5)
    for base in bases:
        assert same((base.unit.parameter, dict(base.unit.states[0])), run.states[5][base.unit.name])
