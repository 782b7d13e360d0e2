"""What lies under a loader of somebody else's: the DataLoader that it wraps, and in which process that fetches.

Wrappers are looked through by what they hold, never by calling them: Accelerate's loaders (``base_dataloader``), timm's
prefetcher (``loader``), and any object that holds exactly one DataLoader.

Accelerate's are generators that begin at their first ``next()`` and run one batch ahead. They count the passes
(``iteration``) and tell samplers the number. Those over torchdata's stateful loader give its state, which holds the
order of a pass only where the sampler is torchdata's too, and no random states: so a pass is replayed, from the state
before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

_NAMES = ("base_dataloader", "dataloader", "loader")
_DEPTH_MAX = 8
_OF_SEQUENCES: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


def inner_dataloader(loader: object) -> DataLoader[object] | None:
    """The DataLoader that fetches: the object itself or what it wraps; None where there is none, or several."""
    for one in wrapper_chain(loader):
        if is_loader_of_torch(one):
            return one  # type: ignore[return-value]
    return None


def wrapper_chain(loader: object) -> list[object]:
    """The loader, what it wraps, and so on; the last one wraps none."""
    found = [loader]
    while len(found) < _DEPTH_MAX and not is_loader_of_torch(found[-1]):
        inner = _held_by(found[-1])
        if inner is None or any(inner is known for known in found):
            break
        found.append(inner)
    return found


def is_loader_of_torch(value: object) -> bool:
    """By its class, and not by ``isinstance``: Accelerate's loaders say that they are of the class that they wrap."""
    return issubclass(type(value), DataLoader)


def is_accelerated(loader: object) -> bool:
    return type(loader).__module__.partition(".")[0] == "accelerate"


def _held_by(wrapper: object) -> object | None:
    attributes = getattr(wrapper, "__dict__", None)
    if type(attributes) is not dict:
        return None
    for name in _NAMES:
        if hasattr(type(attributes.get(name)), "__iter__"):
            return attributes[name]  # type: ignore[no-any-return]
    loaders = [value for value in attributes.values() if is_loader_of_torch(value)]
    return loaders[0] if len(loaders) == 1 else None


def may_prefetch(batches: Iterator[object]) -> bool:
    """Whether it may have fetched more than it gave. What is in a list was made before."""
    return not is_made_by_torch(batches) and type(batches) not in _OF_SEQUENCES


def is_made_by_torch(batches: Iterator[object]) -> bool:
    """Whether this iterator is a DataLoader's own: it gives what it fetched last, and fetches nothing ahead here."""
    return type(batches).__module__ == "torch.utils.data.dataloader"


def fetches_here(loader: object, dataloader: DataLoader[object] | None, batches: Iterator[object]) -> bool:
    """Whether a ``next()`` may draw random numbers for a batch in this process. Where workers fetch, torch's iterators
    and Accelerate's do not; a wrapper of another kind may change the batches here."""
    has_workers = dataloader is not None and dataloader.num_workers > 0
    return not (has_workers and (is_made_by_torch(batches) or is_accelerated(loader)))


def keeps_state(loader: object) -> bool:
    """Whether it is a loader of Accelerate's over a stateful loader."""
    return is_accelerated(loader) and hasattr(getattr(loader, "base_dataloader", None), "load_state_dict")


def pass_number_of(loader: object) -> int | None:
    """The number of the pass that a loader of Accelerate's tells its sampler; None for any other loader."""
    count = getattr(loader, "iteration", None) if is_accelerated(loader) else None
    return count if type(count) is int and count >= 0 else None


def set_pass_number(loader: Any, count: int | None) -> None:
    if count is not None and pass_number_of(loader) is not None:
        loader.iteration = count


def reset_first_pass(dataloader: Any) -> None:
    """Give a stateful loader a new iterator for its first pass, which Accelerate makes when it is prepared, where that
    was used up since. (The attribute is private to torchdata; a wrong batch would be found.)"""
    if not getattr(dataloader, "_initial_iter_for_state_dict", True):
        dataloader.load_state_dict({})
        dataloader.state_dict()
