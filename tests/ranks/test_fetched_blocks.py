"""What crosses from one host to another when a world changes: the blocks that the ranks of a host need, and no others.

``LIGHTCK_TEST_HOST`` and a folder stand for a host. The model is so large that its payload is most of a pool.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import log_lines, run_ranks, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.pool import create
from lightck.pool.partial_copy import metadata_of
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.pool.storage.file import FileContainer
from lightck.session import partial_copies
from lightck.session.group import HOST_VARIABLE

from .trainings import fsdp
from .worlds import Whole, is_equal, whole_of

BLOCK = 1 << 16
ROW_NBYTES = 4 * 512
ROWS = (3000, 1000)
"""Of the two matrices. With momentum the state has 16 MB."""
N_TENSORS = 8
MESSAGES_NBYTES = 1 << 14
"""More than the requests of a test take."""


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, ROWS[0])
        self.second = nn.Linear(512, ROWS[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum() + self.second(x).sum()


@dataclass
class Fetched:
    """What one rank saw."""

    began: Whole
    end: Whole
    sent: list[int]
    """Bytes of each message to a rank on another host, or to one that writes for it."""
    allocated: int
    """Bytes on the medium of the copies in the directory of this rank's host, at the end."""
    lines: list[str]

    @property
    def sent_nbytes(self) -> int:
        return sum(self.sent)


def body(kind: str, pools: Path, hosts: Sequence[int], upto: int, **options: Any) -> Callable[[int], Fetched]:
    def run(rank: int) -> Fetched:
        os.environ[HOST_VARIABLE] = f"host-{hosts[rank]}"
        pools.mkdir(exist_ok=True)
        directory = pools / f"host-{hosts[rank]}"
        torch.manual_seed(0)
        model = Wide()
        if kind == "fsdp":
            fsdp(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        sent, allocated = [], []
        real_send, real_close = partial_copies._Transport.send, partial_copies.PartialCopies.close

        def send(self: Any, data: torch.Tensor, to: int) -> None:
            sent.append(data.nbytes)
            real_send(self, data, to)

        def close(self: Any) -> None:
            found = (directory / partial_copies.PARTIAL_COPIES).glob("*.pool")
            allocated.append(sum(path.stat().st_blocks * 512 for path in found))
            real_close(self)

        partial_copies._Transport.send, partial_copies.PartialCopies.close = send, close
        with (
            log_lines() as lines,
            lightck.attach(model, directory, optimizer=optimizer, resume=True, timeout=60, **options) as session,
        ):
            began = whole_of(session.step, model, optimizer)
            called = DistributedDataParallel(model) if kind == "ddp" else model
            for step in range(session.step, upto):
                called(torch.randn(2, 512, generator=torch.Generator().manual_seed(step + 100 * rank))).backward()
                optimizer.step()
                optimizer.zero_grad()
            end = whole_of(session.step, model, optimizer)
        return Fetched(began, end, sent, max(allocated, default=0), lines)

    return run


def train(kind: str, pools: Path, hosts: Sequence[int], upto: int = 2, **options: Any) -> list[Fetched]:
    return values(run_ranks(len(hosts), body(kind, pools, hosts, upto, **options)))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(create, "BLOCK_MAX", BLOCK)


def path_of(pools: Path, host: int, rank: int, n_ranks: int) -> Path:
    return pools / f"host-{host}" / f"rank-{rank:05d}-of-{n_ranks:05d}.pool"


def metadata_nbytes(path: Path) -> int:
    with closing(open_pool(str(path))) as reader:
        return sum(end - begin for begin, end in metadata_of(reader))


def range_of_first(path: Path) -> tuple[int, int]:
    """Where a matrix of the newest checkpoint lies in a pool."""
    with closing(open_pool(str(path))) as reader:
        stored = next(iter(reader.checkpoints()))
        assert isinstance(stored, StoredCheckpoint)
        return stored.range_of("model/first.weight", 0, stored.entries["model/first.weight"].nbytes)


def damage(path: Path) -> None:
    """Change each block of that matrix."""
    begin, end = range_of_first(path)
    with path.open("r+b") as file:
        for at in range(begin, end, BLOCK):
            file.seek(at)
            file.write(b"\x55\xaa\x55\xaa")


def test_only_the_blocks_that_a_host_needs_are_sent(pools):
    """Of each matrix host 0 has the first third, and its rank needs the first half. Host 1 has what its rank needs."""
    expected = train("fsdp", pools, [0, 1, 1])[0].end
    metadata = [metadata_nbytes(path_of(pools, int(rank > 0), rank, 3)) for rank in range(3)]
    found = train("fsdp", pools, [0, 1])
    assert all(is_equal(one.began, expected) for one in found)
    needed = 2 * sum((-(-rows // 2) - -(-rows // 3)) * (ROW_NBYTES + 4) for rows in ROWS)
    most = needed + N_TENSORS * BLOCK + metadata[1] + metadata[2] + MESSAGES_NBYTES
    assert needed < found[1].sent_nbytes <= most
    assert found[0].sent_nbytes <= metadata[0] + MESSAGES_NBYTES, "host 1 needs no payload"
    assert found[0].allocated <= most + 3 * N_TENSORS * 4096 + 32 * 4096, "the rest of the copies are holes"


def test_ranks_of_one_host_get_a_block_once(pools):
    """Three ranks on an empty host need the whole of each tensor."""
    expected = train("ddp", pools, [0, 0], split=False)[0].end
    found = train("ddp", pools, [0, 1, 1, 1], split=False)
    assert all(is_equal(one.began, expected) for one in found)
    state = 2 * sum(rows * (ROW_NBYTES + 4) for rows in ROWS)
    assert state <= found[0].sent_nbytes < 1.2 * state


def test_pools_that_hold_the_same_send_about_the_same(pools):
    expected = train("ddp", pools, [0, 1], split=False)[0].end
    found = train("ddp", pools, [0, 1, 2], split=False)
    assert all(is_equal(one.began, expected) for one in found)
    state = 2 * sum(rows * (ROW_NBYTES + 4) for rows in ROWS)
    assert sum(one.sent_nbytes for one in found) < 1.2 * state, "only host 2 needs payload"
    assert min(found[0].sent_nbytes, found[1].sent_nbytes) > 0.3 * state


def test_hosts_with_the_same_pool_send_a_part_of_it_each(pools):
    """Host 2 has a copy of the pool of rank 1."""
    expected = train("fsdp", pools, [0, 1])[0].end
    (pools / "host-2").mkdir()
    shutil.copy(path_of(pools, 1, 1, 2), pools / "host-2")
    found = train("fsdp", pools, [1, 2, 0])  # rank 2, on host 0, needs a third from the copies of one pool
    assert all(is_equal(one.began, expected) for one in found)
    needed = 2 * sum(rows // 3 * ROW_NBYTES for rows in ROWS)
    assert found[0].sent_nbytes > 0.4 * needed
    assert found[1].sent_nbytes > 0.4 * needed


@pytest.mark.parametrize("kind", ["damaged", "unreadable"])
def test_a_bad_block_of_one_host_is_taken_from_another_that_has_the_same_pool(pools, monkeypatch, kind):
    """As above, but the pool on host 1 is bad where no rank on host 1 needs it."""
    expected = train("fsdp", pools, [0, 1])[0].end
    (pools / "host-2").mkdir()
    bad = path_of(pools, 1, 1, 2)
    shutil.copy(bad, pools / "host-2")
    if kind == "damaged":
        damage(bad)
    (begin, end), real = range_of_first(bad), FileContainer.read

    def read(self: FileContainer, offset: int, nbytes: int) -> bytes:
        if "host-1/" in self.path and offset < end and begin < offset + nbytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, offset, nbytes)

    if kind == "unreadable":
        monkeypatch.setattr(FileContainer, "read", read)
    found = train("fsdp", pools, [1, 2, 0])
    assert all(is_equal(one.began, expected) for one in found)
    assert not any("is damaged" in line or "cannot be used" in line for one in found for line in one.lines)
    assert any("cannot be read" in line for line in found[0].lines) == (kind == "unreadable")


@pytest.mark.parametrize("n_damaged", [1, 2])
def test_what_is_damaged_in_a_pool_is_fetched_from_a_rank_that_holds_the_same(pools, n_damaged):
    """The host of that pool needs blocks then that were not planned. If the other pool is damaged too, an older
    checkpoint is taken."""
    older = train("ddp", pools, [0, 1], split=False)[0].end
    newest = train("ddp", pools, [0, 1], 3, split=False)[0].end
    for rank in range(n_damaged):
        damage(path_of(pools, rank, rank, 2))
    found = train("ddp", pools, [0, 1, 2], 3, split=False)
    assert all(is_equal(one.began, newest if n_damaged == 1 else older) for one in found)
    assert any("is damaged" in line for line in found[0].lines)


def test_if_all_pools_of_a_piece_are_damaged_an_older_checkpoint_is_fetched(pools):
    older = train("fsdp", pools, [0, 1])[0].end
    assert train("fsdp", pools, [0, 1], 3)[0].end.step == 3
    damage(path_of(pools, 1, 1, 2))
    for one in train("fsdp", pools, [1, 0, 0], 3):
        assert one.began.step == 2
        assert is_equal(one.began, older)


@pytest.mark.usefixtures("pmdk")
def test_blocks_of_a_pmdk_pool_are_fetched_too(pools):
    expected = train("fsdp", pools, [0, 1], backend="pmdk")[0].end
    for one in train("fsdp", pools, [1, 0, 0], backend="pmdk"):
        assert is_equal(one.began, expected)


def test_a_message_is_no_longer_than_a_buffer(pools, monkeypatch):
    expected = train("fsdp", pools, [0, 1])[0].end
    monkeypatch.setattr(partial_copies, "CHUNK_NBYTES", 1 << 18)
    found = train("fsdp", pools, [1, 0])
    assert all(is_equal(one.began, expected) for one in found)
    assert all(max(one.sent) <= 1 << 18 for one in found)
    assert all(one.sent.count(1 << 18) > 10 for one in found), "the payload is sent in many messages"
