"""``session.loader(dl, replay="skip")``: a resume in mid-pass that draws what was given before from the sampler alone.

Of the batches before only the last one is fetched, and compared with the one that was given. What a dataset draws from
a generator of its own, counts or keeps while it fetches is missing then, and what it draws from a global generator
inside a worker: so this is the user's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightck.dataloader.under import is_loader_of_torch
from lightck.errors import SessionError

FACT = " (those before it were not fetched: replay='skip'. Say replay='fetch', and all are)"


def wants_skip(loader: object, replay: object) -> bool:
    """What ``replay=`` says. Raises ``ValueError``; ``SessionError`` for a loader whose batches cannot be skipped."""
    if replay not in ("fetch", "skip"):
        raise ValueError(f"replay={replay!r}: say 'fetch' (all that a pass gave before) or 'skip' (in the sampler).")
    is_plain = is_loader_of_torch(loader) and type(loader).__iter__ is DataLoader.__iter__  # type: ignore[attr-defined]
    if replay == "skip" and (not is_plain or isinstance(loader.dataset, IterableDataset)):  # type: ignore[attr-defined]
        raise SessionError(
            f"replay='skip' on a {type(loader).__qualname__}: batches are skipped in the sampler of a plain DataLoader "
            "over a map-style dataset, and this is none. Leave replay= out: what was given before is fetched again."
        )
    return replay == "skip"


def iterate_behind(loader: DataLoader[Any], count: int, then: Callable[[], None]) -> Iterator[Any]:
    """An iterator of the loader's that begins behind ``count`` batches. ``then`` is called where those are drawn."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = loader.__dict__[name]
    loader.__dict__[name] = _Behind(sampler, count, then)  # which the iterator keeps; a DataLoader lets nobody set it
    try:
        return iter(loader)
    finally:
        loader.__dict__[name] = sampler


class _Behind:
    """A sampler, or a batch sampler. Once: persistent workers iterate it in each pass."""

    def __init__(self, sampler: Any, count: int, then: Callable[[], None]) -> None:
        self._sampler, self._count, self._then = sampler, count, then

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        drawn = iter(self._sampler)
        count, self._count = self._count, 0
        if count:
            for _ in range(count):
                next(drawn, None)
            self._then()
        yield from drawn
