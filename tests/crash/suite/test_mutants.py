"""Bugs that were planted into what is written: each must be found, or the simulator proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import bugs
import pytest
from crash.cuts import Limits
from crash.oracle import Outcome, Recovered, Refused
from crash.persistence import Adversary, BlockDevice, Model, PersistentCaches, PersistentMemory
from crash.recorded import Workload, record
from crash.recording import Expected, Recorder, Recording, SlotPlace, Tape
from crash.simulator import Effort, Simulator, Transform
from crash.trace import Event, Flush, Mark, Store, Sync
from workloads import media_error, plain

from lightck import _native
from lightck.pool import writer
from lightck.pool.format.structures import CommitRecord
from lightck.pool.reader import PoolReader
from lightck.pool.slots import Slot, Slots
from lightck.pool.storage.file import FileBackend
from lightck.pool.writer import PoolWriter

pytestmark = pytest.mark.long

PM, EADR, ADVERSARY, DISK = PersistentMemory(), PersistentCaches(), Adversary(), BlockDevice()
LIMITS = Limits(budget=512, metadata=8, payload=4, contents=4, prefixes=2, masks=4)
EFFORT = Effort(LIMITS, again_every=1 << 30, violations_max=10)

IN_THE_TRACE: list[tuple[Transform, str, tuple[Model, ...]]] = [
    (bugs.no_fence_before_the_record, "two slots", (PM, EADR, ADVERSARY, DISK)),
    (bugs.no_flush_of_the_manifest, "two slots", (PM, ADVERSARY)),
    (bugs.no_flush_of_the_payload, "two slots", (PM, ADVERSARY)),
    (bugs.record_never_waited_for, "two slots", (PM, EADR, ADVERSARY)),
    (bugs.no_sync_after_the_record, "two slots", (DISK,)),
    (bugs.no_fence_at_all, "two slots", (PM, EADR, ADVERSARY, DISK)),
    (bugs.record_in_one_piece, "two slots", (PM, EADR, ADVERSARY, DISK)),
    (bugs.no_header, "two slots", (PM, EADR, ADVERSARY)),
    (bugs.header_not_fenced, "two slots", (PM, EADR, ADVERSARY)),
    (bugs.header_written_once, "two slots", (PM, EADR, ADVERSARY)),  # on a disk the blocks' checksums tell
    (bugs.payload_not_fenced, "background", (PM, EADR, ADVERSARY)),
    (bugs.payload_not_fenced, "layered", (PM,)),
    (bugs.no_flush_of_the_payload, "by a device, direct", (PM, ADVERSARY)),
    (bugs.payload_not_fenced, "by a device, direct", (PM, ADVERSARY)),  # no streamed stores: caches that persist do
    (bugs.no_header, "by a device, direct", (PM, EADR, ADVERSARY)),
    (bugs.no_header, "layered", (PM,)),
    (bugs.payload_after_the_record, "two slots", (PM, EADR, ADVERSARY, DISK)),
    (bugs.adoption_not_durable, "going back", (PM, DISK)),
    (bugs.no_adoption_record, "going back", (PM, EADR, ADVERSARY, DISK)),
    (bugs.published_before_durable, "two slots", (PM, EADR, ADVERSARY, DISK)),
    (bugs.tables_not_flushed, "two slots", (PM, ADVERSARY)),
    (bugs.acknowledged_at_once, "two slots", (PM, EADR, ADVERSARY, DISK)),
]
CASES = [(bug, name, model) for bug, name, models in IN_THE_TRACE for model in models]


@pytest.mark.parametrize(("bug", "workload", "model"), CASES, ids=[f"{b.__name__}-{w}-{m.name}" for b, w, m in CASES])
def test_a_bug_in_the_trace_is_found(
    bug: Transform, workload: str, model: Model, recorded: Callable[[str], tuple[Recording, Path]], folder: Path
) -> None:
    report = Simulator(recorded(workload)[0], str(folder), effort=EFFORT).check(model, bug)
    print(report)
    assert report.violations, str(report)


# -- in the code -----------------------------------------------------------------------------------------------------


def slot_reused_too_early() -> AbstractContextManager[object]:
    def protected_too(slots: Slots, held: frozenset[int]) -> Slot | None:
        free = [s for s in slots.slots if not s.is_bad and not s.in_flight]
        return free[0] if free else None

    return patch.object(Slots, "choose", protected_too)


def manifest_updated_in_place() -> AbstractContextManager[object]:
    """The checkpoint keeps its slot, and its manifest overwrites the previous one."""

    def same(slots: Slots, held: frozenset[int]) -> Slot | None:
        slot = slots.slots[0]
        slot.manifest_index = 0
        return None if slot.in_flight else slot

    return patch.object(Slots, "choose", same)


def record_overwritten_in_place() -> AbstractContextManager[object]:
    return patch.object(writer, "next_position", lambda *args: 0)


@contextmanager
def damaged_slot_protected() -> Iterator[None]:
    """Keeps the slot of the newest commit record, instead of that of the checkpoint that the training resumes from."""
    adopt = PoolWriter.adopt

    def wrong(pool: PoolWriter, line: CommitRecord) -> None:
        newest = max(pool.commit_log.records.values(), key=lambda known: known.generation)
        adopt(pool, line)
        pool.slots.protected = newest.slot
        pool.slots.dead = (0, 0)

    with patch.object(PoolWriter, "adopt", wrong):
        yield


@pytest.mark.parametrize(
    ("bug", "workload"),
    [
        (slot_reused_too_early, plain(2, 2)),
        (manifest_updated_in_place, plain(2, 2)),
        (record_overwritten_in_place, plain(2, 3)),
        (damaged_slot_protected, media_error(2)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bug_in_the_writer_is_found(
    bug: Callable[[], AbstractContextManager[object]], workload: Workload, folder: Path
) -> None:
    with bug():
        recording = record(Workload(lambda recorder: _as_far_as_it_goes(workload, recorder)), folder / "run.pool")
    simulator = Simulator(recording, str(folder), effort=EFFORT)
    for model in (PM, EADR, ADVERSARY, DISK):
        report = simulator.check(model)
        print(report)
        assert report.violations, str(report)


def _as_far_as_it_goes(workload: Workload, recorder: Recorder) -> None:
    """A bug may show at the end of the training itself: what was written up to there counts."""
    with suppress(AssertionError):
        workload.run(recorder)


# -- another protocol ------------------------------------------------------------------------------------------------

COMMIT, PAYLOADS = 0, (4096, 8192)


def commits(pack: Callable[[int, int], bytes]) -> Recording:
    """Three checkpoints in two slots, each committed by storing what ``pack(generation, slot)`` gives in one place."""
    events: list[Event] = []
    for generation in (1, 2, 3):
        at, data = PAYLOADS[generation % 2], bytes([generation]) * 64
        word = pack(generation, generation % 2)
        events += [Mark(0, _native.lib.LCK_MARK_BEGIN, generation), Store(0, at, data), Flush(0, at, 64), Sync(0)]
        events += [Store(0, COMMIT, word), Flush(0, COMMIT, 16), Sync(0), Mark(0, _native.lib.LCK_MARK_ACK, generation)]
    expected = {generation: Expected(generation, bytes([generation]) * 64) for generation in (1, 2, 3)}
    nowhere = (SlotPlace(1 << 40, 1 << 40, 1 << 40),)
    tape = Tape(1 << 20, ((0, 1 << 20),), {}, True, tuple(events), nowhere, expected, {1: 1, 2: 2, 3: 3})
    return (tape,)


def recovery_of(unpack: Callable[[bytes], tuple[int, int]]) -> Callable[[str], Outcome]:
    def recover(path: str) -> Outcome:
        container = FileBackend().open(path, write=False)
        try:
            reader = object.__new__(PoolReader)  # nothing in this file is a pool's but where it is read
            reader.container = container
            generation, slot = unpack(reader.read(COMMIT, 16))
            if not generation:
                return Refused("NoCheckpointError", "", True)
            payload = reader.read(PAYLOADS[slot], 64)
            return Recovered(generation, generation, payload)
        finally:
            container.close()

    return recover


@pytest.mark.parametrize("model", [PM, EADR, ADVERSARY, DISK], ids=lambda model: str(model.name))
def test_a_commit_of_16_bytes_without_a_checksum_is_found_and_one_of_8_is_sound(model: Model, folder: Path) -> None:
    def unpack(data: bytes) -> tuple[int, int]:
        return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")

    def unpack_word(data: bytes) -> tuple[int, int]:
        word = int.from_bytes(data[:8], "little")
        return word >> 1, word & 1

    two = commits(lambda generation, slot: generation.to_bytes(8, "little") + slot.to_bytes(8, "little"))
    report = Simulator(two, str(folder), recover=recovery_of(unpack), effort=EFFORT).check(model)
    assert any("other values" in violation.reason for violation in report.violations), str(report)
    one = commits(lambda generation, slot: (generation << 1 | slot).to_bytes(8, "little"))
    report = Simulator(one, str(folder), recover=recovery_of(unpack_word), effort=EFFORT).check(model)
    assert not report.violations, str(report)
