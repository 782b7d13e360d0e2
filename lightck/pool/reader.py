"""Reading a pool: superblock, layout table, ring, manifests, verified payload. It writes nothing.

Every structure is copied to private memory once and used from there, so bytes that change under us (a pool in use,
a hostile file) can make a check fail but cannot slip past it. Recovery, resume, the checker and the writer's own
start all use this one reader.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightck import _native
from lightck._native import ffi, lib
from lightck.errors import CorruptPoolError, FormatError, NotAPoolError, PoolTruncatedError
from lightck.pool.commit_log import CommitLog, candidates, read_commit_log
from lightck.pool.format import layout
from lightck.pool.format.layout import Entry, blocks_of
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    MANIFEST_HEADER_NBYTES,
    NEXT_NBYTES,
    NEXT_OFFSET,
    NUMBER_MAX,
    RO_COMPAT_KNOWN,
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
    unpack_next,
    unpack_slot_header,
    uuid_words,
)
from lightck.pool.storage import emulation
from lightck.pool.storage.backend import Container
from lightck.pool.storage.extents import native
from lightck.pool.storage.failures import as_io_error, io_error, is_medium_error, undo_on_error

log = logging.getLogger("lightck")
TENSOR_RECORD_DTYPE = np.dtype(
    [("generation", "<u8"), ("step", "<u8"), ("offset", "<u8"), ("crc", "<u4"), ("zero", "<u4")]
)
READ_DTYPE = np.dtype([(name, "u8") for name in ("off", "dst", "nbytes", "crcs", "tensor", "generation")])
"""``lck_read``."""
PARALLEL_READ_NBYTES_MIN = 4 << 20
"""Less than this is read by one thread: starting others costs more."""
THREADS_MAX = 8
RESUMABLE_NUMBER_MAX = NUMBER_MAX // 2
"""Of any number to go on from: what comes after it is far from what a reader takes for damage."""
SPARSE_READ_NBYTES_MAX = 64 << 20
"""What may be read at once of a file that takes up less: a hole costs whoever makes a file nothing."""


STRUCK_REASON = (
    "it was struck by its training: it holds old bytes of a tensor that was written unannounced, which was found later"
)


class PoolReader:
    """An open pool, as far as it can be read. Raises ``PoolError`` where it is not a pool that we can read."""

    def __init__(self, container: Container, path: str) -> None:
        self.container = container
        self.path = path
        fd, places = container.source
        self.source = fd, native(places), len(places)
        self._unreadable: OSError | None = None
        self.superblock = self._read_superblock()
        self.table, self.entries = self._read_table()

    @property
    def is_writable(self) -> bool:
        return not self.superblock.ro_compat & ~RO_COMPAT_KNOWN

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the pool; fewer where the file ends, none where the medium cannot read them. What is then missing
        fails its check. Raises ``PoolIOError`` where the system cannot read now, which says nothing of the pool."""
        try:
            return self._read_twice(offset, nbytes)
        except MemoryError as err:
            raise io_error(f"{nbytes} bytes of the pool {self.path!r} cannot be read", errno.ENOMEM) from err
        except OSError as err:
            if not is_medium_error(err.errno):
                raise io_error(f"The pool {self.path!r} cannot be read", err.errno, err.strerror) from err
            log.warning(
                "lightck: %d bytes at %d of the pool %r cannot be read: %s", nbytes, offset, self.path, err.strerror
            )
            self._unreadable = err
            return b""

    def _read_twice(self, offset: int, nbytes: int) -> bytes:
        """A medium that failed once may not do so again (unlike a failed sync, that is no lie)."""
        try:
            return self.container.read(offset, nbytes)
        except OSError as err:
            if not is_medium_error(err.errno):
                raise
        return self.container.read(offset, nbytes)

    def _fits_on_medium(self, nbytes: int) -> bool:
        """Whether a structure of this length may lie in the file. One that is long has to fit into what it takes up."""
        if nbytes <= SPARSE_READ_NBYTES_MAX:
            return True
        st = os.fstat(self.container.fd)
        return not stat.S_ISREG(st.st_mode) or nbytes <= st.st_blocks * 512

    def _refuse_unreadable(self) -> None:
        """Where nothing is left to go on with: what could not be read is no proof that it is damaged, or foreign."""
        if self._unreadable is not None:
            fact = f"The pool {self.path!r} cannot be read at its beginning"
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
            self._check_size(superblock)
            return superblock
        for problem in problems:
            if isinstance(problem, FormatError):
                raise FormatError(f"{self.path!r}: {problem}") from problem
        self._refuse_unreadable()
        if all(isinstance(problem, NotAPoolError) for problem in problems):
            raise NotAPoolError(
                f"The file {self.path!r} is not a lightck pool: it has no lightck signature. Nothing was changed. "
                "Choose another path, or remove the file if nobody needs it."
            )
        raise CorruptPoolError(
            f"Both superblocks of the pool {self.path!r} are damaged ({problems[0]}; {problems[1]}). Without them "
            "nothing in it can be found. Use a copy of the pool if there is one."
        )

    def _matching_superblock(self, first: Superblock, last: Superblock) -> Superblock:
        """Of two that differ one is another pool's, written here by mistake: no line passes with its uuid."""
        if first != last and not read_commit_log(first, self.read).records and read_commit_log(last, self.read).records:
            return last
        return first

    def _check_size(self, superblock: Superblock) -> None:
        if superblock.nbytes != self.container.nbytes:
            raise PoolTruncatedError(
                f"The pool {self.path!r} was made with {superblock.nbytes} bytes and has {self.container.nbytes} now. "
                "It was truncated, extended or copied in part. Use a complete copy."
            )

    def _read_table(self) -> tuple[bytes, tuple[Entry, ...]]:
        sb = self.superblock
        for offset in sb.table_offsets:
            table = self.read(offset, sb.table_nbytes) if self._fits_on_medium(sb.table_nbytes) else b""
            if layout_hash(table) == sb.table_hash:
                try:
                    return table, layout.decode(table, low=sb.payload_offset, high=sb.reserve_offset)
                except DamagedError as err:
                    raise CorruptPoolError(
                        f"The pool {self.path!r} has an impossible layout ({err}). Whoever wrote it was no lightck, or "
                        "a broken one. Use another copy of the pool."
                    ) from err
        self._refuse_unreadable()
        raise CorruptPoolError(
            f"Both layout tables of the pool {self.path!r} are damaged. Without one, no tensor can be found. Use a "
            "copy of the pool if there is one."
        )

    def commit_log(self) -> CommitLog:
        return read_commit_log(self.superblock, self.read)

    def slot_generation(self, slot: int) -> int | None:
        """Generation that the slot's header names; None where the header proves nothing."""
        data = self.read(self.superblock.slots[slot][0], COMMIT_RECORD_NBYTES)
        if len(data) < COMMIT_RECORD_NBYTES:
            return None
        return unpack_slot_header(data, slot, self.superblock.uuid)

    def unnamed_generations(self) -> tuple[int, ...]:
        """Generations of versions that no line names though one must have: no line is there, and several slots hold a
        manifest, of which the second is written after the first line. A crash before that leaves one at most."""
        if not self.commit_log().is_empty:
            return ()
        found = [self._manifest_generation(slot) for slot in range(len(self.superblock.slots))]
        generations = tuple(generation for generation in found if generation is not None)
        return generations if len(generations) > 1 and self.commit_log().is_empty else ()  # nor did one come meanwhile

    def _manifest_generation(self, slot: int) -> int | None:
        """The generation that the slot's header names, where a manifest of it lies there."""
        sb, generation = self.superblock, self.slot_generation(slot)
        for index in (0, 1) if generation is not None else ():
            try:
                data = self.read(sb.manifest_at(slot, index), MANIFEST_HEADER_NBYTES)
                header = ManifestHeader.unpack(data, sb.manifest_nbytes)
            except (DamagedError, FormatError):
                continue
            if (header.generation, header.slot, header.table_hash) == (generation, slot, sb.table_hash):
                return generation
        return None

    def next_batches(self, record: CommitRecord) -> tuple[NextBatch, ...] | None:
        """What is recorded of the batch that followed the version of this line; None where nothing is."""
        sb = self.superblock
        if not sb.has_next_batch:
            return None
        data = self.read(sb.slots[record.slot][0] + NEXT_OFFSET, NEXT_NBYTES)
        return unpack_next(data, record.payload_generation, sb.uuid)

    def is_reused(self, record: CommitRecord) -> bool:
        """Whether the slot's header names a newer version than this line. An older one proves nothing: a header is
        durable before any line that counts on it, so a later write of it was lost."""
        return (self.slot_generation(record.slot) or 0) > record.payload_generation

    def _is_struck(self, slot: int) -> bool:
        data = self.read(self.superblock.slots[slot][0], COMMIT_RECORD_NBYTES)
        return len(data) == COMMIT_RECORD_NBYTES and is_struck_header(data)

    def checkpoints(self, step: int | None = None) -> Iterator[StoredCheckpoint | RejectedCheckpoint]:
        """Versions from the newest on (or those of one step), each with its manifest checked, not its payload."""
        for record in candidates(self.commit_log(), step):
            try:
                yield self.checkpoint(record)
            except DamagedError as err:
                yield RejectedCheckpoint(record.step, record.generation, str(err))

    def checkpoint(self, record: CommitRecord) -> StoredCheckpoint:
        """The version that a line names. Raises ``DamagedError`` with the reason where it is not (all) there, and
        ``PoolIOError`` where there is no memory to look."""
        with as_io_error(f"The version of step {record.step} in the pool {self.path!r} cannot be read"):
            return self._checkpoint(record)

    def _checkpoint(self, record: CommitRecord) -> StoredCheckpoint:
        sb = self.superblock
        if self.is_reused(record):
            raise DamagedError(
                STRUCK_REASON if self._is_struck(record.slot) else "its slot was reused by a newer version"
            )
        if record.manifest_nbytes > sb.manifest_nbytes:
            raise DamagedError("its manifest is larger than the place for it")
        if not self._fits_on_medium(record.manifest_nbytes):
            raise DamagedError("its manifest is larger than all that the file holds")
        manifest = self.read(sb.manifest_at(record.slot, record.manifest_index), record.manifest_nbytes)
        if len(manifest) != record.manifest_nbytes or manifest_hash(sb.uuid, manifest) != record.manifest_hash:
            raise DamagedError("its manifest does not match the commit line")
        header = ManifestHeader.unpack(manifest)
        identity = (header.generation, header.step, header.slot, header.table_hash)
        if identity != (record.payload_generation, record.step, record.slot, sb.table_hash):
            raise DamagedError("its manifest belongs to another version")
        return StoredCheckpoint(self, record, header, manifest)

    def close(self) -> None:
        """Reads fail from here on: also those that went by addresses."""
        self.source = -1, *self.source[1:]
        self.container.close()


@dataclass(frozen=True, slots=True)
class RejectedCheckpoint:
    """A version that was passed over, and why."""

    step: int
    generation: int
    reason: str

    def __str__(self) -> str:
        return f"step {self.step} (generation {self.generation}): {self.reason}"


class StoredCheckpoint:
    """One committed version: its manifest is checked, its payload is verified as it is read."""

    def __init__(self, reader: PoolReader, record: CommitRecord, header: ManifestHeader, manifest: bytes) -> None:
        self.reader = reader
        self.record = record
        self.header = header
        sb = reader.superblock
        if header.n_table != len(reader.entries):
            raise DamagedError("its manifest counts on another layout")
        extras = layout.decode_extras(
            manifest[header.extras_offset : header.extras_offset + header.extras_nbytes],
            low=sb.reserve_offset,
            high=sb.slot_nbytes,
        )
        if header.n_records != header.n_table + len(extras):
            raise DamagedError("its manifest has a wrong number of records")
        self.records = np.frombuffer(manifest, TENSOR_RECORD_DTYPE, header.n_records, offset=128)
        self.crcs = np.frombuffer(manifest, "<u4", header.crcs_count, offset=header.crcs_offset)
        self.state = manifest[header.state_offset : header.state_offset + header.state_nbytes]
        self.extras = extras
        self._all = reader.entries + extras
        self._index = self._present()
        self.entries: dict[str, Entry] = {name: self._all[number] for name, number in self._index.items()}
        """The tensors of this version by name."""
        layout.check_ties(self.entries)

    def _present(self) -> dict[str, int]:
        """name -> record number of every tensor in this version, each checked against layout and bounds."""
        block, n_crcs, present = self.reader.superblock.block, len(self.crcs), {}
        columns = (self.records[name].tolist() for name in ("generation", "offset", "crc"))
        for number, (entry, generation, offset, crc) in enumerate(zip(self._all, *columns, strict=True)):
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
        return self.header.iteration

    def read_into(self, name: str, address: int) -> None:
        """Verified bytes of one tensor to ``address`` (0: verify only). Raises ``DamagedError`` at a bad block."""
        number = self._index[name]
        entry, record = self._all[number], self.records[number]
        if not entry.nbytes:
            return
        bad = ffi.new("uint64_t *")
        first_crc = self.crcs.ctypes.data + 4 * int(record["crc"])
        status = lib.lck_read_verified(
            *self.reader.source,
            self._base + entry.offset,
            ffi.cast("void *", address),
            entry.nbytes,
            self.reader.superblock.block,
            ffi.cast("uint32_t *", first_crc),
            *uuid_words(self.header.origin),
            number,
            int(record["generation"]),
            bad,
        )
        self._refuse_bad(status, name, bad[0])

    def read_many(self, places: Sequence[tuple[str, int]]) -> None:
        """The same for many tensors, whose memory does not overlap, on as many threads as there are processors. Of bad
        blocks the first is told, in this order."""
        if not places:
            return
        numbers = [self._index[name] for name, _ in places]
        nbytes = [self._all[number].nbytes for number in numbers]
        threads = read_threads() if sum(nbytes) >= PARALLEL_READ_NBYTES_MIN else 1
        records = self.records[numbers]
        reads = np.zeros(len(places), READ_DTYPE)
        reads["off"] = records["offset"] + np.uint64(self._base)
        reads["dst"] = [address for _, address in places]
        reads["nbytes"] = nbytes
        reads["crcs"] = np.uint64(self.crcs.ctypes.data) + np.uint64(4) * records["crc"]
        reads["tensor"] = numbers
        reads["generation"] = records["generation"]
        bad = ffi.new("uint64_t[2]")
        status = lib.lck_read_many(
            *self.reader.source,
            ffi.cast("lck_read *", reads.ctypes.data),
            len(reads),
            self.reader.superblock.block,
            *uuid_words(self.header.origin),
            threads,
            bad,
            bad + 1,
        )
        self._refuse_bad(status, places[bad[0]][0], bad[1])

    @property
    def _base(self) -> int:
        """Where its slot begins in the pool."""
        return self.reader.superblock.slots[self.record.slot][0]

    def _refuse_bad(self, status: int, name: str, block: int) -> None:
        if status == lib.LCK_ECHECKSUM:
            raise DamagedError(f"block {block} of {name!r} does not match its checksum")
        if status == lib.LCK_ESHORT or is_medium_error(_native.errno_of(status)):
            raise DamagedError(f"block {block} of {name!r} cannot be read: {_native.reason(status)}")
        if status != lib.LCK_OK:
            fact = f"{name!r} in the pool {self.reader.path!r} cannot be read"
            raise io_error(fact, _native.errno_of(status), _native.reason(status))

    def is_intact(self) -> bool:
        """Whether the slot still holds this version: it may be in use by a writer."""
        return not self.reader.is_reused(self.record)

    def verify(self) -> None:
        """Read and verify every block. Raises ``DamagedError``."""
        self.read_many([(name, 0) for name in self._index])
        if not self.is_intact():
            raise DamagedError("its slot was reused while it was read")


def read_threads() -> int:
    """Threads on which much is read."""
    return min(len(os.sched_getaffinity(0)), THREADS_MAX)


def open_pool(path: str, backend: str = "auto", *, write: bool = False) -> PoolReader:
    """Open an existing pool for reading (``write``: its container may be written afterwards)."""
    from lightck.pool.storage.backends import backend_for

    emulation.active_profile()  # verified reads follow it
    kind = backend_for(path, backend)
    if write:  # looked at first: a backend that opens for writing changes things of its own in the file
        with contextlib.closing(_read(kind.open(path, write=False), path)) as reader:
            refuse_unwritable(reader)
    return _read(kind.open(path, write=write), path)


def _read(container: Container, path: str) -> PoolReader:
    with undo_on_error(container.close):
        return PoolReader(container, path)


def refuse_unwritable(reader: PoolReader) -> None:
    """Whether a training may go on in a pool that can be read: asked before anything in it, or in a model, is changed.
    Raises ``FormatError``, ``CorruptPoolError``."""
    if not reader.is_writable:
        raise FormatError(
            f"{reader.path!r}: the pool uses features ({reader.superblock.ro_compat:#x}) that this lightck can "
            "read but not write. It was written by a newer lightck. Install that version to go on in it; "
            "lightck.recover() reads it."
        )
    generations = (reader.slot_generation(slot) or 0 for slot in range(len(reader.superblock.slots)))
    highest = max(reader.commit_log().highest_number, *generations)
    if highest >= RESUMABLE_NUMBER_MAX:
        raise CorruptPoolError(
            f"The pool {reader.path!r} has counted up to {highest}, and its numbers end at {NUMBER_MAX}. No training "
            "comes so far: it is damaged, or was made to look like this. lightck.recover() reads it; train into "
            "another pool, or overwrite=True discards it."
        )
