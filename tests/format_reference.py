"""A second reader of pools, written from docs/format.md alone: plain Python, no lightck, no native code, no numpy.

It is slow and exact. Where it and the library disagree, one of the two or the document is wrong.
"""

from __future__ import annotations

import collections
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

MASK = 2**64 - 1


# -- checksums -------------------------------------------------------------------------------------------------------


def _table(poly: int) -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (poly if crc & 1 else 0)
        table.append(crc)
    return table


_CRC32C, _CRC64 = _table(0x82F63B78), _table(0xC96C5795D7870F42)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC32C[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def crc64(data: bytes) -> int:
    crc = MASK
    for byte in data:
        crc = (crc >> 8) ^ _CRC64[(crc ^ byte) & 0xFF]
    return crc ^ MASK


def _m(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def seed(uuid: bytes, tensor: int, generation: int, index: int) -> int:
    low, high = struct.unpack("<QQ", uuid)
    return _m(_m(_m(_m(_m(low) ^ high) ^ tensor) ^ generation) ^ index) & 0xFFFFFFFF


# -- MessagePack -----------------------------------------------------------------------------------------------------


class MessagePack:
    """The subset of MessagePack that a pool uses, decoded."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    @classmethod
    def decode(cls, data: bytes) -> Any:
        reader = cls(data)
        value = reader.value()
        assert reader.at == len(data), "bytes are left"
        return value

    def take(self, n: int) -> bytes:
        part = self.data[self.at : self.at + n]
        assert len(part) == n, "the data ends early"
        self.at += n
        return part

    def number(self, form: str) -> Any:
        return struct.unpack(">" + form, self.take(struct.calcsize(form)))[0]

    def value(self) -> Any:
        code = self.number("B")
        if code < 0x80:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code < 0x90:
            return self.map(code & 0x0F)
        if code < 0xA0:
            return self.array(code & 0x0F)
        if code < 0xC0:
            return self.take(code & 0x1F).decode()
        return self.long(code)

    def long(self, code: int) -> Any:
        simple = {0xC0: None, 0xC2: False, 0xC3: True}
        if code in simple:
            return simple[code]
        numbers = {0xCB: "d", 0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
        if code in numbers:
            return self.number(numbers[code])
        sizes = {0xC4: "B", 0xC5: "H", 0xC6: "I", 0xD9: "B", 0xDA: "H", 0xDB: "I"}
        if code in sizes:
            raw = self.take(self.number(sizes[code]))
            return raw if code < 0xD0 else raw.decode()
        if code in (0xDC, 0xDD):
            return self.array(self.number("HI"[code - 0xDC]))
        if code in (0xDE, 0xDF):
            return self.map(self.number("HI"[code - 0xDE]))
        fixed = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
        n = fixed[code] if code in fixed else self.number({0xC7: "B", 0xC8: "H", 0xC9: "I"}[code])
        kind = self.number("b")
        return extended(kind, MessagePack.decode(self.take(n)))

    def array(self, n: int) -> list[Any]:
        return [self.value() for _ in range(n)]

    def map(self, n: int) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(n)}


@dataclass(frozen=True)
class Raw:
    """A numpy array or scalar, a small tensor (``shape`` None: a scalar) or the name of a large one."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    data: bytes = b""
    name: str = ""


def extended(code: int, value: Any) -> Any:
    """The table under "Small state"."""
    if code == 1:
        return tuple(value)
    if code in (2, 3, 4, 5):
        pairs = [(k, v) for k, v in value]
        kinds = {2: dict, 3: collections.OrderedDict, 4: lambda p: collections.Counter(dict(p))}
        return kinds[code](pairs) if code in kinds else collections.defaultdict(None, pairs)
    if code in (6, 13):
        return set(value) if code == 6 else frozenset(value)
    if code == 7:
        return collections.deque(value[1], value[0])
    if code == 8:
        return int.from_bytes(value, "little", signed=True)
    if code == 9:
        return Raw("array", value[0], tuple(value[1]), value[2])
    if code == 10:
        return Raw("scalar", value[0], None, value[1])
    if code == 11:
        return Raw("tensor", value[0], tuple(value[1]), value[2])
    assert code == 12, f"extension type {code}"
    return Raw("large", name=value)


# -- the pool --------------------------------------------------------------------------------------------------------


def split(names: str) -> list[str]:
    return names.split()


SUPERBLOCK = struct.Struct("<8sIHHQQQ16sQQIIQQQ16sQQQQQII")
SUPERBLOCK_FIELDS = split(
    "magic endian major minor compat ro_compat incompat uuid nbytes ring_offset ring_lines ring_stride table_a table_b "
    "table_nbytes table_hash block manifest_offset manifest_nbytes payload_offset reserve_offset regions zero"
)
LINE = struct.Struct("<QQQQQIBBBBQQ")
COMMIT_RECORD_FIELDS = split(
    "generation incarnation step payload_generation manifest_hash manifest_nbytes kind slot manifest_index zero_a "
    "zero_b check"
)
HEADER = struct.Struct("<Q8sII32sQ")
HEADER_FIELDS = split("generation magic slot zero zeros check")
NEXT = struct.Struct("<8sQII")
NEXT_FIELDS = split("magic generation entries zero")
MANIFEST = struct.Struct("<8sQQQQ16s16sIIQQIIIIIIII")
MANIFEST_FIELDS = split(
    "magic generation incarnation step iteration table_hash origin records table_records records_offset record_nbytes "
    "crcs_offset crcs_count extras_offset extras_nbytes state_offset state_nbytes slot zero"
)
RECORD = struct.Struct("<QQQII")
RECORD_FIELDS = split("generation step offset crc zero")

Fields = dict[str, Any]


def fields(form: struct.Struct, names: list[str], data: bytes, at: int = 0) -> Fields:
    return dict(zip(names, form.unpack_from(data, at), strict=True))


@dataclass
class Checkpoint:
    """One checkpoint that was verified in every block."""

    record: Fields
    manifest: Fields
    records: list[Fields]
    crcs: list[int]
    extras: list[Fields]
    tensors: dict[str, bytes]
    aliases: dict[str, str]
    state: Any


def contained(data: bytes) -> bytes:
    """The pool in a PMDK pool, put together from its arenas; what is no PMDK pool, as it is."""
    if data[:8] != b"PMEMOBJ\0":
        return data
    assert struct.unpack_from("<I", data, 8) == (6,)
    uuids = [data[at : at + 16] for at in range(40, 120, 16)]
    assert uuids == 5 * uuids[:1]
    assert data[4096:5120] == b"lightck/1".ljust(1024, b"\0")
    (root,), (root_nbytes,) = struct.unpack_from("<Q", data, 6144), struct.unpack_from("<Q", data, 6160)
    raw = data[root : root + root_nbytes]
    magic, version, count, nbytes, file_nbytes = struct.unpack_from("<8sIIQQ", raw)
    assert (magic, version, file_nbytes) == (b"LCKPMDK1", 1, len(data))
    end = 32 + 32 * count
    assert struct.unpack_from("<Q", raw, end)[0] == crc64(raw[:end])
    assert not raw[end + 8 :].strip(b"\0")
    parts = []
    for i in range(count):
        _, offset, start, length = struct.unpack_from("<QQQQ", raw, 32 + 32 * i)
        assert start == -(-(offset + 4096) // (1 << 21)) * (1 << 21)
        parts.append(data[start : start + length])
    pool = b"".join(parts)
    assert len(pool) == nbytes
    return pool


class Pool:
    """A whole pool, read from its bytes. Raises ``AssertionError`` where no part of it can be trusted."""

    def __init__(self, data: bytes) -> None:
        self.data = data = contained(data)
        self.superblock, self.slots = self._superblock()
        self.group: Fields | None = None
        self.entries = self._table()
        self.damaged: list[int] = []
        self.records = self._lines()

    def _superblock(self) -> tuple[Fields, list[tuple[int, int]]]:
        for at in (0, 4096):
            raw = self.data[at : at + 4096]
            if raw[:8] == b"LIGHTCK\x01" and struct.unpack("<Q", raw[4088:])[0] == crc64(raw[:4088]):
                break
        else:
            raise AssertionError("no superblock")
        sb = fields(SUPERBLOCK, SUPERBLOCK_FIELDS, raw)
        assert (sb["endian"], sb["major"], sb["zero"]) == (0x01020304, 1, 0)
        assert sb["nbytes"] == len(self.data)
        assert not raw[168 + 32 * sb["regions"] : 4088].strip(b"\0")
        regions = [struct.unpack_from("<IIQQQ", raw, 168 + 32 * i) for i in range(sb["regions"])]
        return sb, self._slots(sb, regions)

    def _slots(self, sb: Fields, regions: list[tuple[int, ...]]) -> list[tuple[int, int]]:
        assert sb["incompat"] in (0, 1, 3)
        for i, (kind, index, offset, nbytes, zero) in enumerate(regions):
            assert (kind, index, zero) == (1, i, 0)
            assert offset % (1 << 21) == nbytes % (1 << 21) == 0
        return [region[2:4] for region in regions]

    def _table(self) -> list[Fields]:
        sb = self.superblock
        for at in (sb["table_a"], sb["table_b"]):
            table = self.data[at : at + sb["table_nbytes"]]
            if blake2b(table, digest_size=16).digest() == sb["table_hash"]:
                decoded = MessagePack.decode(table)
                assert list(decoded) == (["group", "entries"] if sb["incompat"] & 1 else ["entries"])
                self.group = decoded.get("group")
                return list(decoded["entries"])
        raise AssertionError("no layout table")

    def _lines(self) -> dict[int, Fields]:
        found, sb = {}, self.superblock
        for i in range(sb["ring_lines"]):
            at = sb["ring_offset"] + i * sb["ring_stride"]
            raw = self.data[at : at + 64]
            incomplete = raw[:8] == bytes(8)
            if incomplete:
                raw = raw[24:32] + raw[8:]
            record = fields(LINE, COMMIT_RECORD_FIELDS, raw)
            if incomplete and (not any(raw) or crc64(sb["uuid"] + raw[:56]) != record["check"]):
                continue
            if crc64(sb["uuid"] + raw[:56]) != record["check"]:
                self.damaged.append(i)
                continue
            assert record["kind"] in (1, 2)
            assert max(record[n] for n in ("generation", "incarnation", "step", "payload_generation")) < 2**63
            assert record["zero_a"] == record["zero_b"] == 0
            found[i] = record
        return found

    def slot_generation(self, slot: int) -> int | None:
        raw = self.data[self.slots[slot][0] :][:64]
        header = fields(HEADER, HEADER_FIELDS, raw)
        if crc64(self.superblock["uuid"] + raw[:56]) != header["check"]:
            return None
        assert (header["magic"], header["slot"], header["zero"], header["zeros"]) == (b"LCKSLOT1", slot, 0, bytes(32))
        return int(header["generation"])

    def next_batches(self, slot: int) -> list[tuple[bytes, int, int]] | None:
        """Key, kind and checksum of what followed the checkpoint in a slot; None where nothing is recorded of it."""
        raw = self.data[self.slots[slot][0] + 2048 :][:2048]
        record = fields(NEXT, NEXT_FIELDS, raw)
        end = 24 + 16 * record["entries"]
        if not self.superblock["compat"] & 1 or record["magic"] != b"LCKNEXT1" or record["entries"] > 126:
            return None
        if crc64(self.superblock["uuid"] + raw[:end]) != struct.unpack_from("<Q", raw, end)[0]:
            return None
        assert record["zero"] == 0
        if record["generation"] != self.slot_generation(slot):
            return None
        return [struct.unpack_from("<8sII", raw, at) for at in range(24, end, 16)]

    def candidates(self) -> list[Fields]:
        """Live lines, newest first."""
        records = list(self.records.values())
        adoptions = [a for a in records if a["kind"] == 2]
        live = [
            ln
            for ln in records
            if not any(a["payload_generation"] < ln["generation"] < a["generation"] for a in adoptions)
        ]
        return sorted(live, key=lambda ln: (ln["incarnation"], ln["generation"]), reverse=True)

    def checkpoints(self) -> list[Checkpoint]:
        """What verifies, newest first; a checkpoint that is named by two lines comes twice."""
        found = []
        for record in self.candidates():
            checkpoint = self.checkpoint(record)
            if checkpoint is not None:
                found.append(checkpoint)
        return found

    def checkpoint(self, record: Fields) -> Checkpoint | None:
        sb = self.superblock
        if (self.slot_generation(record["slot"]) or 0) > record["payload_generation"]:
            return None
        base = self.slots[record["slot"]][0]
        at = base + sb["manifest_offset"] + record["manifest_index"] * sb["manifest_nbytes"]
        raw = self.data[at : at + record["manifest_nbytes"]]
        if crc64(sb["uuid"] + raw) != record["manifest_hash"]:
            return None
        manifest = fields(MANIFEST, MANIFEST_FIELDS, raw)
        assert manifest["magic"] == b"LCKMANI1"
        assert manifest["table_hash"] == sb["table_hash"]
        assert (manifest["generation"], manifest["slot"]) == (record["payload_generation"], record["slot"])
        assert manifest["zero"] == 0
        return self._read(record, manifest, raw, base)

    def _read(self, record: Fields, manifest: Fields, raw: bytes, base: int) -> Checkpoint | None:
        def part(name: str) -> bytes:
            at = manifest[f"{name}_offset"]
            return raw[at : at + manifest[f"{name}_nbytes"]]

        extras = MessagePack.decode(part("extras")) if manifest["extras_nbytes"] else []
        entries = [*self.entries, *extras]
        assert manifest["table_records"] == len(self.entries)
        assert manifest["records"] == len(entries)
        at, step = manifest["records_offset"], manifest["record_nbytes"]
        records = [fields(RECORD, RECORD_FIELDS, raw, at + i * step) for i in range(len(entries))]
        crcs = list(struct.unpack_from(f"<{manifest['crcs_count']}I", raw, manifest["crcs_offset"]))
        checkpoint = Checkpoint(record, manifest, records, crcs, extras, {}, {}, MessagePack.decode(part("state")))
        for number, (entry, record) in enumerate(zip(entries, records, strict=True)):
            if record["generation"] == 0:
                continue
            assert record["zero"] == 0
            assert record["offset"] == entry["offset"]
            assert entry["name"] not in checkpoint.tensors
            if entry["alias"] is not None:
                checkpoint.aliases[entry["name"]] = entry["alias"]
                continue
            bytes_ = self.data[base + entry["offset"] :][: entry["nbytes"]]
            if not self._verifies(bytes_, number, record, manifest["origin"], crcs):
                return None
            checkpoint.tensors[entry["name"]] = bytes_
        return checkpoint

    def _verifies(self, data: bytes, tensor: int, record: Fields, origin: bytes, crcs: list[int]) -> bool:
        block = self.superblock["block"]
        return all(
            crc32c(data[at : at + block]) ^ seed(origin, tensor, record["generation"], at // block)
            == crcs[record["crc"] + at // block]
            for at in range(0, len(data), block)
        )


# -- pools with gradient records -------------------------------------------------------------------------------------

HOME_ROW_FIELDS = split("generation step offset crc home")
PART = struct.Struct("<8sIIIIQ")
CHAIN = struct.Struct("<QQQIBBH")
CHAIN_FIELDS = split("step generation manifest_hash manifest_nbytes slot manifest_index flags")


@dataclass
class GradientCheckpoint:
    """A gradient record and what its manifest names, verified in every block. Of a checkpoint that is not the newest,
    bases may be missing."""

    manifest: Fields
    chain: list[Fields]
    bases: dict[str, tuple[int, bytes]]
    """Name -> the newest step whose state the base is, and its bytes."""
    older: dict[str, tuple[int, bytes]]
    record: dict[str, bytes]
    sentinels: list[int]


class GradientPool(Pool):
    """The same for a pool with the incompat flag 4, where no tensor is tied and none appeared later."""

    def _slots(self, sb: Fields, regions: list[tuple[int, ...]]) -> list[tuple[int, int]]:
        assert sb["incompat"] & 4
        (kind, index, offset, nbytes, count), *homes = regions
        assert (kind, index) == (1, 0)
        assert 2 <= count <= 255
        assert [(home[0], home[1], home[4]) for home in homes] == [(2, 0, 0), (2, 1, 0)]
        assert len({home[3] for home in homes}) == 1
        self.homes = [home[2] for home in homes]
        slots = [(offset + i * nbytes, nbytes) for i in range(count)]
        places = [(home[2], home[2] + home[3]) for home in homes] + [(at, at + n) for at, n in slots]
        assert all(a[1] <= b[0] for a, b in zip(sorted(places), sorted(places)[1:], strict=False))
        assert 8 <= sb["ring_lines"] <= 64
        return slots

    def named(self, named: Fields) -> GradientCheckpoint:
        """What a commit record or a chain entry names."""
        sb = self.superblock
        base = self.slots[named["slot"]][0]
        at = base + sb["manifest_offset"] + named["manifest_index"] * sb["manifest_nbytes"]
        raw = self.data[at : at + named["manifest_nbytes"]]
        assert crc64(sb["uuid"] + raw) == named["manifest_hash"]
        assert self.slot_generation(named["slot"]) == named.get("payload_generation", named["generation"])
        manifest = fields(MANIFEST, MANIFEST_FIELDS, raw)
        assert (manifest["step"], manifest["table_hash"]) == (named["step"], sb["table_hash"])
        crcs = list(struct.unpack_from(f"<{manifest['crcs_count']}I", raw, manifest["crcs_offset"]))
        older, older_crcs, chain, sentinels = self._part(manifest, raw)
        found = GradientCheckpoint(manifest, chain, {}, {}, {}, sentinels)
        in_homes = [number for number, entry in enumerate(self.entries) if entry["place"] == "home"]
        for number, entry in enumerate(self.entries):
            row = fields(RECORD, HOME_ROW_FIELDS, raw, 128 + 32 * number)
            if row["generation"] == 0:
                continue
            assert row["offset"] == entry["offset"]
            assert (entry["role"] == "gradient") == entry["name"].startswith("gradient/")
            if entry["place"] == "home":
                self._add(found.bases, number, row, manifest, crcs)
                before = older[in_homes.index(number)]
                assert before["generation"] == 0 or before["home"] == 1 - row["home"]
                self._add(found.older, number, before, manifest, older_crcs)
            else:
                data = self.data[base + entry["offset"] :][: entry["nbytes"]]
                assert self._verifies(data, number, row, manifest["origin"], crcs)
                found.record[entry["name"]] = data
        return found

    def _add(
        self, bases: dict[str, tuple[int, bytes]], number: int, row: Fields, manifest: Fields, crcs: list[int]
    ) -> None:
        """Add a base, unless it was overwritten since the checkpoint."""
        entry = self.entries[number]
        data = self.data[self.homes[row["home"]] + entry["offset"] :][: entry["nbytes"]]
        if row["generation"] and self._verifies(data, number, row, manifest["origin"], crcs):
            bases[entry["name"]] = row["step"], data

    def _part(self, manifest: Fields, raw: bytes) -> tuple[list[Fields], list[int], list[Fields], list[int]]:
        """Older bases, their checksums, chain, sentinels."""
        at = -(-(manifest["state_offset"] + manifest["state_nbytes"]) // 8) * 8
        magic, n_older, n_crcs, n_chain, n_sentinels, zero = PART.unpack_from(raw, at)
        assert (magic, zero) == (b"LCKGRAD1", 0)
        assert n_older == sum(entry["place"] == "home" for entry in self.entries)
        at += 32
        older = [fields(RECORD, HOME_ROW_FIELDS, raw, at + 32 * i) for i in range(n_older)]
        at += 32 * n_older
        crcs = list(struct.unpack_from(f"<{n_crcs}I", raw, at))
        at += 4 * n_crcs
        chain = [fields(CHAIN, CHAIN_FIELDS, raw, at + 32 * i) for i in range(n_chain)]
        at += 32 * n_chain
        sentinels = list(struct.unpack_from(f"<{n_sentinels}I", raw, at))
        assert at + 4 * n_sentinels == len(raw)
        assert [one["step"] for one in chain] == list(range(manifest["step"] - n_chain, manifest["step"]))
        return older, crcs, chain, sentinels
