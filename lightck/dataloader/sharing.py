"""How the ranks of a group share the samples of a pass, and how another number of ranks goes on with that pass.

torch's ``DistributedSampler`` puts the samples of a pass into an order that depends on its seed and its epoch alone,
and deals them to the ranks in turn. So when each rank has got the same number of full batches, the ranks together have
got the first samples of that order. Another number of ranks deals what is left in the same way. No sample is given
twice, and none is left out, apart from those that the sampler itself repeats or drops to give each rank equally many.

A position says how many samples earlier worlds have given (``PassState.samples_before``). The batches that the present
world gave after them are counted from there. So a pass may be moved any number of times.

Any other loader begins its pass again in another world.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightck.dataloader.wrapped_loader import is_loader_of_torch
from lightck.errors import DriftError

_KEYS = ("ranks", "batch_size", "samples", "shuffle", "seed", "epoch")


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a ``DistributedSampler`` shares the samples of a pass."""

    ranks: int
    """Number of ranks that share them."""
    batch_size: int
    """Samples in a batch of one rank."""
    samples: int
    """Number of samples of the dataset."""
    shuffle: int
    seed: int
    epoch: int

    def to_value(self) -> dict[str, int]:
        return {key: getattr(self, key) for key in _KEYS}

    @classmethod
    def from_value(cls, value: object) -> Sharing | None:
        """Return None for None, and for anything that is no sharing."""
        if not isinstance(value, dict) or set(value) != set(_KEYS):
            return None
        if any(type(number) is not int or not 0 <= number < 1 << 63 for number in value.values()):
            return None
        return cls(**value) if value["ranks"] and value["batch_size"] else None

    @property
    def order(self) -> tuple[int, ...]:
        """What the order of the samples depends on. Two samplers with the same order differ only in how many ranks they
        deal to."""
        return self.samples, self.shuffle, self.seed, self.epoch


def sharing_of(loader: object) -> Sharing | None:
    """Return how the loader's samples are shared among ranks; None if it is no plain DataLoader with torch's
    ``DistributedSampler``."""
    if not is_loader_of_torch(loader) or getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
        return None
    assert isinstance(loader, DataLoader)
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is not DistributedSampler.__iter__:
        return None
    if batch_sampler is not None and (type(batch_sampler) is not BatchSampler or batch_sampler.sampler is not sampler):
        return None
    try:
        samples = len(sampler.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    numbers = (sampler.num_replicas, loader.batch_size or 1, samples, sampler.shuffle, sampler.seed, sampler.epoch)
    try:
        return Sharing(*map(int, numbers))
    except (TypeError, ValueError):
        return None


# -- the rest of a pass ------------------------------------------------------------------------------------------------


def iterate_rest(loader: DataLoader[object], samples_before: int) -> Iterator[object]:
    """Return an iterator of a loader with a ``DistributedSampler`` that gives this rank its share of the samples from
    ``samples_before`` on."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    own = loader.__dict__[name]
    assert isinstance(loader.sampler, DistributedSampler)
    # The iterator keeps this sampler. It is set in __dict__, because DataLoader forbids a normal assignment.
    loader.__dict__[name] = _Rest(own, loader.sampler, samples_before)
    try:
        return iter(loader)
    finally:
        loader.__dict__[name] = own


class _Rest:
    """A sampler, or a batch sampler, that gives the rest of a pass, in the first pass only. (With persistent workers
    the same iterator, and so the same sampler, serves every pass.)"""

    def __init__(self, own: Any, sampler: DistributedSampler[Any], samples_before: int) -> None:
        self._own, self._sampler, self._samples_before = own, sampler, samples_before

    def __len__(self) -> int:
        return len(self._own)  # of a whole pass, as ``len(loader)`` of any other pass

    def __iter__(self) -> Iterator[object]:
        before, self._samples_before = self._samples_before, 0
        if not before:
            yield from self._own
        elif self._own is self._sampler:
            yield from rest_of(self._sampler, before)
        else:
            yield from BatchSampler(rest_of(self._sampler, before), self._own.batch_size, self._own.drop_last)


def rest_of(sampler: DistributedSampler[Any], samples_before: int) -> list[int]:
    """Return the indices of the samples that the sampler's rank gets of those from ``samples_before`` on."""
    whole: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
    )
    whole.set_epoch(sampler.epoch)
    order = list(whole)
    left, ranks = order[samples_before:], sampler.num_replicas
    if sampler.drop_last:
        left = left[: len(left) // ranks * ranks]
    else:  # repeat samples from the beginning of the pass, as the sampler does
        n_missing = -len(left) % ranks
        left = [*left, *(order[number % len(order)] for number in range(n_missing))]
    return left[sampler.rank :: ranks]


def refuse_other_order(name: str, saved: Sharing, loader: object) -> None:
    """Raise ``DriftError`` if a pass of another world cannot go on with this loader, because it would give other
    samples."""
    now = sharing_of(loader)
    if now is not None and now.order == saved.order:
        return
    differ = "this loader has no DistributedSampler of torch" if now is None else _difference(saved, now)
    raise DriftError(
        f"loader {name!r} cannot go on in mid-pass: the pass was begun by {saved.ranks} ranks, and {differ}. Build the "
        "loader as it was, with a DistributedSampler, and call sampler.set_epoch(epoch) before the pass; or begin the "
        "pass anew: session.loader(..., anew=True)."
    )


def _difference(saved: Sharing, now: Sharing) -> str:
    names = {"samples": "the number of samples", "shuffle": "shuffle", "seed": "the seed", "epoch": "the epoch"}
    return ", ".join(
        f"{text} of its sampler was {getattr(saved, key)} and is {getattr(now, key)}"
        for key, text in names.items()
        if getattr(saved, key) != getattr(now, key)
    )
