"""A virtual machine with an emulated NVDIMM, for tests: qemu, Debian's kernel, an initramfs of busybox and modules.

The guest sees the host's file system read-only under an overlay in its own memory, so it runs the host's Python on this
very checkout; what it writes to ``/out`` is the host's folder. The NVDIMM is a file on the host mapped shared, so what
the guest stored stays when qemu is killed. ``Unavailable`` says what is missing here; nothing is installed.
"""

from __future__ import annotations

import functools
import gzip
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE_VARIABLE = "LIGHTCK_GUEST_CACHE"
MODULES = (
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32c_generic",
    "libcrc32c",
    "ext4",
    "nfit",
    "nd_btt",
    "nd_pmem",
    "nd_e820",
    "virtio_pmem",
    "device_dax",
    "dax_pmem",
)


class Unavailable(Exception):
    """Why no guest can be booted here."""


@dataclass(frozen=True)
class Kernel:
    image: Path
    modules: Path


def tool(name: str, package: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise Unavailable(f"{name} is not installed (Debian: apt-get install {package})")
    return found


def kernel() -> Kernel:
    """Debian's kernel package, downloaded once into a cache folder and unpacked there, not installed."""
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "lightck-guest")
    unpacked = cache / "kernel"
    if not unpacked.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        _download(cache)
    images = sorted(unpacked.glob("boot/vmlinuz-*"))
    if not images:
        raise Unavailable(f"{unpacked} holds no kernel: remove that folder, so that it is downloaded again")
    return Kernel(images[-1], unpacked / "lib" / "modules" / images[-1].name.removeprefix("vmlinuz-"))


def _download(cache: Path) -> None:
    tools = [tool("apt-cache", "apt"), tool("apt-get", "apt"), tool("dpkg-deb", "dpkg")]
    depends = subprocess.run([tools[0], "depends", "linux-image-amd64"], capture_output=True, text=True, check=False)
    package = re.search(r"Depends: (linux-image-\S+)", depends.stdout)
    if package is None:
        raise Unavailable("apt knows no linux-image-amd64 (apt-get update first; a Debian is needed)")
    command = [tools[1], "download", "-q", package[1]]
    got = subprocess.run(command, cwd=cache, capture_output=True, text=True, check=False)
    files = sorted(cache.glob(f"{package[1]}_*.deb"))
    if got.returncode != 0 or not files:
        raise Unavailable(f"the kernel package {package[1]} cannot be downloaded: {got.stderr.strip()[-300:]}")
    subprocess.run([tools[2], "-x", files[-1], cache / "kernel.part"], check=True)
    os.rename(cache / "kernel.part", cache / "kernel")


# -- initramfs ---------------------------------------------------------------------------------------------


def initramfs(kernel: Kernel, job: str, target: Path) -> None:
    """A compressed cpio archive: busybox, the modules in the order of their needs, ``init`` and the job."""
    busybox = Path(tool("busybox", "busybox-static"))
    folders = ("bin", "modules", "proc", "sys", "dev", "root")
    files: list[tuple[str, int, bytes]] = [(name, 0o040755, b"") for name in folders]
    files.append(("bin/busybox", 0o100755, busybox.read_bytes()))
    for name in ("sh", "mount", "mkdir", "cat", "insmod", "cp", "echo", "chroot", "sync", "poweroff"):
        files.append((f"bin/{name}", 0o120777, b"busybox"))
    order = list(_with_needs(kernel))
    files += [(f"modules/{path.name}", 0o100644, path.read_bytes()) for path in order]
    files.append(("modules/order", 0o100644, "\n".join(path.name for path in order).encode()))
    files.append(("init", 0o100755, (HERE / "init").read_bytes()))
    files.append(("job", 0o100644, job.encode()))
    target.write_bytes(gzip.compress(b"".join(_cpio(files)), 1))


def _with_needs(kernel: Kernel) -> Iterator[Path]:
    """Each module after those that it depends on; what is built into the kernel has no file."""
    paths = {path.name.removesuffix(".ko").replace("-", "_"): path for path in kernel.modules.rglob("*.ko")}
    seen: set[str] = set()

    def visit(name: str) -> Iterator[Path]:
        if name in seen or name not in paths:
            return
        seen.add(name)
        depends = re.search(rb"\0depends=([^\0]*)\0", paths[name].read_bytes())
        for need in depends[1].decode().split(",") if depends else ():
            yield from visit(need.replace("-", "_"))
        yield paths[name]

    for name in MODULES:
        yield from visit(name)


def _cpio(files: Sequence[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """The "newc" format: headers of 13 fields in hexadecimal, names and contents padded to 4 bytes."""
    for number, (name, mode, content) in enumerate([*files, ("TRAILER!!!", 0, b"")], 1):
        encoded = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        yield head + b"\0" * (-len(head) % 4) + content + b"\0" * (-len(content) % 4)


# -- the machine -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boot:
    """One boot of a guest: qemu's process and the folder that it shares with us as ``/out``."""

    process: subprocess.Popen[bytes]
    out: Path

    @property
    def console(self) -> str:
        file = self.out / "console"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait(self, timeout: float) -> int:
        """The job's exit status. Raises ``AssertionError`` with the end of the console where it did not end."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass  # the assertion below says where it hangs
        finally:
            self.kill()
        status = self.out / "status"
        said = (self.out / "qemu.log").read_text(errors="replace")[-1000:]
        assert status.exists(), f"the guest did not get to its end:\n{self.console[-3000:]}\n{said}"
        return int(status.read_text())

    def kill(self) -> None:
        """SIGKILL to qemu, if it still runs: for the guest, the power is gone."""
        self.process.kill()
        self.process.wait()


@functools.cache
def accelerator() -> tuple[str, str]:
    """``-accel`` and ``-cpu``: KVM where a kernel gets through its start under it, else emulation. Inside of virtual
    machines KVM can be there and hang."""
    kvm = ("kvm", "host,arch-capabilities=off")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return ("tcg", "max")
    command = [
        tool("qemu-system-x86_64", "qemu-system-x86"),
        "-nodefaults",
        "-no-reboot",
        "-display",
        "none",
        "-serial",
        "stdio",
        "-accel",
        kvm[0],
        "-cpu",
        kvm[1],
        "-m",
        "512M",
        "-kernel",
        str(kernel().image),
        "-append",
        "console=ttyS0 panic=-1",
    ]
    try:  # without a root file system the kernel panics, and that ends qemu
        tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return ("tcg", "max")
    return kvm if b"Kernel panic" in tried.stdout else ("tcg", "max")


def boot(
    job: str, out: Path, nvdimm: Path, *, persistence: str = "mem-ctrl", append: str = "", extra: Sequence[str] = ()
) -> Boot:
    """Start a guest that runs ``job`` (a shell script). The NVDIMM is a file of a multiple of 128 MiB; ``persistence``
    is ``"mem-ctrl"`` (ADR) or ``"cpu"`` (eADR)."""
    qemu = tool("qemu-system-x86_64", "qemu-system-x86")
    linux = kernel()
    accel, cpu = accelerator()
    out.mkdir(parents=True, exist_ok=True)
    (out / "status").unlink(missing_ok=True)
    image = out / "initramfs"
    initramfs(linux, job, image)
    memory = f"memory-backend-file,id=pm,share=on,mem-path={nvdimm},size={nvdimm.stat().st_size},align=2M"
    command = [
        qemu,
        "-nodefaults",
        "-no-reboot",
        "-display",
        "none",
        "-serial",
        f"file:{out / 'console'}",
        "-accel",
        accel,
        "-cpu",
        cpu,
        "-smp",
        "2",
        "-m",
        "3G,slots=4,maxmem=32G",
        "-machine",
        f"pc,nvdimm=on,nvdimm-persistence={persistence}",
        "-object",
        memory,
        "-device",
        "nvdimm,id=nv,memdev=pm",
        "-kernel",
        str(linux.image),
        "-initrd",
        str(image),
        "-append",
        f"console=ttyS0 panic=-1 quiet {append}",
        "-virtfs",
        "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
        "-virtfs",
        f"local,path={out},mount_tag=out,security_model=none",
        *extra,
    ]
    with (out / "qemu.log").open("wb") as log:
        return Boot(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log), out)
