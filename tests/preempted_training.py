"""A training that a signal may end, run as a process (``start``).

It prints a line for each step, and at the end "stopped at N" or "ended HASH" with a hash of everything that it has
trained.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import torch
from forked import ForkedProgram
from noisy_training import Noisy
from toys import everything

import lightck


class Data(torch.utils.data.Dataset):
    """Samples that take a while."""

    def __init__(self, pause: float) -> None:
        self._rows, self._pause = torch.arange(64.0).reshape(16, 4) / 64, pause

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._pause / 4)
        return self._rows[index]


def settings(**changed: Any) -> dict[str, Any]:
    """What the process is given."""
    found = {"pool": "", "tier": None, "until": 40, "pause": 0.004, "workers": 0, "interval": 1, "grace": "60s"}
    found |= {"loop": "loader", "asks": True, "every": "1h", "thread": False, "preempts": True, "long_after": -1}
    assert changed.keys() <= found.keys()
    return {**found, **{name: str(value) if isinstance(value, Path) else value for name, value in changed.items()}}


def start(**changed: Any) -> ForkedProgram:
    """Start the training. Its lines are read from ``stdout``, and its log from ``stderr``."""
    program = "import json, sys; from preempted_training import main; main(json.loads(sys.argv[1]))"
    return ForkedProgram(program, [json.dumps(settings(**changed))])


def hash_of(value: Any) -> str:
    """A hash of all bits of tensors, numbers and texts in nested containers."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            found.update(f"{one.dtype} {tuple(one.shape)} ".encode() + one.contiguous().numpy().tobytes())
        elif isinstance(one, dict):
            add([part for item in one.items() for part in item])
        elif isinstance(one, (list, tuple)):
            found.update(f"{len(one)} ".encode())
            for part in one:
                add(part)
        else:
            found.update(repr(one).encode())

    add(value)
    return found.hexdigest()[:16]


def main(said: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s")
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(Data(said["pause"]), 4, shuffle=True, num_workers=said["workers"])
    tiers = None if said["tier"] is None else [lightck.Tier(said["tier"], every=said["every"])]
    options = {"resume": True, "strict_data": True, "interval": said["interval"], "tiers": tiers}
    with lightck.attach(model, said["pool"], optimizer=optimizer, **options) as session:
        assert session.recovered is None or session.recovered.exact
        if said["preempts"]:
            lightck.preemption(session, grace=said["grace"])
        work = threading.Thread(target=loop, args=(said, session, model, optimizer, scheduler, loader))
        if said["thread"]:
            work.start()
            work.join()
        else:
            work.run()
        step, state = session.step, (everything(model, optimizer), scheduler.state_dict(), torch.get_rng_state())
    print(f"ended {hash_of(state)}" if step == said["until"] else f"stopped at {step}")


def loop(said: dict[str, Any], session: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
    batches = session.loader(loader)
    ends_steps, asks_first = said["loop"] == "end_step", said["loop"] == "asks first"
    while session.step < said["until"]:
        for x in batches:
            if asks_first and session.should_stop:
                return
            time.sleep(60.0 if session.step == said["long_after"] else said["pause"])
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if ends_steps:
                session.end_step()
            print(session.step)
            if session.step == said["until"] or (said["asks"] and not asks_first and session.should_stop):
                return
