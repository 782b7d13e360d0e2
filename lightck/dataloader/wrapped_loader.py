"""The DataLoader inside a wrapper of another library, and the process in which it fetches.

Wrappers are examined by their attributes, and never called: Accelerate's loaders (``base_dataloader``), timm's
prefetcher (``loader``), and any object that holds exactly one DataLoader.

Accelerate's loaders are generators that begin at their first ``next()`` and run one batch ahead. They count the passes
and pass the number to samplers; so do Fabric's loaders. Accelerate's loaders may wrap torchdata's stateful loader.
Their state is then that of torchdata's loader. This state holds no random states, and it holds the order of a pass
only if the sampler is one of torchdata's. So a resume loads the state that was saved at the beginning of the pass, and
replays the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

_NAMES = ("base_dataloader", "dataloader", "loader")
"""Attributes in which wrappers keep what they wrap."""
_COUNTERS = {"accelerate": "iteration", "lightning": "_num_iter_calls", "lightning_fabric": "_num_iter_calls"}
"""The attributes in which wrappers of these packages count the passes."""
_DEPTH_MAX = 8
"""The largest number of objects in a chain of wrappers that are examined, the outermost one included."""
_SEQUENCE_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter(range(0))))


def inner_dataloader(loader: object) -> DataLoader[object] | None:
    """Return the DataLoader that fetches: ``loader`` itself, or the DataLoader inside it; None if it holds no
    DataLoader, or several."""
    for one in wrapper_chain(loader):
        if is_loader_of_torch(one):
            return one  # type: ignore[return-value]
    return None


def wrapper_chain(loader: object) -> list[object]:
    """Return the loader, the object that it wraps, the object that this one wraps, and so on."""
    found = [loader]
    while len(found) < _DEPTH_MAX and not is_loader_of_torch(found[-1]):
        inner = _wrapped_loader(found[-1])
        if inner is None or any(inner is known for known in found):
            break
        found.append(inner)
    return found


def is_loader_of_torch(value: object) -> bool:
    """Whether the object's class is a subclass of DataLoader. ``isinstance`` would be wrong, because Accelerate's
    loaders claim the class of the DataLoader that they wrap."""
    return issubclass(type(value), DataLoader)


def is_accelerated(loader: object) -> bool:
    """Whether the loader is one of Accelerate's."""
    return _package_of(loader) == "accelerate"


def _package_of(loader: object) -> str:
    return type(loader).__module__.partition(".")[0]


def _wrapped_loader(wrapper: object) -> object | None:
    """Return the loader that a wrapper holds; None if the object holds no loader, or several."""
    attributes = getattr(wrapper, "__dict__", None)
    if type(attributes) is not dict:
        return None
    for name in _NAMES:
        if hasattr(type(attributes.get(name)), "__iter__"):
            return attributes[name]  # type: ignore[no-any-return]
    loaders = [value for value in attributes.values() if is_loader_of_torch(value)]
    return loaders[0] if len(loaders) == 1 else None


def may_prefetch(batches: Iterator[object]) -> bool:
    """Whether the iterator may have fetched more batches than it gave. Iterators over lists, tuples and ranges fetch
    nothing."""
    return not is_made_by_torch(batches) and type(batches) not in _SEQUENCE_ITERATORS


def is_made_by_torch(batches: Iterator[object]) -> bool:
    """Whether torch's DataLoader made this iterator. It may fetch ahead in workers, but not in this process."""
    return type(batches).__module__ == "torch.utils.data.dataloader"


def may_draw_here(loader: object, dataloader: DataLoader[object] | None, batches: Iterator[object]) -> bool:
    """Whether a ``next()`` may draw random numbers for a batch in this process. If workers fetch, torch's and
    Accelerate's iterators do not draw here; another wrapper may change the batches here."""
    has_workers = dataloader is not None and dataloader.num_workers > 0
    return not (has_workers and (is_made_by_torch(batches) or is_accelerated(loader)))


def is_accelerated_stateful(loader: object) -> bool:
    """Whether the loader is one of Accelerate's over a stateful loader, which keeps a state of its own between
    passes."""
    return is_accelerated(loader) and hasattr(getattr(loader, "base_dataloader", None), "load_state_dict")


def pass_number_of(loader: object) -> int | None:
    """Return the counter of passes that a loader of Accelerate or of Fabric gives to its sampler (``set_epoch``); None
    for any other loader."""
    count = getattr(loader, _COUNTERS.get(_package_of(loader), ""), None)
    return count if type(count) is int and count >= 0 else None


def set_pass_number(loader: Any, count: int | None) -> None:
    """Set what `pass_number_of` returns, if it returns a number. None: change nothing."""
    if count is not None and pass_number_of(loader) is not None:
        setattr(loader, _COUNTERS[_package_of(loader)], count)


def reset_first_pass(dataloader: Any) -> None:
    """Give a stateful loader a new iterator for its first pass, if its first iterator is used up. Accelerate creates
    the first iterator when it prepares the loader. An attribute that is private to torchdata says whether it is used
    up. If the meaning of this attribute changes one day, the checksum of the last batch detects the wrong pass."""
    if not getattr(dataloader, "_initial_iter_for_state_dict", True):
        dataloader.load_state_dict({})  # drops the iterator
        dataloader.state_dict()  # makes a new one
