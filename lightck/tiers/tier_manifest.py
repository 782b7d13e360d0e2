"""The manifest of one checkpoint of one rank in a tier: which objects hold which bytes of the pool.

It is JSON of at most ``MANIFEST_NBYTES_MAX`` bytes. The checkpoint keeps the form that it had in its pool: the
superblock, the layout table, the pool's own manifest with the checksums of all blocks, and the payload. So a pool is
made again from the objects byte by byte, and it verifies by the checksums that the training computed, not by new ones.

An object of tensors may be compressed (``codecs.py``). The offsets of runs are those in the piece that it was made
from.

A manifest is untrusted input. ``parse`` checks every number before anything is allocated for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    SUPERBLOCK_NBYTES,
    CommitRecord,
    DamagedError,
    Superblock,
)
from lightck.tiers.codecs import Coding, parsed_coding
from lightck.tiers.names import ManifestName, ObjectName, Writer
from lightck.tiers.names import parse as parse_name
from lightck.tiers.store import Store

MANIFEST_NBYTES_MAX = 64 << 20
OBJECT_NBYTES_MAX = 32 << 20
"""The largest object; but a layout table, and a pool's manifest, are one object each."""
TABLE_NBYTES_MAX = 1 << 30
FORMAT = "lightck tier checkpoint"
VERSION, VERSION_WITH_CODECS = 1, 2
"""The second one only if an object is compressed, so that releases that cannot read such an object refuse it."""
_KEYS = {
    "format",
    "version",
    "written_by",
    "claim",
    "incarnation",
    "superblock",
    "record",
    "table",
    "objects",
    "runs",
    "metrics",
}


class SentObject(NamedTuple):
    """An object, and what it was made from."""

    name: ObjectName
    nbytes: int
    key: str
    """Hash that identifies the tensors from which its bytes were made, and their state (``sending.py``); empty if they
    are no tensors. Objects with the same key were made from the same bytes."""
    coding: Coding | None = None
    """How it was compressed; None: it was not."""

    @property
    def content_nbytes(self) -> int:
        """Bytes of the piece that it was made from."""
        return self.nbytes if self.coding is None else self.coding.nbytes

    def packed(self) -> list[object]:
        found: list[object] = [f"{self.name.content}-{self.name.nonce}", self.nbytes, self.key]
        return found if self.coding is None else [*found, *self.coding]


class Run(NamedTuple):
    """Bytes of the pool that lie in an object."""

    offset: int
    """In the pool."""
    nbytes: int
    object: int
    """Number of the object."""
    begin: int
    """Offset in the piece that the object was made from."""


@dataclass(frozen=True)
class TierManifest:
    """What a manifest says."""

    written_by: str
    """Release of lightck."""
    claim: str
    """The claim that the checkpoint itself names (``pool/format/saved_by.py``); empty if it names none. It need not be
    the one below which the manifest lies: ``lightck copy`` makes claims that the training does not know, and a drain
    may send the checkpoint from which its training went on."""
    incarnation: int
    superblock: bytes
    record: CommitRecord
    table: int
    """Number of the object that is the layout table."""
    objects: tuple[SentObject, ...]
    runs: tuple[Run, ...]
    metrics: dict[str, float]

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(run.nbytes for run in self.runs if self.objects[run.object].key)

    @property
    def codecs(self) -> set[str]:
        """With what its objects are compressed."""
        return {each.coding.codec for each in self.objects if each.coding is not None}

    def packed(self) -> bytes:
        uuid = Superblock.unpack(self.superblock).uuid
        body = {
            "format": FORMAT,
            "version": VERSION_WITH_CODECS if self.codecs else VERSION,
            "written_by": self.written_by,
            "claim": self.claim,
            "incarnation": self.incarnation,
            "superblock": self.superblock.hex(),
            "record": self.record.pack(uuid).hex(),
            "table": self.table,
            "objects": [each.packed() for each in self.objects],
            "runs": self.runs,
            "metrics": {name: float(value) for name, value in self.metrics.items()},
        }
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def read_manifest(store: Store, name: ManifestName) -> TierManifest:
    """Read and check a manifest. Raises ``DamagedError`` with the reason, and ``TierError``."""
    try:
        data = store.get(str(name), MANIFEST_NBYTES_MAX)
    except FileNotFoundError:
        raise DamagedError("its manifest is gone") from None
    return parse(data, name.writer, name.step)


def parse(data: bytes, writer: Writer, step: int) -> TierManifest:
    """Parse and check the manifest of ``step`` that ``writer`` has written. Raises ``DamagedError`` with the reason."""
    body = _json(data)
    superblock_bytes = _hex(body, "superblock", SUPERBLOCK_NBYTES)
    try:
        superblock = Superblock.unpack(superblock_bytes)
    except ValueError as err:  # of a newer format, or no superblock
        raise DamagedError(f"its superblock cannot be read: {err}") from err
    record = CommitRecord.unpack(_hex(body, "record", COMMIT_RECORD_NBYTES), superblock.uuid)
    if record is None or record.step != step:
        raise DamagedError("its commit record is damaged, or of another step")
    has_codecs = body["version"] == VERSION_WITH_CODECS
    objects = tuple(_object(each, writer, has_codecs=has_codecs) for each in _list(body, "objects"))
    manifest = TierManifest(
        _text(body, "written_by"),
        _text(body, "claim"),
        _number(body.get("incarnation"), "incarnation"),
        superblock_bytes,
        record,
        _number(body.get("table"), "table"),
        objects,
        tuple(_run(each) for each in _list(body, "runs")),
        _metrics(body.get("metrics")),
    )
    _check_places(manifest, superblock)
    return manifest


def _check_places(manifest: TierManifest, superblock: Superblock) -> None:
    """Raise ``DamagedError`` unless the table is an object, and each run lies in its object and in the slot of the
    checkpoint, where no two overlap."""
    sizes = [each.content_nbytes for each in manifest.objects]
    if manifest.table >= len(sizes) or sizes[manifest.table] != superblock.table_nbytes:
        raise DamagedError("it names no layout table")
    if manifest.record.slot >= len(superblock.slots):
        raise DamagedError("its pool has no such slot")
    begin, nbytes = superblock.slots[manifest.record.slot]
    last = begin
    for run in sorted(manifest.runs):
        if run.object >= len(sizes) or run.begin + run.nbytes > sizes[run.object]:
            raise DamagedError("it names bytes outside of an object")
        if run.offset < last or run.offset + run.nbytes > begin + nbytes:
            raise DamagedError("it names bytes outside of its slot, or twice")
        last = run.offset + run.nbytes


def _json(data: bytes) -> dict[str, Any]:
    if len(data) > MANIFEST_NBYTES_MAX:
        raise DamagedError(f"it has more than {MANIFEST_NBYTES_MAX} bytes")
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as err:
        raise DamagedError("it is not JSON") from err
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DamagedError("it is no manifest of a tier")
    if body.get("version") not in (VERSION, VERSION_WITH_CODECS):
        raise DamagedError("it has a format that this release of lightck does not read: install a newer release")
    if set(body) != _KEYS:
        raise DamagedError("it has other fields than a manifest of a tier")
    return body


def _refuse_constant(text: str) -> float:
    raise ValueError(text)


def _number(value: object, what: str, most: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise DamagedError(f"its {what} is no number, or too large")
    return value


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if type(value) is not str or len(value) > 100:
        raise DamagedError(f"its {key} is no short text")
    return value


def _hex(body: dict[str, Any], key: str, nbytes: int) -> bytes:
    value = body.get(key)
    try:
        found = bytes.fromhex(value) if type(value) is str and len(value) == 2 * nbytes else b""
    except ValueError:
        found = b""
    if len(found) != nbytes:
        raise DamagedError(f"its {key} is not {nbytes} bytes")
    return found


def _list(body: dict[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if not isinstance(value, list):
        raise DamagedError(f"its {key} are no list")
    return value


def _object(value: object, writer: Writer, *, has_codecs: bool) -> SentObject:
    lengths = (3, 5) if has_codecs else (3,)
    if not isinstance(value, list) or len(value) not in lengths or not all(type(value[at]) is str for at in (0, 2)):
        raise DamagedError("an object in it is malformed")
    name = parse_name(f"{writer}/data/{value[0]}")
    if not isinstance(name, ObjectName) or len(value[2]) > 64:
        raise DamagedError("an object in it has a malformed name or key")
    coding = parsed_coding(value[3], value[4], OBJECT_NBYTES_MAX) if len(value) == 5 else None
    found = SentObject(name, _number(value[1], "object", TABLE_NBYTES_MAX), value[2], coding)
    if coding is not None and found.nbytes >= coding.nbytes:
        raise DamagedError("an object in it is not smaller than what it was made from")
    return found


def _run(value: object) -> Run:
    if not isinstance(value, list) or len(value) != len(Run._fields):
        raise DamagedError("a run in it is malformed")
    return Run(*(_number(each, "run") for each in value))


def _metrics(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or not all(type(each) is float for each in value.values()):
        raise DamagedError("its metrics are no numbers")
    return value


def joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs, with those joined that follow each other both in the pool and in an object."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if (
            last is not None
            and last.object == run.object
            and last.offset + last.nbytes == run.offset
            and last.begin + last.nbytes == run.begin
        ):
            found[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
        else:
            found.append(run)
    return tuple(found)
