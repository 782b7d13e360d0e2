"""Ranks that train on one device, killed and resumed; a program, because a process that uses CUDA cannot fork ranks.

    PYTHONPATH=.:tests python tests/gpu/ranks_on_device.py TRAINING FOLDER

Ends with status 0 if the killed training has the bits of the one that never imported lightck, and if a single process
loads what it left.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranked
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from toys import same

DEVICE = os.environ.get("LIGHTCK_TEST_DEVICE", "cuda")
UPDATES, KILLED_AT = 8, 5


def whole() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3000), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3000, 3)).to(DEVICE)


def sharded() -> nn.Module:
    model = whole()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


TRAININGS: dict[str, tuple[int, str, Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "ddp-gloo": (2, "gloo", whole, DistributedDataParallel),
    "fsdp-gloo": (2, "gloo", sharded, lambda model: model),
    "ddp-nccl": (1, "nccl", whole, DistributedDataParallel),
    "fsdp-nccl": (1, "nccl", sharded, lambda model: model),
}
"""Name -> number of ranks, backend, the model that is attached, and what makes of it the one that the loop calls."""


def body(name: str, pools: Path | None, kill_at: int = 0) -> Callable[[int], Any]:
    _, _, build, wrap = TRAININGS[name]

    def run(rank: int) -> Any:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(100 + rank)
        session, began = None, 0
        if pools is not None:
            import lightck

            session = lightck.attach(model, pools, resume=True, timeout=60)
            began = session.step
        called = wrap(model)
        for step in range(began, UPDATES):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1000 * step + rank)).to(DEVICE)
            called(x).square().mean().backward()
            if kill_at and step == kill_at and rank == TRAININGS[name][0] - 1:
                ranked.die()
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            session.close()
        return began, [tensor.cpu() for tensor in ranked.everything(model, optimizer)]

    return run


def single_process(rank: int) -> Any:
    """What one process without a group reads from the directory."""
    import lightck

    model = whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lightck.recover(Path(sys.argv[2]) / "pools", model, optimizer)
    return [tensor.cpu() for tensor in model.state_dict().values()]


def main(name: str, folder: Path) -> None:
    n_ranks, communication, _, _ = TRAININGS[name]

    def ranks(*args: Any) -> list[ranked.Ended]:
        return ranked.run_ranks(n_ranks, body(name, *args), communication=communication)

    expected = ranked.values(ranks(None))
    pools = folder / "pools"
    assert any(one.is_killed for one in ranks(pools, KILLED_AT))
    found = ranked.values(ranks(pools))
    assert all(KILLED_AT - 1 <= began <= KILLED_AT for began, _ in found), found
    for (_, state), (_, want) in zip(found, expected, strict=True):
        assert same(state, want), "the killed training ended in another state"
    (alone,) = ranked.values(ranked.run_ranks(1, single_process, has_group=False))
    if "ddp" in name or n_ranks == 1:
        n = len(alone)
        assert same(alone, found[0][1][:n]), "a single process loaded another state"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
