"""The checkpoints of a pool with gradient records, newest first, each given to a restore as if it were stored whole.

A ``ReplayedCheckpoint`` has the members of ``StoredCheckpoint`` that a restore uses. Its units are replayed when its
tensors are first asked for (``gradient_state.py``). Buffers, and what else its record holds, are read from the record.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

from lightck.pool.commit_log import candidates
from lightck.pool.format import layout
from lightck.pool.format.gradients import CHAIN_COMMITTED, ChainEntry
from lightck.pool.format.layout import GRADIENT_ROLE, HOME_PLACE, Entry
from lightck.pool.format.structures import KIND_CHECKPOINT, CommitRecord, DamagedError, ManifestHeader
from lightck.pool.gradient_reader import GradientCheckpoint, chain_entry_of, checkpoint_of, find_damaged_bases
from lightck.pool.reader import PoolReader, RejectedCheckpoint
from lightck.restore.contents import MemorySource, load_tensor
from lightck.restore.gradient_state import UnitsAtStep, refuse_unreadable, units_at_step
from lightck.restore.optimizers_at_hand import OptimizersAtHand
from lightck.state.blocks import checksums


class ReplayedCheckpoint:
    """One checkpoint of a pool with gradient records. Its manifest is checked. Its tensors are replayed when they
    are first asked for, which may raise as ``units_at_step`` does."""

    def __init__(self, checkpoint: GradientCheckpoint, record: CommitRecord, optimizers: OptimizersAtHand) -> None:
        """``record``: names the checkpoint. ``optimizers``: replay its updates."""
        self._checkpoint, self.record, self.optimizers = checkpoint, record, optimizers
        self.reader = checkpoint.reader
        homes = {entry.name for entry in checkpoint.reader.entries if entry.place == HOME_PLACE}
        self._recorded = {
            name: one
            for name, one in checkpoint.in_record.items()
            if one.entry.role != GRADIENT_ROLE and name not in homes
        }
        """Name -> tensor that the record holds, and that has no home."""

    @property
    def header(self) -> ManifestHeader:
        return self._checkpoint.header

    @property
    def step(self) -> int:
        return self._checkpoint.step

    @property
    def iteration(self) -> int:
        return self._checkpoint.header.iteration

    @property
    def state(self) -> bytes:
        return self._checkpoint.state

    @property
    def path(self) -> str:
        return self._checkpoint.reader.path

    @property
    def uuid(self) -> bytes:
        return self._checkpoint.reader.superblock.uuid

    @cached_property
    def _units(self) -> UnitsAtStep:
        return units_at_step(self._checkpoint, self.optimizers)

    @cached_property
    def _source(self) -> MemorySource:
        return MemorySource(self._units.entries, self._units.tensors)

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Name -> entry, in the order of the layout table. Which state the optimizers have is known only when the
        updates were replayed."""
        found = {**self._units.entries, **{name: one.entry for name, one in self._recorded.items()}}
        layout.check_ties(found)
        in_table = [one.name for one in self._checkpoint.reader.entries if one.name in found]
        return {name: found[name] for name in dict.fromkeys((*in_table, *found))}

    @property
    def gradient_checkpoint(self) -> GradientCheckpoint:
        """The checkpoint as it lies in the pool, before an update is replayed."""
        return self._checkpoint

    @cached_property
    def not_exact(self) -> str:
        """Why a training that continues from this checkpoint may not be bit-identical to the training that saved it:
        updates were replayed by another torch or processor, or residuals of ``TopK`` are older than the checkpoint.
        Empty if it is bit-identical. Needs a replay, as ``entries`` does."""
        return "; ".join(filter(None, (self._other_conditions, self._older_residuals)))

    @property
    def _other_conditions(self) -> str:
        conditions = self._units.other_conditions
        if not conditions:
            return ""
        return (
            f"updates were replayed under other conditions than in the training ({conditions}), and may have given "
            "other bits. The pages that were compared are equal"
        )

    @property
    def _older_residuals(self) -> str:
        older = self._units.older_residuals
        if not older:
            return ""
        norm = sum(float(self._units.tensors[name].double().norm()) ** 2 for name in older) ** 0.5
        steps, n_zero = {step for step in older.values() if step is not None}, list(older.values()).count(None)
        of_steps = f"steps {min(steps)} to {max(steps)}" if len(steps) > 1 else f"step {max(steps, default=0)}"
        zeros = f" ({n_zero} not saved yet, and zero)" if n_zero else ""
        n_parameters = "1 parameter" if len(older) == 1 else f"{len(older)} parameters"
        return (
            f"the residuals (error feedback of TopK) of {n_parameters}{zeros} are of {of_steps}, and the "
            f"checkpoint is of step {self.step}; their norm is {norm:.6g}. What was left out of gradients since then "
            "is lost"
        )

    @cached_property
    def listed_entries(self) -> Mapping[str, Entry]:
        """Name -> entry of the tensors that the manifest names. Needs no replay. Raises
        ``DamagedError``."""
        checkpoint, sentinels = self._checkpoint, self._checkpoint.part.sentinels.tolist()
        homes = [entry for entry in checkpoint.reader.entries if entry.place == HOME_PLACE]
        in_homes = {
            entry.name: entry
            for number, entry in enumerate(homes)
            # Optimizer state that is created after the base of its unit has a sentinel and no base.
            if checkpoint.rows[number]["generation"] or (sentinels and sentinels[number])
        }
        found = {**in_homes, **{name: one.entry for name, one in self._recorded.items()}}
        layout.check_ties(found)
        return found

    def refuse_unreadable(self) -> None:
        """Read and verify everything that the replay needs, without a replay. Raises ``DamagedError`` if something is
        damaged and nothing stands in for it."""
        refuse_unreadable(self._checkpoint)
        self._checkpoint.read([(one, 0) for one in self._recorded.values()])  # address 0: only verified

    def replay(self) -> None:
        """Replay the updates, and compare the result with the checksums of the records. Nothing of it is kept.
        Raises as ``units_at_step`` does."""
        units_at_step(self._checkpoint, self.optimizers)
        self._checkpoint.read([(one, 0) for one in self._recorded.values()])  # address 0: only verified

    def read_into(self, name: str, address: int) -> None:
        """As ``StoredCheckpoint.read_into``."""
        self.read_many([(name, address)])

    def read_many(self, places: Sequence[tuple[str, int]]) -> None:
        """As ``StoredCheckpoint.read_many``."""
        self._source.read_many([(name, address) for name, address in places if name not in self._recorded])
        recorded = [(self._recorded[name], address) for name, address in places if name in self._recorded]
        self._checkpoint.read(recorded)

    @property
    def block_nbytes(self) -> int:
        """As ``StoredCheckpoint.block_nbytes``."""
        return self.reader.superblock.block

    def read_blocks(self, places: Sequence[tuple[str, int, int, int]]) -> None:
        """As ``StoredCheckpoint.read_blocks``. (The tensors are in memory already, apart from those that the record
        holds, which are read whole for each of these places.)"""
        for name, first, nbytes, address in places:
            tensor = load_tensor(self, name)
            if address:
                ctypes.memmove(address, tensor.data_ptr() + first * self.block_nbytes, nbytes)

    def verify(self) -> None:
        """As ``StoredCheckpoint.verify``. No update is replayed."""
        self.refuse_unreadable()
        if not self.owns_slot():
            raise DamagedError("its slot was reused while it was read")

    def raw_checksums(self, name: str) -> list[int]:
        """As ``StoredCheckpoint.raw_checksums``; computed from the tensor."""
        found: list[int] = checksums(load_tensor(self, name), self.reader.superblock.block).tolist()
        return found

    def find_damaged_bases(self) -> None:
        """Let the reader know which bases are damaged, before a training continues from this checkpoint."""
        find_damaged_bases(self._checkpoint)

    def hold(self) -> AbstractContextManager[None]:
        """Do nothing: what this checkpoint needs lies in many places, which the training reuses in turn."""
        return nullcontext()

    def owns_slot(self) -> bool:
        """Whether the record was not overwritten. (What lies in other places was verified when it was read.)"""
        return (self._checkpoint.reader.slot_generation(self.record.slot) or 0) <= self.record.payload_generation


def replayed_checkpoints(
    reader: PoolReader, optimizers: OptimizersAtHand, step: int | None = None
) -> Iterator[ReplayedCheckpoint | RejectedCheckpoint]:
    """Yield the checkpoints of a pool with gradient records, from newest to oldest: those that a commit record names,
    and those that only the chain of a newer one names as committed. (A record that was never committed is no
    checkpoint: it holds what its update consumed, and no more.) ``step``: yield only the checkpoints of this step. A
    checkpoint whose manifest fails a check is yielded as a ``RejectedCheckpoint``."""
    committed = candidates(reader.commit_log())
    if step is not None:  # also those that an adoption has left behind
        committed += [one for one in candidates(reader.commit_log(), step) if one not in committed]
    known = {(one.slot, one.payload_generation) for one in committed}
    in_chains: dict[int, ChainEntry] = {}
    """Generation -> entry, for what chains name and no commit record does."""
    for record, older in zip(committed, [*committed[1:], None], strict=False):  # ``committed`` may be empty
        try:
            checkpoint = checkpoint_of(reader, chain_entry_of(record))
        except DamagedError as err:
            if step is None or record.step == step:
                yield RejectedCheckpoint(record.step, record.generation, str(err))
        else:
            if step is None or record.step == step:
                yield ReplayedCheckpoint(checkpoint, record, optimizers)
            in_chains |= {
                one.generation: one
                for one in checkpoint.part.chain
                if one.flags & CHAIN_COMMITTED and (one.slot, one.generation) not in known
            }
        end = -1 if older is None else older.payload_generation
        for generation in sorted((one for one in in_chains if one > end), reverse=True):
            entry = in_chains.pop(generation)
            known.add((entry.slot, generation))
            if step is None or entry.step == step:
                yield _named_by_chain(reader, entry, optimizers)


def _named_by_chain(
    reader: PoolReader, entry: ChainEntry, optimizers: OptimizersAtHand
) -> ReplayedCheckpoint | RejectedCheckpoint:
    try:
        checkpoint = checkpoint_of(reader, entry)
    except DamagedError as err:
        return RejectedCheckpoint(entry.step, entry.generation, str(err))
    record = CommitRecord(
        entry.generation,
        checkpoint.header.incarnation,
        entry.step,
        entry.generation,
        entry.manifest_hash,
        entry.manifest_nbytes,
        KIND_CHECKPOINT,
        entry.slot,
        entry.manifest_index,
    )
    return ReplayedCheckpoint(checkpoint, record, optimizers)


def replayed_checkpoint(reader: PoolReader, record: CommitRecord, optimizers: OptimizersAtHand) -> ReplayedCheckpoint:
    """Return the checkpoint that a commit record, or the ``record`` of a ``ReplayedCheckpoint``, names. Raises
    ``DamagedError``."""
    return ReplayedCheckpoint(checkpoint_of(reader, chain_entry_of(record)), record, optimizers)
