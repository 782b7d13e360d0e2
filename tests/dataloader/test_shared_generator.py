"""A generator from which the sampler draws during the pass, and somebody else too: a replay lacks the other draws."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loader_host import Host
from torch.utils.data import DataLoader, RandomSampler

ITEMS = 160
MESSAGE = "the loader's sampler draws from a random generator of its own at next(), and the loop, or another loader"


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class PerItem:
    """Draws each index at its turn, from a generator of its own."""

    def __init__(self, generator: Any, draw: Callable[[Any], int]) -> None:
        self.own, self._draw = generator, draw

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        for _ in range(ITEMS):
            yield self._draw(self.own)


OF_TORCH = (lambda: torch.Generator().manual_seed(1), lambda g: int(torch.randint(ITEMS, (), generator=g)))
OF_NUMPY = (lambda: np.random.default_rng(1), lambda g: int(g.integers(ITEMS)))
OF_PYTHON = (lambda: random.Random(1), lambda g: g.randrange(ITEMS))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [OF_TORCH, OF_NUMPY, OF_PYTHON], ids=["torch", "numpy", "python"])
def test_draws_of_the_loop_are_reported_once(caplog, kind, workers):
    make, draw = kind
    sampler = PerItem(make(), draw)
    loader = Host().loader(DataLoader(Numbers(), 4, sampler=sampler, num_workers=workers))
    for _ in range(2):
        for _ in itertools.islice(loader, 6):
            draw(sampler.own)
    assert caplog.text.count(MESSAGE) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_draws_between_the_chunks_of_torch_s_sampler_are_reported(caplog, workers):
    generator = torch.Generator().manual_seed(1)  # RandomSampler draws 32 indices at once
    sampler = RandomSampler(Numbers(), replacement=True, num_samples=ITEMS, generator=generator)
    loader = Host().loader(DataLoader(Numbers(), 8, sampler=sampler, num_workers=workers))
    for _ in loader:
        torch.rand(1, generator=generator)
    assert caplog.text.count(MESSAGE) == 1


def test_another_loader_that_draws_from_the_generator_is_reported(caplog):
    generator = torch.Generator().manual_seed(1)
    host = Host()
    one, two = (
        host.loader(DataLoader(Numbers(), 4, sampler=PerItem(generator, OF_TORCH[1])), name=name)
        for name in ("labelled", "unlabelled")
    )
    for _ in itertools.islice(zip(one, two, strict=True), 4):
        pass
    assert caplog.text.count(MESSAGE) == 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [4, 9])  # the last batch is smaller with 9
def test_a_generator_from_which_a_pass_draws_only_at_its_beginning_is_not_reported(caplog, size, workers):
    generator = torch.Generator().manual_seed(1)
    loader = Host().loader(DataLoader(Numbers(), size, shuffle=True, num_workers=workers, generator=generator))
    for _ in range(2):
        for _ in loader:
            torch.rand(1, generator=generator)
    assert not caplog.records


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_from_which_only_the_sampler_draws_is_not_reported(caplog, workers):
    make, draw = OF_NUMPY
    loader = Host().loader(DataLoader(Numbers(), 4, sampler=PerItem(make(), draw), num_workers=workers))
    for _ in range(2):
        for _ in loader:
            torch.rand(1)
    assert not [one for one in caplog.records if MESSAGE in one.message]
