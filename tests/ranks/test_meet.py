"""``Meeting``: ranks as threads over one store, answers of earlier attempts, errors, and ranks that do not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from lightck.errors import RankError
from lightck.ranks.meet import Meeting


def run(n_ranks: int, body: Callable[[Meeting], Any], store: Any = None, *, absent: tuple[int, ...] = ()) -> list[Any]:
    """Run ``body`` in a thread per rank. Returns what each returned or raised; None for an absent rank."""
    store = dist.HashStore() if store is None else store
    results: list[Any] = [None] * n_ranks

    def one(rank: int) -> None:
        try:
            results[rank] = body(Meeting(store, rank, n_ranks, timeout=20.0 if not absent else 2.0))
        except BaseException as err:
            results[rank] = err

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(n_ranks) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def exchanged(meeting: Meeting) -> list[bytes]:
    meeting.meet(f"host{meeting.rank}")
    return meeting.exchange("numbers", bytes([meeting.rank]))


@pytest.mark.parametrize("n_ranks", [2, 3, 16])
def test_each_rank_gets_the_values_of_all(n_ranks):
    assert run(n_ranks, exchanged) == [[bytes([rank]) for rank in range(n_ranks)]] * n_ranks


def test_ranks_meet_again_over_the_same_store():
    store = dist.HashStore()
    for _ in range(3):
        assert run(3, exchanged, store) == [[b"\0", b"\1", b"\2"]] * 3


def test_answers_and_challenges_of_an_earlier_attempt_are_not_taken():
    """Under ``torchrun --max-restarts`` the store may outlive the processes."""
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"lightck/challenge/{rank}", b"old challenge of 16"[:16])
        store.set(f"lightck/answer/{rank}", b"another challenge"[:16] + b"an old nonce....")
    for rank in range(3):  # under the nonce of the old answer everything is there
        store.set(f"lightck/{b'an old nonce....'.hex()}/1/{rank}", b"\x81\xa5error\xa3old")
    assert run(3, exchanged, store) == [[b"\0", b"\1", b"\2"]] * 3


def test_a_rank_that_does_not_come_is_named():
    results = run(4, exchanged, absent=(1, 3))
    assert isinstance(results[0], RankError)
    assert "Ranks 1, 3 of 4 did not reach this point of lightck.attach within 2 seconds" in str(results[0])
    assert "group=False" in str(results[0])
    assert isinstance(results[2], RankError)


def test_without_rank_0_the_others_name_it():
    results = run(2, exchanged, absent=(0,))
    assert "Rank 0 of 2 did not reach this point" in str(results[1])


def test_an_error_of_one_rank_is_raised_on_all():
    def body(meeting: Meeting) -> None:
        meeting.meet("h")
        with meeting.shares_errors():
            meeting.exchange("numbers", b"")
            if meeting.rank == 1:
                raise ValueError("no such thing")
            meeting.exchange("others", b"")

    results = run(3, body)
    assert isinstance(results[1], ValueError)
    for rank in (0, 2):
        assert isinstance(results[rank], RankError)
        assert "Rank 1 (host h) failed" in str(results[rank])
        assert "ValueError: no such thing" in str(results[rank])


def test_an_error_is_raised_on_ranks_that_wait_for_a_third_one():
    """The third rank never comes to the round in which the second one fails."""
    third_may_end = threading.Event()

    def body(meeting: Meeting) -> None:
        meeting.meet("h")
        if meeting.rank == 2:
            third_may_end.wait(10)
            return
        with meeting.shares_errors():
            if meeting.rank == 1:
                raise ValueError("no such thing")
            try:
                meeting.exchange("numbers", b"")
            finally:
                third_may_end.set()

    results = run(3, body)
    assert "no such thing" in str(results[0])
    assert isinstance(results[1], ValueError)


def test_ranks_at_different_places_are_named():
    def body(meeting: Meeting) -> None:
        meeting.meet("h")
        meeting.exchange("apples" if meeting.rank else "pears", b"")

    for result in run(2, body):
        assert "are at different points of lightck.attach" in str(result)


def test_an_error_of_the_store_is_typed():
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionResetError("gone")

    with pytest.raises(RankError, match=r"store of the process group.*ConnectionResetError: gone.*rank 0"):
        Meeting(Broken(), 1, 2, timeout=1.0).meet("h")


class LateStore:
    """A store in which the other rank goes on and fails just after this one has found its message missing."""

    def __init__(self, store: Any, then: Callable[[], Any]) -> None:
        self._store, self._then = store, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        found = bool(self._store.check(keys))
        if not found and len(keys) > 1 and self._then is not None:
            then, self._then = self._then, None
            then()
        return found


def test_an_error_after_an_exchange_does_not_take_its_values_from_others():
    """So a rank that has the same error raises its own one, and not that of the other rank."""
    store = dist.HashStore()

    def body(meeting: Meeting) -> list[bytes]:
        meeting.meet("h")
        if meeting.rank == 0:
            return []
        other = Meeting(store, 0, 2, 20.0, ["h", "h"], _nonce=meeting._nonce, _n_rounds=meeting._n_rounds)

        def goes_on_and_fails() -> None:
            with pytest.raises(ValueError), other.shares_errors():
                other.exchange("numbers", b"\0")
                raise ValueError("too late")

        meeting.store = LateStore(store, goes_on_and_fails)
        return meeting.exchange("numbers", b"\1")

    assert run(2, body, store)[1] == [b"\0", b"\1"]


class ServedStore:
    """A store that is gone when the process which serves it has ended."""

    def __init__(self) -> None:
        self._store, self.is_served = dist.HashStore(), True

    def __getattr__(self, name: str) -> Any:
        if not self.is_served:
            raise ConnectionError("connection reset by peer")
        return getattr(self._store, name)


def test_an_error_of_rank_0_is_read_before_its_process_ends():
    """Rank 0 usually serves the store, and its process ends soon after the error."""
    store = ServedStore()

    def body(meeting: Meeting) -> None:
        meeting.meet("h")
        with meeting.shares_errors():
            if meeting.rank == 0:
                raise ValueError("no space")
            time.sleep(0.1 * meeting.rank)
            meeting.exchange("numbers", b"")

    def ends(meeting: Meeting) -> None:
        try:
            body(meeting)
        finally:
            store.is_served = store.is_served and meeting.rank != 0

    results = run(3, ends, store)
    assert isinstance(results[0], ValueError)
    for error in results[1:]:
        assert isinstance(error, RankError)
        assert "Rank 0 (host h) failed" in str(error)
        assert "ValueError: no space" in str(error)
