"""MessagePack as a tree in which any node can be replaced, and every size around it follows; or lies on purpose.

Made for bytes that are well formed (they come from a good pool). What is put in their place need not be.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LIST, MAP, STR, BIN, EXT, PLAIN = "list", "map", "str", "bin", "ext", "plain"
_PLAIN_NBYTES = {0xCA: 4, 0xCB: 8, **{0xCC + i: 1 << i % 4 for i in range(8)}}
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_SIZED = {
    **{0xC4 + i: (BIN, 1 << i) for i in range(3)},
    **{0xC7 + i: (EXT, 1 << i) for i in range(3)},
    **{0xD9 + i: (STR, 1 << i) for i in range(3)},
    **{0xDC + i: (LIST, 2 << i) for i in range(2)},
    **{0xDE + i: (MAP, 2 << i) for i in range(2)},
}


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One value. Extensions, and bytes that are MessagePack again, have what they hold as their child.

    ``first`` is its number in the order of the bytes, ``last`` that of the last node inside it."""

    kind: str
    raw: bytes
    children: tuple[Node, ...]
    code: int
    first: int
    last: int

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def body(self) -> bytes:
        return b"".join(child.raw for child in self.children)


def parse(data: bytes) -> Node:
    """Raises ``ValueError`` where the bytes are not exactly one value."""
    node, end = _parse(data, 0, 0)
    if end != len(data):
        raise ValueError("bytes are left")
    return node


def _parse(data: bytes, at: int, number: int) -> tuple[Node, int]:
    kind, count, code, start = _head(data, at)
    children: list[Node] = []
    last, end = number, start + count
    if kind in (LIST, MAP):
        end = start
        for _ in range(count * (2 if kind == MAP else 1)):
            child, end = _parse(data, end, last + 1)
            children.append(child)
            last = child.last
    elif kind in (BIN, EXT) and end <= len(data):
        children = _inside(data[start:end], last + 1, is_sure=kind == EXT)
        last = children[-1].last if children else last
    if end > len(data):
        raise ValueError("it ends too early")
    return Node(kind, data[at:end], tuple(children), code, number, last), end


def _inside(data: bytes, number: int, is_sure: bool) -> list[Node]:
    if not is_sure and (not data or not (0x80 <= data[0] < 0xA0 or data[0] in (0xDC, 0xDD, 0xC7, 0xC8, 0xC9))):
        return []
    try:
        node, end = _parse(data, 0, number)
    except ValueError:
        return []
    return [node] if end == len(data) else []


def _head(data: bytes, at: int) -> tuple[str, int, int, int]:
    """Kind, count, extension code, and where the body starts."""
    if at >= len(data):
        raise ValueError("it ends too early")
    tag, at = data[at], at + 1
    if tag < 0x80 or tag >= 0xE0 or tag in (0xC0, 0xC2, 0xC3):
        return PLAIN, 0, 0, at
    if tag < 0xC0:
        kind = MAP if tag < 0x90 else LIST if tag < 0xA0 else STR
        return kind, tag & (0x1F if kind == STR else 0x0F), 0, at
    if tag in _PLAIN_NBYTES:
        return PLAIN, _PLAIN_NBYTES[tag], 0, at
    if tag in _FIXED_EXT:
        return EXT, _FIXED_EXT[tag], data[at] if at < len(data) else 0, at + 1
    if tag not in _SIZED:
        raise ValueError("not MessagePack")
    kind, width = _SIZED[tag]
    count = int.from_bytes(data[at : at + width], "big")
    return kind, count, data[at + width] if kind == EXT and at + width < len(data) else 0, at + width + (kind == EXT)


def replaced(node: Node, changes: Mapping[int, bytes]) -> bytes:
    """The bytes of a tree with other bytes in the place of some nodes (by ``first``)."""
    if node.first in changes:
        return changes[node.first]
    if not any(node.first < number <= node.last for number in changes):
        return node.raw
    body = b"".join(replaced(child, changes) for child in node.children)
    count = {LIST: len(node.children), MAP: len(node.children) // 2}.get(node.kind, len(body))
    return head(node.kind, count, node.code) + body


def head(kind: str, count: int, code: int = 0) -> bytes:
    """What stands before a value's body; ``count`` may be a lie."""
    widest = {LIST: 0xDD, MAP: 0xDF, STR: 0xDB, BIN: 0xC6, EXT: 0xC9}[kind]
    if kind in (LIST, MAP, STR) and count < (32 if kind == STR else 16):
        return bytes([{LIST: 0x90, MAP: 0x80, STR: 0xA0}[kind] | count])
    return bytes([widest]) + struct.pack(">I", count % (1 << 32)) + (bytes([code]) if kind == EXT else b"")


def integer(value: int) -> bytes:
    """An int of up to 64 bits, in the widest form."""
    return struct.pack(">BQ", 0xCF, value) if value >= 0 else struct.pack(">Bq", 0xD3, value)


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return head(STR, len(raw)) + raw


def extension(code: int, body: bytes) -> bytes:
    return head(EXT, len(body), code) + body
