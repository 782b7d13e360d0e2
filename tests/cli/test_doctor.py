"""``lightck doctor`` on fake machines: each condition gives a finding with a cure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import call, call_json, run
from toys import net

import lightck
from lightck.cli import checks, doctor
from lightck.cli.machine import Machine, Space
from lightck.errors import PoolPermissionError
from lightck.pool.storage import pmemobj
from lightck.pool.storage.durability import Durability

GB = 10**9
TMPFS = Durability(True, False, False, False, "tmpfs", ("made up",), 0)
DISK = Durability(True, True, True, False, "disk (ext2/3/4)", ("made up",), 1)
NFS = Durability(True, False, False, False, "unknown file system", ("made up",), 1)


class Fake:
    """A fake machine without problems, to which a test adds one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.spaces = {"/dev/shm": Space(8 * GB, 16 * GB), "/tmp": Space(50 * GB, 90 * GB)}
        self.media = {"/dev/shm": TMPFS}
        self.devices: dict[str, tuple[int, Durability] | PoolPermissionError] = {}
        self.refusals: dict[str, str] = {}
        self.limits: dict[str, int | None] = {}
        self.env: dict[str, str] = {"USER": "ada"}
        self.uid = 1000
        self.file("/proc/sys/kernel/osrelease", "6.1.0-13-amd64\n")
        self.file("/proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n")
        self.file("/proc/meminfo", "MemTotal: 64000000 kB\nMemAvailable:   32000000 kB\n")
        self.file("/proc/self/cgroup", "0::/user.slice\n")

    def file(self, path: str, text: str = "") -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def machine(self) -> Machine:
        return Machine(
            self.root,
            self.env,
            self.uid,
            space=lambda folder: self.spaces.get(folder, Space(9 * GB, 10 * GB)),
            limit=lambda name: self.limits.get(name),
            durability=lambda folder: self.media.get(folder, DISK),
            disk_writes=lambda folder, tier: "page cache: made up" if tier == 1 else None,
            device=self.device,
            writable=lambda folder: folder in self.spaces or Path(folder).is_dir(),
            folder_refusal=self.refusals.get,
        )

    def device(self, path: str) -> tuple[int, Durability] | None:
        found = self.devices.get(path)
        if isinstance(found, PoolPermissionError):
            raise found
        return found

    def lines(self, path: str | None = None) -> dict[str, checks.Finding]:
        return {line.topic: line for line in doctor.examine(self.machine(), path)}


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path / "root")


def test_a_machine_without_oddities_has_no_problem_and_no_note(fake):
    lines = fake.lines()
    odd = {topic: line for topic, line in lines.items() if line.level != checks.OK and topic != "backend pmdk"}
    assert not odd
    assert {
        "lightck",
        "torch",
        "native library",
        "kernel",
        "backend file",
        "/dev/shm",
        "/tmp",
        "memory",
        "swap",
        "file size limit",
        "locked memory",
        "worker start",
    } <= lines.keys()
    assert lines["/dev/shm"].said == "tmpfs, 8.0 GB free of 16.0 GB; survives a killed process"


def test_every_line_that_is_not_fine_says_what_to_do(fake):
    fake.spaces["/dev/shm"] = Space(64 << 20, 64 << 20)
    fake.limits["RLIMIT_FSIZE"] = 1 << 30
    fake.file("/proc/swaps", "Filename Type\n/dev/dm-1 partition 1 0 -2\n")
    fake.file("/.dockerenv")
    fake.file("/run/systemd/system/x")
    fake.file("/proc/sys/kernel/osrelease", "5.10.0")
    fake.env["SLURM_JOB_ID"] = "4711"
    notes = [line for line in doctor.examine(fake.machine()) if line.level != checks.OK]
    assert len(notes) >= 7
    assert all(line.cure for line in notes)
    assert all(line.level == checks.NOTE for line in notes)


@pytest.mark.parametrize(
    ("release", "level"),
    [("5.13.19", "note"), ("5.14.0-362.el9.x86_64", "ok"), ("4.18.0", "note"), ("10.0", "ok"), ("", "problem")],
)
def test_kernel(fake, release, level):
    fake.file("/proc/sys/kernel/osrelease", release)
    assert fake.lines()["kernel"].level == level


def test_shared_memory_of_a_container_is_too_small(fake):
    fake.spaces["/dev/shm"] = Space(64 << 20, 64 << 20)
    line = fake.lines()["/dev/shm"]
    assert line.level == "note"
    assert "--shm-size" in line.cure
    assert "medium: Memory" in line.cure


def test_a_path_without_room_or_folder_is_a_problem(fake, tmp_path):
    assert fake.lines(str(tmp_path / "run.pool"))[str(tmp_path)].level == "ok"
    assert fake.lines(str(tmp_path / "no" / "run.pool"))[str(tmp_path / "no" / "run.pool")].level == "problem"
    fake.spaces[str(tmp_path)] = Space(1 << 20, 1 << 30)
    assert "no room" in fake.lines(str(tmp_path))[str(tmp_path)].cure


def test_a_folder_that_attach_refuses_is_a_problem_where_it_was_asked_for(fake, tmp_path):
    fake.refusals = {"/tmp": "The folder is everybody's. Use another.", str(tmp_path): "It is not yours. Ask root."}
    assert (fake.lines()["/tmp"].level, fake.lines()["/tmp"].cure) == ("note", "Use another.")
    line = fake.lines(str(tmp_path))[str(tmp_path)]
    assert (line.level, line.said, line.cure) == ("problem", "It is not yours.", "Ask root.")


def test_a_file_that_is_no_pool_is_a_problem_and_a_pool_s_folder_is_looked_at(fake, tmp_path, good):
    text = tmp_path / "text.txt"
    text.write_text("mine\n" * 4000)
    line = fake.lines(str(text))[str(text)]
    assert line.level == "problem"
    assert "not a lightck pool" in line.said
    fake.spaces[str(good.parent)] = Space(GB, GB)
    assert fake.lines(str(good))[str(good.parent)].level == "ok"


def test_no_room_anywhere_is_a_problem_and_a_full_folder_is_none(fake):
    fake.spaces["/tmp"] = Space(0, GB)
    assert fake.lines()["/tmp"].level == "note"
    no_room = Space(0, GB)
    full = Machine(fake.root, fake.env, 1000, lambda _: no_room, fake.limits.get, lambda _: DISK, lambda _: True)
    assert {line.topic for line in doctor.examine(full) if line.level == "problem"} == {"media"}


def test_a_file_system_of_which_nothing_is_known(fake):
    fake.media["/tmp"] = NFS
    line = fake.lines()["/tmp"]
    assert (line.level, "local disk" in line.cure) == ("note", True)


def test_a_file_system_with_dax_is_a_candidate(fake):
    fake.spaces["/mnt/pm em"] = Space(GB, GB)
    fake.file(
        "/proc/self/mountinfo",
        "36 35 259:1 / /mnt/pm\\040em rw,relatime shared:1 - ext4 /dev/pmem0 rw,dax=always\n"
        "37 35 259:2 / /mnt/other rw,relatime - ext4 /dev/sda1 rw,dax=never\n",
    )
    assert fake.lines()["/mnt/pm em"].level == "ok"
    assert "/mnt/other" not in fake.lines()


def test_each_device_has_a_line_with_what_it_survives(fake):
    fake.file("/sys/bus/dax/devices/dax0.0")
    fake.file("/sys/bus/dax/devices/dax1.0")
    fake.devices["/dev/dax0.0"] = 64 * GB, Durability(True, True, True, False, "persistent memory", ("made up",), 2)
    fake.devices["/dev/dax1.0"] = 8 * GB, Durability(True, False, False, False, "memory", ("made up", "so it is"), 0)
    lines = fake.lines()
    assert (lines["/dev/dax0.0"].level, "a power cut" in lines["/dev/dax0.0"].said) == ("ok", True)
    assert "64" in lines["/dev/dax0.0"].said
    assert (lines["/dev/dax1.0"].level, "so it is" in lines["/dev/dax1.0"].cure) == ("note", True)
    asked = fake.lines("/dev/dax0.0")
    assert (asked["/dev/dax0.0"].level, list(asked).count("/dev/dax0.0")) == ("ok", 1)


def test_a_device_that_cannot_be_used_says_why(fake):
    fake.file("/sys/bus/dax/devices/dax0.0")
    fake.devices["/dev/dax0.0"] = PoolPermissionError("The device is not yours.")
    assert (fake.lines()["/dev/dax0.0"].level, fake.lines()["/dev/dax0.0"].said) == ("note", "The device is not yours.")
    assert fake.lines("/dev/dax0.0")["/dev/dax0.0"].level == "problem"


def test_limits_of_files(fake):
    fake.limits["RLIMIT_FSIZE"] = 1 << 30
    assert fake.lines()["file size limit"].level == "note"
    fake.limits["RLIMIT_FSIZE"] = 1 << 20
    assert fake.lines()["file size limit"].level == "problem"


@pytest.mark.parametrize(
    ("group", "file", "text", "limit"),
    [
        ("0::/a/b", "/sys/fs/cgroup/a/b/memory.max", "2000000000", 2 * GB),
        ("0::/a/b", "/sys/fs/cgroup/a/memory.max", "2000000000", 2 * GB),
        ("0::/../c", "/sys/fs/cgroup/memory.max", "2000000000", 2 * GB),
        ("0::/a/b", "/sys/fs/cgroup/a/b/memory.max", "max", None),
        ("4:cpu,memory:/x", "/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "2000000000", 2 * GB),
        ("4:memory:/x", "/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000000", 2 * GB),
        ("4:memory:/x", "/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712", None),
    ],
)
def test_limit_of_a_control_group(fake, group, file, text, limit):
    fake.file("/proc/self/cgroup", f"1:name=systemd:/\n{group}\n")
    fake.file(file, text + "\n")
    assert fake.machine().memory_limit() == limit
    assert fake.lines()["memory"].level == ("ok" if limit is None else "note")


def test_swap(fake):
    fake.file("/proc/swaps", "Filename Type Size Used Priority\n/dev/dm-1 partition 1 0 -2\n/swapfile file 1 0 -3\n")
    assert fake.lines()["swap"].said == "on: /dev/dm-1, /swapfile"


@pytest.mark.parametrize("file", ["/.dockerenv", "/run/.containerenv"])
def test_container_by_file(fake, file):
    fake.file(file)
    assert fake.lines()["container"].said == f"yes ({file})"


def test_container_by_environment_or_group(fake):
    assert "container" not in fake.lines()
    fake.file("/proc/1/cgroup", "0::/kubepods/pod1\n")
    assert "kubepods" in fake.lines()["container"].said
    fake.env["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
    assert "KUBERNETES_SERVICE_HOST" in fake.lines()["container"].said


def test_slurm_job_with_memory_of_its_own(fake):
    assert "Slurm" not in fake.lines()
    fake.env["SLURM_JOB_ID"] = "4711"
    assert "may be private to it" in fake.lines()["Slurm"].said
    fake.file("/proc/self/mountinfo", "99 35 259:1 /local/4711/.tmp /tmp rw,relatime - ext4 /dev/sda1 rw\n")
    assert "/tmp are private to this job and are deleted at its end" in fake.lines()["Slurm"].said


def test_files_in_shared_memory_that_go_at_logout(fake):
    assert "logout" not in fake.lines()
    fake.file("/run/systemd/system/x")
    assert "enable-linger" in fake.lines()["logout"].cure
    fake.file("/etc/systemd/logind.conf", "[Login]\n#RemoveIPC=no\n")
    assert "logout" in fake.lines()
    fake.file("/etc/systemd/logind.conf.d/10.conf", "[Login]\nRemoveIPC=no\n")
    assert "logout" not in fake.lines()
    fake.file("/etc/systemd/logind.conf.d/20.conf", "[Login]\nRemoveIPC=yes\n")
    assert "logout" in fake.lines()
    fake.file("/var/lib/systemd/linger/ada")
    assert "logout" not in fake.lines()
    fake.env.clear()
    assert "logout" in fake.lines()
    fake.uid = 0
    assert "logout" not in fake.lines()


@pytest.mark.parametrize(
    ("version", "level"),
    [(None, "problem"), ("2.8.1", "note"), ("2.9.0+cu128", "ok"), ("2.13.0+cpu", "ok"), ("3.0", "ok")],
)
def test_torch(monkeypatch, fake, version, level):
    monkeypatch.setattr(checks, "_installed", lambda _: version)
    assert fake.lines()["torch"].level == level


def test_version_of_libpmemobj_is_read_from_the_library():
    assert checks.version_in(b"\0\0src version: 1.12.1\0x") == "1.12.1"
    assert checks.version_in(b"nothing") is None
    maps = "7f0-7f1 r-xp 00000000 fe:00 12   /usr/lib/libpmemobj.so.1.0.0\n7f2-7f3 rw-p 0 0 0 [heap]\n"
    assert checks.loaded("libpmemobj", maps) == "/usr/lib/libpmemobj.so.1.0.0"
    assert checks.loaded("libother", maps) is None


@pytest.mark.parametrize(
    ("name", "level"), [("", None), ("auto", None), ("file", None), ("devdax", "note"), ("tape", "problem")]
)
def test_the_backend_that_the_environment_names(fake, name, level):
    fake.env["LIGHTCK_BACKEND"] = name
    line = fake.lines().get("LIGHTCK_BACKEND")
    assert (line.level if line else None) == level
    assert line is None or (name in line.said and "Unset LIGHTCK_BACKEND" in line.cure)


def test_a_backend_that_is_named_and_not_there_is_a_problem(fake, monkeypatch):
    monkeypatch.setenv("LIGHTCK_LIBPMEMOBJ", "/nowhere/libpmemobj.so")
    monkeypatch.setattr(pmemobj, "load", lambda: (_ for _ in ()).throw(pmemobj.MissingError("no such library")))
    assert fake.lines()["backend pmdk"].level == "note"
    fake.env["LIGHTCK_BACKEND"] = "pmdk"
    assert fake.lines()["backend pmdk"].level == "problem"


@pytest.mark.parametrize("variable", ["LIGHTCK_ISA", "LIGHTCK_KILL", "LIGHTCK_EMULATE"])
def test_a_variable_that_keeps_the_library_from_loading_is_a_problem_among_the_other_lines(variable):
    done = run("doctor", "--json", **{variable: "mmx"})
    assert done.returncode == 1, done.stderr
    lines = {line["topic"]: line for line in json.loads(done.stdout)["lines"]}
    assert lines["native library"]["level"] == "problem"
    assert f"{variable}='mmx' cannot be used" in lines["native library"]["said"]
    assert lines["native library"]["cure"].startswith(f"Unset {variable}")
    assert {"kernel", "media", "swap"} <= lines.keys()


def test_a_folder_that_attach_refuses_is_a_problem_here(folder):
    shared = folder / "open"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PoolPermissionError):
        lightck.attach(net(), shared / "run.pool")
    result = call("doctor", shared)
    assert result.exit_code == 1
    assert f"chmod o-w {shared}" in result.stdout
    shared.chmod(0o1777)
    assert call("doctor", shared).exit_code == 0


def test_here(folder):
    result = call("doctor", folder)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("lightck can be used here")
    status, facts = call_json("doctor", folder / "nothing" / "here")
    assert (status, facts["ok"]) == (1, False)
    assert json.dumps(facts)
    result = call("doctor", folder / "nothing" / "here")
    assert result.stdout.splitlines()[-1].startswith("1 problem: lightck cannot be used like this")
