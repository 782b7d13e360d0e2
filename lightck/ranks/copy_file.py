"""A peer copy: a file on another host with some checkpoints of a rank's pool.

The file has the bytes of the pool at the same offsets: both superblocks, both layout tables, and the bytes of each
checkpoint that was copied. Everything else in it is a hole, which takes no space. So it is read as any pool is, and
each block is verified with the checksums of the pool.

*Order of writes.* (1) The commit records of what the slot held before are erased. (2) The bytes of the checkpoint are
written. (3) They are read back and verified. (4) The commit record is written. Each of these is durable before the next
one begins. So at every moment each checkpoint whose record is in the file is complete.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress

from lightck.errors import PoolError
from lightck.pool.commit_log import candidates
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    PAGE,
    SUPERBLOCK_OFFSETS,
    CommitRecord,
    DamagedError,
    Superblock,
    layout_hash,
)
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.pool.storage import holes, lock, temporary
from lightck.pool.storage.failures import undo_on_error
from lightck.pool.storage.file import sync_folder
from lightck.ranks.rule import CheckpointId

log = logging.getLogger("lightck")
PEER_COPIES = "peer-copies"
"""Name of the folder in the directory of a host in which the peer copies of other hosts' pools lie."""
_GAP_NBYTES_MAX = 64 << 10
"""Two runs of bytes with a smaller gap between them are copied as one."""

Run = tuple[int, int]
"""Begin and end of bytes in a pool."""


def copies_in(directory: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the peer copies in a host's directory, sorted."""
    folder = os.path.join(directory, PEER_COPIES)
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [os.path.join(folder, name) for name in sorted(names) if name.endswith(".pool")]


def readable_copies(directory: str) -> Iterator[tuple[str, PoolReader]]:
    """Yield path and open reader of each peer copy in a host's directory that can be read. A warning names the others.
    The caller closes the readers."""
    for path in copies_in(directory):
        try:
            yield path, open_pool(path)
        except PoolError as err:
            log.warning("lightck: the peer copy %r cannot be read, and is not used: %s", path, err)


def is_peer_copy(path: str) -> bool:
    """Whether a pool is a peer copy, by the folder in which it lies."""
    return os.path.basename(os.path.dirname(path)) == PEER_COPIES


def id_of(stored: StoredCheckpoint) -> CheckpointId:
    return CheckpointId(stored.header.incarnation, stored.header.step)


def checkpoint_in(reader: PoolReader, checkpoint_id: CheckpointId) -> StoredCheckpoint | None:
    """Return the newest checkpoint with this id in a pool; None if there is none. Its payload is not verified."""
    for record in candidates(reader.commit_log()):
        if record.step == checkpoint_id.step:
            with suppress(DamagedError):
                stored = reader.checkpoint(record)
                if id_of(stored) == checkpoint_id:
                    return stored
    return None


def runs_of(stored: StoredCheckpoint) -> list[Run]:
    """Return the places of all bytes of a checkpoint in its pool: slot header, manifest and payload."""
    sb, record = stored.reader.superblock, stored.record
    base, manifest = sb.slots[record.slot][0], sb.manifest_at(record.slot, record.manifest_index)
    runs = [(base, base + PAGE), (manifest, manifest + record.manifest_nbytes)]
    runs += [_run_of(base, entry) for entry in stored.entries.values() if entry.nbytes]
    joined: list[Run] = []
    for begin, end in sorted(runs):
        if joined and begin - joined[-1][1] < _GAP_NBYTES_MAX:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _run_of(base: int, entry: Entry) -> Run:
    return base + entry.offset, base + entry.offset + entry.nbytes


class CopyFile:
    """An open peer copy. ``path``: its path. Only one process writes it."""

    def __init__(self, path: str) -> None:
        """Raises ``PoolError`` and ``OSError``."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with undo_on_error(lambda: os.close(self._fd)):
            self._reader = open_pool(path)

    @classmethod
    def create(cls, path: str, superblock: bytes, table: bytes) -> CopyFile:
        """Make a peer copy without checkpoints. The file gets its name when it is complete. ``superblock``, ``table``:
        the bytes of the pool. Raises ``DamagedError`` if these do not fit each other, ``PoolError`` and ``OSError``."""
        sb = Superblock.unpack(superblock)
        if layout_hash(table) != sb.table_hash or len(table) != sb.table_nbytes:
            raise DamagedError("its layout table does not match its superblock")
        temporary.remove_stale(path)
        fd, locked = temporary.make(path)
        try:
            os.ftruncate(fd, sb.nbytes)
            copies = [(at, superblock) for at in SUPERBLOCK_OFFSETS] + [(at, table) for at in sb.table_offsets]
            for at, data in copies:
                _write(fd, data, at)
            os.fsync(fd)
            os.rename(temporary.path_of(path), path)
            sync_folder(os.path.dirname(path))
        finally:
            with suppress(OSError):
                os.unlink(temporary.path_of(path))
            lock.unlock_file(locked)
            os.close(fd)
        return cls(path)

    @property
    def uuid(self) -> bytes:
        """The uuid of the pool."""
        return self._reader.superblock.uuid

    def contents(self) -> frozenset[CheckpointId]:
        """The checkpoints whose commit records and manifests are intact."""
        found = set()
        for record in candidates(self._reader.commit_log()):
            with suppress(DamagedError):
                found.add(id_of(self._reader.checkpoint(record)))
        return frozenset(found)

    def has(self, checkpoint_id: CheckpointId, record: CommitRecord) -> bool:
        """Whether the file has this checkpoint, with the bytes that ``record`` of the pool names, and they verify."""
        stored = checkpoint_in(self._reader, checkpoint_id)
        if stored is None or stored.record.manifest_hash != record.manifest_hash:
            return False
        if stored.record.payload_generation != record.payload_generation:
            return False
        with suppress(DamagedError):
            stored.verify()
            return True
        return False

    def begin(self, slot: int, runs: Sequence[Run]) -> None:
        """Prepare the file for a checkpoint in this slot: erase the records of what the slot held, and take the space
        for the bytes. Raises ``DamagedError`` if a run lies outside of the slot, and ``OSError``."""
        sb = self._reader.superblock
        if not 0 <= slot < len(sb.slots):
            raise DamagedError(f"its pool has no slot {slot}")
        begin, end = sb.slots[slot][0], sb.slots[slot][0] + sb.slot_nbytes
        if not all(begin <= low < high <= end for low, high in runs):
            raise DamagedError("its bytes lie outside of its slot")
        self._erase([at for at, one in self._records().items() if one.slot == slot])
        self._punch(slot)
        for low, high in runs:
            os.posix_fallocate(self._fd, low, high - low)

    def write(self, data: bytes | memoryview, at: int) -> None:
        """Write bytes of the checkpoint. Raises ``OSError``."""
        _write(self._fd, data, at)

    def commit(self, checkpoint_id: CheckpointId, record: CommitRecord) -> None:
        """Make the bytes durable, verify them, and write the commit record. Raises ``DamagedError`` if they do not
        verify, ``PoolError`` and ``OSError``."""
        os.fdatasync(self._fd)
        stored = self._reader.checkpoint(record)
        if id_of(stored) != checkpoint_id:
            raise DamagedError("its manifest belongs to another checkpoint")
        stored.verify()
        taken = self._records()
        sb = self._reader.superblock
        position = next(at for at in range(sb.ring_lines) if at not in taken)
        _write(self._fd, record.pack(self.uuid), sb.commit_record_offset(position))
        os.fdatasync(self._fd)

    def drop(self, ids: Collection[CheckpointId]) -> None:
        """Erase these checkpoints, and give their space back. Raises ``OSError``."""
        slots = {}
        for at, record in self._records().items():
            with suppress(DamagedError):
                if id_of(self._reader.checkpoint(record)) in ids:
                    slots[at] = record.slot
        self._erase(list(slots))
        kept = {record.slot for record in self._records().values()}
        for slot in set(slots.values()) - kept:
            self._punch(slot)

    def remove(self) -> None:
        """Close and remove the file."""
        self.close()
        with suppress(OSError):
            os.unlink(self.path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._reader.close()

    def _records(self) -> dict[int, CommitRecord]:
        return dict(self._reader.commit_log().records)

    def _erase(self, positions: Sequence[int]) -> None:
        for at in positions:
            _write(self._fd, bytes(COMMIT_RECORD_NBYTES), self._reader.superblock.commit_record_offset(at))
        if positions:
            os.fdatasync(self._fd)

    def _punch(self, slot: int) -> None:
        """Give the space of a slot back."""
        holes.punch(self._fd, *self._reader.superblock.slots[slot])


def _write(fd: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, at)
        view, at = view[n:], at + n


def uuid_of(path: str) -> bytes | None:
    """Return the uuid of a pool; None if it cannot be opened."""
    with suppress(PoolError), closing(open_pool(path)) as reader:
        return reader.superblock.uuid
    return None
