"""Real trainings, whose updates are captured, in pools with gradient records that are written byte by byte.

``Trained`` makes updates and keeps what each left behind: the tensors, the gradients that were copied, the small state.
``TrainedPool`` writes this into a pool as docs/format.md says; ``GradientLog`` says what is written where.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pools_by_hand as by_hand
import torch
from captured import Captured
from torch import nn
from toys import everything

from lightck._native import ffi, lib
from lightck.pool.commit_log import CommitLog
from lightck.pool.format import layout
from lightck.pool.format.gradients import CHAIN_COMMITTED, HOME_ROW_DTYPE, IN_RECORD, ChainEntry, GradientPart
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
    uuid_words,
)
from lightck.pool.gradient_log import GradientLog, RecordPlan, next_position_in_gradient_pool, records_default
from lightck.restore.gradient_state import page_checksum
from lightck.state import values
from lightck.state.fingerprint import fingerprint
from lightck.state.inventory import Live, ModelView, OptimizerView, entry_of, optimizer_views, unit_of
from lightck.state.update_record import UpdatePacker, gradient_tensors, unrecordable_reason

UUID = bytes(range(16))
BLOCK, MANIFEST = 256, 128 * KIB
PAYLOAD = 4 * KIB + 2 * MANIFEST


@dataclass
class Step:
    """What one update left behind."""

    number: int
    entries: dict[str, Entry]
    tensors: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    """Entry name -> what is stored of a gradient."""
    updated: set[str]
    """Parameters that had a gradient."""
    outside: set[str]
    state: dict[str, Any]
    everything: Any


class Trained:
    """A training, with what each of its updates left behind."""

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self.model, self.optimizers = model, optimizers
        self.training = Captured(model, *optimizers)
        self.packer = UpdatePacker()
        self.steps: list[Step] = []

    def update(self, *inputs: Any, outside: Collection[str] = ()) -> None:
        """Make one update with the sum of the model's output as loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(*inputs).float().sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.take(outside)

    def take(self, outside: Collection[str] = ()) -> None:
        """Keep what the last update left behind. ``outside``: parameters that something else has written since."""
        self.training.gate()
        update = self.training.copies.updates[-1]
        assert unrecordable_reason(update) == ""
        assert update.is_complete
        lives = ModelView(self.model).tensors(None)
        views = optimizer_views(self.optimizers, ModelView(self.model).names_by_id())
        lives += [live for view in views for live in (*view.outside(), *view.state_tensors())]
        entries = {live.name: _entry(live) for live in lives}
        copies = self.training.copies.of
        self.steps.append(
            Step(
                update.step,
                entries,
                {live.name: live.tensor.detach().clone() for live in lives if live.alias is None},
                {name: copies[gradient][n].clone() for name, gradient, n in gradient_tensors(update)},
                {one.name for one in update.gradients()},
                set(outside),
                {**_small_state(views), "update": self.packer.value(update)},
                everything(self.model, *self.optimizers),
            )
        )

    def close(self) -> None:
        self.training.close()


def _entry(live: Live) -> Entry:
    entry = entry_of(live)
    is_of_unit = live.role in layout.HOME_ROLES and live.alias is None
    return entry._replace(place=HOME_PLACE if is_of_unit else layout.SLOT_PLACE, layer=-1)


def _small_state(views: Iterable[OptimizerView]) -> dict[str, Any]:
    state: dict[str, Any] = values.unpack(by_hand.small_state())
    state["fingerprint"] = dict(fingerprint())
    state["optimizers"] = [
        {
            "class": view.class_name,
            "wraps": view.wraps,
            "names": view.names,
            "groups": values.pack(view.groups(), path=""),
            "values": values.pack(view.state_values(), path=""),
            "rest": values.pack(view.other_state(), path=""),
        }
        for view in views
    ]
    return state


@dataclass
class TrainedPool:
    """The bytes of a pool, and what its writer knows."""

    trained: Trained
    n: int = 3
    n_slots: int | None = None
    interval: int = 1
    has_sentinels: bool = True
    whole: Mapping[int, Collection[str]] = field(default_factory=dict)
    """Step -> parameters whose gradient was overwritten, so that their units are written whole."""
    block: int = BLOCK

    def __post_init__(self) -> None:
        self.n_slots = self.n_slots or records_default(self.n, self.interval)
        first = {}
        for step in self.trained.steps:
            for name, entry in step.entries.items():
                first.setdefault(name, entry)
            for name, tensor in step.gradients.items():
                if not name.endswith(("/indices", "/values")):
                    first.setdefault(name, gradient_entry(name, tensor))
        homes, home_end = layout.assign_offsets([one for one in first.values() if one.place == HOME_PLACE], 0)
        slots, end = layout.assign_offsets([one for one in first.values() if one.place != HOME_PLACE], PAYLOAD)
        self.entries = [*homes, *slots]
        self.homes = len(homes)
        self.numbers = {entry.name: number for number, entry in enumerate(self.entries)}
        self.units = list(dict.fromkeys(map(unit_of, homes)))
        self._make(align_up(max(home_end, 1), 2 * MIB), end)
        self.log = GradientLog.new(self.n, self.n_slots, [i % self.n for i in range(len(self.units))], 0)
        self.named: dict[int, ChainEntry] = {}
        self.row_crcs: dict[tuple[int, int], list[int]] = {}
        self.places = [0] * self.n_slots
        self.records: dict[int, CommitRecord] = {}
        self.plans: dict[int, RecordPlan] = {}
        for step in self.trained.steps:
            self._save(step)

    def _make(self, home_nbytes: int, end: int) -> None:
        assert self.n_slots is not None
        slot_nbytes, table = align_up(end + MIB, 2 * MIB), layout.encode(self.entries, has_gradients=True)
        first = 2 * MIB + 2 * home_nbytes
        self.sb = Superblock(
            incompat=INCOMPAT_GRADIENTS,
            uuid=UUID,
            nbytes=first + self.n_slots * slot_nbytes,
            table_offsets=(16 * KIB, MIB),
            table_nbytes=len(table),
            table_hash=layout_hash(table),
            block=self.block,
            manifest_offset=4 * KIB,
            manifest_nbytes=MANIFEST,
            payload_offset=PAYLOAD,
            reserve_offset=end,
            slots=tuple((first + i * slot_nbytes, slot_nbytes) for i in range(self.n_slots)),
            homes=((2 * MIB, home_nbytes), (2 * MIB + home_nbytes, home_nbytes)),
        )
        self.data = bytearray(self.sb.nbytes)
        for at, part in ((0, self.sb.pack()), (4 * KIB, self.sb.pack()), (16 * KIB, table), (MIB, table)):
            self.put(at, part)

    def put(self, at: int, data: bytes) -> None:
        self.data[at : at + len(data)] = data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.data)
        path.chmod(0o600)
        return path

    def crcs(self, number: int, data: bytes, generation: int) -> list[int]:
        return [
            lib.lck_crc32c(ffi.from_buffer(data[at : at + self.block]), len(data[at : at + self.block]))
            ^ lib.lck_block_seed(*uuid_words(UUID), number, generation, at // self.block)
            for at in range(0, len(data), self.block)
        ]

    # -- one step

    def _save(self, step: Step) -> None:
        plan = self.log.next_record(
            step.number, np.array([one in step.updated for one in self.units]), self._outside(step)
        )
        assert plan is not None
        self.plans[step.number] = plan
        self.put(self.sb.slots[plan.slot][0], pack_slot_header(plan.generation, plan.slot, UUID))
        for unit, home in zip(plan.units.tolist(), plan.homes.tolist(), strict=True):
            for number in self._tensors_of(unit, step):
                data = bytes_of(step.tensors[self.entries[number].name])
                self.put(self.sb.homes[home][0] + self.entries[number].offset, data)
                self.row_crcs[number, plan.generation] = self.crcs(number, data, plan.generation)
        self._name(plan, step, self._manifest(plan, step))
        self.log = self.log.with_record(plan)
        if step.number % self.interval == 0:
            self._commit(plan, step)
            self.log = self.log.with_commit(plan)

    def _outside(self, step: Step) -> np.ndarray:
        outside = {*step.outside, *self.whole.get(step.number, ())}
        return np.array([one in outside for one in self.units])

    def _tensors_of(self, unit: int, step: Step) -> list[int]:
        name = self.units[unit]
        of_unit = [n for n in range(self.homes) if unit_of(self.entries[n]) == name]
        return [n for n in of_unit if self.entries[n].name in step.tensors]

    def _manifest(self, plan: RecordPlan, step: Step) -> bytes:
        bases, whole = plan.checkpoint.bases, [self.units[unit] for unit in plan.in_record.tolist()]
        held = {n: t for n, t in step.tensors.items() if step.entries[n].place != HOME_PLACE}
        held |= {n: t for n, t in step.gradients.items() if not _is_gradient_of(n, whole)}
        extras = [gradient_entry(name, tensor) for name, tensor in held.items() if name not in self.numbers]
        in_whole = [n for unit in plan.in_record.tolist() for n in self._tensors_of(unit, step)]
        extras += [self.entries[n]._replace(place=layout.SLOT_PLACE) for n in in_whole]
        held |= {self.entries[n].name: step.tensors[self.entries[n].name] for n in in_whole}
        extras, _ = layout.assign_offsets(extras, self.sb.reserve_offset)
        entries = [*self.entries, *extras]
        records, older = np.zeros(len(entries), HOME_ROW_DTYPE), np.zeros(self.homes, HOME_ROW_DTYPE)
        crcs: list[int] = []
        older_crcs: list[int] = []
        for unit in range(len(self.units)):
            self._rows(unit, plan, bases, step, records, older, crcs, older_crcs)
        for number, entry in enumerate(entries):
            if entry.place == HOME_PLACE or (entry.alias is None and entry.name not in held):
                continue
            if number < len(self.entries) and any(one.name == entry.name for one in extras):
                continue
            data = b"" if entry.alias is not None else bytes_of(held[entry.name])
            self.put(self.sb.slots[plan.slot][0] + entry.offset, data)
            records[number] = (plan.generation, step.number, entry.offset, len(crcs), 0)
            crcs += self.crcs(number, data, plan.generation)
        chain = tuple(self.named[one.generation] for one in plan.chain)
        part = GradientPart(older, np.array(older_crcs, np.uint32), chain, self._sentinels(step))
        return self._packed(plan, step, records, crcs, layout.encode_extras(extras, has_gradients=True), part)

    def _rows(self, unit: int, plan: RecordPlan, bases: Any, step: Step, *out: Any) -> None:
        records, older, crcs, older_crcs = out
        generation, before = int(bases.generation[unit]), int(bases.older_generation[unit])
        home, at = int(bases.home[unit]), int(bases.step[unit])
        for number in range(self.homes):
            entry = self.entries[number]
            if unit_of(entry) != self.units[unit]:
                continue
            if home == IN_RECORD:
                if entry.name in step.tensors:
                    records[number] = (self._generation_of(at + 1, plan), at, entry.offset, 0, home)
                continue
            if (number, generation) in self.row_crcs:
                records[number] = (generation, at, entry.offset, len(crcs), home)
                crcs += self.row_crcs[number, generation]
            if before and (number, before) in self.row_crcs:
                older[number] = (before, bases.older_step[unit], entry.offset, len(older_crcs), 1 - home)
                older_crcs += self.row_crcs[number, before]

    def _generation_of(self, step: int, plan: RecordPlan) -> int:
        return plan.generation if step == plan.step else self.plans[step].generation

    def _sentinels(self, step: Step) -> np.ndarray:
        if not self.has_sentinels:
            return np.zeros(0, np.uint32)
        found = [
            page_checksum(step.tensors[one.name], one, step.number) if one.name in step.tensors else 0
            for one in self.entries[: self.homes]
        ]
        return np.array(found, np.uint32)

    def _packed(
        self, plan: RecordPlan, step: Step, records: np.ndarray, crcs: Sequence[int], extras: bytes, part: GradientPart
    ) -> bytes:
        state, head = values.pack(step.state, path=""), 128 + 32 * len(records)
        extras_at = head + 4 * len(crcs)
        at = extras_at + len(extras)
        header = ManifestHeader(
            plan.generation, 1, step.number, step.number, self.sb.table_hash, UUID, len(records), len(self.entries),
            head, len(crcs), extras_at, len(extras), at, len(state), plan.slot,
        )  # fmt: skip
        body = header.pack() + records.tobytes() + np.array(crcs, "<u4").tobytes() + extras + state
        return body.ljust(align_up(len(body), 8), b"\0") + part.pack()

    def _name(self, plan: RecordPlan, step: Step, manifest: bytes) -> None:
        place = self.places[plan.slot]
        self.places[plan.slot] = 1 - place
        self.put(self.sb.manifest_at(plan.slot, place), manifest)
        assert len(manifest) <= MANIFEST
        hashed = manifest_hash(UUID, manifest)
        flags = CHAIN_COMMITTED if step.number % self.interval == 0 else 0
        self.named[plan.generation] = ChainEntry(
            step.number, plan.generation, hashed, len(manifest), plan.slot, place, flags
        )

    def _commit(self, plan: RecordPlan, step: Step) -> None:
        named = self.named[plan.generation]
        record = CommitRecord(
            plan.generation, 1, step.number, plan.generation, named.manifest_hash, named.manifest_nbytes,
            KIND_CHECKPOINT, plan.slot, named.manifest_index,
        )  # fmt: skip
        position = next_position_in_gradient_pool(
            CommitLog(self.records, ()), 2, self.sb.ring_lines, (step.number - 1) % 16
        )
        self.records[position] = record
        self.put(self.sb.commit_record_offset(position), record.pack(UUID))

    # -- where something lies

    def base_of(self, name: str, step: int) -> tuple[int, int]:
        """Offset and length, in the pool, of the base of a tensor that the checkpoint of a step names."""
        entry, bases = self.entries[self.numbers[name]], self.plans[step].checkpoint.bases
        home = int(bases.home[self.units.index(unit_of(entry))])
        return self.sb.homes[home][0] + entry.offset, entry.nbytes

    def base_step(self, parameter: str, step: int) -> int:
        """The step of the base of a unit that the checkpoint of a step names."""
        return int(self.plans[step].checkpoint.bases.step[self.units.index(parameter)])

    def in_record(self, name: str, step: int) -> int:
        """Offset in the pool of a tensor in the record of a step."""
        return self.sb.slots[self.plans[step].slot][0] + self.entries[self.numbers[name]].offset


def _is_gradient_of(name: str, parameters: Collection[str]) -> bool:
    return name.removeprefix("gradient/").removesuffix("/indices").removesuffix("/values") in parameters


def gradient_entry(name: str, tensor: torch.Tensor) -> Entry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    role = "gradient" if name.startswith("gradient/") else "buffer"
    return by_hand.entry(name, tuple(tensor.shape), role=role, dtype=dtype)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a dense tensor in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
