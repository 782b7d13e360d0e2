"""The native library through its Python bindings, against references written from docs/format.md."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck import _native
from lightck._native import check, ffi, lib
from lightck.pool.reader import READ_DTYPE
from lightck.pool.writer import COPY_DTYPE
from lightck.profiler.spans import SPAN_DTYPE

MASK = 2**64 - 1
U64 = st.integers(0, MASK)
ISAS = [
    n
    for n in ("portable", "sse2-table", "sse2", "avx2-narrow", "avx2", "avx512")
    if lib.lck_isa_set(n.encode()) == _native.lib.LCK_OK
]
lib.lck_isa_set(b"auto")


@pytest.mark.parametrize(
    ("dtype", "struct"),
    [(COPY_DTYPE, "lck_copy"), (READ_DTYPE, "lck_read"), (SPAN_DTYPE, "lck_span")],
    ids=str,
)
def test_an_array_that_the_library_takes_has_the_fields_of_its_struct(dtype, struct):
    fields = {
        name.removesuffix("_ns"): (field.offset, ffi.sizeof(field.type)) for name, field in ffi.typeof(struct).fields
    }
    assert {name: (at, kind.itemsize) for name, (kind, at) in dtype.fields.items()} == fields
    assert dtype.itemsize == ffi.sizeof(struct)


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def seed_reference(uuid_lo: int, uuid_hi: int, tensor: int, generation: int, index: int) -> int:
    x = splitmix64(uuid_lo)
    for word in (uuid_hi, tensor, generation, index):
        x = splitmix64(x ^ word)
    return x & 0xFFFFFFFF


def crc_reference(data: bytes, poly: int, bits: int) -> int:
    ones = (1 << bits) - 1
    crc = ones
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (poly if crc & 1 else 0)
    return crc ^ ones


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    check(lib.lck_isa_set(request.param.encode()), "isa_set")
    yield request.param
    check(lib.lck_isa_set(b"auto"), "isa_set")


class Pool:
    """A temporary file with a medium over it."""

    def __init__(self, nbytes: int, kind: int) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the pool
        self.file.truncate(nbytes)
        out = ffi.new("lck_medium **")
        self.extents = ffi.new("lck_extent[]", [(0, nbytes)])
        check(lib.lck_medium_open(self.file.fileno(), self.extents, 1, kind, out), "open")
        self.medium: Any = out[0]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        check(lib.lck_medium_close(self.medium), "close")
        self.file.close()

    def copy(self, off: int, data: bytes) -> int:
        crc = ffi.new("uint32_t *")
        check(lib.lck_m_copy(self.medium, off, ffi.from_buffer(data), len(data), crc), "copy")
        check(lib.lck_m_sync(self.medium), "sync")
        value: int = crc[0]
        return value


def seeded(data: bytes, block: int, identity: tuple[int, int, int, int]) -> Any:
    count = -(-len(data) // block)
    crcs = ffi.new("uint32_t[]", max(count, 1))
    check(lib.lck_crc32c_blocks(ffi.from_buffer(data), len(data), block, crcs), "blocks")
    for index in range(count):
        crcs[index] ^= lib.lck_block_seed(*identity, index)
    return crcs


def read(pool: Pool, off: int, nbytes: int, block: int, crcs: Any, identity: tuple[int, int, int, int]) -> Any:
    """Status, number of the bad block, and the bytes that were delivered into a buffer of 0xEE."""
    dst = bytearray(b"\xee" * nbytes)
    bad = ffi.new("uint64_t *", MASK)
    where = pool.file.fileno(), pool.extents, 1, off
    status = lib.lck_read_verified(*where, ffi.from_buffer(dst), nbytes, block, crcs, *identity, bad)
    return status, bad[0], bytes(dst)


def test_known_values(isa: str) -> None:
    assert lib.lck_crc32c(b"123456789", 9) == 0xE3069283
    assert lib.lck_crc32c(bytes(32), 32) == 0x8A9136AA
    assert lib.lck_crc64(0, b"123456789", 9) == 0x995DC9BBDF1939FA
    assert isa.startswith(ffi.string(lib.lck_isa_name()).decode())


@given(st.binary(max_size=700))
def test_checksums_equal_their_definition(data: bytes) -> None:
    assert lib.lck_crc32c(data, len(data)) == crc_reference(data, 0x82F63B78, 32)
    assert lib.lck_crc64(0, data, len(data)) == crc_reference(data, 0xC96C5795D7870F42, 64)


@given(st.binary(max_size=300), st.integers(0, 300))
def test_crc64_goes_on_where_it_stopped(data: bytes, cut: int) -> None:
    head, tail = data[:cut], data[cut:]
    assert lib.lck_crc64(lib.lck_crc64(0, head, len(head)), tail, len(tail)) == lib.lck_crc64(0, data, len(data))


@given(st.randoms(use_true_random=False), st.integers(0, 6000), st.integers(0, 600), st.integers(0, 70))
def test_kernels_agree(random: Any, nbytes: int, off: int, shift: int) -> None:
    data = random.randbytes(shift + nbytes)
    view = ffi.from_buffer(data) + shift
    with Pool(16384, _native.lib.LCK_MEDIUM_PM_EMULATED) as pool:
        sums = set()
        for name in ISAS:
            check(lib.lck_isa_set(name.encode()), "isa_set")
            crc = ffi.new("uint32_t *")
            check(lib.lck_m_store(pool.medium, 0, bytes(8192), 8192), "store")
            check(lib.lck_m_copy(pool.medium, off, view, nbytes, crc), "copy")
            assert os.pread(pool.file.fileno(), 8192, 0) == bytes(off) + data[shift:] + bytes(8192 - off - nbytes)
            sums |= {crc[0], lib.lck_crc32c(view, nbytes)}
        check(lib.lck_isa_set(b"auto"), "isa_set")
    assert len(sums) == 1


@given(U64, U64, U64, U64, U64)
def test_block_seed(uuid_lo: int, uuid_hi: int, tensor: int, generation: int, index: int) -> None:
    words = (uuid_lo, uuid_hi, tensor, generation, index)
    assert lib.lck_block_seed(*words) == seed_reference(*words)


@given(
    st.binary(max_size=5000),
    st.integers(0, 5),
    st.sampled_from([256, 512, 4096]),
    st.sampled_from([_native.lib.LCK_MEDIUM_CACHE, _native.lib.LCK_MEDIUM_DISK]),
    st.tuples(U64, U64, U64, U64),
)
def test_round_trip(data: bytes, place: int, block: int, kind: int, identity: tuple[int, int, int, int]) -> None:
    off = 256 * place
    with Pool(8192, kind) as pool:
        assert pool.copy(off, data) == lib.lck_crc32c(data, len(data))
        crcs = seeded(data, block, identity)
        assert read(pool, off, len(data), block, crcs, identity) == (_native.lib.LCK_OK, MASK, data)
        assert (
            lib.lck_read_verified(
                pool.file.fileno(), pool.extents, 1, off, ffi.NULL, len(data), block, crcs, *identity, ffi.NULL
            )
            == _native.lib.LCK_OK
        )


@given(st.binary(min_size=1, max_size=3000), st.data())
def test_a_flipped_bit_is_found(data: bytes, draw: st.DataObject) -> None:
    identity = (1, 2, 3, 4)
    at = draw.draw(st.integers(0, len(data) - 1))
    bit = draw.draw(st.integers(0, 7))
    with Pool(4096, _native.lib.LCK_MEDIUM_CACHE) as pool:
        pool.copy(0, data)
        crcs = seeded(data, 256, identity)
        os.pwrite(pool.file.fileno(), bytes([data[at] ^ 1 << bit]), at)
        status, bad, got = read(pool, 0, len(data), 256, crcs, identity)
    assert (status, bad) == (_native.lib.LCK_ECHECKSUM, at // 256)
    good, end = at // 256 * 256, min(at // 256 * 256 + 256, len(data))
    assert got == data[:good] + b"\xff" * (end - good) + b"\xee" * (len(data) - end)


@pytest.mark.parametrize("word", range(4))
def test_intact_bytes_under_another_identity_do_not_pass(word: int) -> None:
    data = bytes(range(256)) * 4
    with Pool(4096, _native.lib.LCK_MEDIUM_CACHE) as pool:
        pool.copy(0, data)
        other = [1, 2, 3, 4]
        other[word] += 1
        crcs = seeded(data, 256, (1, 2, 3, 4))
        assert (
            read(pool, 0, len(data), 256, crcs, (other[0], other[1], other[2], other[3]))[0]
            == _native.lib.LCK_ECHECKSUM
        )


def test_a_short_file_is_an_error() -> None:
    data = bytes(2000)
    with Pool(4096, _native.lib.LCK_MEDIUM_CACHE) as pool:
        crcs = seeded(data, 512, (1, 2, 3, 4))
        assert read(pool, 2600, 2000, 512, crcs, (1, 2, 3, 4))[:2] == (_native.lib.LCK_ESHORT, 2)


def test_a_forked_child_can_do_nothing() -> None:
    with Pool(4096, _native.lib.LCK_MEDIUM_CACHE) as pool:
        out = ffi.new("lck_engine **")
        check(lib.lck_engine_open(1, out), "engine_open")
        engine = out[0]
        child = os.fork()
        if child == 0:
            answers = {
                lib.lck_m_store(pool.medium, 0, b"x", 1),
                lib.lck_m_copy(pool.medium, 0, b"x", 1, ffi.NULL),
                lib.lck_m_sync(pool.medium),
                lib.lck_trace_start(pool.medium),
                lib.lck_medium_close(pool.medium),
                lib.lck_job_wait(engine, 1, 2, 0),
                lib.lck_engine_close(engine),
            }
            os._exit(0 if answers == {_native.lib.LCK_EFORK} else 1)
        assert os.waitpid(child, 0)[1] == 0
        check(lib.lck_engine_close(engine), "engine_close")
        assert os.pread(pool.file.fileno(), 1, 0) == b"\0"


def test_check_tells_status_and_errno() -> None:
    check(_native.lib.LCK_OK, "nothing")
    with pytest.raises(_native.NativeError, match=r"opening failed: .*descriptor") as caught:
        whole = ffi.new("lck_extent[]", [(0, 4096)])
        check(
            lib.lck_medium_open(2**20 + 7, whole, 1, _native.lib.LCK_MEDIUM_CACHE, ffi.new("lck_medium **")), "opening"
        )
    assert (caught.value.status, caught.value.errno) == (_native.lib.LCK_ESYS, errno.EBADF)
    with pytest.raises(_native.NativeError, match="forked child") as caught:
        check(_native.lib.LCK_EFORK, "storing")
    assert (caught.value.status, caught.value.errno) == (_native.lib.LCK_EFORK, None)


def is_idle(tid: int) -> bool:
    return os.sched_getscheduler(tid) == os.SCHED_IDLE or os.getpriority(os.PRIO_PROCESS, tid) == 19


def test_workers_are_named_and_idle() -> None:
    out = ffi.new("lck_engine **")
    check(lib.lck_engine_open(2, out), "engine_open")
    tasks = {(task / "comm").read_text().strip(): int(task.name) for task in Path("/proc/self/task").iterdir()}
    workers = [tasks["lightck-copy-0"], tasks["lightck-copy-1"]]
    deadline = time.monotonic() + 20  # they see to it themselves, when they get a processor
    while not all(map(is_idle, workers)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all(map(is_idle, workers))
    check(lib.lck_engine_close(out[0]), "engine_close")


def in_child(env: dict[str, str], code: str) -> subprocess.CompletedProcess[str]:
    code = f"from lightck._native import ffi, lib; {code}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_environment() -> None:
    done = in_child({"LIGHTCK_ISA": "portable"}, "print(ffi.string(lib.lck_isa_name()).decode())")
    assert done.stdout.strip() == "portable"
    assert "LIGHTCK_ISA='mmx'" in in_child({"LIGHTCK_ISA": "mmx"}, "").stderr
    assert "LIGHTCK_KILL='nowhere:1'" in in_child({"LIGHTCK_KILL": "nowhere:1"}, "").stderr
    line = (
        "import os; fd = os.memfd_create('x'); os.ftruncate(fd, 4096); m = ffi.new('lck_medium **'); "
        "e = ffi.new('lck_extent[]', [(0, 4096)]); lib.lck_medium_open(fd, e, 1, 0, m); "
        "lib.lck_m_commit_record(m[0], 0, bytes(64))"
    )
    assert in_child({"LIGHTCK_KILL": "word:1"}, line).returncode == -9
    assert in_child({"LIGHTCK_KILL": "word:2"}, line).returncode == 0


def test_the_stub_has_what_the_header_has():
    tree = ast.parse(Path(_native.__file__).with_name("_lck_ffi.pyi").read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Lib")
    constants = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    functions = {node.name: len(node.args.posonlyargs) - 1 for node in body if isinstance(node, ast.FunctionDef)}
    assert constants == {name for name in dir(lib) if name.startswith("LCK_")}
    assert functions == {name: len(ffi.typeof(getattr(lib, name)).args) for name in dir(lib) if name.startswith("lck_")}
