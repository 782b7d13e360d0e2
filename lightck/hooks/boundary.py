"""Which event closes a checkpoint: the rules of "the state after step t", as a state machine without tensors.

*Checkpoint t is the state from which step t+1 starts.* The boundary that closes it is the first event after an update
at which that state is complete.
"""

from __future__ import annotations

from lightck.events import ClosingEvent

BY_HAND = -1
"""The optimizer index of an update if the session follows no optimizer."""
_BY_USER = (ClosingEvent.END_STEP, ClosingEvent.FLUSH)
"""Calls of the user. Such a call closes a checkpoint if an update was made since the last checkpoint closed."""


class Boundary:
    """Counts updates and iterations, and decides which event closes a checkpoint."""

    def __init__(self, n_optimizers: int, step: int = 0, iteration: int = 0, explicit: bool = False) -> None:
        self.n_optimizers = n_optimizers
        """Number of optimizers whose ``step`` makes updates. An optimizer inside a wrapper is not counted."""
        self.iteration = iteration
        """Number of iterations of the loop that have ended."""
        self.explicit = explicit
        """Whether ``end_step()`` was ever called, or will be called after each step. If so, only ``_BY_USER`` events
        close a checkpoint."""
        self._closed = step
        """Step of the last closed checkpoint."""
        self._updates: dict[int, int] = {}
        """Index of an optimizer -> number of its updates since the last checkpoint closed."""
        self._n_updates = 0
        """The sum of ``_updates``."""
        self._flushed = False
        """Whether a ``flush()`` closed the last checkpoint, and only ``flush()`` was called since. If so, the iteration
        was counted there, and an ``end_step()`` that follows does not count the iteration again."""

    @property
    def step(self) -> int:
        """The number of updates so far, those before a resume included. With several optimizers, a round in which every
        optimizer has stepped is one update."""
        if self.n_optimizers <= 1:
            return self._closed + self._n_updates
        return self._closed + int(self._is_round_complete)

    @property
    def _is_round_complete(self) -> bool:
        return len(self._updates) >= max(self.n_optimizers, 1)

    @property
    def is_in_round(self) -> bool:
        """Whether some of several optimizers have stepped, and others have not."""
        return self.n_optimizers > 1 and bool(self._updates) and not self._is_round_complete

    def updated(self, optimizer: int) -> None:
        """Count an optimizer step that made an update."""
        self._updates[optimizer] = self._updates.get(optimizer, 0) + 1
        self._n_updates += 1
        self._flushed = False

    def pending(self, optimizer: int) -> int:
        """The number of updates that the optimizer with this index made since the last checkpoint closed."""
        return self._updates.get(optimizer, 0)

    @property
    def most_pending(self) -> int:
        """The largest number of updates that one optimizer made since the last checkpoint closed."""
        return max(self._updates.values(), default=0)

    def closes_at(self, event: ClosingEvent) -> bool:
        """Whether this event closes a checkpoint. A call of the user closes one after any update. So does every other
        event if there is at most one optimizer. With several optimizers, ``next()`` and the pre-step hook close one
        when every optimizer has stepped, and other events close none. With ``explicit``, only calls of the user close
        checkpoints."""
        if not self._updates:
            return False
        if event in _BY_USER:
            return True
        if self.explicit:
            return False
        if self.n_optimizers <= 1:
            return True
        return self._is_round_complete and event in (ClosingEvent.NEXT, ClosingEvent.PRE_STEP)

    def close(self, event: ClosingEvent) -> int:
        """Close the checkpoint, count the iteration that ends here, and return the checkpoint's step."""
        # If the user closes a checkpoint when only some of several optimizers have stepped, this round counts as an
        # update.
        partial = self.n_optimizers > 1 and not self._is_round_complete
        self._closed = self.step + int(partial)
        self._updates.clear()
        self._n_updates = 0
        self.iteration += 1
        self._flushed = event is ClosingEvent.FLUSH
        if event is ClosingEvent.END_STEP:
            self.explicit = True
        return self._closed

    def closed_nothing(self, event: ClosingEvent, scaler_skipped: bool) -> None:
        """Handle an event that closed no checkpoint: count the iteration if an iteration ends at this event.
        ``scaler_skipped``: a GradScaler skipped an update since the last event."""
        if event is ClosingEvent.FLUSH:
            return  # flush() may be called anywhere in an iteration
        if event is ClosingEvent.END_STEP:
            self.explicit = True
            if not self._flushed:
                self.iteration += 1
        elif scaler_skipped and not self.explicit:
            self.iteration += 1
        self._flushed = False
