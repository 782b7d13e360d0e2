"""Warns if the loop fetches a batch ahead by hand: after the model's forward, and before the update.

Such a batch waits in a variable of the loop while the checkpoint closes. The position of its loader counts the batch as
given, so a resume skips it.

    x = next(it)
    for ...:
        loss = model(x)      # a forward, although no batch was fetched since the update
        x = next(it)         # the batch of the next iteration
        loss.backward()
        optimizer.step()     # an update, although no forward ran since the fetch

One such iteration may have another reason (a batch that is used in some iterations only), so two in a row are needed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightck.dataloader.loader import SessionLoader

log = logging.getLogger("lightck")
_IN_A_ROW = 2


class FetchedAheadCheck:
    """The check of one session. Its methods run at every step."""

    def __init__(self, *, may_keep_batch: bool) -> None:
        """``may_keep_batch``: whether an object that the user passed in ``state=`` might hold the waiting batch. If so,
        nothing is checked."""
        self._is_over = may_keep_batch
        """Whether nothing is left to check."""
        self._has_fetched = False
        """Whether a session loader gave a batch since the last update."""
        self._has_forward_before_fetch = False
        """Whether a training forward ran since the last update, before any batch was fetched."""
        self._ahead: SessionLoader | None = None
        """The loader that gave a batch while ``_has_forward_before_fetch`` was True. It is set to None at the next
        forward, which perhaps uses that batch."""
        self._n_in_a_row = 0
        """Number of successive updates, the last one included, at which ``_ahead`` was set."""

    def forward(self) -> None:
        """A training forward of the root module begins."""
        self._has_forward_before_fetch |= not self._has_fetched
        self._ahead = None

    def batch_given(self, loader: SessionLoader) -> None:
        """A session loader gave a batch for training."""
        if self._has_forward_before_fetch:
            self._ahead = loader
        self._has_fetched = True

    def updated(self) -> None:
        """A followed optimizer made an update."""
        self._n_in_a_row = 0 if self._ahead is None else self._n_in_a_row + 1
        if self._n_in_a_row == _IN_A_ROW and not self._is_over:
            self._is_over = True
            assert self._ahead is not None
            log.warning(
                "lightck: loader %r: the loop takes the next batch after the model's forward and before the update. "
                "The loader's position counts this batch, but the batch waits in a variable, which no checkpoint "
                "holds. So a resume skips it. Take the next batch after the update, or let the DataLoader fetch ahead "
                "(num_workers=, prefetch_factor=). `lightck docs loops` shows such a loop",
                self._ahead.name,
            )
        self._ahead = None
        self._has_fetched = self._has_forward_before_fetch = False
