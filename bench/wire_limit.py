"""The rate of a wire between two ranks: in network namespaces, or where these are forbidden by pacing their sockets.

*Namespaces*: each rank has one of its own. A pair of virtual network devices joins the two, and a token bucket filter
limits the rate of each device. This needs ``ip`` and ``tc``, and root or unprivileged user namespaces.

*Pacing*: both ranks use the loopback device. Each asks the kernel to send on each of its TCP connections at no more
than the rate (``SO_MAX_PACING_RATE``). This needs Linux only. Connections do not share the rate, and gloo has one for
each process group, so a group that is used at the same time as another one has a wire of its own.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time

NAMESPACES, PACING = "namespaces", "pacing"
_IN_NAMESPACE = "LIGHTCK_BENCH_WIRE"
_SO_MAX_PACING_RATE = 47
_UNITS = {"mbit": 125_000, "gbit": 125_000_000}


def bytes_per_second(rate: str) -> int:
    """Of a rate as ``tc`` takes it, as "1gbit"."""
    return int(rate[:-4]) * _UNITS[rate[-4:]]


# -- namespaces --------------------------------------------------------------------------------------------------------


def enter_namespace() -> str:
    """Start this program again in a network namespace of its own, in which it may add devices, and return
    ``NAMESPACES``. Where that is not possible, say why, and return ``PACING``."""
    if os.environ.get(_IN_NAMESPACE):
        return NAMESPACES
    flags = "-n" if os.geteuid() == 0 else "-Urn"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        why = f"{', '.join(missing)} not found (on Debian: apt-get install iproute2 util-linux)"
    elif subprocess.run(["unshare", flags, "true"], capture_output=True, check=False).returncode:
        why = f"'unshare {flags}' is not permitted"
    else:
        os.environ[_IN_NAMESPACE] = "1"
        os.execvp("unshare", ["unshare", flags, sys.executable, *sys.argv])
    print(f"no network namespaces: {why}. The connections of the ranks are paced instead.", file=sys.stderr)
    return PACING


def add_devices() -> None:
    subprocess.run(["ip", "link", "add", "lck0", "type", "veth", "peer", "name", "lck1"], check=True)


def give_device(rank: int, process: subprocess.Popen[bytes]) -> None:
    """Move the rank's device into the namespace of its process, as soon as it has one."""
    own = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{process.pid}/ns/net") == own:
        time.sleep(0.01)
    subprocess.run(["ip", "link", "set", f"lck{rank}", "netns", str(process.pid)], check=True)


def take_device(rank: int, rate: str) -> tuple[str, str]:
    """In the rank: wait for its device, set its address and rate ("": no limit). Returns the device's name, and the
    address of rank 0."""
    name = f"lck{rank}"
    while subprocess.run(["ip", "link", "show", name], capture_output=True, check=False).returncode:
        time.sleep(0.01)
    limit = f"tc qdisc add dev {name} root tbf rate {rate} burst 256kb latency 50ms"
    for command in (
        "ip link set lo up",
        f"ip addr add 10.211.0.{rank + 1}/24 dev {name}",
        f"ip link set {name} up",
        *([limit] if rate else []),
    ):
        subprocess.run(command.split(), check=True)
    return name, "10.211.0.1"


# -- pacing ------------------------------------------------------------------------------------------------------------


def pace_connections(rate: str) -> None:
    """Limit the rate of all TCP connections that this process has now."""
    for name in os.listdir("/proc/self/fd"):
        if _target(name).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_second(rate))


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # closed meanwhile
        return ""
