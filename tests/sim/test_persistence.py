"""The persistence models themselves: what may be lost after a few events."""

from __future__ import annotations

from lightck.testing.persistence import BlockDevice, Model, PersistentMemory, Tracker
from lightck.testing.trace import Event, Fence, Flush, Store, Sync

PM, DISK = PersistentMemory(), BlockDevice()
LINE = bytes(range(64))


def after(model: Model, *events: Event) -> Tracker:
    tracker = model.tracker(lambda offset, nbytes: bytes(nbytes))
    for event in events:
        tracker.feed(event)
    return tracker


def test_a_store_is_durable_after_flush_and_fence_of_its_own_thread() -> None:
    store, flush, fence = Store(0, 64, LINE), Flush(0, 64, 64), Fence(0)
    assert not after(PM, store, flush, fence).pending
    assert after(PM, store, fence).pending
    assert after(PM, store, flush).pending
    assert after(PM, store, fence, flush).pending
    assert after(PM, store, flush, Fence(1)).pending
    assert after(PM, store, Flush(1, 64, 64), Fence(1)).pending
    assert not after(PM, store, flush, Sync(0)).pending


def test_whole_lines_that_were_streamed_need_a_fence_only() -> None:
    assert not after(PM, Store(0, 64, LINE * 2, streamed=True), Fence(0)).pending
    assert list(after(PM, Store(0, 64, LINE + LINE[:10], streamed=True), Fence(0)).pending) == [2]


def test_stores_to_a_line_arrive_in_program_order() -> None:
    tracker = after(PM, Store(0, 8, b"b" * 8), Store(0, 0, b"a" * 8))
    assert tracker.pending[0].contents() == [
        bytes(64),
        bytes(8) + b"b" * 8 + bytes(48),
        b"a" * 8 + b"b" * 8 + bytes(48),
    ]


def test_a_flush_covers_only_what_was_stored_before_it() -> None:
    tracker = after(PM, Store(0, 0, b"a" * 8), Flush(0, 0, 8), Store(0, 8, b"b" * 8), Fence(0))
    assert tracker.pending[0].contents() == [b"a" * 8 + bytes(56), b"a" * 8 + b"b" * 8 + bytes(48)]


def test_a_larger_store_may_be_torn_and_a_word_may_not() -> None:
    assert after(PM, Store(0, 0, LINE)).pending[0].contents() == [bytes(64), LINE[:32] + bytes(32), LINE]
    assert after(PM, Store(0, 0, LINE[:8])).pending[0].contents() == [bytes(64), LINE[:8] + bytes(56)]


def test_on_a_disk_only_a_sync_makes_durable_and_it_does_so_for_all_threads() -> None:
    stores = (Store(0, 0, LINE), Store(1, 512, LINE))
    assert set(after(DISK, *stores, Flush(0, 0, 64), Fence(0)).pending) == {0, 1}
    assert not after(DISK, *stores, Fence(0), Sync(0)).pending


def test_a_store_of_another_thread_during_a_sync_is_not_counted() -> None:
    assert set(after(DISK, Store(0, 0, LINE), Store(1, 512, LINE), Sync(0)).pending) == {1}
