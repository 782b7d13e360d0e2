"""The checks of ``lightck doctor``. Each check yields findings. A finding has a level and, if the level is not *ok*, a
cure.

A *problem* makes lightck unusable on this machine or medium; a *note* is a limitation that a user may meet. No check
leaves anything behind. (On a disk, one makes a file without a name for a moment.)
"""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lightck.cli.machine import Machine
from lightck.cli.text import SURVIVED, size
from lightck.errors import LightckError

OK, NOTE, PROBLEM = "ok", "note", "problem"
MIB = 1 << 20
POOL_NBYTES_SMALL = 8 * MIB
"""Size of the smallest pool, rounded up: two slots of 2 MiB, and the pool's structures."""
SHARED = "/dev/shm"
DOCKER_SHARED_NBYTES = 64 * MIB
"""The size that Docker gives /dev/shm by default."""
TORCH_OLDEST = (2, 9)
"""The oldest version of torch with which lightck is tested."""
NATIVE = "native library"
"""The topic of the findings about liblck.so."""
_ELSEWHERE = "Choose another folder for the pool."
POPULATE_SINCE = (5, 14)
"""The version of Linux that introduced MADV_POPULATE_WRITE."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check; ``--json`` prints these fields."""

    topic: str
    level: str
    """``OK``, ``NOTE`` or ``PROBLEM``."""
    said: str
    """What the check found, as text."""
    cure: str = ""


# -- software --------------------------------------------------------------------------------------------------------


def software(_: Machine) -> Iterator[Finding]:
    version = _installed("lightck") or "(a source tree)"
    yield Finding(
        "lightck", OK, f"{version}, Python {platform.python_version()} on {sys.platform} {platform.machine()}"
    )
    yield _torch(_installed("torch"))


def refused(topic: str, message: str) -> Finding:
    """Return a finding of level *problem*, whose text and cure are those of an error message of lightck. The last
    sentence of the message is the cure."""
    fact, end, cure = message.rpartition(". ")
    return Finding(topic, PROBLEM, fact + end.rstrip(), cure) if end else Finding(topic, PROBLEM, message)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch(version: str | None) -> Finding:
    if version is None:
        return Finding("torch", PROBLEM, "not installed", "pip install torch: nothing can be saved without it.")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < TORCH_OLDEST:
        oldest = ".".join(map(str, TORCH_OLDEST))
        cure = f"pip install 'torch>={oldest}': older versions are not tested."
        return Finding("torch", NOTE, f"{version}, older than {oldest}", cure)
    return Finding("torch", OK, version)


def native(_: Machine) -> Iterator[Finding]:
    try:
        from lightck._native import ffi, lib
        from lightck.pool.storage import emulation

        emulation.active_profile()  # raises ImportError if LIGHTCK_EMULATE is invalid
    except ImportError as error:
        yield refused(NATIVE, str(error))
        return
    isa = ffi.string(lib.lck_isa_name()).decode()
    back = ffi.string(lib.lck_write_back_name()).decode()
    forced = " (forced by LIGHTCK_ISA)" if os.environ.get("LIGHTCK_ISA") else ""
    if isa in ("portable", "sse2", "sse2-table"):
        slower = "Nothing to do: without AVX2 copies take longer, and what they write is the same."
        cure = "Unset LIGHTCK_ISA." if forced else slower
        yield Finding(NATIVE, NOTE, f"copies with {isa}{forced}, {back}", cure)
    else:
        yield Finding(NATIVE, OK, f"copies with {isa}{forced}, {back}")


def kernel(machine: Machine) -> Iterator[Finding]:
    release, version = machine.kernel()
    if not release:
        yield Finding("kernel", PROBLEM, "its version cannot be read", "lightck needs Linux with /proc mounted.")
    elif version < POPULATE_SINCE:
        cure = "Nothing to do: without MADV_POPULATE_WRITE the pages of a new pool are allocated one by one, slowly."
        yield Finding("kernel", NOTE, f"{release}, older than 5.14", cure)
    else:
        yield Finding("kernel", OK, f"{release} (MADV_POPULATE_WRITE allocates the pages of a pool)")


def workers(_: Machine) -> Iterator[Finding]:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method == "fork":
        yield Finding(
            "worker start", OK, "fork: DataLoader workers are copies of the process; sessions are inactive in them"
        )
    else:
        yield Finding(
            "worker start",
            OK,
            f"{method}: each worker imports the script; call attach only below if __name__ == '__main__'",
        )


# -- media -----------------------------------------------------------------------------------------------------------


def media(machine: Machine, asked: str | None = None) -> Iterator[Finding]:
    """Yield a finding for each folder or device in which a pool could lie. ``asked``: the path that the user named, or
    None. An unusable folder or device is a problem if the user named it, otherwise a note. If the user named none and
    no folder is usable, one more finding, the problem "media", says so."""
    folders = [SHARED, machine.env.get("XDG_RUNTIME_DIR", ""), "/tmp", os.getcwd()]
    folders += [mount.point for mount in machine.mounts() if is_dax(mount.options + mount.own_options)]
    findings = [_medium(machine, folder) for folder in dict.fromkeys(filter(None, folders))]
    first = _asked_medium(machine, asked) if asked is not None else None
    if first is not None:
        findings = [one for one in findings if one.topic != first.topic]
        yield first
    elif all(one.level == PROBLEM for one in findings):
        yield Finding(
            "media", PROBLEM, "no folder has room for a pool", "Free some space, or name a folder: lightck doctor PATH."
        )
    for one in findings:
        yield one if one.level != PROBLEM else Finding(one.topic, NOTE, one.said, one.cure)
    for name in machine.listing("/sys/bus/dax/devices"):
        device = _device(machine, f"/dev/{name}")
        if device is not None and (first is None or device.topic != first.topic):
            yield device if device.level != PROBLEM else Finding(device.topic, NOTE, device.said, device.cure)


def is_dax(options: tuple[str, ...]) -> bool:
    """Whether a mount with these options maps files directly onto persistent memory."""
    return "dax" in options or "dax=always" in options


def _device(machine: Machine, path: str) -> Finding | None:
    """Return the finding for a device-dax device, or None if the path is no such device."""
    try:
        found = machine.device(path)
    except (LightckError, OSError) as error:
        return Finding(path, PROBLEM, str(error), "Choose another place for the pool.")
    if found is None:
        return None
    nbytes, durability = found
    survived = ", ".join(words for name, words in SURVIVED.items() if getattr(durability, name))
    said = f"{durability.medium}, {size(nbytes)}; survives {survived}"
    if durability.os:
        return Finding(path, OK, said)
    return Finding(path, NOTE, said, f"More than that is not guaranteed, because {durability.evidence[-1]}.")


def _asked_medium(machine: Machine, path: str) -> Finding:
    """Return the finding for a path that the user named: a device, a folder, or a pool in a folder."""
    folder = os.path.abspath(path)
    device = _device(machine, folder)
    if device is not None:
        return device
    if not os.path.isdir(folder):
        why_not = machine.pool_refusal(folder)
        if why_not is not None:
            return refused(path, why_not)
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        return Finding(path, PROBLEM, "there is no such folder", "Create the folder: lightck creates only files.")
    return _medium(machine, folder)


def _medium(machine: Machine, folder: str) -> Finding:
    """Return the finding for a folder: whether a pool can lie in it, and what the pool survives."""
    space = machine.space(folder)
    if space is None or not machine.writable(folder):
        return Finding(folder, PROBLEM, "missing, or not writable by you", _ELSEWHERE)
    why_not = machine.folder_refusal(folder)
    if why_not is not None:
        return refused(folder, why_not)
    try:
        durability = machine.durability(folder)
    except (LightckError, OSError) as error:
        return Finding(folder, PROBLEM, str(error), _ELSEWHERE)
    survived = [words for name, words in SURVIVED.items() if getattr(durability, name)]
    room = f"{size(space.free)} free of {size(space.total)}"
    said = f"{durability.medium}, {room}; survives {', '.join(survived) or 'nothing'}"
    method = machine.disk_writes(folder, durability.medium_kind)
    said += f"; large blocks are written: {method}" if method else ""
    if space.free < POOL_NBYTES_SMALL:
        return Finding(folder, PROBLEM, said, "There is no room for a pool: free some space, or choose another folder.")
    if folder == SHARED and space.total <= DOCKER_SHARED_NBYTES:
        return Finding(folder, NOTE, said, _MORE_SHARED)
    if durability.medium.startswith("unknown"):
        cure = "It is not known whether a pool in this folder survives more than a killed process: prefer a local disk."
        return Finding(folder, NOTE, said, cure)
    return Finding(folder, OK, said)


_MORE_SHARED = (
    "This is a container's default size, too small for most models (a pool takes twice the size of model and optimizer "
    "state). Use docker run --shm-size=16g, in Kubernetes an emptyDir with medium: Memory at /dev/shm, or another "
    "folder."
)


# -- limits ----------------------------------------------------------------------------------------------------------


def limits(machine: Machine) -> Iterator[Finding]:
    largest = machine.limit("RLIMIT_FSIZE")
    if largest is None:
        yield Finding("file size limit", OK, "none")
    else:
        level = PROBLEM if largest < POOL_NBYTES_SMALL else NOTE
        yield Finding(
            "file size limit",
            level,
            size(largest),
            "A larger pool cannot be created. Raise the limit: ulimit -f unlimited.",
        )
    locked = machine.limit("RLIMIT_MEMLOCK")
    yield Finding("locked memory", OK, f"{'no limit' if locked is None else size(locked)} (lightck locks none)")


def memory(machine: Machine) -> Iterator[Finding]:
    limit, available = machine.memory_limit(), machine.memory_available()
    if limit is None:
        said = f"{size(available)} available" if available is not None else "not readable from /proc/meminfo"
        yield Finding("memory", OK, f"{said}; no limit by a control group")
    else:
        cure = (
            "A pool on tmpfs counts against this limit, even after its process was killed. Leave room for the pool, or "
            "use a disk."
        )
        yield Finding("memory", NOTE, f"limited to {size(limit)} by a control group", cure)
    swaps = machine.swaps()
    if swaps:
        cure = (
            "Swapping out a pool on tmpfs is slow, and leaves weights in the swap. Run swapoff -a, or encrypt the swap."
        )
        yield Finding("swap", NOTE, f"on: {', '.join(swaps)}", cure)
    else:
        yield Finding("swap", OK, "off")


# -- what may delete a pool --------------------------------------------------------------------------------------------


def surroundings(machine: Machine) -> Iterator[Finding]:
    evidence = machine.container()
    if evidence is not None:
        cure = "Its /dev/shm and its layers are deleted with the container. Mount a volume for a pool that must remain."
        yield Finding("container", NOTE, f"yes ({evidence})", cure)
    yield from slurm(machine)
    yield from logout(machine)


def slurm(machine: Machine) -> Iterator[Finding]:
    """Yield a note in a Slurm job. The job may have a private /tmp and /dev/shm (job_container/tmpfs), which are
    deleted when the job ends. So after a requeue of the job, a pool in one of them is gone. The root of a private mount
    is a folder whose path contains the number of the job."""
    job = machine.env.get("SLURM_JOB_ID")
    if job is None:
        return
    private = [m.point for m in machine.mounts() if m.point in ("/tmp", SHARED) and job in re.split(r"\D+", m.root)]
    cure = (
        "For a job that may be requeued, put the pool on a disk that outlives the job (scratch, a shared file system)."
    )
    if private:
        yield Finding(
            "Slurm",
            NOTE,
            f"job {job}: {' and '.join(private)} are private to this job and are deleted at its end",
            cure,
        )
    else:
        yield Finding("Slurm", NOTE, f"job {job}: /dev/shm and /tmp may be private to it and deleted at its end", cure)


def logout(machine: Machine) -> Iterator[Finding]:
    """Yield a note if systemd-logind removes the user's files in /dev/shm at the last logout, which it does unless
    RemoveIPC=no is set, the user lingers (loginctl enable-linger), or the user is a system user."""
    if machine.uid < 1000 or not machine.exists("/run/systemd/system"):
        return
    files = ["/etc/systemd/logind.conf", *_drop_ins(machine)]
    per_file = [re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)", machine.text(path), re.M) for path in files]
    settings = [each for found in per_file for each in found]
    if settings and settings[-1].lower() in ("no", "false", "off", "0"):
        return
    cure = f"After your last logout a pool in {SHARED} is gone. Run loginctl enable-linger, or use a disk."
    if not machine.exists(f"/var/lib/systemd/linger/{machine.env.get('USER', '')}") or not machine.env.get("USER"):
        yield Finding("logout", NOTE, f"systemd removes your files in {SHARED} when you log out (RemoveIPC)", cure)


def _drop_ins(machine: Machine) -> list[str]:
    folder = "/etc/systemd/logind.conf.d"
    return [f"{folder}/{name}" for name in machine.listing(folder) if name.endswith(".conf")]


# The check of backends and media runs between these two groups.
CHECKS_BEFORE_MEDIA: tuple[Callable[[Machine], Iterator[Finding]], ...] = (software, native, kernel, workers)
CHECKS_AFTER_MEDIA: tuple[Callable[[Machine], Iterator[Finding]], ...] = (limits, memory, surroundings)


_ABOUT = {
    "file": "plain files on tmpfs, a disk or persistent memory",
    "devdax": "device-dax devices: persistent memory without a file system",
}


def backends(machine: Machine) -> Iterator[Finding]:
    """Yield a finding for each kind of pool: whether this installation can create it. To find out, libpmemobj is
    loaded, in the same way as the backend loads it."""
    from lightck.pool.storage.backends import BACKEND_VARIABLE, BACKENDS

    wanted = machine.env.get(BACKEND_VARIABLE) or "auto"
    if wanted not in ("auto", *BACKENDS):
        cure = f"Unset {BACKEND_VARIABLE}, or name one of {', '.join(BACKENDS)}."
        yield Finding(BACKEND_VARIABLE, PROBLEM, f"{wanted!r} is no backend: attach cannot create any pool", cure)
    elif wanted == "devdax":
        cure = (
            f"Unset {BACKEND_VARIABLE}: attach then creates pool files, and a path such as /dev/dax0.0 is still a pool "
            "on that device."
        )
        yield Finding(BACKEND_VARIABLE, NOTE, f"{wanted!r}: attach creates pools on DAX devices only", cure)
    for name in BACKENDS:
        if name != "pmdk":
            yield Finding(f"backend {name}", OK, _ABOUT.get(name, "built in"))
    if find_spec("lightck.pool.storage.pmemobj") is not None:
        yield _pmdk(is_wanted=wanted == "pmdk")


def _pmdk(is_wanted: bool) -> Finding:
    """Return the finding for the PMDK backend. ``is_wanted``: whether LIGHTCK_BACKEND names this backend, so that a
    missing libpmemobj is a problem."""
    module = importlib.import_module("lightck.pool.storage.pmemobj")
    try:
        module.load()
    except module.MissingError as error:
        cure = (
            "To create PMDK pools, apt install libpmemobj1, or set LIGHTCK_LIBPMEMOBJ to the path of libpmemobj.so.1. "
            "PMDK pools can be read without libpmemobj."
        )
        level = PROBLEM if is_wanted else NOTE
        return Finding("backend pmdk", level, f"libpmemobj was not found ({error}): PMDK pools cannot be created", cure)
    path = loaded("libpmemobj", Path("/proc/self/maps").read_text(errors="replace"))
    version = version_in(Path(path).read_bytes()) if path else None
    return Finding("backend pmdk", OK, f"libpmemobj {version or '(of unknown version)'}{f' at {path}' if path else ''}")


def loaded(name: str, maps: str) -> str | None:
    """Return the path of a loaded library, or None. ``maps``: the text of /proc/self/maps."""
    found = re.search(rf"^.* (/\S*{re.escape(name)}\S*)$", maps, re.M)
    return found[1] if found else None


def version_in(library: bytes) -> str | None:
    """Return the version in the bytes of a PMDK library, or None. PMDK writes it into each of its libraries."""
    found = re.search(rb"src version: ([0-9][0-9A-Za-z.+~-]*)", library)
    return found[1].decode() if found else None
