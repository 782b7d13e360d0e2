"""Several ranks: the script of docs/ranks.md is exact after kills, and a group of one is a single process."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toys import adam, net, train

import lightck

fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def group() -> Iterator[None]:
    """Ends the process group that a test makes."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def join(rank: int, n_ranks: int = 2) -> None:
    torch.distributed.init_process_group("fake", rank=rank, world_size=n_ranks, store=fake.FakeStore())


def test_a_group_of_one_is_a_single_process(pool, group, caplog):
    join(0, n_ranks=1)
    model = net()
    optimizer = adam(model)
    with caplog.at_level(logging.WARNING, "lightck"), lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)
    assert caplog.records == []


def script(folder: Path) -> Path:
    page = (ROOT / "docs" / "ranks.md").read_text()
    path = folder / "train.py"
    path.write_text(re.findall(r"^```python\n(# train.py.*?)^```$", page, re.M | re.S)[0])
    return path


class Rank:
    """One process of the script: forked, so that nothing has to be imported again."""

    def __init__(self, path: Path, rank: int, port: int) -> None:
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.dup2(write, 1)
                os.chdir(path.parent)
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank)}
                sys.stdout = os.fdopen(1, "w")
                names = {"__name__": "__main__"}  # held to the end: gloo may wait for the other rank where DDP is freed
                exec(compile(path.read_text(), path.name, "exec"), names)
                sys.stdout.flush()
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        self.said = os.fdopen(read)

    def end(self) -> tuple[list[str], int]:
        """What it has yet to say, and how it ended."""
        with self.said:
            lines = self.said.read().splitlines()
        return lines, os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def started(path: Path) -> list[Rank]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Rank(path, rank, port) for rank in range(2)]


def to_its_end(path: Path) -> list[list[str]]:
    """What each rank says."""
    ends = [rank.end() for rank in started(path)]
    assert [status for _, status in ends] == [0, 0]
    return [lines for lines, _ in ends]


def test_the_script_of_the_page_is_exact_after_kills(folder):
    (folder / "whole").mkdir()
    (folder / "killed").mkdir()
    whole = to_its_end(script(folder / "whole"))
    path, rng = script(folder / "killed"), random.Random(3)
    for n_steps in (5, 4):
        ranks = started(path)
        for _ in range(n_steps):
            assert "step" in ranks[0].said.readline()
        for rank in rng.sample(ranks, 2):
            os.kill(rank.pid, signal.SIGKILL)
            rank.end()
    for rank, (killed, reference) in enumerate(zip(to_its_end(path), whole, strict=True)):
        assert len(reference) == 25
        assert 1 < len(killed) < 25, rank
        assert killed == reference[-len(killed) :], rank
