"""Loaders of Hugging Face's Accelerate: what they keep beside the DataLoader that they wrap.

They are generators that begin at their first ``next()`` and run one batch ahead. They count the passes (``iteration``)
and tell samplers the number. Those over torchdata's stateful loader give its state, which holds the order of a pass
only where the sampler is torchdata's too, and no random states: so a pass is replayed, from the state before it.
"""

from __future__ import annotations

from typing import Any

from lightck.dataloader.under import is_accelerated


def keeps_state(loader: object) -> bool:
    """Whether it is one over a stateful loader."""
    return is_accelerated(loader) and hasattr(getattr(loader, "base_dataloader", None), "load_state_dict")


def passes_of(loader: object) -> int | None:
    """The number of the pass that a loader of Accelerate's tells its sampler; None for any other loader."""
    count = getattr(loader, "iteration", None) if is_accelerated(loader) else None
    return count if type(count) is int and count >= 0 else None


def set_passes(loader: Any, count: int | None) -> None:
    if count is not None and passes_of(loader) is not None:
        loader.iteration = count


def renew(core: Any) -> None:
    """Give a stateful loader a new iterator for its first pass, which Accelerate makes when it is prepared, where that
    was used up since. (The attribute is private to torchdata; a wrong batch would be found.)"""
    if not getattr(core, "_initial_iter_for_state_dict", True):
        core.load_state_dict({})
        core.state_dict()
