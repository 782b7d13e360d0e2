"""The ranks of a group agree where their loops end, after one of them was asked to stop.

Ranks that left their loops at different points would wait for each other for ever, in a collective that some of them
do not reach. The loop of each rank asks at the same points whether to stop (``Session.should_stop``), and every answer
"no" lets the rank pass one of them:

    request     a rank was asked to stop. It writes that into the store
    freeze      each rank learns it, passes no further point, and writes how many it has passed
    verdict     the largest of these numbers: every rank continues up to this point
    end         each rank passes points up to the verdict; the next answer is "yes" on all ranks
    withdrawal  a rank that has waited too long for the numbers of the others gives up for all: each rank passes all
                points. Verdict and withdrawal have one key in the store, and the first of them counts

*Data flow.* A helper thread of each rank looks into the key-value store of the process group, over a connection of its
own. The training thread never uses the store: it calls ``pass_point``.

*Invariant.* All ranks get "yes" at the same point, or none does. A rank passes nothing between its freeze and the
verdict, so the verdict is at least what each rank has passed; and a rank that has passed less goes on until it is
there, so no rank is left alone in a step that another one has begun.

*Failure cases.* A rank is killed or stands still before it has frozen: there is no verdict, and a caller of
``pass_point`` that has waited long enough calls ``withdraw`` (``missing`` says for whom it waited). The store fails:
the helper tries again each second, and if that lasts, the caller goes on although nothing is decided. The ranks are
restarted: keys of the earlier attempt have another nonce.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import msgpack

from lightck.ranks.meet import Store

log = logging.getLogger("lightck")
_POLL_SECONDS = 0.25
"""Seconds between two looks for a request of another rank."""
_WAITING_SECONDS = 0.01
"""Seconds between two looks for the numbers of the others, once there is a request."""
_RETRY_SECONDS = 1.0
"""Seconds until a call of the store that failed is tried again."""
_SLOWER_ABOVE_RANKS = 64
"""In a group of more ranks than this ``_POLL_SECONDS`` and ``_WAITING_SECONDS`` are longer in proportion."""
_JOIN_SECONDS = 1.0
_WITHDRAWN = -1
"""The decision, in place of a verdict, that no rank ends."""


class EndAgreement:
    """Where the loops of a group end, on one rank."""

    def __init__(
        self,
        store: Store,
        key: Callable[[str, int], str],
        rank: int,
        world_size: int,
        requested: Callable[[int], None],
    ) -> None:
        """``store``: over a connection that belongs to this object from now on. ``key``: (what, rank) -> key of the
        store. ``requested``: called on the helper thread, with the number of the signal, when this rank learns that
        another one was asked to stop."""
        self._store, self._rank, self._requested = store, rank, requested
        self._request_key, self._decision_key = key("end-request", 0), key("end-decision", 0)
        self._passed_keys = [key("end-passed", one) for one in range(world_size)]
        self._factor = max(1.0, world_size / _SLOWER_ABOVE_RANKS)
        self._lock = threading.Lock()
        self._n_passed = 0
        self._is_frozen = False
        self._verdict: int | None = None
        """The verdict: how many points all ranks pass."""
        self.is_withdrawn = False
        """Whether a rank gave up before there was a verdict, so that all ranks pass all points."""
        self._wants_withdrawal = False
        self._missing: list[int] = []
        self._signal: int | None = None
        self._is_own_request = self._is_count_written = False
        self._news: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """The number of a signal, or None at the end. (``put`` may be called in a signal's handler.)"""
        self._thread = threading.Thread(target=self._run, name="lightck-end", daemon=True)
        self._thread.start()

    def request(self, signum: int) -> None:
        """Ask all ranks to stop, because this one got the signal ``signum``. May be called in a signal's handler."""
        self._news.put(signum)

    def pass_point(self) -> bool | None:
        """Let the loop pass this point, count it, and return True; return False if the loop must end here. None if that
        is not decided yet, and the caller asks again. Called on the training thread."""
        with self._lock:
            if self._is_frozen and self._verdict is None and not self.is_withdrawn:
                return None
            if self._verdict is not None and self._n_passed >= self._verdict:
                return False
            self._n_passed += 1
            return True

    def withdraw(self) -> None:
        """Give up for all ranks, unless there is a verdict by now. Then ask ``pass_point`` again, which goes on to give
        None until that is decided."""
        self._wants_withdrawal = True

    def postpone(self) -> None:
        """Let the loop pass this point too: ``pass_point`` has returned False, but no rank can end its loop here, for
        example because the point does not lie between two steps."""
        with self._lock:
            assert self._verdict is not None, "it was decided"
            self._n_passed, self._verdict = self._n_passed + 1, self._verdict + 1

    @property
    def missing(self) -> list[int]:
        """The ranks that had not answered when this one looked last."""
        return list(self._missing)

    def close(self) -> None:
        """End the helper. Returns after a second even if the store does not answer."""
        self._news.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    # -- the helper --------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _POLL_SECONDS * self._factor
        while self._verdict is None and not self.is_withdrawn:
            try:
                signum = self._news.get(timeout=pause)
            except queue.Empty:
                pass
            else:
                if signum is None:
                    return
                self._signal, self._is_own_request = (
                    (signum, True) if self._signal is None else (self._signal, self._is_own_request)
                )
            try:
                self._advance()
                pause = (_POLL_SECONDS if self._signal is None else _WAITING_SECONDS) * self._factor
            except Exception as err:  # any error of the store
                log.debug("lightck: the store of the process group cannot be used (%s: %s)", type(err).__name__, err)
                pause = _RETRY_SECONDS

    def _advance(self) -> None:
        if self._signal is None:
            if not self._store.check([self._request_key]):
                return
            self._signal = int(msgpack.unpackb(self._store.multi_get([self._request_key])[0]))
            self._requested(self._signal)
        if self._is_own_request:
            self._store.set(self._request_key, msgpack.packb(self._signal))
            self._is_own_request = False
        with self._lock:
            self._is_frozen, n_passed = True, self._n_passed
        if not self._is_count_written:
            self._store.set(self._passed_keys[self._rank], msgpack.packb(n_passed))
            self._is_count_written = True
        decision = self._decided()
        if decision is not None:
            with self._lock:
                self._verdict, self.is_withdrawn = (None, True) if decision == _WITHDRAWN else (decision, False)

    def _decided(self) -> int | None:
        """Decide if that is possible, and return the decision that counts; None if there is none yet."""
        if self._store.check(self._passed_keys):
            wanted = max(int(msgpack.unpackb(one)) for one in self._store.multi_get(self._passed_keys))
        elif self._wants_withdrawal:
            wanted = _WITHDRAWN
        elif self._store.check([self._decision_key]):
            return int(self._store.multi_get([self._decision_key])[0])
        else:
            self._missing = [rank for rank, key in enumerate(self._passed_keys) if not self._store.check([key])]
            return None
        return int(self._store.compare_set(self._decision_key, "", str(wanted)))
