"""Direct writes: pools on a disk whose large blocks go past the page cache.

``native/tests/test_direct.c`` has the neighbours in the page cache, and the kernel's answers. Here are whole pools and
trainings, on the disk that holds the temporary files, and on ext4 in files of their own.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pools_by_hand
import pytest
import torch
from torch import nn

import lightck
from lightck.errors import BackgroundError, NoCheckpointError
from lightck.pool import direct_writes
from lightck.pool.direct_writes import DIRECT
from lightck.pool.engine import ENDED, THREADS_DEFAULT, THREADS_FOR_DIRECT_WRITES
from lightck.pool.format.structures import KIB, MIB, PAGE, CommitRecord
from lightck.pool.reader import open_pool
from lightck.pool.storage.durability import MEDIUM_CACHE, MEDIUM_DISK, probe
from lightck.pool.writer import PoolWriter

pytestmark = pytest.mark.skipif(
    os.environ.get("LIGHTCK_BACKEND", "file") != "file", reason="only plain files are written directly"
)
SIZES = (256 * KIB - 1, MIB, 300, MIB + 1, 3 * MIB + 777, 7, 256 * KIB + PAGE, 2 * MIB + PAGE, 5000, MIB - 1)
"""Bytes of tensors, large and small ones in turn. Pages in which they begin and end are shared."""


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a disk that takes direct writes."""
    method = direct_writes.method_in(str(tmp_path), probe(str(tmp_path)).medium_kind)
    if method != DIRECT:
        pytest.skip(f"the temporary folder is on no disk that takes direct writes: {method}")
    return tmp_path


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let pools that are mapped from then on be written through the page cache."""

    def forbid() -> None:
        monkeypatch.setattr(direct_writes, "_FILE_SYSTEMS", {})
        monkeypatch.setattr(direct_writes, "_IN_TESTS", False)

    return forbid


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts an ext4 of its own: ``mounted(nbytes, mkfs options, mount options)`` is its folder."""
    folders: list[Path] = []

    def mount(nbytes: int, mkfs: Sequence[str] = (), options: str = "defaults") -> Path:
        image, folder = tmp_path / f"{len(folders)}.img", tmp_path / f"mounted-{len(folders)}"
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(nbytes)
        for command in (["mkfs.ext4", "-q", *mkfs, image], ["mount", "-o", f"loop,{options}", image, folder]):
            try:
                subprocess.run(command, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as err:
                pytest.skip(f"no file system can be made here: {err} {getattr(err, 'stderr', b'')!r}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", folder], check=True)


# -- bytes ---------------------------------------------------------------------------------------------------


def make(path: Path) -> None:
    pools_by_hand.make(path, [pools_by_hand.entry(f"t{i}", (n,), dtype="uint8") for i, n in enumerate(SIZES)])


def contents(step: int) -> dict[str, npt.NDArray[np.uint8]]:
    generator = np.random.default_rng(step)
    return {f"t{i}": generator.integers(0, 256, n, np.uint8) for i, n in enumerate(SIZES)}


def commit(writer: PoolWriter, step: int) -> None:
    """Commit a checkpoint of ``contents``, copied in the background."""
    tensors = contents(step)
    plan = pools_by_hand.plan_of(writer, step, tensors, pools_by_hand.NO_STATE)
    plan = plan._replace(at_boundary=np.zeros(len(plan.records), np.bool_))
    slot = writer.slots.choose()
    assert slot is not None
    pending = writer.begin(plan, slot, tensors)
    pending.job.release()
    pending.job.wait(ENDED)
    writer.committed(pending)
    pending.job.forget()


def read_past_the_cache(path: Path) -> bytes:
    """The file as it is on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        nbytes = os.fstat(fd).st_size
        buffer = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE)  # aligned, as O_DIRECT needs it
        at = 0
        while at < nbytes:
            at += os.preadv(fd, [memoryview(buffer)[at:]], at)
        return bytes(buffer[:nbytes])
    finally:
        os.close(fd)


def check_pool(path: Path, steps: Sequence[int]) -> None:
    """Each of these checkpoints verifies, and its bytes are right by whatever way they are read."""
    on_disk, cached = read_past_the_cache(path), path.read_bytes()
    reader = open_pool(str(path))
    try:
        records = {record.step: record for record in reader.commit_log().records.values()}
        for step in steps:
            start = reader.superblock.slots[records[step].slot][0]
            for one in reader.entries:
                at, expected = start + one.offset, contents(step)[one.name].tobytes()
                assert on_disk[at : at + one.nbytes] == expected, f"{one.name} of step {step} on the disk"
                assert cached[at : at + one.nbytes] == expected, f"{one.name} of step {step} in the page cache"
    finally:
        reader.close()


def test_the_bytes_are_those_of_the_page_cache(disk, without, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda n: bytes(range(n)))  # both pools have the same uuid
    for name in ("direct", "cached"):
        if name == "cached":
            without()
        make(disk / name)
        with pools_by_hand.writer_of(disk / name) as writer:
            for step in (1, 2, 3):
                commit(writer, step)
                check_pool(disk / name, [step])
            is_direct = writer.direct_writes.method == DIRECT
            assert is_direct == (name == "direct")
            assert (writer.direct_writes.nbytes > 0) == is_direct
            if is_direct:
                pages = sum(n // MIB * MIB for n in SIZES)
                assert writer.direct_writes.nbytes > 3 * 0.9 * pages, "most of it"
        check_pool(disk / name, [2, 3])
    assert (disk / "direct").read_bytes() == (disk / "cached").read_bytes()


def test_both_ways_in_turn_on_one_pool(disk, without):
    make(disk / "run.pool")
    for step in range(1, 7):
        with pytest.MonkeyPatch.context() as patch:
            if step % 3 == 0:
                patch.setattr(direct_writes, "_FILE_SYSTEMS", {})
                patch.setattr(direct_writes, "_IN_TESTS", False)
            with pools_by_hand.writer_of(disk / "run.pool") as writer:
                writer.slots.protected = (step - 1) % 2
                commit(writer, step)
        check_pool(disk / "run.pool", [step - 1, step] if step > 1 else [step])


def test_a_reader_that_has_the_file_mapped_sees_the_new_bytes(disk):
    make(disk / "run.pool")
    with pools_by_hand.writer_of(disk / "run.pool") as writer, (disk / "run.pool").open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        for step in (1, 2, 3, 4):
            assert len(bytes(view)) == len(view)  # every page is in the page cache, and mapped
            commit(writer, step)
            newest = max(open_records(disk / "run.pool"), key=lambda record: record.step)
            for number, name in enumerate(contents(step)):
                at, nbytes = writer.superblock.slots[newest.slot][0] + writer.entries[number].offset, SIZES[number]
                assert view[at : at + nbytes] == contents(step)[name].tobytes(), f"{name} of step {step}"
        view.close()


def open_records(path: Path) -> list[CommitRecord]:
    reader = open_pool(str(path))
    try:
        return list(reader.commit_log().records.values())
    finally:
        reader.close()


def test_copies_at_the_boundary_do_not_wait_for_the_disk(disk):
    make(disk / "run.pool")
    with pools_by_hand.writer_of(disk / "run.pool") as writer:
        pools_by_hand.commit(writer, 1)
        assert (writer.direct_writes.method, writer.direct_writes.nbytes) == (DIRECT, 0)


# -- trainings -----------------------------------------------------------------------------------------------


def stepping(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(700, 701), nn.Linear(701, 3))
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    model(torch.randn(2, 700, generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def check_recovered(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found = lightck.recover(path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.model[name], tensor), name
    saved = found.optimizer
    assert isinstance(saved, dict)
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(saved["state"][number][key], value), (number, key)


def test_a_training_on_a_disk_is_written_directly(disk):
    model, optimizer = stepping()
    with lightck.attach(model, disk / "run.pool") as session:
        for number in range(4):
            step(model, optimizer, number)
        session.flush()
        assert session.stats().disk_writes == DIRECT
        check_recovered(disk / "run.pool", model, optimizer)
    check_recovered(disk / "run.pool", model, optimizer)


def test_in_memory_nothing_is_said(folder):
    if probe(str(folder)).medium_kind != MEDIUM_CACHE:
        pytest.skip("there is no tmpfs here")
    model, optimizer = stepping()
    with lightck.attach(model, folder / "run.pool") as session:
        step(model, optimizer, 0)
        session.flush()
        assert session.stats().disk_writes is None
    assert direct_writes.method_in(str(folder), MEDIUM_CACHE) is None


def test_another_file_system_is_written_through_the_page_cache_and_it_is_said(disk, without):
    without()
    model, optimizer = stepping()
    with lightck.attach(model, disk / "run.pool") as session:
        step(model, optimizer, 0)
        session.flush()
        method = session.stats().disk_writes
        assert method is not None
        assert method.startswith("page cache: direct writes are used on")
    check_recovered(disk / "run.pool", model, optimizer)
    assert direct_writes.method_in(str(disk), MEDIUM_DISK) == method


@pytest.mark.parametrize(
    ("mkfs", "options", "is_direct"),
    [
        ((), "data=journal", False),
        ((), "data=ordered", True),
        (("-b", "1024"), "defaults", True),
        (("-O", "^extents,^64bit,^has_journal"), "defaults", True),
    ],
)
def test_what_a_file_system_says_is_believed(mounted, mkfs, options, is_direct):
    folder = mounted(64 * MIB, mkfs, options)
    model, optimizer = stepping()
    with lightck.attach(model, folder / "run.pool") as session:
        for number in range(3):
            step(model, optimizer, number)
        session.flush()
        method = session.stats().disk_writes
        assert method is not None
        assert (method == DIRECT) == is_direct, method
        assert is_direct or method.startswith("page cache: the file takes no direct writes")
    check_recovered(folder / "run.pool", model, optimizer)


def test_no_space_is_reported_as_such_and_the_committed_checkpoint_stays(mounted):
    """A pool is allocated in full. But a file system may need space all the same, if a file has holes: here they are
    punched."""
    folder = mounted(64 * MIB)
    model, optimizer = stepping()
    with pytest.raises(BackgroundError) as raised, lightck.attach(model, folder / "run.pool") as session:
        for number in range(2):
            step(model, optimizer, number)
        session.flush()
        assert session.stats().disk_writes == DIRECT
        newest = max(open_records(folder / "run.pool"), key=lambda record: record.step)
        reader = open_pool(str(folder / "run.pool"))
        (other,) = {0, 1} - {newest.slot}
        start, nbytes = reader.superblock.slots[other]
        skipped = reader.superblock.payload_offset
        reader.close()
        subprocess.run(
            ["fallocate", "-p", "-o", str(start + skipped), "-l", str(nbytes - skipped), folder / "run.pool"],
            check=True,
        )
        with (folder / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(bytes(64 * KIB))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for number in range(2, 5):
            step(model, optimizer, number)
    assert raised.value.errno == errno.ENOSPC
    found = lightck.recover(folder / "run.pool")
    assert found.step == newest.step
    assert all(torch.equal(found.model[name], tensor) for name, tensor in before.items())


def test_a_truncated_pool_is_found_out(disk):
    model, optimizer = stepping()
    with pytest.raises(BackgroundError), lightck.attach(model, disk / "run.pool") as session:
        step(model, optimizer, 0)
        session.flush()
        os.truncate(disk / "run.pool", 5 * MIB)
        for number in range(1, 4):
            step(model, optimizer, number)


def test_a_forked_child_disturbs_nothing(disk):
    model, optimizer = stepping()
    with lightck.attach(model, disk / "run.pool") as session:
        for number in range(6):
            step(model, optimizer, number)  # its copies are under way at the fork
            child = os.fork()
            if child == 0:
                time.sleep(0.05)
                os._exit(0)
            step(model, optimizer, 100 + number)
            assert os.waitpid(child, 0)[1] == 0
        session.flush()
        assert session.stats().disk_writes == DIRECT
    check_recovered(disk / "run.pool", model, optimizer)


# -- other processes -----------------------------------------------------------------------------------------

_TRAINING = """
import os, sys
sys.path.insert(0, {tests!r})
import torch, lightck
torch.set_num_threads(1)
class Filled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(n)) for n in (400_003, 300_001))
    def forward(self, x):
        return self.a.sum() + self.b.sum() + x
model = Filled()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
session = lightck.attach(model, {path!r}, optimizer=optimizer, resume={resume})
print("began", flush=True)
for number in range({steps}):
    optimizer.zero_grad()
    model(0.0).backward()
    optimizer.step()  # each element becomes smaller by 1
session.close()
assert session.stats().disk_writes == "direct"
"""


def start(path: Path, steps: int, *, resume: bool = False) -> subprocess.Popen[str]:
    text = _TRAINING.format(tests=str(Path(__file__).parents[1]), path=str(path), steps=steps, resume=resume)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)


def check_whole(path: Path) -> int:
    """The newest checkpoint has the bytes of one step, and no others. Returns its step."""
    found = lightck.recover(path)
    for name in ("a", "b"):
        values = found.model[name]
        assert bool((values == -float(found.step)).all()), f"{name} of step {found.step}: {values.unique()}"
    return int(found.step)


def test_a_reader_in_another_process_sees_each_checkpoint_whole(disk):
    training = start(disk / "run.pool", 60)
    assert training.stdout is not None
    assert training.stdout.readline() == "began\n"
    seen = set()
    while training.poll() is None:
        with contextlib.suppress(NoCheckpointError):  # each was overwritten while it was read
            seen.add(check_whole(disk / "run.pool"))
    assert training.returncode == 0
    assert check_whole(disk / "run.pool") == 60
    assert len(seen) > 3, seen


@pytest.mark.long
def test_a_kill_at_any_time_leaves_a_whole_checkpoint(disk):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    moments, last = random.Random(seed), 0
    for life in range(30):
        if life >= 3 and last > 0:
            break
        training = start(disk / "run.pool", 100_000, resume=life > 0)
        assert training.stdout is not None
        assert training.stdout.readline() == "began\n"
        time.sleep(moments.uniform(0.0, 0.7))
        training.send_signal(signal.SIGKILL)
        training.wait()
        try:
            found = check_whole(disk / "run.pool")
        except NoCheckpointError:  # the training was killed before its first commit
            found = 0
        assert found >= last
        last = found
    assert last > 0


def test_the_folder_of_the_doctor_is_left_as_it_was(disk):
    before = sorted(os.listdir(disk))
    assert direct_writes.method_in(str(disk), MEDIUM_DISK) == DIRECT
    assert sorted(os.listdir(disk)) == before
    assert direct_writes.method_in(str(disk / "missing"), MEDIUM_DISK) is None


def n_copy_threads(path: Path | None = None, backend: str = "file") -> int:
    """How many copy threads this process has now, or while a model is attached to a pool."""
    if path is not None:
        model = nn.Linear(4, 4)
        with lightck.attach(model, path, optimizer=torch.optim.SGD(model.parameters()), backend=backend):
            return n_copy_threads()
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("lightck-copy") for name in names)


def test_many_threads_copy_into_a_pool_that_is_written_directly_and_few_into_others(disk, without):
    """Each sleeps while the disk writes its block, and waits for a free processor then."""

    assert n_copy_threads() == 0
    assert n_copy_threads(disk / "direct.pool") == THREADS_FOR_DIRECT_WRITES
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        assert 1 <= n_copy_threads(Path(memory, "memory.pool")) <= THREADS_DEFAULT
    without()
    assert 1 <= n_copy_threads(disk / "cached.pool") <= THREADS_DEFAULT
    assert n_copy_threads() == 0, "they end with the session"


def test_few_threads_copy_into_a_pmdk_pool_on_a_disk(disk, pmdk):
    """It is written through the page cache, where many threads are slower."""
    assert 1 <= n_copy_threads(disk / "pmdk.pool", "pmdk") <= THREADS_DEFAULT


def test_a_large_state_is_written_by_many_threads_at_once_with_the_same_bits(disk):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(24)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with lightck.attach(model, disk / "run.pool", optimizer=optimizer, slots=8) as session:
        for _ in range(12):
            model(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.stats().disk_writes == DIRECT
    found = lightck.recover(disk / "run.pool")
    assert found.step == 12
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.model[name], tensor)
