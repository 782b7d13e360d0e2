"""A helper thread of a rank that uses the key-value store of the process group, so that the training thread never does.

A subclass says in ``_exchange`` what is written and read, and in ``_longest_sleep`` how often. The thread sleeps while
there is nothing to do. While it waits for news, each sleep is twice as long as the one before, up to a limit. So it
learns the news after at most about twice the time that they took to come. If the store fails, the thread tries again
each second.
"""

from __future__ import annotations

import logging
import threading

from lightck.ranks.meet import Store

log = logging.getLogger("lightck")
SLEEP_SECONDS_MAX = 0.1
"""The longest sleep between two reads of the store while news are expected, in seconds."""
_SLEEP_SECONDS = 0.001
"""The first sleep."""
_RETRY_SECONDS = 1.0
"""Seconds between two attempts to use a store that fails."""
_JOIN_SECONDS = 1.0
"""``_end`` waits at most so long for the thread, which may be in a call of the store."""


class StoreThread:
    """Base class of what exchanges news through the store."""

    def __init__(self, store: Store, name: str, *, has_final_exchange: bool = False) -> None:
        """``store``: over a connection that belongs to this object from now on. ``name``: of the thread.
        ``has_final_exchange``: whether ``_end`` lets it exchange once more."""
        self._store = store
        self.error: Exception | None = None
        """The error of the last attempt to use the store; None if that succeeded."""
        self._is_ending, self._has_final_exchange = False, has_final_exchange
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _begin(self) -> None:
        """Start the thread. Called when everything that ``_exchange`` needs is there."""
        self._thread.start()

    def _end(self) -> None:
        """End the thread. Returns after a second even if the store does not answer."""
        self._is_ending = True
        self._wake.set()
        self._thread.join(_JOIN_SECONDS)

    # -- the thread --------------------------------------------------------------------------------------

    def _exchange(self) -> bool:
        """Write what is to be written, and read what may have come. Return whether there were news. What the store
        raises is caught."""
        raise NotImplementedError

    def _longest_sleep(self) -> float | None:
        """Return the longest sleep until the next exchange, in seconds; None: until ``_wake`` is set."""
        raise NotImplementedError

    def _run(self) -> None:
        sleep = _SLEEP_SECONDS / 2
        while not self._is_ending or self._has_final_exchange:
            is_last = self._is_ending
            try:
                is_new = self._exchange()
                self.error = None
            except Exception as err:  # any error of the store
                self._failed(err)
                is_new = False
            if is_last:
                return
            sleep = _SLEEP_SECONDS if is_new else 2 * sleep
            longest = self._longest_sleep()
            if self.error is not None:
                sleep = longest = _RETRY_SECONDS
            if self._wake.wait(None if longest is None else min(sleep, longest)):
                self._wake.clear()
                sleep = _SLEEP_SECONDS
            sleep = min(sleep, longest or sleep)

    def _failed(self, err: Exception) -> None:
        if self.error is None:
            log.debug(
                "lightck: the store of the process group cannot be used (%s: %s), so this rank learns nothing new of "
                "others through it. lightck tries again",
                type(err).__name__,
                err,
            )
        self.error = err
