"""Read a pool with gradient records: checkpoints, their bases and older bases, the records of their chains.

The *chain* of a checkpoint is the list of the gradient records of consecutive steps before its own. An *older base* is
an older copy of a unit, which lies in the other home than the base. What this module reads is not the state of the
checkpoint yet: the state of a unit is its base, updated again with the gradients of the records after the base. This
module makes no updates and writes nothing. As in ``pool/reader.py``, every structure is copied and checked before it is
used, and blocks are verified while they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from lightck import _native
from lightck._native import ffi, lib
from lightck.pool.commit_log import candidates
from lightck.pool.format.gradients import (
    CHAIN_COMMITTED,
    HOME_ROW_DTYPE,
    IN_RECORD,
    N_HOMES,
    ChainEntry,
    Crcs,
    GradientPart,
    Rows,
    checked_homes,
    first_step,
)
from lightck.pool.format.layout import HOME_PLACE, SLOT_PLACE, Entry, blocks_of, is_of_unit
from lightck.pool.format.structures import (
    MANIFEST_HEADER_NBYTES,
    SLOT_HEADER_NBYTES,
    CommitRecord,
    DamagedError,
    ManifestHeader,
    is_struck_header,
    manifest_hash,
    unpack_slot_header,
    uuid_words,
)
from lightck.pool.gradient_log import Bases, GradientRecord, LoggedCheckpoint
from lightck.pool.reader import READ_DTYPE, STRUCK_REASON, PoolReader
from lightck.pool.storage.failures import as_io_error, io_error, is_medium_error
from lightck.pool.storage.system import PARALLEL_READ_NBYTES_MIN, read_threads


class StoredTensor(NamedTuple):
    """Where the bytes of one tensor lie in the pool, and their checksums. The bytes are those of a base or an older
    base, or lie in a gradient record. ``GradientCheckpoint.read`` verifies the bytes."""

    entry: Entry
    number: int
    """Number of the tensor record, which seeds the block checksums."""
    offset: int
    """Offset of the bytes in the pool."""
    generation: int
    step: int
    """For a base: the newest step at whose end the tensor had these bytes. Otherwise: the step of the record."""
    crcs: Crcs
    """The checksums of the blocks."""


class GradientCheckpoint:
    """One gradient record with its manifest, which describes a checkpoint. The manifest is checked at construction."""

    def __init__(self, reader: PoolReader, chain_entry: ChainEntry, manifest: bytes) -> None:
        """``chain_entry``: the entry of a chain that names the record, or ``chain_entry_of`` its commit record. Raises
        ``DamagedError`` if the parts of the manifest contradict each other."""
        self.reader, self.chain_entry = reader, chain_entry
        sb = reader.superblock
        self.header = header = ManifestHeader.unpack(manifest)
        identity = (header.generation, header.step, header.slot, header.table_hash)
        if identity != (chain_entry.generation, chain_entry.step, chain_entry.slot, sb.table_hash):
            raise DamagedError("its manifest belongs to another checkpoint")
        extras = reader.extras_of(manifest, header)
        self._entries = (*reader.entries, *extras)
        if (header.n_table_entries, header.n_records) != (len(reader.entries), len(self._entries)):
            raise DamagedError("its manifest has a wrong number of records")
        self._records = np.frombuffer(manifest, HOME_ROW_DTYPE, header.n_records, MANIFEST_HEADER_NBYTES)
        self._crcs = np.frombuffer(manifest, "<u4", header.crcs_count, header.crcs_offset)
        self._home_numbers = [number for number, entry in enumerate(reader.entries) if entry.place == HOME_PLACE]
        self.part = GradientPart.unpack(manifest, header, sb, len(self._home_numbers))
        self.rows: Rows = checked_homes(self._records, reader.entries, len(self._crcs), self.part, header, sb.block)
        """For each entry in a home, in the order of the layout table, where its base lies (``HOME_ROW_DTYPE``)."""
        self.state = manifest[header.state_offset : header.state_offset + header.state_nbytes]
        """The small state."""
        self.in_record = self._tensors_in_record()
        """What the record holds: gradients, and tensors that are whole in it. Name -> tensor."""

    @property
    def step(self) -> int:
        return self.header.step

    @property
    def first_step(self) -> int:
        """The step of the oldest record that the chain names."""
        return first_step(self.part.chain, self.header)

    def _tensors_in_record(self) -> dict[str, StoredTensor]:
        sb, found = self.reader.superblock, dict[str, StoredTensor]()
        slot_offset = sb.slots[self.header.slot][0]
        for number, (entry, row) in enumerate(zip(self._entries, self._records.tolist(), strict=True)):
            generation, step, offset, crc, zero = row
            if entry.place != SLOT_PLACE or not generation:
                continue
            n_blocks = blocks_of(entry.nbytes, sb.block)
            if offset != entry.offset or crc + n_blocks > len(self._crcs) or zero:
                raise DamagedError(f"its record of {entry.name!r} is out of place")
            if (generation, step) != (self.header.generation, self.header.step):
                raise DamagedError(f"its record of {entry.name!r} is of another checkpoint")
            if entry.name in found:
                raise DamagedError(f"it holds {entry.name!r} twice")
            crcs = self._crcs[crc : crc + n_blocks]
            found[entry.name] = StoredTensor(entry, number, slot_offset + offset, generation, step, crcs)
        return found

    def name_of(self, row: int) -> str:
        """Return the name of the tensor whose base ``rows[row]`` describes."""
        return self._entries[self._home_numbers[row]].name

    def bases(self) -> Iterator[StoredTensor]:
        """Yield the base of each tensor that lies in a home."""
        return self._in_homes(self.rows, self._crcs)

    def older_bases(self) -> Iterator[StoredTensor]:
        """Yield the older bases to which the chain reaches back. They can stand in for damaged bases."""
        for base in self._in_homes(self.part.older, self.part.older_crcs):
            if base.step + 1 >= self.first_step:
                yield base

    def bases_in_record(self) -> list[str]:
        """Return the names of the tensors that have a home, and whose base lies in a record nevertheless
        (``IN_RECORD``)."""
        return [
            self._entries[number].name
            for number, row in zip(self._home_numbers, self.rows, strict=True)
            if row["generation"] and row["home"] == IN_RECORD
        ]

    def units_without_home(self) -> list[StoredTensor]:
        """Return the tensors of units that have no home: they are whole in each checkpoint."""
        names_in_homes = {self._entries[number].name for number in self._home_numbers}
        return [
            one
            for name, one in self.in_record.items()
            if name not in names_in_homes and is_of_unit(one.entry.role, name, one.entry.alias)
        ]

    def _in_homes(self, rows: Rows, crcs: Crcs) -> Iterator[StoredTensor]:
        sb = self.reader.superblock
        for number, row in zip(self._home_numbers, rows.tolist(), strict=True):
            generation, step, offset, crc, home = row
            if generation and home < N_HOMES:
                entry = self._entries[number]
                found = crcs[crc : crc + blocks_of(entry.nbytes, sb.block)]
                yield StoredTensor(entry, number, sb.homes[home][0] + offset, generation, step, found)

    @property
    def oldest_base_step(self) -> int:
        """The step of the oldest base: the updates after it are made again."""
        present = self.rows["generation"] > 0
        return int(self.rows["step"][present].min(initial=self.step))

    def needed_records(self) -> list[ChainEntry]:
        """Return the records of the chain without which the checkpoint cannot be recovered from its bases, oldest
        first."""
        low = self.oldest_base_step
        return [one for one in self.part.chain if one.step > low]

    def read(self, tensors: Sequence[tuple[StoredTensor, int]]) -> None:
        """Read tensors on several threads, each to the memory at its address; 0: only verify its bytes. Raises
        ``DamagedError`` at the first bad block, and ``PoolIOError``."""
        whole = [(one, 0, one.entry.nbytes, address) for one, address in tensors if one.entry.nbytes]
        if whole:
            self._read_blocks(whole)

    def read_blocks(self, tensor: StoredTensor, first: int, nbytes: int, address: int) -> None:
        """As ``read``, for the bytes of a tensor from block ``first`` on. They end where a block ends."""
        self._read_blocks([(tensor, first, nbytes, address)])

    def _read_blocks(self, places: Sequence[tuple[StoredTensor, int, int, int]]) -> None:
        block = self.reader.superblock.block
        reads = np.array(
            [
                (
                    tensor.offset + first * block,
                    address,
                    nbytes,
                    tensor.crcs.ctypes.data + 4 * first,
                    tensor.number,
                    tensor.generation,
                    first,
                )
                for tensor, first, nbytes, address in places
            ],
            READ_DTYPE,
        )
        bad = ffi.new("uint64_t[2]")
        status = lib.lck_read_many(
            *self.reader.read_arguments,
            ffi.cast("lck_read *", reads.ctypes.data),
            len(reads),
            block,
            *uuid_words(self.header.origin),
            read_threads() if sum(nbytes for _, _, nbytes, _ in places) >= PARALLEL_READ_NBYTES_MIN else 1,
            bad,
            bad + 1,
        )
        tensor, first, *_ = places[bad[0]]
        self._raise_if_bad(status, tensor, first + bad[1])

    def _raise_if_bad(self, status: int, tensor: StoredTensor, block: int) -> None:
        name = tensor.entry.name
        if status == lib.LCK_ECHECKSUM or status == lib.LCK_ESHORT or is_medium_error(_native.errno_of(status)):
            self.reader.damaged.add((tensor.number, tensor.generation))
        if status == lib.LCK_ECHECKSUM:
            raise DamagedError(f"block {block} of {name!r} does not match its checksum")
        if status == lib.LCK_ESHORT or is_medium_error(_native.errno_of(status)):
            raise DamagedError(f"block {block} of {name!r} cannot be read: {_native.reason(status)}")
        if status != lib.LCK_OK:
            fact = f"The tensor {name!r} in the pool {self.reader.path!r} cannot be read"
            raise io_error(fact, _native.errno_of(status), _native.reason(status))


def checkpoint_of(reader: PoolReader, entry: ChainEntry) -> GradientCheckpoint:
    """Return the checkpoint that a commit record (``chain_entry_of``) or a chain names. Raises ``DamagedError`` with
    the reason if it was overwritten or struck, or if its manifest fails a check, and ``PoolIOError``."""
    sb = reader.superblock
    with as_io_error(f"The checkpoint of step {entry.step} in the pool {reader.path!r} cannot be read"):
        slot_header = reader.read(sb.slots[entry.slot][0], SLOT_HEADER_NBYTES)
        if (unpack_slot_header(slot_header, entry.slot, sb.uuid) or 0) > entry.generation:
            is_struck = is_struck_header(slot_header)
            raise DamagedError(STRUCK_REASON if is_struck else "its slot was reused by a newer gradient record")
        if entry.manifest_nbytes > sb.manifest_nbytes:
            raise DamagedError("its manifest is larger than the space for it")
        manifest = reader.read(sb.manifest_at(entry.slot, entry.manifest_index), entry.manifest_nbytes)
        if len(manifest) != entry.manifest_nbytes or manifest_hash(sb.uuid, manifest) != entry.manifest_hash:
            raise DamagedError("its manifest does not match the commit record or the chain that names it")
        return GradientCheckpoint(reader, entry, manifest)


def chain_entry_of(record: CommitRecord) -> ChainEntry:
    """Return the chain entry that names the same checkpoint as a commit record."""
    return ChainEntry(
        record.step,
        record.payload_generation,
        record.manifest_hash,
        record.manifest_nbytes,
        record.slot,
        record.manifest_index,
        CHAIN_COMMITTED,
    )


def committed(reader: PoolReader) -> list[ChainEntry]:
    """Return a chain entry for each checkpoint that recovery tries (``candidates``), newest first."""
    return [chain_entry_of(record) for record in candidates(reader.commit_log())]


def logged_checkpoint(checkpoint: GradientCheckpoint, units: Sequence[Sequence[str]]) -> LoggedCheckpoint:
    """Return the checkpoint as the gradient log sees it. ``units``: for each unit, the names of its tensors. Raises
    ``DamagedError`` if a unit has no base, or if its tensors have bases of different steps."""
    rows = {checkpoint.name_of(number): row for number, row in enumerate(checkpoint.rows.tolist())}
    older = {checkpoint.name_of(number): row for number, row in enumerate(checkpoint.part.older.tolist())}
    columns: list[tuple[int, int, int, int, int]] = []
    for names in units:
        present = [name for name in names if rows[name][0]]  # those with a generation
        bases = {(home, generation, step) for generation, step, _, _, home in map(rows.__getitem__, present)}
        # A row without a generation is not checked, so its step may be anything.
        older_bases = {(gen, step if gen else 0) for gen, step, *_ in map(older.__getitem__, present)}
        if len(bases) != 1:
            raise DamagedError(f"the tensors of {names[0]!r} have no base, or bases of different steps")
        columns.append((*bases.pop(), *(older_bases.pop() if len(older_bases) == 1 else (0, 0))))
    home, generation, step, older_generation, older_step = np.array(columns, np.int64).reshape(-1, 5).T
    generation = np.where(home == IN_RECORD, 0, generation)
    bases_of_units = Bases(home.astype(np.uint8), generation, step, step, older_generation, older_step)
    chain = (*checkpoint.part.chain, checkpoint.chain_entry)
    records = tuple(GradientRecord(entry.step, entry.generation, entry.slot) for entry in chain)
    return LoggedCheckpoint(checkpoint.step, checkpoint.header.generation, bases_of_units, records)


def find_damaged_bases(checkpoint: GradientCheckpoint) -> None:
    """Read all bases, and add those that are damaged to ``PoolReader.damaged``. Raises ``PoolIOError``."""
    bases = [(base, 0) for base in checkpoint.bases()]
    try:
        checkpoint.read(bases)
    except DamagedError:  # there may be more than one
        for base in bases:
            with suppress(DamagedError):
                checkpoint.read([base])


class Problem(NamedTuple):
    """Damage in something that a checkpoint names."""

    tensor: str | None
    """The damaged tensor; None: a manifest is damaged, or was overwritten."""
    reason: str


def problems_of(reader: PoolReader, checkpoint: GradientCheckpoint) -> list[str]:
    """Verify everything that a checkpoint needs to be recovered from its bases: the bases, its own record, and the
    records after the oldest base. Returns what is damaged; empty: nothing is. Raises ``PoolIOError``."""
    return [problem.reason for problem in needed_problems(reader, checkpoint)]


def needed_problems(
    reader: PoolReader, checkpoint: GradientCheckpoint, advance: Callable[[int], None] = lambda _: None
) -> list[Problem]:
    """As ``problems_of``, with the names of tensors. ``advance`` is called with the number of bytes of each place that
    was verified."""
    found = []
    for base in checkpoint.bases():
        found += _problems(checkpoint, [base], f"base of step {base.step}", advance)
    for entry in checkpoint.needed_records():
        found += _problems_of_record(reader, entry, advance)
    own = list(checkpoint.in_record.values())
    return found + _problems(checkpoint, own, f"gradient record of step {checkpoint.step}", advance)


def older_base_problems(
    reader: PoolReader, checkpoint: GradientCheckpoint, advance: Callable[[int], None] = lambda _: None
) -> list[Problem]:
    """Verify the older bases, which replace damaged bases, and the records that only they need. A record whose slot was
    reused is no damage. ``advance``: as for ``needed_problems``. Raises ``PoolIOError``."""
    found = []
    for base in checkpoint.older_bases():
        found += _problems(checkpoint, [base], f"older base of step {base.step}", advance)
    needed = checkpoint.needed_records()
    for entry in checkpoint.part.chain:
        if entry not in needed and not is_overwritten(reader, entry):
            found += _problems_of_record(reader, entry, advance)
    return found


def is_overwritten(reader: PoolReader, entry: ChainEntry) -> bool:
    """Whether the slot of a gradient record was reused by a newer one, or the record was struck."""
    return (reader.slot_generation(entry.slot) or 0) > entry.generation


def _problems_of_record(reader: PoolReader, entry: ChainEntry, advance: Callable[[int], None]) -> list[Problem]:
    label = f"gradient record of step {entry.step}"
    try:
        record = checkpoint_of(reader, entry)
    except DamagedError as err:
        return [Problem(None, f"{label}: {err}")]
    return _problems(record, list(record.in_record.values()), label, advance)


def _problems(
    checkpoint: GradientCheckpoint, tensors: Sequence[StoredTensor], label: str, advance: Callable[[int], None]
) -> list[Problem]:
    """Verify tensors, and return a problem for each that is damaged. ``label``: what holds them."""
    found = []
    try:
        checkpoint.read([(tensor, 0) for tensor in tensors])
    except DamagedError:  # this says what is wrong with one of them
        for tensor in tensors:
            try:
                checkpoint.read([(tensor, 0)])
            except DamagedError as err:
                found.append(Problem(tensor.entry.name, f"{label}: {err}"))
    advance(sum(tensor.entry.nbytes for tensor in tensors))
    return found
