"""A training that ends when its power is cut, and what is found afterwards. Run by test_guest.py inside a guest.

``endless.py train POOL FILE`` writes the newest committed step into FILE after every iteration (with a third argument
it forks a child first, which outlives it; its pid goes into ``worker`` beside FILE); ``endless.py check
POOL FILE`` recovers, trains anew up to the same step and compares every bit, then goes on for two steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from toys import adam, everything, is_step, net, train

import lightck

WIDTH = 20000


def endless(pool: str, file: Path) -> None:
    model = net(WIDTH)
    optimizer = adam(model)
    number = 0
    with lightck.attach(model, pool, optimizer=optimizer, require="power") as session:
        if len(sys.argv) > 4:
            fork_a_worker(file.parent / "worker")
        (file.parent / "durability").write_text(json.dumps([str(session.durability), *session.durability.evidence]))
        while True:
            train(model, optimizer, 1, start=number)
            number += 1
            file.write_text(f"{session.committed} \n")


def fork_a_worker(file: Path) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(3600)
        os._exit(0)
    file.write_text(str(pid))


def check(pool: str, file: Path) -> None:
    found = lightck.recover(pool)
    model = net(WIDTH)
    optimizer = adam(model)
    train(model, optimizer, found.step)
    exact = is_step(found, everything(model, optimizer))
    again = net(WIDTH, seed=7)
    its = adam(again)
    with lightck.attach(again, pool, optimizer=its, resume=True) as session:
        train(again, its, 2, start=session.step)
    train(model, optimizer, 2, start=found.step)
    goes_on = is_step(lightck.recover(pool), everything(model, optimizer))
    rejected = [str(version) for version in found.rejected]
    file.write_text(json.dumps({"step": found.step, "exact": exact, "goes_on": goes_on, "rejected": rejected}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": endless, "check": check}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
