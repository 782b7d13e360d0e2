"""The transfer methods that a user can name: the values of ``attach(..., staging=...)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Host:
    """The device copies to pinned host memory, and lightck's threads copy from there into the pool. (This is mode C of
    LightCheck.)

    ``Host()`` is always available. If memory cannot be pinned, ordinary memory is used.
    """


@dataclass(frozen=True, slots=True)
class Direct:
    """The device writes directly into the pool, and lightck's threads read the written bytes back, to compute
    checksums. (This is mode D of LightCheck.)

    ``Direct()`` needs no host memory and less processor time. It is available for a pool in memory (tmpfs, persistent
    memory) that the device's driver can register. Elsewhere ``Host()`` is used, and the log says so.
    """


@dataclass(frozen=True, slots=True)
class Device:
    """The device makes a copy of the state in its own memory, in the order of its computation. This copy is then
    transferred as with ``Host()``. (This is mode G of LightCheck.)

    The copy takes as much memory on the device as the state. The transfer takes as much host memory as with
    ``Host()``. The next update does not wait for the transfer: with ``slots=3`` or more the transfer may take as long
    as a step. (With two slots a checkpoint must be committed before the next update with any method.) If the device has
    no room for the copy, ``Host()`` is used, and the log says so.
    """


StagingOption: TypeAlias = "Host | Direct | Device"


def check_staging(staging: Any) -> None:
    """Raise ``TypeError`` unless this is a transfer method or None."""
    if staging is not None and not isinstance(staging, (Host, Direct, Device)):
        name = getattr(staging, "__name__", type(staging).__name__)
        raise TypeError(
            f"staging is {name!r}. Pass lightck.Host(), lightck.Direct() or lightck.Device(), or leave it out: then "
            "lightck tries those that can help here, and keeps the one that stalls the training least."
        )
