"""Read a pool: superblock, layout table, commit log, manifests, verified payload. The reader writes nothing.

Every structure is copied to private memory once, and checked and used there. Bytes that change in the pool meanwhile (a
pool in use, a hostile file) can make a check fail but cannot bypass it. Recovery, resume, the checker and the start of
the writer all use this reader.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from lightck import _native
from lightck._native import ffi, lib
from lightck.errors import CorruptPoolError, FormatError, NotAPoolError
from lightck.pool.commit_log import CommitLog, candidates, read_commit_log
from lightck.pool.format import layout
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.layout import Entry, blocks_of
from lightck.pool.format.structures import (
    MANIFEST_HEADER_NBYTES,
    NEXT_NBYTES,
    NEXT_OFFSET,
    NUMBER_MAX,
    RO_COMPAT_KNOWN,
    SLOT_HEADER_NBYTES,
    SUPERBLOCK_NBYTES,
    SUPERBLOCK_OFFSETS,
    CommitRecord,
    DamagedError,
    ManifestHeader,
    NextBatch,
    Superblock,
    is_struck_header,
    layout_hash,
    manifest_hash,
    unpack_next_batch,
    unpack_slot_header,
    uuid_words,
)
from lightck.pool.partial_copy import BlockSource
from lightck.pool.slot_locks import hold
from lightck.pool.storage import emulation
from lightck.pool.storage.backend import Container
from lightck.pool.storage.extents import as_c_array, runs
from lightck.pool.storage.failures import as_io_error, io_error, is_medium_error, truncated_error, undo_on_error
from lightck.pool.storage.system import PARALLEL_READ_NBYTES_MIN, read_threads

log = logging.getLogger("lightck")
# A tensor record of the manifest (docs/format.md, "Manifest"); ``crc`` is the index of its first block checksum.
TENSOR_RECORD_DTYPE = np.dtype(
    [("generation", "<u8"), ("step", "<u8"), ("offset", "<u8"), ("crc", "<u4"), ("zero", "<u4")]
)
READ_DTYPE = np.dtype([(name, "u8") for name in ("off", "dst", "nbytes", "crcs", "tensor", "generation", "first")])
"""The C struct ``lck_read``."""
RESUMABLE_NUMBER_MAX = NUMBER_MAX // 2
"""A training continues in a pool only if all generations, incarnations and steps in the pool are below this number. The
numbers that the training adds then stay far below ``NUMBER_MAX``."""
SPARSE_READ_NBYTES_MAX = 64 << 20
"""A structure with more bytes than this is read only if the file has at least as many allocated bytes as the structure.
Otherwise the structure lies partly in holes of a sparse file: such a file costs a hostile user nothing, and reading the
holes would take memory."""

STRUCK_REASON = (
    "the training made this checkpoint unreadable because it may hold wrong bytes: only after it was saved did lightck "
    "detect a write to a tensor, or that replaying a recorded update gives another result"
)


class PoolReader:
    """An open pool. The constructor raises ``PoolError`` if this lightck cannot read the pool."""

    def __init__(self, container: Container, path: str, *, gradients: bool = False) -> None:
        """``gradients``: whether the caller can handle a pool with gradient records (``pool/gradient_reader.py``). If
        it is False, such a pool is refused. Raises ``PoolError``."""
        self._reads_gradients = gradients
        self.container = container
        self.path = path
        fd, extents = container.reads_from
        self.read_arguments = fd, as_c_array(extents), len(extents)
        """The first three arguments of the native functions that read: descriptor, extents, number of extents."""
        self._unreadable: OSError | None = None
        """The last medium error of ``read``."""
        self.damaged: set[tuple[int, int]] = set()
        """(number of the tensor record, generation) of what was read from a pool with gradient records and failed its
        checks."""
        self.partial: BlockSource | None = None
        """Knows which payload the file has, if this is a partial copy; None if the file is the pool itself."""
        self.superblock = self._read_superblock()
        self.group: GroupIdentity | None = None
        """The identity of a rank's pool, whose entries may have pieces; None if the pool is not that of a rank."""
        self.table, self.entries = self._read_table()

    @property
    def is_writable(self) -> bool:
        """Whether this lightck knows all features that a writer of the pool must know."""
        return not self.superblock.ro_compat & ~RO_COMPAT_KNOWN

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read bytes of the pool. At the end of the file the result is shorter than ``nbytes``. If the medium fails,
        the result is empty and a warning is logged; the structure in these bytes then fails its check.

        Raises ``PoolIOError`` for errors that say nothing about the pool's bytes (out of memory, no descriptors)."""
        try:
            return self._read_with_retry(offset, nbytes)
        except MemoryError as err:
            raise io_error(f"{nbytes} bytes of the pool {self.path!r} cannot be read", errno.ENOMEM) from err
        except OSError as err:
            if not is_medium_error(err.errno):
                raise io_error(f"The pool {self.path!r} cannot be read", err.errno, err.strerror) from err
            log.warning(
                "lightck: %d bytes at offset %d of the pool %r cannot be read: %s",
                nbytes,
                offset,
                self.path,
                err.strerror,
            )
            self._unreadable = err
            return b""

    def extras_of(self, manifest: bytes, header: ManifestHeader) -> tuple[Entry, ...]:
        """Return the extra entries in a manifest. Raises ``DamagedError``."""
        sb = self.superblock
        return layout.decode_extras(
            manifest[header.extras_offset : header.extras_offset + header.extras_nbytes],
            low=sb.reserve_offset,
            high=sb.slot_nbytes,
            has_group=sb.has_group,
            has_shares=sb.has_shares,
            has_gradients=sb.has_gradients,
        )

    def file_runs(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Return where these bytes lie in the file ``container.fd``, as (offset, nbytes) pairs; an empty list if the
        medium can only be mapped."""
        fd, places = self.container.reads_from
        return runs(places, offset, nbytes) if fd == self.container.fd else []

    def _read_with_retry(self, offset: int, nbytes: int) -> bytes:
        """Read bytes, and read them a second time after a medium error, which may be transient. (A failed sync, in
        contrast, is never repeated.) Raises ``OSError``."""
        try:
            return self.container.read(offset, nbytes)
        except OSError as err:
            if not is_medium_error(err.errno):
                raise
        return self.container.read(offset, nbytes)

    def _fits_on_medium(self, nbytes: int) -> bool:
        """Whether the file can contain a structure of ``nbytes`` (see ``SPARSE_READ_NBYTES_MAX``)."""
        if nbytes <= SPARSE_READ_NBYTES_MAX:
            return True
        st = os.fstat(self.container.fd)
        return not stat.S_ISREG(st.st_mode) or nbytes <= st.st_blocks * 512

    def _refuse_unreadable(self) -> None:
        """Raise ``PoolIOError`` if a ``read`` met a medium error, because unreadable bytes do not prove that the pool
        is damaged or that the file is no pool."""
        if self._unreadable is not None:
            fact = f"The beginning of the pool {self.path!r} cannot be read"
            raise io_error(fact, self._unreadable.errno, self._unreadable.strerror) from self._unreadable

    def _read_superblock(self) -> Superblock:
        problems: list[Exception] = []
        found: list[Superblock] = []
        for offset in SUPERBLOCK_OFFSETS:
            try:
                found.append(Superblock.unpack(self.read(offset, SUPERBLOCK_NBYTES)))
            except (DamagedError, NotAPoolError, FormatError) as err:
                problems.append(err)
        if found:
            superblock = self._matching_superblock(found[0], found[-1])
            self._refuse_gradients(superblock)
            self._check_size(superblock)
            return superblock
        for problem in problems:
            if isinstance(problem, FormatError):
                raise FormatError(f"{self.path!r}: {problem}") from problem
        self._refuse_unreadable()
        if all(isinstance(problem, NotAPoolError) for problem in problems):
            raise NotAPoolError(
                f"The file {self.path!r} is not a lightck pool: it has no superblock of lightck. Nothing was changed. "
                "Choose another path, or remove the file if nobody needs it."
            )
        raise CorruptPoolError(
            f"Both superblocks of the pool {self.path!r} are damaged ({problems[0]}; {problems[1]}). Without a "
            "superblock nothing in the pool can be found. Use a copy of the pool if there is one."
        )

    def _matching_superblock(self, first: Superblock, last: Superblock) -> Superblock:
        """Return the superblock that belongs to this pool. ``first``, ``last``: the two copies, both valid. If they
        differ, one of them belongs to another pool and was written here by mistake. The commit log has valid records
        only with the uuid of the right one."""
        if first != last and not read_commit_log(first, self.read).records and read_commit_log(last, self.read).records:
            return last
        return first

    def _refuse_gradients(self, superblock: Superblock) -> None:
        """Raise ``FormatError`` if the pool has gradient records and the caller cannot handle them. Such a caller would
        take the older bytes of a base for the tensor of the checkpoint."""
        if superblock.has_gradients and not self._reads_gradients:
            raise FormatError(
                f"The pool {self.path!r} holds gradient records: a training with strategy=Gradients(...) made it, and "
                "its updates must be made again before a tensor can be read. Pass strategy=lightck.Gradients(...) to "
                "attach(); or write the checkpoint into a new pool for any other strategy (in a single process: "
                "lightck compact POOL NEW), or load it with lightck.recover(path), without lazy=."
            )

    def _check_size(self, superblock: Superblock) -> None:
        if superblock.nbytes != self.container.nbytes:
            raise truncated_error(self.path, superblock.nbytes, self.container.nbytes)

    def _read_table(self) -> tuple[bytes, tuple[Entry, ...]]:
        sb = self.superblock
        for offset in sb.table_offsets:
            table = self.read(offset, sb.table_nbytes) if self._fits_on_medium(sb.table_nbytes) else b""
            if layout_hash(table) == sb.table_hash:
                try:
                    return table, self._parse_table(table)
                except DamagedError as err:
                    raise CorruptPoolError(
                        f"The pool {self.path!r} has an impossible layout ({err}). Another program or a faulty lightck "
                        "wrote it. Use another copy of the pool."
                    ) from err
        self._refuse_unreadable()
        raise CorruptPoolError(
            f"Both layout tables of the pool {self.path!r} are damaged. Without a table no tensor can be found. Use a "
            "copy of the pool if there is one."
        )

    def _parse_table(self, table: bytes) -> tuple[Entry, ...]:
        """Parse the layout table, and set ``group``. Raises ``DamagedError``."""
        sb = self.superblock
        low, high, home_nbytes = sb.payload_offset, sb.reserve_offset, sb.home_nbytes if sb.has_gradients else None
        if not sb.has_group:
            return layout.decode(table, low=low, high=high, home_nbytes=home_nbytes)
        self.group, entries = layout.decode_of_rank(
            table, low=low, high=high, has_shares=sb.has_shares, home_nbytes=home_nbytes
        )
        return entries

    def commit_log(self) -> CommitLog:
        """Read the commit log at this moment."""
        return read_commit_log(self.superblock, self.read)

    def slot_generation(self, slot: int) -> int | None:
        """Return the generation that the slot's header names; None if the header fails its check."""
        data = self.read(self.superblock.slots[slot][0], SLOT_HEADER_NBYTES)
        if len(data) < SLOT_HEADER_NBYTES:
            return None
        return unpack_slot_header(data, slot, self.superblock.uuid)

    def generations_of_erased_records(self) -> tuple[int, ...]:
        """Return the generations of the checkpoints whose commit records were erased; () if no record was erased.

        Records were erased if the commit log is empty and at least two slots hold a manifest. (A second slot gets a
        manifest only after the first commit. So a crash before the first commit leaves at most one manifest.)"""
        if not self.commit_log().is_empty:
            return ()
        found = [self._manifest_generation(slot) for slot in range(len(self.superblock.slots))]
        generations = tuple(generation for generation in found if generation is not None)
        if len(generations) < 2 or not self.commit_log().is_empty:  # read again: a writer may have committed meanwhile
            return ()
        return generations

    def _manifest_generation(self, slot: int) -> int | None:
        """Return the generation that the slot's header names, or None if the slot holds no manifest of that
        generation."""
        sb, generation = self.superblock, self.slot_generation(slot)
        if generation is None:
            return None
        for index in (0, 1):
            try:
                data = self.read(sb.manifest_at(slot, index), MANIFEST_HEADER_NBYTES)
                header = ManifestHeader.unpack(data, sb.manifest_nbytes)
            except (DamagedError, FormatError):
                continue
            if (header.generation, header.slot, header.table_hash) == (generation, slot, sb.table_hash):
                return generation
        return None

    def next_batches(self, record: CommitRecord) -> tuple[NextBatch, ...] | None:
        """Return the entries of the next-batch record that belongs to this commit record's checkpoint; None if the
        checkpoint has no next-batch record."""
        sb = self.superblock
        if not sb.has_next_batch:
            return None
        data = self.read(sb.slots[record.slot][0] + NEXT_OFFSET, NEXT_NBYTES)
        return unpack_next_batch(data, record.payload_generation, sb.uuid)

    def has_lost_slot(self, record: CommitRecord) -> bool:
        """Whether the checkpoint of this commit record has lost its slot: the slot was reused, or the checkpoint was
        struck. Then the slot's header names a newer generation than the record.

        A header that names an older generation shows that a faulty medium lost the write of the header. (A crash cannot
        cause this, because the header is durable before the commit record.)"""
        return (self.slot_generation(record.slot) or 0) > record.payload_generation

    def _is_struck(self, slot: int) -> bool:
        data = self.read(self.superblock.slots[slot][0], SLOT_HEADER_NBYTES)
        return len(data) == SLOT_HEADER_NBYTES and is_struck_header(data)

    def newest_struck_generation(self) -> int:
        """Return the largest generation in the headers of slots whose checkpoint was struck; -1 if there are none."""
        struck = [i for i in range(len(self.superblock.slots)) if self._is_struck(i)]
        return max((self.slot_generation(i) or 0 for i in struck), default=-1)

    def checkpoints(self, step: int | None = None) -> Iterator[StoredCheckpoint | RejectedCheckpoint]:
        """Yield the checkpoints from newest to oldest. ``step``: yield only the checkpoints of this step (None: of all
        steps). The manifests are checked, but not the payload. A checkpoint that fails a check is yielded as a
        ``RejectedCheckpoint``."""
        for record in candidates(self.commit_log(), step):
            try:
                yield self.checkpoint(record)
            except DamagedError as err:
                yield RejectedCheckpoint(record.step, record.generation, str(err))

    def checkpoint(self, record: CommitRecord) -> StoredCheckpoint:
        """Return the checkpoint that a commit record names.

        Raises ``DamagedError`` with the reason if the checkpoint was overwritten or struck, or fails a check. Raises
        ``PoolIOError`` if the system cannot read the pool (out of memory, no descriptors)."""
        with as_io_error(f"The checkpoint of step {record.step} in the pool {self.path!r} cannot be read"):
            return self._checkpoint(record)

    def _checkpoint(self, record: CommitRecord) -> StoredCheckpoint:
        sb = self.superblock
        assert not sb.has_gradients, "pool/gradient_reader.py reads such a pool"
        if self.has_lost_slot(record):
            raise DamagedError(
                STRUCK_REASON if self._is_struck(record.slot) else "its slot was reused by a newer checkpoint"
            )
        if record.manifest_nbytes > sb.manifest_nbytes:
            raise DamagedError("its manifest is larger than the space for it")
        if not self._fits_on_medium(record.manifest_nbytes):
            raise DamagedError("its manifest is larger than the allocated part of the file")
        manifest = self.read(sb.manifest_at(record.slot, record.manifest_index), record.manifest_nbytes)
        if len(manifest) != record.manifest_nbytes or manifest_hash(sb.uuid, manifest) != record.manifest_hash:
            raise DamagedError("its manifest does not match the commit record")
        header = ManifestHeader.unpack(manifest)
        identity = (header.generation, header.step, header.slot, header.table_hash)
        if identity != (record.payload_generation, record.step, record.slot, sb.table_hash):
            raise DamagedError("its manifest belongs to another checkpoint")
        return StoredCheckpoint(self, record, header, manifest)

    def close(self) -> None:
        """Close the container. Afterwards every read of a ``StoredCheckpoint`` fails, even if the container is a
        mapping."""
        self.read_arguments = -1, *self.read_arguments[1:]
        self.container.close()


@dataclass(frozen=True, slots=True)
class RejectedCheckpoint:
    """A checkpoint that recovery rejected, and the reason."""

    step: int
    generation: int
    reason: str

    def __str__(self) -> str:
        return f"step {self.step} (generation {self.generation}): {self.reason}"


class StoredCheckpoint:
    """One committed checkpoint. Its manifest is checked at construction; its payload is verified while it is read."""

    def __init__(self, reader: PoolReader, record: CommitRecord, header: ManifestHeader, manifest: bytes) -> None:
        """Raises ``DamagedError`` if the parts of the manifest contradict each other."""
        self.reader = reader
        self.record = record
        self.header = header
        if header.n_table_entries != len(reader.entries):
            raise DamagedError("its manifest expects another layout table")
        extras = reader.extras_of(manifest, header)
        if header.n_records != header.n_table_entries + len(extras):
            raise DamagedError("its manifest has a wrong number of records")
        # Tensor records: first one for each entry of the layout table, then one for each extra entry.
        self.records = np.frombuffer(manifest, TENSOR_RECORD_DTYPE, header.n_records, offset=MANIFEST_HEADER_NBYTES)
        self.crcs = np.frombuffer(manifest, "<u4", header.crcs_count, offset=header.crcs_offset)
        self.state = manifest[header.state_offset : header.state_offset + header.state_nbytes]
        self.extras = extras
        self._record_entries = reader.entries + extras
        """The entry of each record, also of a record whose tensor is not in this checkpoint."""
        self._index = self._present()
        self.entries: dict[str, Entry] = {name: self._record_entries[number] for name, number in self._index.items()}
        """The tensors of this checkpoint by name."""
        layout.check_ties(self.entries)

    def _present(self) -> dict[str, int]:
        """Return name -> record number of every tensor in this checkpoint. Raises ``DamagedError`` if a record does not
        fit its entry, or if a name occurs twice."""
        block, n_crcs, present = self.reader.superblock.block, len(self.crcs), {}
        columns = (self.records[name].tolist() for name in ("generation", "offset", "crc"))
        for number, (entry, generation, offset, crc) in enumerate(zip(self._record_entries, *columns, strict=True)):
            if not generation:
                continue
            if offset != entry.offset or crc + blocks_of(entry.nbytes, block) > n_crcs:
                raise DamagedError(f"its record of {entry.name!r} is out of place")
            if entry.name in present:
                raise DamagedError(f"it holds {entry.name!r} twice")
            present[entry.name] = number
        return present

    @property
    def step(self) -> int:
        return self.header.step

    @property
    def iteration(self) -> int:
        """As in ``ManifestHeader``."""
        return self.header.iteration

    @property
    def path(self) -> str:
        """The path of the pool."""
        return self.reader.path

    @property
    def uuid(self) -> bytes:
        """The uuid of the pool."""
        return self.reader.superblock.uuid

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block: the unit that has a checksum."""
        return self.reader.superblock.block

    def read_into(self, name: str, address: int) -> None:
        """Read the bytes of one tensor to the memory at ``address``; 0: only verify the bytes. Raises ``DamagedError``
        at the first bad block, and ``PoolIOError``."""
        number = self._index[name]
        entry, record = self._record_entries[number], self.records[number]
        if not entry.nbytes:
            return
        if self.reader.partial is not None:
            self.reader.partial.require(self, [(name, 0, entry.nbytes, address)])
        bad = ffi.new("uint64_t *")
        first_crc = self.crcs.ctypes.data + 4 * int(record["crc"])
        status = lib.lck_read_verified(
            *self.reader.read_arguments,
            self._slot_offset + entry.offset,
            ffi.cast("void *", address),
            entry.nbytes,
            self.reader.superblock.block,
            ffi.cast("uint32_t *", first_crc),
            *uuid_words(self.header.origin),
            number,
            int(record["generation"]),
            bad,
        )
        self._raise_if_bad(status, name, bad[0])

    def read_many(self, places: Sequence[tuple[str, int]]) -> None:
        """Read many tensors on several threads. ``places``: (name, address as for ``read_into``) of each tensor. The
        memory of two tensors must not overlap.

        Raises ``DamagedError`` for the first bad block in the order of ``places``, and ``PoolIOError``."""
        self.read_blocks([(name, 0, self.entries[name].nbytes, address) for name, address in places])

    def read_blocks(self, places: Sequence[tuple[str, int, int, int]]) -> None:
        """Read some blocks of many tensors on several threads. ``places``: name, number of the first block, number of
        bytes from there on (whole blocks, but for the last one of the tensor), and address as for ``read_into``. The
        memory of two places must not overlap. Raises as ``read_many`` does, and ``BlocksMissingError`` if the file is a
        partial copy without these blocks."""
        if places and self.reader.partial is not None:
            self.reader.partial.require(self, places)
        if places:
            self._read_blocks(places)

    def verify_blocks(self, name: str, first: int, nbytes: int) -> None:
        """Verify some blocks of a tensor, also blocks that a partial copy does not count as present yet. Raises as
        ``read_many`` does."""
        self._read_blocks([(name, first, nbytes, 0)])

    def range_of(self, name: str, first: int, nbytes: int) -> tuple[int, int]:
        """Return (begin, end): the range of the pool in which ``nbytes`` bytes of a tensor lie, from its block
        ``first`` on."""
        begin = self._slot_offset + self._record_entries[self._index[name]].offset + first * self.block_nbytes
        return begin, begin + nbytes

    def _read_blocks(self, places: Sequence[tuple[str, int, int, int]]) -> None:
        names, firsts, nbytes, addresses = zip(*places, strict=True)
        numbers, block = [self._index[name] for name in names], self.block_nbytes
        threads = read_threads() if sum(nbytes) >= PARALLEL_READ_NBYTES_MIN else 1
        records = self.records[numbers]
        reads = np.zeros(len(places), READ_DTYPE)
        reads["first"] = firsts
        reads["off"] = records["offset"] + np.uint64(self._slot_offset) + reads["first"] * np.uint64(block)
        reads["dst"] = addresses
        reads["nbytes"] = nbytes
        reads["crcs"] = np.uint64(self.crcs.ctypes.data) + np.uint64(4) * (records["crc"] + reads["first"])
        reads["tensor"] = numbers
        reads["generation"] = records["generation"]
        bad = ffi.new("uint64_t[2]")
        status = lib.lck_read_many(
            *self.reader.read_arguments,
            ffi.cast("lck_read *", reads.ctypes.data),
            len(reads),
            block,
            *uuid_words(self.header.origin),
            threads,
            bad,
            bad + 1,
        )
        self._raise_if_bad(status, names[bad[0]], firsts[bad[0]] + bad[1])

    def raw_checksums(self, name: str) -> list[int]:
        """Return the unseeded checksum of each block of a tensor, from the manifest. Equal bytes have equal ones, also
        in another pool (if its blocks have the same size)."""
        number, record = self._index[name], self.records[self._index[name]]
        n_blocks = blocks_of(self._record_entries[number].nbytes, self.reader.superblock.block)
        stored = self.crcs[int(record["crc"]) :][:n_blocks].tolist()
        origin, generation = uuid_words(self.header.origin), int(record["generation"])
        return [crc ^ lib.lck_block_seed(*origin, number, generation, block) for block, crc in enumerate(stored)]

    @property
    def _slot_offset(self) -> int:
        """Offset of this checkpoint's slot in the pool."""
        return self.reader.superblock.slots[self.record.slot][0]

    def _raise_if_bad(self, status: int, name: str, block: int) -> None:
        """Raise the error for the status of a verified read. ``block``: number of the bad block in the tensor, from
        0."""
        if status == lib.LCK_ECHECKSUM:
            raise DamagedError(f"block {block} of {name!r} does not match its checksum")
        if status == lib.LCK_ESHORT or is_medium_error(_native.errno_of(status)):
            raise DamagedError(f"block {block} of {name!r} cannot be read: {_native.reason(status)}")
        if status != lib.LCK_OK:
            fact = f"The tensor {name!r} in the pool {self.reader.path!r} cannot be read"
            raise io_error(fact, _native.errno_of(status), _native.reason(status))

    def owns_slot(self) -> bool:
        """Whether the slot still belongs to this checkpoint. (A process that writes to the pool can reuse the slot, or
        strike the checkpoint, while this process reads it.)"""
        return not self.reader.has_lost_slot(self.record)

    def hold(self) -> AbstractContextManager[None]:
        """Keep the training from overwriting this checkpoint during the ``with`` block (``pool/slot_locks.py``). Call
        ``owns_slot`` in the block: the training may have overwritten this checkpoint before."""
        return hold(self.reader.container.fd, self.record.slot)

    def verify(self) -> None:
        """Read and verify every block. Raises ``DamagedError`` or ``PoolIOError``."""
        self.read_many([(name, 0) for name in self._index])
        if not self.owns_slot():
            raise DamagedError("its slot was reused while it was read")


def open_pool(path: str, backend: str = "auto", *, write: bool = False, gradients: bool = False) -> PoolReader:
    """Open an existing pool. ``backend``: as the parameter ``name`` of ``backend_for``. ``write``: call
    ``refuse_unwritable``, then open the container for reading and writing. ``gradients``: as for ``PoolReader``. Raises
    ``PoolError``."""
    from lightck.pool.storage.backends import backend_for

    emulation.active_profile()  # the first call reads LIGHTCK_EMULATE, so that reads are slowed down too
    kind = backend_for(path, backend)
    if write:  # check before the open for writing, which changes the backend's own structures in the file (PMDK)
        with contextlib.closing(_reader_of(kind.open(path, write=False), path, gradients)) as reader:
            refuse_unwritable(reader)
    return _reader_of(kind.open(path, write=write), path, gradients)


def _reader_of(container: Container, path: str, gradients: bool) -> PoolReader:
    with undo_on_error(container.close):
        return PoolReader(container, path, gradients=gradients)


def refuse_unwritable(reader: PoolReader) -> None:
    """Raise ``FormatError`` or ``CorruptPoolError`` if a training must not continue in this pool, though it can be
    read.

    Call this function before anything in the pool or in a model is changed."""
    if not reader.is_writable:
        raise FormatError(
            f"The pool {reader.path!r} uses features ({reader.superblock.ro_compat:#x}) that this lightck can "
            "read but not write. The pool was written by a newer lightck. Update lightck to continue training in the "
            "pool; lightck.recover() reads it."
        )
    generations = (reader.slot_generation(slot) or 0 for slot in range(len(reader.superblock.slots)))
    highest = max(reader.commit_log().highest_number, *generations)
    if highest >= RESUMABLE_NUMBER_MAX:
        raise CorruptPoolError(
            f"The pool {reader.path!r} has a generation, incarnation or step of {highest}. lightck continues a "
            f"training only if all three are below {RESUMABLE_NUMBER_MAX}. No training reaches this number: the pool "
            "is damaged or was manipulated. lightck.recover() reads the pool. Train into another pool, or discard this "
            "one with overwrite=True."
        )
