"""DataLoaders with persistent workers that no session loader wraps.

Such a loader draws the seed of its workers from torch's global generator in its first pass of each process, when its
workers start, and not in later passes. So the interrupted run and the resumed run draw at different times, and all
later random numbers differ.
(For a session loader this is no problem: its position includes the random state from which its workers started.)
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader

from lightck.dataloader.wrapped_loader import wrapper_chain

if TYPE_CHECKING:
    from lightck.dataloader.loader import SessionLoader

log = logging.getLogger("lightck")


_RESTORED = "_lightck_restores_draw"
"""Attribute of a DataLoader. An integration sets it to True if it undoes the draw of the workers' seed when the workers
start again."""


def draws_once(loader: object) -> bool:
    """Whether the loader draws its workers' seed from the global generator in its first pass, and not in later ones."""
    if getattr(loader, "generator", None) is not None or getattr(loader, _RESTORED, False):
        return False
    return bool(getattr(loader, "persistent_workers", False))


class PersistentLoaders:
    """The DataLoaders with persistent workers that were alive when one session was attached."""

    def __init__(self, loaders: Sequence[SessionLoader], objects: Mapping[str, object]) -> None:
        self._loaders, self._objects = loaders, objects
        self._found: list[weakref.ref[DataLoader[object]]] = []
        self.had_started_at_checkpoint = False
        """What ``have_started_now`` returned in the interrupted run when the restored checkpoint was closed."""

    def follow(self, found: Iterable[DataLoader[object]]) -> None:
        """Set the DataLoaders. They are not kept alive."""
        self._found = [weakref.ref(loader) for loader in found]

    def have_started_now(self) -> bool:
        """Whether the workers of a DataLoader that is outside (see ``_outside``) have started."""
        if not self._found:
            return False
        return any(getattr(loader, "_iterator", None) is not None for loader in self._outside())

    def before_first_update(self) -> None:
        """Warn, after a resume, about loaders that drew in the interrupted run before the checkpoint and will
        draw again."""
        if not self.had_started_at_checkpoint:
            return
        for loader in self._outside():
            log.warning(
                "lightck: a DataLoader with persistent workers (over a %s, batch size %s) is used outside "
                "session.loader(). It draws from torch's global random generator in its first pass of each process, so "
                "the random numbers after that pass are not those of the interrupted run. Pass the DataLoader "
                "to session.loader(loader, name=...), or build it with persistent_workers=False or a generator= of its "
                "own",
                type(loader.dataset).__name__,
                loader.batch_size,
            )

    def _outside(self) -> Iterator[DataLoader[object]]:
        """Yield those DataLoaders that neither a session loader nor an object of ``state=`` wraps."""
        followed = [*(loader.loader for loader in self._loaders), *self._objects.values()]
        known = {id(one) for loader in followed for one in wrapper_chain(loader)}
        for ref in self._found:
            loader = ref()
            if loader is not None and id(loader) not in known:
                yield loader
