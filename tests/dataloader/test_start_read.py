"""`start`, read while a variable holds the iterator of the resumed pass: the value is right, or a warning is given."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightck

UPDATES = 2
DATA = TensorDataset(torch.arange(40.0).reshape(10, 4) / 40)
WARNING = "skips no batch"


def held(loader) -> Iterable[tuple[int, object]]:
    return enumerate(loader, loader.start)


def held_apart(loader) -> Iterable[tuple[int, object]]:
    start = loader.start
    return zip(itertools.count(start), iter(loader), strict=False)


def fetched_before(loader) -> Iterable[tuple[int, object]]:
    batches = iter(loader)
    first = next(batches)
    return enumerate(itertools.chain([first], batches), loader.start)


class FetchedAhead:
    """Batches of a loader, one of them fetched ahead."""

    def __init__(self, loader) -> None:
        self._batches = iter(loader)
        self._ahead = next(self._batches)

    def __iter__(self) -> Iterator[object]:
        for batch in self._batches:
            ahead, self._ahead = self._ahead, batch
            yield ahead
        yield self._ahead


def fetched_ahead(loader) -> Iterable[tuple[int, object]]:
    return enumerate(FetchedAhead(loader), loader.start)


def numbers(pool: Path, numbered, passes: int, *, lets_go: bool) -> list[list[int]]:
    """Make passes that end by ``break`` at batch UPDATES, and return the numbers that each of them saw."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[list[int]] = []
    with lightck.attach(model, str(pool), optimizer=optimizer, resume=True) as session:
        loader = session.loader(DataLoader(DATA, 2, shuffle=True))
        batches: Iterable[tuple[int, object]] = ()
        for _ in range(passes):
            if lets_go:
                batches = ()
            seen.append([])
            batches = numbered(loader)
            for i, (x,) in batches:
                seen[-1].append(i)
                if i == UPDATES:
                    break
                model(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return seen


WHOLE = [0, 1, 2]


@pytest.mark.parametrize("numbered", [held, held_apart])
def test_a_loop_that_holds_its_iterator_is_warned_that_its_numbers_are_wrong(tmp_path, caplog, numbered):
    assert numbers(tmp_path / "a.pool", numbered, 1, lets_go=False) == [WHOLE]
    assert WARNING not in caplog.text
    assert numbers(tmp_path / "a.pool", numbered, 3, lets_go=False) != [[UPDATES], WHOLE, WHOLE]
    assert caplog.text.count(WARNING) == 1


@pytest.mark.parametrize("numbered", [held, held_apart])
def test_a_loop_that_lets_go_of_its_iterator_first_has_right_numbers(tmp_path, caplog, numbered):
    assert numbers(tmp_path / "a.pool", numbered, 1, lets_go=True) == [WHOLE]
    assert numbers(tmp_path / "a.pool", numbered, 3, lets_go=True) == [[UPDATES], WHOLE, WHOLE]
    assert WARNING not in caplog.text


@pytest.mark.parametrize("lets_go", [False, True])
def test_a_loop_that_fetches_before_it_reads_has_right_numbers_and_no_warning(tmp_path, caplog, lets_go):
    assert numbers(tmp_path / "a.pool", fetched_ahead, 2, lets_go=lets_go) == [WHOLE, WHOLE]
    assert numbers(tmp_path / "a.pool", fetched_ahead, 2, lets_go=lets_go)[1:] == [WHOLE]
    assert WARNING not in caplog.text


def test_a_value_that_is_read_after_the_first_fetch_is_that_of_the_resumed_pass(tmp_path):
    assert numbers(tmp_path / "a.pool", fetched_before, 1, lets_go=False) == [WHOLE]
    assert numbers(tmp_path / "a.pool", fetched_before, 1, lets_go=False) == [[UPDATES]]
