"""Checksums, computed by the native library: CRC-64/XZ for metadata, seeded CRC-32C for blocks of payload."""

from __future__ import annotations

from lightck._native import ffi, lib


def crc64(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """CRC-64/XZ of ``data``; ``crc`` is the value of the bytes before it."""
    return int(lib.lck_crc64(crc, ffi.from_buffer(data), len(data)))


def uuid_words(uuid: bytes) -> tuple[int, int]:
    """A uuid as the two little-endian words that seed the block checksums."""
    return int.from_bytes(uuid[:8], "little"), int.from_bytes(uuid[8:], "little")


def block_seed(uuid: bytes, tensor: int, generation: int, index: int) -> int:
    """What is xored onto the CRC-32C of a block before it is stored."""
    return int(lib.lck_block_seed(*uuid_words(uuid), tensor, generation, index))
