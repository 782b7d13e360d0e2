"""By which way tensors leave their device: what ``attach(..., staging=...)`` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Host:
    """By pinned host memory, from there into the pool by lightck's threads (LightCheck-C).

    Always possible: where memory cannot be pinned, ordinary memory is used.
    """


@dataclass(frozen=True, slots=True)
class Direct:
    """The device writes into the pool by itself, and lightck's threads read back what it wrote (LightCheck-D): no host
    memory, and less for processors to do.

    For a pool in memory (tmpfs, persistent memory) that the device's driver can register. Elsewhere ``Host()`` is used,
    and the log says so.
    """


@dataclass(frozen=True, slots=True)
class Device:
    """First copied on the device, in the order of its computation; from that copy as by ``Host()`` (LightCheck-G).

    It takes as much memory on the device as the state does, and host memory as ``Host()``. No update waits for the way
    into the pool then: with ``slots=3`` or more it may take as long as a step (with two slots a version is committed
    before the next update all the same). Where the device has no room for the copy, ``Host()`` is used, and the log
    says so.
    """


Kind: TypeAlias = "Host | Direct | Device"


def check_kind(staging: Any) -> None:
    """Raises ``TypeError``."""
    if staging is not None and not isinstance(staging, (Host, Direct, Device)):
        name = getattr(staging, "__name__", type(staging).__name__)
        raise TypeError(
            f"staging is {name!r}. Pass lightck.Host(), lightck.Direct() or lightck.Device(), or leave it out: then "
            "the way that holds the training up least is taken."
        )
