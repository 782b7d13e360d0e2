"""Pools with gradient records, written byte by byte from docs/format.md; ``GradientLog`` says what is written where.

Two units: ``a`` has a weight and optimizer state, ``b`` has a weight alone. An update adds the gradient to the weight,
and three times the gradient to the optimizer state, modulo 256, so that a test can make the updates again.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import format_reference as reference
import numpy as np
import pools_by_hand as by_hand

from lightck.pool.commit_log import CommitLog
from lightck.pool.format import layout
from lightck.pool.format.gradients import CHAIN_COMMITTED, HOME_ROW_DTYPE, ChainEntry, GradientPart
from lightck.pool.format.layout import HOME_PLACE, Entry
from lightck.pool.format.structures import (
    INCOMPAT_GRADIENTS,
    KIB,
    KIND_CHECKPOINT,
    MIB,
    CommitRecord,
    ManifestHeader,
    Superblock,
    align_up,
    layout_hash,
    manifest_hash,
    pack_slot_header,
)
from lightck.pool.gradient_log import GradientLog, RecordPlan, next_position_in_gradient_pool

UUID = bytes(range(16))
BLOCK, MANIFEST, PAYLOAD, RESERVE = 256, 8 * KIB, 20 * KIB, 64 * KIB
UNITS = {"a": 700, "b": 90}
FACTORS = {"model/a": 1, "optimizer/a/exp_avg": 3, "model/b": 1}
"""Tensor -> what the gradient is multiplied with when it is added."""


def entries() -> list[Entry]:
    plain = {"dtype": "uint8"}
    homes, _ = layout.assign_offsets(
        [
            by_hand.entry("model/a", (700,), place=HOME_PLACE, **plain),
            by_hand.entry("optimizer/a/exp_avg", (700,), place=HOME_PLACE, role="optimizer", **plain),
            by_hand.entry("model/b", (90,), place=HOME_PLACE, **plain),
        ],
        0,
    )
    slots, _ = layout.assign_offsets(
        [
            by_hand.entry("model/mean", (5,), role="buffer", **plain),
            *(by_hand.entry(f"gradient/model/{unit}", (n,), role="gradient", **plain) for unit, n in UNITS.items()),
            by_hand.entry("model/whole", (300,), **plain),
            by_hand.entry("optimizer/whole/exp_avg", (300,), role="optimizer", **plain),
        ],
        PAYLOAD,
    )
    return [*homes, *slots]


@dataclass
class HandPool:
    """A training of two units with homes, and of one that is whole in each record, and the bytes of its pool."""

    n: int = 3
    n_slots: int = 5
    entries: list[Entry] = field(default_factory=entries)
    step: int = -1
    states: dict[str, np.ndarray] = field(default_factory=dict)
    history: list[dict[str, np.ndarray]] = field(default_factory=list)
    """The states of each step."""

    def __post_init__(self) -> None:
        table = layout.encode(self.entries, has_gradients=True)
        self.sb = Superblock(
            incompat=INCOMPAT_GRADIENTS,
            uuid=UUID,
            nbytes=(3 + self.n_slots) * 2 * MIB,
            table_offsets=(16 * KIB, 32 * KIB),
            table_nbytes=len(table),
            table_hash=layout_hash(table),
            block=BLOCK,
            manifest_offset=4 * KIB,
            manifest_nbytes=MANIFEST,
            payload_offset=PAYLOAD,
            reserve_offset=RESERVE,
            slots=tuple(((3 + i) * 2 * MIB, 2 * MIB) for i in range(self.n_slots)),
            homes=((2 * MIB, 2 * MIB), (4 * MIB, 2 * MIB)),
        )
        self.data = bytearray(self.sb.nbytes)
        for at, part in ((0, self.sb.pack()), (4 * KIB, self.sb.pack()), (16 * KIB, table), (32 * KIB, table)):
            self.put(at, part)
        self.log = GradientLog.new(self.n, self.n_slots, [0, 1], -1)
        self.rng = np.random.default_rng(1)
        for name in FACTORS:
            self.states[name] = self.random(UNITS[name.split("/")[1]])
        self.named: dict[int, ChainEntry] = {}
        self.rows = np.zeros(3, HOME_ROW_DTYPE)
        self.row_crcs: dict[tuple[int, int], list[int]] = {}
        """(number of the entry, generation) -> the checksums of that base."""
        self.places = [0] * self.n_slots
        self.records: dict[int, CommitRecord] = {}

    def random(self, n: int) -> np.ndarray:
        return self.rng.integers(0, 256, n).astype(np.uint8)

    def put(self, at: int, data: bytes) -> None:
        self.data[at : at + len(data)] = data

    def crcs(self, number: int, data: bytes, generation: int) -> list[int]:
        return [
            reference.crc32c(data[at : at + BLOCK]) ^ reference.seed(UUID, number, generation, at // BLOCK)
            for at in range(0, len(data), BLOCK)
        ]

    # -- one step

    def train(self, n_steps: int, *, asleep: Sequence[str] = ()) -> None:
        for _ in range(n_steps):
            self.save([unit for unit in UNITS if unit not in asleep])

    def save(self, updated: Sequence[str]) -> None:
        """Update these units, and commit a checkpoint."""
        self.step += 1
        gradients = {unit: self.random(UNITS[unit]) for unit in updated}
        for name, factor in FACTORS.items():
            unit = name.split("/")[1]
            if unit in gradients:
                self.states[name] = self.states[name] + factor * gradients[unit]
        self.history.append(dict(self.states))
        plan = self.log.next_record(self.step + 1, np.array([unit in gradients for unit in UNITS]))
        assert plan is not None
        self.put(self.sb.slots[plan.slot][0], pack_slot_header(plan.generation, plan.slot, UUID))
        self._write_homes(plan)
        self._commit(plan, self._manifest(plan, self._write_record(plan, gradients)))
        self.log = self.log.with_record(plan).with_commit(plan)

    def _tensors_of(self, unit: int) -> list[int]:
        return [number for number, name in enumerate(FACTORS) if name.split("/")[1] == list(UNITS)[unit]]

    def _write_homes(self, plan: RecordPlan) -> None:
        for unit, home in zip(plan.units.tolist(), plan.homes.tolist(), strict=True):
            for number in self._tensors_of(unit):
                entry, data = self.entries[number], self.states[self.entries[number].name].tobytes()
                self.put(self.sb.homes[home][0] + entry.offset, data)
                self.row_crcs[number, plan.generation] = self.crcs(number, data, plan.generation)

    def _write_record(self, plan: RecordPlan, gradients: dict[str, np.ndarray]) -> dict[int, bytes]:
        present = {3: bytes([self.step % 256] * 5)}
        present |= {4 + list(UNITS).index(unit): one.tobytes() for unit, one in gradients.items()}
        present |= {number: whole_at(self.step, number).tobytes() for number in (6, 7)}
        for number, data in present.items():
            self.put(self.sb.slots[plan.slot][0] + self.entries[number].offset, data)
        return present

    # -- manifest and commit record

    def _manifest(self, plan: RecordPlan, present: dict[int, bytes]) -> bytes:
        bases = plan.checkpoint.bases
        records, older = np.zeros(len(self.entries), HOME_ROW_DTYPE), np.zeros(3, HOME_ROW_DTYPE)
        crcs: list[int] = []
        older_crcs: list[int] = []
        for unit in range(len(UNITS)):
            for number in self._tensors_of(unit):
                offset, home = self.entries[number].offset, int(bases.home[unit])
                generation, before = int(bases.generation[unit]), int(bases.older_generation[unit])
                records[number] = (generation, bases.step[unit], offset, len(crcs), home)
                crcs += self.row_crcs[number, generation]
                if before:
                    older[number] = (before, bases.older_step[unit], offset, len(older_crcs), 1 - home)
                    older_crcs += self.row_crcs[number, before]
        for number, data in present.items():
            records[number] = (plan.generation, self.step, self.entries[number].offset, len(crcs), 0)
            crcs += self.crcs(number, data, plan.generation)
        sentinels = [reference.crc32c(self._page(number)) for number in range(3)]
        chain = tuple(self.named[one.generation] for one in plan.chain)
        part = GradientPart(older, np.array(older_crcs, np.uint32), chain, np.array(sentinels, np.uint32))
        head = 128 + 32 * len(records)
        state, at = by_hand.NO_STATE, head + 4 * len(crcs)
        header = ManifestHeader(
            plan.generation, 1, self.step, self.step, self.sb.table_hash, UUID, len(records), len(records), head,
            len(crcs), at, 0, at, len(state), plan.slot,
        )  # fmt: skip
        body = header.pack() + records.tobytes() + struct.pack(f"<{len(crcs)}I", *crcs) + state
        return body.ljust(align_up(len(body), 8), b"\0") + part.pack()

    def _page(self, number: int) -> bytes:
        data = self.states[self.entries[number].name].tobytes()
        page = self.step % -(-len(data) // 4096)
        return data[4096 * page : 4096 * page + 4096]

    def _commit(self, plan: RecordPlan, manifest: bytes) -> None:
        place = self.places[plan.slot]
        self.places[plan.slot] = 1 - place
        self.put(self.sb.manifest_at(plan.slot, place), manifest)
        named = ChainEntry(
            self.step, plan.generation, manifest_hash(UUID, manifest), len(manifest), plan.slot, place, CHAIN_COMMITTED
        )
        self.named[plan.generation] = named
        record = CommitRecord(
            plan.generation, 1, self.step, plan.generation, named.manifest_hash, len(manifest), KIND_CHECKPOINT,
            plan.slot, place,
        )  # fmt: skip
        position = next_position_in_gradient_pool(
            CommitLog(self.records, ()), 2, self.sb.ring_lines, (self.step - 1) % 16
        )
        self.records[position] = record
        self.put(self.sb.commit_record_offset(position), record.pack(UUID))


def whole_at(step: int, number: int) -> np.ndarray:
    """The bytes that entry 6 or 7 has at the end of a step."""
    return np.full(300, 7 * step + number, np.uint8)


def sentinels_of(entries: Sequence[Entry], states: Mapping[str, np.ndarray], step: int) -> np.ndarray:
    """The sentinels of a state: for each entry in a home the checksum of one page."""
    found = []
    for one in entries:
        if one.place == HOME_PLACE:
            data = states[one.name].tobytes()
            page = step % max(1, -(-len(data) // 4096))
            found.append(reference.crc32c(data[4096 * page : 4096 * page + 4096]))
    return np.array(found, np.uint32)
