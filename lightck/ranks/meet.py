"""How the ranks of a group meet in attach or recover, and exchange short messages there.

The messages go through the key-value store of the process group. No tensor is sent, so this works with every backend.
Each rank calls the same methods in the same order. Every wait is bounded, and an error of one rank is raised on all
ranks.

*Data flow.* First the ranks agree on a nonce. Each rank but rank 0 writes a random challenge. Rank 0 answers each rank
with that rank's challenge and its own nonce. All further keys contain the nonce. So no rank reads a key that an earlier
attempt of the same job left in the store. (Under ``torchrun --max-restarts`` the store may outlive the processes.)
After that, ``exchange`` writes the value of this rank, and waits for the values of all ranks.

*Failure cases.* If a rank does not come or is killed, the others raise ``RankError`` after the timeout, with the number
of that rank. If a rank raises an error, it writes the error into the store, and the others raise ``RankError`` with the
same text.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgpack

from lightck.errors import LightckError, RankError, capitalized, listed
from lightck.ranks.waiting import wait_until

log = logging.getLogger("lightck")
_PREFIX = "lightck"
_ATTACH = "lightck.attach"
_CHALLENGE_NBYTES = 16
_LEAVE_SECONDS = 2.0
"""After an error rank 0 waits at most so long until the other ranks have read it."""
_PAUSES = (0.001, 0.02)
"""Seconds between two reads of the store while a rank waits: the first pause, and the longest one."""


class Store(Protocol):
    """The methods of ``torch.distributed.Store`` that are used here. A value is read as bytes."""

    def set(self, key: str, value: bytes, /) -> object: ...

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> Sequence[bytes]: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn an error of the store into a ``RankError``."""
    try:
        yield
    except LightckError:
        raise
    except Exception as err:
        raise RankError(
            f"The store of the process group cannot be used ({type(err).__name__}: {err}). The rank that serves it, "
            "usually rank 0, may have ended: look for its error."
        ) from err


@dataclass(slots=True)
class Meeting:
    """One meeting of all ranks of a group."""

    store: Store
    rank: int
    world_size: int
    timeout: float
    """Seconds after which a wait for another rank ends with an error."""
    hosts: list[str] = field(default_factory=list)
    """Name of each rank's host, for messages; empty until the ranks have met."""
    call: str = _ATTACH
    """The function of lightck in which the ranks meet, for messages."""
    _error_of_other: RankError | None = None
    """The error of another rank that was raised on this rank; None if there was none."""
    _nonce: str = ""
    _n_rounds: int = 0
    """How many messages this rank has written. The number is part of each message's key."""

    def meet(self, host: str) -> None:
        """Wait until all ranks are here. ``host``: name of this rank's host. Raises ``RankError``."""
        with _store_errors():
            if self.rank == 0:
                self._answer_challenges()
            else:
                self._nonce = self._nonce_of_rank_0().hex()
                self.store.set(self.key("here", self.rank), b"1")
        self.hosts = [value.decode("utf-8", "replace") for value in self.exchange("host names", host.encode())]

    def exchange(self, what: str, value: bytes) -> list[bytes]:
        """Return the value of each rank, in the order of the ranks. ``value``: that of this rank. ``what``: a noun for
        the values, for messages. Raises ``RankError``."""
        with _store_errors():
            messages = self._exchanged(what, value)
        for rank, message in enumerate(messages):
            if "error" in message:
                self._raise_error_of(rank, message)
            if message["what"] != what:
                raise RankError(
                    f"{capitalized(self.name_of(rank))} and rank {self.rank} are at different points of "
                    f"{self.call}: the first sent its {message['what']}, the second its {what}. All ranks must run "
                    "the same release of lightck, and the same script."
                )
        return [message["value"] for message in messages]

    def _exchanged(self, what: str, value: bytes) -> list[dict[str, Any]]:
        """Write this rank's message, and return the messages of all ranks."""
        self._n_rounds += 1
        self._write(msgpack.packb({"what": what, "value": value}))
        keys = [self.key(str(self._n_rounds), rank) for rank in range(self.world_size)]

        def missing() -> list[int]:
            if self.store.check(keys):
                return []
            # A rank that has failed since may have passed this exchange before. Then its message was written before its
            # error, so the keys are looked at again: if all messages are there now, this exchange is complete.
            if self.store.check([self.key("failed")]) and not self.store.check(keys):
                self._raise_failure()
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

        self._wait(missing, f"the {what} of all ranks")
        return [msgpack.unpackb(message) for message in self.store.multi_get(keys)]

    def raise_error_of_others(self) -> None:
        """Raise ``RankError`` if another rank has failed. For waits for something other than ``exchange``."""
        with _store_errors():
            if self.store.check([self.key("failed")]):
                self._raise_failure()

    @contextmanager
    def shares_errors(self) -> Iterator[None]:
        """If the block raises, the other ranks raise ``RankError`` in their next ``exchange``."""
        try:
            yield
        except BaseException as err:
            try:
                if err is not self._error_of_other:
                    self._share(err)
                self._leave()
            except Exception as store_error:  # the store is gone, which raises an error on the other ranks too
                log.debug("lightck: the error could not be passed on to the other ranks: %s", store_error)
            raise

    def _share(self, err: BaseException) -> None:
        """Write the error of this rank."""
        self._n_rounds += 1
        text = str(err.args[0]) if err.args else ""
        message = {"error": f"{type(err).__name__}: {text}" if text else type(err).__name__}
        self._write(msgpack.packb(message))
        self.store.set(self.key("failed"), msgpack.packb([self.rank, message]))

    def _leave(self) -> None:
        """Say that this rank goes no further. Rank 0, whose process often serves the store, waits for a moment until
        all ranks have said so: else they would find the store gone, and not the error."""
        self.store.set(self.key("left", self.rank), b"1")
        others = [self.key("left", rank) for rank in range(self.world_size)]
        end = time.monotonic() + _LEAVE_SECONDS
        while self.rank == 0 and time.monotonic() < end and not self.store.check(others):
            time.sleep(_PAUSES[1])

    def name_of(self, rank: int) -> str:
        """Return a rank with its host, for messages."""
        return f"rank {rank} (host {self.hosts[rank]})" if self.hosts else f"rank {rank}"

    # -- the nonce ---------------------------------------------------------------------------------------

    def _nonce_of_rank_0(self) -> bytes:
        """Write a challenge, wait until rank 0 has answered it, and return the nonce of rank 0 from the answer."""
        challenge = os.urandom(_CHALLENGE_NBYTES)
        self.store.set(f"{_PREFIX}/challenge/{self.rank}", challenge)
        key, nonce = f"{_PREFIX}/answer/{self.rank}", b""

        def missing() -> list[int]:
            nonlocal nonce
            if self.store.check([key]):
                answer = self.store.multi_get([key])[0]
                if answer[:_CHALLENGE_NBYTES] == challenge:
                    nonce = answer[_CHALLENGE_NBYTES:]
            return [] if nonce else [0]

        self._wait(missing, "the answer of rank 0")
        return nonce

    def _answer_challenges(self) -> None:
        """Answer the challenges of the other ranks, as rank 0, until every rank has read its answer. A challenge in the
        store may be left from an earlier attempt, so the challenge of a rank is read again until that rank is here."""
        nonce = os.urandom(_CHALLENGE_NBYTES)
        self._nonce = nonce.hex()
        answered: dict[int, bytes] = {}

        def missing() -> list[int]:
            absent = [rank for rank in range(1, self.world_size) if not self.store.check([self.key("here", rank)])]
            for rank in absent:
                key = f"{_PREFIX}/challenge/{rank}"
                challenge = self.store.multi_get([key])[0] if self.store.check([key]) else None
                if challenge is not None and answered.get(rank) != challenge:
                    answered[rank] = challenge
                    self.store.set(f"{_PREFIX}/answer/{rank}", challenge + nonce)
            return absent

        self._wait(missing, "the other ranks")

    # -- waiting -----------------------------------------------------------------------------------------

    def _wait(self, missing: Callable[[], list[int]], what: str) -> None:
        """Wait until ``missing``, which returns the ranks that did not come yet, returns none. ``what``: what this rank
        waits for, for messages. Raises ``RankError`` after the timeout."""
        ranks: list[int] = []

        def is_over() -> bool:
            ranks[:] = missing()
            return not ranks

        def report(seconds: float) -> None:
            log.warning(
                "lightck: rank %d has waited %.0f seconds in %s for %s. Missing: %s",
                self.rank,
                seconds,
                self.call,
                what,
                self._names(ranks),
            )

        def error() -> RankError:
            cure = "Look for an error of these ranks"
            if self.call == _ATTACH:
                cure += "; or pass group=False, if this process is to be saved alone, or a larger timeout="
            return RankError(
                f"{capitalized(self._names(ranks))} of {self.world_size} did not reach this point of {self.call} "
                f"within {self.timeout:g} seconds. In a process group every rank calls {self.call}. {cure}."
            )

        wait_until(is_over, timeout=self.timeout, pauses=_PAUSES, report=report, error=error)

    def _names(self, ranks: Iterable[int]) -> str:
        """Return the numbers of these ranks as a text: "rank 1", or "ranks 1, 3"."""
        numbers = list(map(str, ranks))
        return f"rank{'s' * (len(numbers) > 1)} {listed(numbers, 8)}"

    # -- errors of others --------------------------------------------------------------------------------

    def _raise_failure(self) -> None:
        """Raise ``RankError`` with the error that another rank has written."""
        rank, message = msgpack.unpackb(self.store.multi_get([self.key("failed")])[0])
        self._raise_error_of(rank, message)

    def _raise_error_of(self, rank: int, message: dict[str, str]) -> None:
        self._error_of_other = RankError(
            f"{capitalized(self.name_of(rank))} failed in {self.call}, so no rank of the group goes on. Its error: "
            f"{message['error']}"
        )
        raise self._error_of_other

    # -- keys --------------------------------------------------------------------------------------------

    def _write(self, message: bytes) -> None:
        self.store.set(self.key(str(self._n_rounds), self.rank), message)

    def new_key(self, what: str) -> str:
        """Return a key of the store that is the same on all ranks, and another one after the next exchange."""
        return self.key(what, self._n_rounds)

    def key(self, *parts: object) -> str:
        return "/".join((_PREFIX, self._nonce, *map(str, parts)))
