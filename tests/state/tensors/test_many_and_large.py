"""Extremes: a hundred thousand tiny tensors, and one with more than 2^31 elements."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toys import checkpoints, crashed

import lightck

pytestmark = pytest.mark.long

MANY = 100_000


class Many(nn.Module):
    """Tiny parameters, one in ten of them frozen."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((3,), value)) for _ in range(MANY))
        for p in self.parts[::10]:
            p.requires_grad_(False)
        self.gradient = torch.ones(3)

    def all(self) -> torch.Tensor:
        return torch.stack([p.detach() for p in self.parts])

    def iterate(self, optimizer: Any) -> None:
        for p in self.parts:
            p.grad = self.gradient if p.requires_grad else None
        optimizer.step()


@pytest.mark.campaign
def test_hundred_thousand_tiny_tensors(pool):
    model = Many(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for _ in range(3):
            model.iterate(optimizer)
            session.end_step()
        session.flush()
        per_checkpoint = session.stats().bytes_written / 3
        assert session.stats().left_out == MANY // 10
        image = crashed(pool)
    assert per_checkpoint <= MANY * (12 + 32 + 4 + 24), "payload, a record, a checksum, its name in the small state"
    other = Many(7.0)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    with lightck.attach(other, image, optimizer=other_optimizer, resume=True) as session:
        assert session.step == 3
        assert torch.equal(other.all(), model.all())
        assert torch.equal(other.all()[1], torch.full((3,), -1.5))
        other.iterate(other_optimizer)
    model.iterate(optimizer)
    assert torch.equal(other.all(), model.all())
    assert lightck.recover(image).step == 4


# -- more than 2^31 elements -----------------------------------------------------------------------------------------

LARGE = 2**31 + 5
MARKS = (0, 1, 2**20 - 1, 2**20, 2**31 - 1, 2**31, 2**31 + 1, LARGE - 1)
_PUNCH, _KEEP_SIZE = 2, 1


def untouched(count: int) -> torch.Tensor:
    """Return zeros that take no memory until they are written to: a private anonymous mapping."""
    return torch.from_numpy(np.zeros(count, np.uint8))


def forget_range(path: Path, offset: int, nbytes: int) -> None:
    """Free the memory of a range of a file on tmpfs, which then reads as zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file:
        done = libc.fallocate(file.fileno(), _PUNCH | _KEEP_SIZE, ctypes.c_long(offset), ctypes.c_long(nbytes))
        assert done == 0, os.strerror(ctypes.get_errno())


@pytest.fixture
def large(folder: Path) -> Iterator[Path]:
    """A pool with a tensor of 2^31 + 5 elements, written twice: the second checkpoint lies beyond 4 GiB in the file."""
    pool = folder / "large.pool"
    model = nn.Linear(1, 1)
    model.register_parameter("large", nn.Parameter(untouched(LARGE), requires_grad=False))
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for step in (1, 2):
            for i, mark in enumerate(MARKS):
                model.large.data[mark] = 10 * step + i
            model.weight.grad = torch.ones(1, 1)
            optimizer.step()
            session.end_step()
            session.flush()
    return pool


def test_more_than_two_to_the_31_elements(large):
    """Needs about 4.3 GB of tmpfs, of which a part is freed before the tensor is read."""
    newest, older = checkpoints(large)
    assert (newest.step, older.step) == (2, 1)
    offset = older.reader.superblock.slots[older.record.slot][0]
    assert newest.reader.superblock.slots[newest.record.slot][0] + newest.entries["model/large"].nbytes > 2**32
    assert newest.entries["model/large"].shape == (LARGE,)
    forget_range(large, offset + older.entries["model/large"].offset, older.entries["model/large"].nbytes)
    checkpoint = lightck.recover(large)
    found = checkpoint.model["large"]
    assert checkpoint.step == 2
    assert found.shape == (LARGE,)
    assert [int(found[mark]) for mark in MARKS] == [20 + i for i in range(len(MARKS))]
    assert int(np.count_nonzero(found.numpy())) == len(MARKS), "every other element is zero"
