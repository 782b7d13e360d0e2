"""What ``lightck doctor`` looks at: each check gives lines, each line says whether that is fine and what to do.

A *problem* makes lightck unusable here or there; a *note* is something that a user may run into. Nothing here writes.
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
"""The smallest pool has two slots of 2 MiB and its structures."""
SHARED = "/dev/shm"
DOCKER_SHARED_NBYTES = 64 * MIB
TORCH_OLDEST = (2, 9)
NATIVE = "native library"
_ELSEWHERE = "Choose another folder for the pool."
POPULATE_SINCE = (5, 14)


@dataclass(frozen=True, slots=True)
class Line:
    """One finding."""

    topic: str
    level: str
    said: str
    cure: str = ""


# -- software --------------------------------------------------------------------------------------------------------


def software(_: Machine) -> Iterator[Line]:
    version = _installed("lightck") or "(a source tree)"
    yield Line("lightck", OK, f"{version}, Python {platform.python_version()} on {sys.platform} {platform.machine()}")
    yield _torch(_installed("torch"))


def refused(topic: str, message: str) -> Line:
    """An error of lightck's as a problem: its last sentence is the cure."""
    fact, end, cure = message.rpartition(". ")
    return Line(topic, PROBLEM, fact + end.rstrip(), cure) if end else Line(topic, PROBLEM, message)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch(version: str | None) -> Line:
    if version is None:
        return Line("torch", PROBLEM, "not installed", "pip install torch: nothing can be saved without it.")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < TORCH_OLDEST:
        oldest = ".".join(map(str, TORCH_OLDEST))
        cure = f"pip install 'torch>={oldest}': older ones are not tested."
        return Line("torch", NOTE, f"{version}, older than {oldest}", cure)
    return Line("torch", OK, version)


def native(_: Machine) -> Iterator[Line]:
    try:
        from lightck._native import ffi, lib
        from lightck.pool.storage import emulation

        emulation.active_profile()  # attach asks as well, and is refused where LIGHTCK_EMULATE names nothing
    except ImportError as error:
        yield refused(NATIVE, str(error))
        return
    isa = ffi.string(lib.lck_isa_name()).decode()
    back = ffi.string(lib.lck_write_back_name()).decode()
    forced = " (forced by LIGHTCK_ISA)" if os.environ.get("LIGHTCK_ISA") else ""
    if isa in ("portable", "sse2", "sse2-table"):
        cure = "Unset LIGHTCK_ISA." if forced else "Nothing to do: the results are the same, copies cost more time."
        yield Line(NATIVE, NOTE, f"copies with {isa}{forced}, {back}", cure)
    else:
        yield Line(NATIVE, OK, f"copies with {isa}{forced}, {back}")


def kernel(machine: Machine) -> Iterator[Line]:
    release, version = machine.kernel()
    if not release:
        yield Line("kernel", PROBLEM, "its version cannot be read", "lightck needs Linux with /proc mounted.")
    elif version < POPULATE_SINCE:
        cure = "Nothing to do: without MADV_POPULATE_WRITE a new pool's pages are touched one by one, which costs more."
        yield Line("kernel", NOTE, f"{release}, older than 5.14", cure)
    else:
        yield Line("kernel", OK, f"{release} (pages of a pool are made ready by MADV_POPULATE_WRITE)")


def workers(_: Machine) -> Iterator[Line]:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method == "fork":
        yield Line("worker start", OK, "fork: DataLoader workers inherit the process; no session runs in them")
    else:
        yield Line("worker start", OK, f"{method}: the script is imported by each worker; keep attach behind __main__")


# -- media -----------------------------------------------------------------------------------------------------------


def media(machine: Machine, asked: str | None = None) -> Iterator[Line]:
    """Folders in which a pool could lie. Where one was asked for, only that one decides."""
    folders = [SHARED, machine.env.get("XDG_RUNTIME_DIR", ""), "/tmp", os.getcwd()]
    folders += [mount.point for mount in machine.mounts() if is_dax(mount.options + mount.own_options)]
    lines = [_medium(machine, folder) for folder in dict.fromkeys(filter(None, folders))]
    first = _asked_medium(machine, asked) if asked is not None else None
    if first is not None:
        lines = [line for line in lines if line.topic != first.topic]
        yield first
    elif all(line.level == PROBLEM for line in lines):
        yield Line("media", PROBLEM, "no folder has room for a pool", "Free space, or: lightck doctor PATH.")
    for line in lines:
        yield line if line.level != PROBLEM else Line(line.topic, NOTE, line.said, line.cure)
    for name in machine.listing("/sys/bus/dax/devices"):
        device = _device(machine, f"/dev/{name}")
        if device is not None and (first is None or device.topic != first.topic):
            yield device if device.level != PROBLEM else Line(device.topic, NOTE, device.said, device.cure)


def is_dax(options: tuple[str, ...]) -> bool:
    return "dax" in options or "dax=always" in options


def _device(machine: Machine, path: str) -> Line | None:
    """A device-dax device; None where the path is none."""
    try:
        found = machine.device(path)
    except (LightckError, OSError) as error:
        return Line(path, PROBLEM, str(error), "Choose another place for the pool.")
    if found is None:
        return None
    nbytes, medium = found
    survived = ", ".join(words for name, words in SURVIVED.items() if getattr(medium, name))
    said = f"{medium.medium}, {size(nbytes)}; survives {survived}"
    if medium.os:
        return Line(path, OK, said)
    return Line(path, NOTE, said, f"It promises no more because {medium.evidence[-1]}.")


def _asked_medium(machine: Machine, path: str) -> Line:
    folder = os.path.abspath(path)
    device = _device(machine, folder)
    if device is not None:
        return device
    if not os.path.isdir(folder):
        why_not = machine.obstacle(folder)
        if why_not is not None:
            return refused(path, why_not)
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        return Line(path, PROBLEM, "there is no such folder", "Create it first: lightck makes files, not folders.")
    return _medium(machine, folder)


def _medium(machine: Machine, folder: str) -> Line:
    space = machine.space(folder)
    if space is None or not machine.writable(folder):
        return Line(folder, PROBLEM, "not there, or not writable by you", _ELSEWHERE)
    why_not = machine.refusal(folder)
    if why_not is not None:
        return refused(folder, why_not)
    try:
        medium = machine.medium(folder)
    except (LightckError, OSError) as error:
        return Line(folder, PROBLEM, str(error), _ELSEWHERE)
    survived = [words for name, words in SURVIVED.items() if getattr(medium, name)]
    room = f"{size(space.free)} free of {size(space.total)}"
    said = f"{medium.medium}, {room}; survives {', '.join(survived) or 'nothing'}"
    if space.free < POOL_NBYTES_SMALL:
        return Line(folder, PROBLEM, said, "There is no room for a pool: free space or choose another folder.")
    if folder == SHARED and space.total <= DOCKER_SHARED_NBYTES:
        return Line(folder, NOTE, said, _MORE_SHARED)
    if medium.medium.startswith("unknown"):
        cure = "On a network or FUSE file system only a kill is survived: prefer a local disk."
        return Line(folder, NOTE, said, cure)
    return Line(folder, OK, said)


_MORE_SHARED = (
    "This is a container's default, too small for most models (a pool takes twice model and optimizer state): "
    "docker run --shm-size=16g, in Kubernetes an emptyDir with medium: Memory at /dev/shm; or another folder."
)


# -- limits ----------------------------------------------------------------------------------------------------------


def limits(machine: Machine) -> Iterator[Line]:
    largest = machine.limit("RLIMIT_FSIZE")
    if largest is None:
        yield Line("file size limit", OK, "none")
    else:
        level = PROBLEM if largest < POOL_NBYTES_SMALL else NOTE
        yield Line("file size limit", level, size(largest), "A larger pool cannot be made: ulimit -f unlimited.")
    locked = machine.limit("RLIMIT_MEMLOCK")
    yield Line("locked memory", OK, f"{'no limit' if locked is None else size(locked)} (lightck locks none)")


def memory(machine: Machine) -> Iterator[Line]:
    limit, available = machine.memory_limit(), machine.memory_available()
    if limit is None:
        said = f"{size(available)} available" if available is not None else "not readable from /proc/meminfo"
        yield Line("memory", OK, f"{said}; no limit by a control group")
    else:
        cure = "A pool on tmpfs counts against it, and stays when the process is killed. Leave room, or use a disk."
        yield Line("memory", NOTE, f"limited to {size(limit)} by a control group", cure)
    swaps = machine.swaps()
    if swaps:
        cure = "Pools on tmpfs may be swapped out: slower, and weights on that disk. swapoff -a, or an encrypted swap."
        yield Line("swap", NOTE, f"on: {', '.join(swaps)}", cure)
    else:
        yield Line("swap", OK, "off")


# -- what may take a pool away ----------------------------------------------------------------------------------------


def surroundings(machine: Machine) -> Iterator[Line]:
    evidence = machine.container()
    if evidence is not None:
        cure = "What lies in its own /dev/shm or layers goes with it: mount a volume for a pool that has to outlive it."
        yield Line("container", NOTE, f"yes ({evidence})", cure)
    yield from slurm(machine)
    yield from logout(machine)


def slurm(machine: Machine) -> Iterator[Line]:
    """A job may have a /tmp and a /dev/shm of its own (job_container/tmpfs), which end with it: a requeued job has
    nothing to recover there."""
    job = machine.env.get("SLURM_JOB_ID")
    if job is None:
        return
    private = [m.point for m in machine.mounts() if m.point in ("/tmp", SHARED) and job in re.split(r"\D+", m.root)]
    cure = "For a job that is requeued, put the pool on a disk that outlives it (scratch, a file system of the site)."
    if private:
        yield Line("Slurm", NOTE, f"job {job}: {' and '.join(private)} belong to this job and vanish with it", cure)
    else:
        yield Line("Slurm", NOTE, f"job {job}: /dev/shm and /tmp may be its own and vanish with it", cure)


def logout(machine: Machine) -> Iterator[Line]:
    """systemd-logind removes a user's files in /dev/shm at the last logout, unless told not to."""
    if machine.uid < 1000 or not machine.exists("/run/systemd/system"):
        return
    files = ["/etc/systemd/logind.conf", *_drop_ins(machine)]
    reported = [re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)", machine.text(path), re.M) for path in files]
    settings = [each for one in reported for each in one]
    if settings and settings[-1].lower() in ("no", "false", "off", "0"):
        return
    cure = f"Then the training ends too, and its pool in {SHARED} is gone: loginctl enable-linger, or a pool on a disk."
    if not machine.exists(f"/var/lib/systemd/linger/{machine.env.get('USER', '')}") or not machine.env.get("USER"):
        yield Line("logout", NOTE, f"systemd removes your files in {SHARED} when you log out (RemoveIPC)", cure)


def _drop_ins(machine: Machine) -> list[str]:
    folder = "/etc/systemd/logind.conf.d"
    return [f"{folder}/{name}" for name in machine.listing(folder) if name.endswith(".conf")]


CHECKS: tuple[Callable[[Machine], Iterator[Line]], ...] = (software, native, kernel, workers)
LATER: tuple[Callable[[Machine], Iterator[Line]], ...] = (limits, memory, surroundings)
"""What follows the media."""


_ABOUT = {
    "file": "plain files on tmpfs, a disk or persistent memory",
    "devdax": "device-dax devices: persistent memory without a file system",
}


def backends(machine: Machine) -> Iterator[Line]:
    """Which kinds of pool this installation can make and read. libpmemobj is looked for in the way in which the backend
    does it, and its version is read from the library's own file."""
    from lightck.pool.storage.backends import BACKEND_VARIABLE, BACKENDS

    wanted = machine.env.get(BACKEND_VARIABLE) or "auto"
    if wanted not in ("auto", *BACKENDS):
        cure = f"Unset {BACKEND_VARIABLE}, or name one of {', '.join(BACKENDS)}."
        yield Line(BACKEND_VARIABLE, PROBLEM, f"{wanted!r} is no backend: attach refuses every new pool", cure)
    elif wanted == "devdax":
        cure = f"Unset {BACKEND_VARIABLE} for pools that are files: a device is known without it."
        yield Line(BACKEND_VARIABLE, NOTE, f"{wanted!r}: attach makes no pool that is a file", cure)
    for name in BACKENDS:
        if name != "pmdk":
            yield Line(f"backend {name}", OK, _ABOUT.get(name, "built in"))
    if find_spec("lightck.pool.storage.pmemobj") is not None:
        yield _pmdk(is_wanted=wanted == "pmdk")


def _pmdk(is_wanted: bool) -> Line:
    """``is_wanted``: for every new pool, none of which can be made without it."""
    module = importlib.import_module("lightck.pool.storage.pmemobj")
    try:
        module.load()
    except module.MissingError as error:
        cure = "Only for PMDK pools, which can be read without it: apt install libpmemobj1, or set LIGHTCK_LIBPMEMOBJ."
        level = PROBLEM if is_wanted else NOTE
        return Line("backend pmdk", level, f"libpmemobj is not there ({error}): PMDK pools cannot be made", cure)
    path = loaded("libpmemobj", Path("/proc/self/maps").read_text(errors="replace"))
    version = version_in(Path(path).read_bytes()) if path else None
    return Line("backend pmdk", OK, f"libpmemobj {version or '(of unknown version)'}{f' at {path}' if path else ''}")


def loaded(name: str, maps: str) -> str | None:
    """The path of a loaded library, from /proc/self/maps."""
    found = re.search(rf"^.* (/\S*{re.escape(name)}\S*)$", maps, re.M)
    return found[1] if found else None


def version_in(library: bytes) -> str | None:
    """PMDK writes its version into each of its libraries."""
    found = re.search(rb"src version: ([0-9][0-9A-Za-z.+~-]*)", library)
    return found[1].decode() if found else None
