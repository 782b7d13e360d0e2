"""Changes of a document, drawn at random: what a hostile or a damaged pool may hold, one structure at a time.

Every integer of a structure is set to its edges, to what stands in another place, or beyond the file; lists lie about
their length; names are those that a path, a terminal or a parser would trip over. Most changes are sealed again.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable
from functools import lru_cache

from crash import messages
from crash.document import Document, Manifest, Patch
from crash.messages import BIN, EXT, LIST, MAP, STR, Node
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    MANIFEST_HEADER_NBYTES,
    SUPERBLOCK_OFFSETS,
    TENSOR_RECORD_NBYTES,
)

Change = Callable[[random.Random, Document], None]
EDGES = (
    0,
    1,
    2,
    3,
    63,
    64,
    255,
    256,
    4095,
    4096,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 53) + 1,
    (1 << 62) - 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
NAMES = (
    "",
    "..",
    ".",
    "/",
    "../../../tmp/evil",
    "/etc/passwd",
    "model/../../x",
    "a\0b",
    "model/",
    "optimizer/",
    "state/",
    "\x1b[2J\x1b]0;x\x07",
    "\u202e\u2066",
    "\n\r",
    "x" * 5000,
    "\U0001f4a5" * 300,
    "__metadata__",
    "model/__metadata__",
    "C:\\x",
    "rng/torch",
    "model/0.weight",
    "optimizer/0.weight/momentum_buffer",
    "#2",
)
NOT_TEXT = (b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80", b"\xf8\x88\x80\x80\x80", b"model/\xff")
DTYPES = (
    "float32",
    "int32",
    "bits8",
    "bits1x8",
    "float4_e2m1fn_x2",
    "float8_e8m0fnu",
    "complex32",
    "uint16",
    "quint8",
    "object",
    "<f4",
    "<c8",
    "|b1",
    ">u2",
    "<f2",
    "<m8[ns]",
)


def number(rng: random.Random, old: int, width: int, nbytes: int) -> int:
    """Something to set an unsigned integer of so many bytes to."""
    draws = (
        lambda: rng.choice(EDGES),
        lambda: old + rng.choice((-1, 1, -8, 8, -256, 256, -4096, 4096)),
        lambda: old ^ 1 << rng.randrange(8 * width),
        lambda: nbytes + rng.choice((-4096, -64, -1, 0, 1, 64, 4096)),
        lambda: rng.getrandbits(8 * width),
        lambda: old * rng.choice((2, 3, 1 << 20)),
        lambda: -old - 1,
    )
    return rng.choice(draws)() % (1 << 8 * width)


def word(rng: random.Random, data: bytearray, start: int, end: int, nbytes: int) -> None:
    """Change one aligned integer of a structure, or put another one in its place."""
    if start == end:
        return
    width = rng.choice((1, 2, 4, 4, 8, 8, 8))
    at = rng.randrange(start // width, end // width) * width
    if rng.random() < 0.15:
        other = rng.randrange(start // width, end // width) * width
        data[at : at + width] = data[other : other + width]
        return
    old = int.from_bytes(data[at : at + width], "little")
    data[at : at + width] = number(rng, old, width, nbytes).to_bytes(width, "little")


# -- structures of fixed size ----------------------------------------------------------------------------------------


def superblock(rng: random.Random, doc: Document) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        word(rng, doc.superblock, 8, 168 + 32 * len(doc.base.sb.slots), doc.base.nbytes)
    doc.copies = rng.choice((SUPERBLOCK_OFFSETS, SUPERBLOCK_OFFSETS, SUPERBLOCK_OFFSETS, (0,), (4096,)))


def regions(rng: random.Random, doc: Document) -> None:
    """Slots that overlap, change places, repeat or lie outside."""
    table = [bytes(doc.superblock[168 + 32 * i : 200 + 32 * i]) for i in range(len(doc.base.sb.slots))]
    rng.shuffle(table)
    chosen = [rng.choice(table) for _ in range(rng.choice((0, 1, 2, 3, 8, 9, 122)))]
    packed = bytearray(b"".join(chosen))
    for i in range(len(chosen)):
        if rng.random() < 0.6:
            struct.pack_into("<I", packed, 32 * i + 4, i)
    doc.superblock[168 : 168 + len(packed)] = packed
    struct.pack_into("<I", doc.superblock, 160, rng.choice((len(chosen), len(chosen), 122, 123, (1 << 32) - 1)))


def record(rng: random.Random, doc: Document) -> None:
    word(rng, doc.record(rng.choice(doc.base.checkpoints).position), 0, 56, doc.base.nbytes)


def many_lines(rng: random.Random, doc: Document) -> None:
    """Lines of all kinds in places that had none: adoptions of what never was, the same payload twice."""
    for _ in range(rng.choice((1, 2, 8, 16))):
        data = doc.record(rng.randrange(doc.base.sb.ring_lines))
        data[:] = doc.base.records[rng.choice(doc.base.checkpoints).position]
        struct.pack_into("<Q", data, 0, rng.randrange(1, 40))
        struct.pack_into("<Q", data, 8, rng.choice((0, 1, 2, (1 << 64) - 1)))
        if rng.random() < 0.5:
            data[44] = 2
            struct.pack_into("<Q", data, 24, rng.randrange(1, 40))


def slot_header(rng: random.Random, doc: Document) -> None:
    slot = rng.randrange(len(doc.base.sb.slots))
    if rng.random() < 0.3:
        doc.slot_header(slot)[:] = rng.choice(doc.base.headers)
    else:
        word(rng, doc.slot_header(slot), 0, 56, doc.base.nbytes)


# -- manifests -------------------------------------------------------------------------------------------------------


def _manifest(rng: random.Random, doc: Document) -> Manifest:
    chosen = doc.manifests[0] if rng.random() < 0.7 else rng.choice(doc.manifests)
    chosen.is_changed = True
    return chosen


def manifest_header(rng: random.Random, doc: Document) -> None:
    manifest = _manifest(rng, doc)
    manifest.pack()
    data = bytearray(manifest.header)
    for _ in range(rng.choice((1, 1, 2))):
        word(rng, data, 8, MANIFEST_HEADER_NBYTES, len(manifest.state))
    manifest.over = [(at, bytes(data[at : at + 1])) for at in range(len(data)) if data[at] != manifest.header[at]]


def records(rng: random.Random, doc: Document) -> None:
    manifest = _manifest(rng, doc)
    data = bytearray(manifest.records)
    action = rng.randrange(4)
    if action == 0 and data:
        data = data[: rng.randrange(0, len(data), TENSOR_RECORD_NBYTES)]
    elif action == 1 and data:
        data += data[: rng.randrange(TENSOR_RECORD_NBYTES, len(data) + 1, TENSOR_RECORD_NBYTES)]
    else:
        word(rng, data, 0, len(data), doc.base.sb.slot_nbytes)
    manifest.records = bytes(data)


def checksums(rng: random.Random, doc: Document) -> None:
    manifest = _manifest(rng, doc)
    manifest.crcs = rng.choice((b"", manifest.crcs[:-4], manifest.crcs * 2, manifest.crcs[::-1]))


def state(rng: random.Random, doc: Document) -> None:
    manifest = _manifest(rng, doc)
    manifest.state = changed_tree(rng, manifest.base.state_tree)


def state_bytes(rng: random.Random, doc: Document) -> None:
    manifest = _manifest(rng, doc)
    manifest.state = damaged(rng, manifest.state)


def extras(rng: random.Random, doc: Document) -> None:
    """Entries that the table does not have: those of the table once more, elsewhere, changed or tied."""
    manifest, sb = _manifest(rng, doc), doc.base.sb
    at = sb.reserve_offset
    packed = []
    for node in rng.choices(doc.base.table_tree.children[1].children, k=rng.choice((1, 1, 2, 5))):
        entry = dict(zip((c.raw for c in node.children[::2]), node.children[1::2], strict=True))
        changes = {entry[messages.text("offset")].first: messages.integer(at)}
        at += 256
        if rng.random() < 0.7:
            changes |= some_changes(rng, node)
        packed.append(messages.replaced(node, changes))
    lied = len(packed) if rng.random() < 0.9 else rng.choice(EDGES)
    manifest.extras = messages.head(LIST, lied) + b"".join(packed)
    doc.follow_extras(manifest)


def swapped_manifest(rng: random.Random, doc: Document) -> None:
    """The manifest of another checkpoint in this one's place, or parts of it."""
    manifest, other = _manifest(rng, doc), rng.choice(doc.base.checkpoints)
    for part in rng.sample(("records", "crcs", "extras", "state"), rng.randint(1, 4)):
        setattr(manifest, part, getattr(other, part))
    if rng.random() < 0.5:
        manifest.header[:] = other.header


# -- the layout table ------------------------------------------------------------------------------------------------


def table(rng: random.Random, doc: Document) -> None:
    doc.table = changed_tree(rng, doc.base.table_tree)
    doc.follow_table()


def table_entries(rng: random.Random, doc: Document) -> None:
    """Fields that go together: a shape with its stride, sizes that make no bytes, a dtype of the same size, a tie."""
    tree = doc.base.table_tree
    changes: dict[int, bytes] = {}
    names = [messages.text(entry.name) for entry in doc.base.entries]
    for node in rng.sample(tree.children[1].children, rng.choice((1, 1, rng.randint(1, len(names))))):
        entry = dict(zip((c.raw for c in node.children[::2]), node.children[1::2], strict=True))
        for name, value in _fields(rng, names):
            if messages.text(name) in entry:
                changes[entry[messages.text(name)].first] = value
    doc.table = messages.replaced(tree, changes)
    doc.follow_table()


def _fields(rng: random.Random, names: list[bytes]) -> list[tuple[str, bytes]]:
    def ints(*values: int) -> bytes:
        return messages.head(LIST, len(values)) + b"".join(map(messages.integer, values))

    huge = rng.choice(EDGES[-9:-2])
    dims = rng.choice((1, 2, 5, 25, 26, 63, 64, 65))
    name = rng.choice((messages.text(rng.choice(NAMES)), rng.choice(names)))
    choices: list[list[tuple[str, bytes]]] = [
        [("shape", ints(0, huge)), ("stride", ints(huge, 1)), ("nbytes", messages.integer(0))],
        [("shape", ints(*[huge] * (dims - 1), 0)), ("stride", ints(*[huge] * dims)), ("nbytes", messages.integer(0))],
        [("shape", ints(*[1] * dims)), ("stride", ints(*[huge] * dims)), ("nbytes", messages.integer(4))],
        [("shape", ints(huge, huge)), ("stride", ints(1, huge)), ("nbytes", messages.integer(0)), ("alias", name)],
        [("dtype", messages.text(rng.choice(DTYPES)))],
        [("dtype", messages.text(rng.choice(DTYPES))), ("shape", ints(0)), ("stride", ints(1)), ("nbytes", b"\0")],
        [("name", name)],
        [("alias", name), ("nbytes", messages.integer(0))],
        [("role", messages.text(rng.choice(("param", "buffer", "optimizer", "state"))))],
        [("device", messages.text(rng.choice(("cuda", "meta", "mps", "cpu:7", "nonsense", ""))))],
        [("offset", messages.integer(rng.choice(EDGES)))],
    ]
    return rng.choice(choices)


def table_bytes(rng: random.Random, doc: Document) -> None:
    doc.table = damaged(rng, doc.table)
    doc.follow_table()


# -- trees and bytes -------------------------------------------------------------------------------------------------


def changed_tree(rng: random.Random, tree: Node) -> bytes:
    changes: dict[int, bytes] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        changes |= some_changes(rng, tree)
    return messages.replaced(tree, changes)


def some_changes(rng: random.Random, tree: Node) -> dict[int, bytes]:
    nodes = _nodes(tree)
    node = rng.choice(nodes)
    if node.children and rng.random() < 0.4:
        return {node.first: _reordered(rng, node)}
    if rng.random() < 0.3:
        return {node.first: rng.choice(nodes).raw}
    return {node.first: value(rng, node)}


@lru_cache(maxsize=64)
def _nodes(tree: Node) -> list[Node]:
    return list(tree.walk())


def _reordered(rng: random.Random, node: Node) -> bytes:
    """The same children in another number or order, or another number said."""
    children = [child.raw for child in node.children]
    action = rng.randrange(5)
    if action == 0:
        del children[rng.randrange(len(children))]
    elif action == 1:
        children.insert(rng.randrange(len(children) + 1), rng.choice(children))
    elif action == 2:
        rng.shuffle(children)
    body = b"".join(children)
    count = len(children) // (2 if node.kind == MAP else 1) if node.kind in (LIST, MAP) else len(body)
    kind = rng.choice((LIST, MAP, BIN, EXT)) if action == 3 else node.kind
    if action == 4:
        count = number(rng, count, 4, len(body))
    return messages.head(kind, count, rng.randrange(16) if action == 3 else node.code) + body


def value(rng: random.Random, old: Node) -> bytes:
    """Something that has no business there."""
    big = (rng.choice((1, 2, 300, 4000)) * b"\x7f") + rng.choice((b"\x7f", b"\x80"))
    draws: tuple[Callable[[], bytes], ...] = (
        lambda: messages.integer(rng.choice(EDGES)),
        lambda: messages.integer(-rng.choice(EDGES[:19])),
        lambda: messages.text(rng.choice(NAMES)),
        lambda: messages.text(rng.choice(NOT_TEXT)),
        lambda: messages.text(rng.choice(DTYPES)),
        lambda: rng.choice((b"\xc0", b"\xc2", b"\xc3", b"\xc1", b"\x90", b"\x80", b"\xa0", b"\xc4\0", b"\xca\0\0\0\0")),
        lambda: b"\xcb" + struct.pack(">d", rng.choice((float("nan"), float("inf"), -0.0, 1e308))),
        lambda: messages.extension(8, messages.head(BIN, len(big)) + big),
        lambda: messages.extension(rng.randrange(16), old.raw),
        lambda: messages.extension(rng.choice((9, 11)), _array(rng)),
        lambda: messages.extension(12, messages.text(rng.choice(NAMES))),
        lambda: _deep(rng, old),
        lambda: _colliding() if rng.random() < 0.2 else _deep(rng, old),
        lambda: messages.head(rng.choice((LIST, MAP, STR, BIN, EXT)), rng.choice(EDGES), rng.randrange(16)) + old.raw,
        lambda: messages.head(LIST, 3) + 3 * old.raw,
        lambda: messages.extension(rng.choice((2, 6)), messages.head(LIST, 2) + 2 * (b"\x92" + old.raw + b"\xc0")),
    )
    return rng.choice(draws)()


def _array(rng: random.Random) -> bytes:
    shape = [rng.choice((0, 0, 1, 1 << 31, 1 << 62, (1 << 63) - 1)) for _ in range(rng.choice((0, 1, 2, 33, 64, 65)))]
    raw = rng.randbytes(rng.choice((0, 1, 4, 8)))
    sizes = messages.head(LIST, len(shape)) + b"".join(map(messages.integer, shape))
    return b"\x93" + messages.text(rng.choice(DTYPES)) + sizes + messages.head(BIN, len(raw)) + raw


def _deep(rng: random.Random, old: Node) -> bytes:
    inner, code = old.raw, rng.choice((None, 1, 2, 6, 7, 8, 9, 10, 11, 13))
    for _ in range(rng.choice((31, 32, 33, 200, 600))):
        inner = b"\x91" + inner if code is None else messages.extension(code, inner)
    if rng.random() < 0.3:  # each list says that all the bytes are its items
        inner = messages.head(LIST, rng.choice((1 << 12, 1 << 14, 1 << 16))) * 900 + inner.ljust(1 << 14, b"\xc0")
    return inner


@lru_cache(maxsize=1)
def _colliding() -> bytes:
    """A dict of many keys with the same hash."""
    keys = ((k * sys.hash_info.modulus).to_bytes(10, "little") for k in range(10, 12_010))
    pairs = (b"\x92" + messages.extension(8, b"\xc4\x0a" + key) + b"\xc0" for key in keys)
    return messages.extension(2, messages.head(LIST, 12_000) + b"".join(pairs))


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes of it flipped, cut, repeated or blotted out."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out)) if out else 0
        n = rng.choice((1, 1, 4, 64, 4096))
        action = rng.randrange(5)
        if action == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            out[at : at + n] = rng.choice((bytes(n), b"\xff" * n, rng.randbytes(n)))[: max(0, len(out) - at)]
        elif action == 2:
            del out[at : at + n]
        elif action == 3:
            out[at:at] = out[:n]
        elif out:
            out[at] = rng.choice((0x90, 0xDD, 0xDF, 0xC6, 0xC9, 0xDB, 0xC1))
    return bytes(out)


def unsealed(rng: random.Random, doc: Document) -> None:
    """Bytes anywhere, checks as they were."""
    nbytes, starts = doc.base.nbytes, [off for off, _ in doc.base.sb.slots]
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.choice((0, 4096, 8192, 16384, *starts, *(s + 4096 for s in starts))) + rng.randrange(4096)
        patch: Patch = (
            at,
            rng.choice((bytes(1), bytes(COMMIT_RECORD_NBYTES), rng.randbytes(rng.choice((1, 8, 64, 4096))))),
        )
        if at + len(patch[1]) <= nbytes:
            doc.tail.append(patch)


CHANGES: tuple[tuple[Change, int], ...] = (
    (superblock, 8),
    (regions, 3),
    (record, 6),
    (many_lines, 4),
    (slot_header, 3),
    (manifest_header, 8),
    (records, 6),
    (checksums, 1),
    (state, 24),
    (state_bytes, 5),
    (extras, 10),
    (swapped_manifest, 2),
    (table, 8),
    (table_entries, 10),
    (table_bytes, 3),
    (unsealed, 4),
)
_WHICH, _WEIGHTS = zip(*CHANGES, strict=True)


def change(rng: random.Random, doc: Document) -> list[str]:
    """Change one or a few structures. Returns what was changed."""
    chosen: list[Change] = rng.choices(_WHICH, _WEIGHTS, k=rng.choice((1, 1, 1, 1, 2, 3)))
    for each in chosen:
        each(rng, doc)
    doc.is_sealed = rng.random() < 0.97
    return [each.__name__ for each in chosen]
