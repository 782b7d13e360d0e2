"""The persistence models themselves: what may be lost after a few events."""

from __future__ import annotations

from crash.fates import Fate
from crash.persistence import (
    BULK_NBYTES,
    Adversary,
    BlockDevice,
    Model,
    PersistentCaches,
    PersistentMemory,
)
from crash.trace import Event, Fence, Flush, Store, Sync

PM, EADR, ADVERSARY, DISK = PersistentMemory(), PersistentCaches(), Adversary(), BlockDevice()
LINE = bytes(range(1, 65))
A, B, Z = b"a" * 8, b"b" * 8, bytes(8)


def after(model: Model, *events: Event) -> list[Fate]:
    """What may be lost after these events, on a medium of zeros."""
    medium = bytearray(1 << 17)
    tracker = model.tracker(lambda offset, nbytes: bytes(medium[offset : offset + nbytes]))
    for event in events:
        tracker.feed(event)
        if isinstance(event, Store):
            medium[event.offset : event.offset + len(event.data)] = event.data
    return tracker.fates()


def lines(fates: list[Fate]) -> set[int]:
    return {at // 64 for fate in fates for at in fate.offsets}


def test_a_store_is_durable_after_flush_and_fence_of_its_own_thread() -> None:
    store, flush, fence = Store(0, 64, LINE), Flush(0, 64, 64), Fence(0)
    for model in (PM, ADVERSARY):
        assert not after(model, store, flush, fence)
        assert after(model, store, fence)
        assert after(model, store, flush)
        assert after(model, store, fence, flush)
        assert after(model, store, flush, Fence(1))
        assert after(model, store, Flush(1, 64, 64), Fence(1))
        assert not after(model, store, flush, Sync(0))


def test_whole_lines_that_were_streamed_need_a_fence_only() -> None:
    for model in (PM, ADVERSARY):
        assert not after(model, Store(0, 64, LINE * 2, streamed=True), Fence(0))
        assert lines(after(model, Store(0, 64, LINE + LINE[:16], streamed=True), Fence(0))) == {2}


def test_stores_to_a_line_arrive_in_program_order() -> None:
    (fate,) = after(PM, Store(0, 8, B), Store(0, 0, A))
    assert fate.offsets == (0, 8)
    assert fate.contents() == [(Z, Z), (Z, B), (A, B)]


def test_words_of_one_store_arrive_in_any_order() -> None:
    (fate,) = after(PM, Store(0, 0, A + B))
    assert set(fate.contents()) == {(Z, Z), (A, Z), (Z, B), (A, B)}
    (fate,) = after(PM, Store(0, 0, LINE))
    assert len(fate.contents()) == fate.count() == 256


def test_words_that_were_streamed_arrive_in_any_order() -> None:
    first, second = after(PM, Store(0, 0, LINE * 2, streamed=True))
    assert first.offsets == tuple(range(0, 64, 8))
    assert second.offsets == tuple(range(64, 128, 8))
    assert len(set(first.contents())) == first.count() == 256


def test_a_word_is_never_torn_and_one_that_does_not_change_has_no_fate() -> None:
    (fate,) = after(PM, Store(0, 0, A))
    assert fate.contents() == [(Z,), (A,)]
    assert not after(PM, Store(0, 0, Z * 8))
    (fate,) = after(PM, Store(0, 3, b"x"))
    assert fate.contents() == [(Z,), (b"\0\0\0x\0\0\0\0",)]


def test_a_flush_covers_only_what_was_stored_before_it() -> None:
    (fate,) = after(PM, Store(0, 0, A), Flush(0, 0, 8), Store(0, 8, B), Fence(0))
    assert fate.offsets == (8,)
    assert fate.contents() == [(Z,), (B,)]


def test_an_adversary_keeps_no_order_in_a_line() -> None:
    (fate,) = after(ADVERSARY, Store(0, 8, B), Store(0, 0, A), Store(0, 0, B))
    assert set(fate.contents()) == {(x, y) for x in (Z, A, B) for y in (Z, B)}
    assert (fate.lost, fate.newest) == ((Z, Z), (B, B))


def test_persistent_caches_keep_the_order_of_all_ordinary_stores() -> None:
    (fate,) = after(EADR, Store(0, 640, A), Store(1, 0, B))
    assert fate.offsets == (0, 640)
    assert fate.contents() == [(Z, Z), (Z, A), (B, A)]
    assert not after(EADR, Store(0, 0, A), Fence(0))
    assert after(EADR, Store(0, 0, A), Fence(1))
    assert not after(EADR, Store(0, 0, A), Store(1, 64, A), Fence(1)), "with the second the first is durable"


def test_what_was_streamed_waits_for_a_fence_in_persistent_caches_too() -> None:
    stream = Store(0, 0, LINE, streamed=True)
    word, line = after(EADR, stream, Store(0, 640, A))
    assert (word.offsets, lines([line])) == ((640,), {0})
    assert line.count() == 256
    assert not after(EADR, stream, Fence(0))
    assert after(EADR, stream, Flush(0, 0, 64), Fence(1))


def test_no_word_has_two_fates() -> None:
    for model in (PM, EADR, ADVERSARY, DISK):
        for stores in ((LINE, True), (A, False)), ((A, False), (LINE, True)), ((A, False), (B, False)):
            fates = after(model, *(Store(0, 0, data, streamed) for data, streamed in stores))
            offsets = [at for fate in fates for at in fate.offsets]
            assert offsets
            assert len(offsets) == len(set(offsets))


def test_on_a_disk_only_a_sync_makes_durable_and_it_does_so_for_all_threads() -> None:
    stores = (Store(0, 0, LINE), Store(1, 512, LINE))
    assert lines(after(DISK, *stores, Flush(0, 0, 64), Fence(0))) == {0, 8}
    assert not after(DISK, *stores, Fence(0), Sync(0))


def test_a_store_of_another_thread_during_a_sync_is_not_counted() -> None:
    assert lines(after(DISK, Store(0, 0, LINE), Store(1, 512, LINE), Sync(0))) == {8}


def test_sectors_of_a_disk_arrive_each_by_itself_and_stores_to_one_in_order() -> None:
    first, second = after(DISK, Store(0, 504, A + B), Store(0, 0, B))
    assert first.contents() == [(Z, Z), (Z, A), (B, A)]
    assert second.contents() == [(Z,), (B,)]


def test_of_a_large_tensor_not_every_word_has_a_fate_of_its_own() -> None:
    for model in (PM, EADR, ADVERSARY, DISK):
        fates = after(model, Store(0, 0, LINE * (BULK_NBYTES // 64 + 8), streamed=True))
        assert sum(len(fate.newest[0]) for fate in fates if fate.count() > 1 << 20) == BULK_NBYTES + 512
        assert fates[0].contents()[0] == fates[0].lost == (bytes(BULK_NBYTES),)
        assert fates[0].contents()[-1] == fates[0].newest == (LINE * (BULK_NBYTES // 64),)
        assert len(fates[0].contents()) == 4


def test_of_a_store_with_many_words_some_torn_contents_are_built() -> None:
    (fate,) = after(DISK, Store(0, 0, LINE * 8))
    assert len(fate.contents()) == 6
