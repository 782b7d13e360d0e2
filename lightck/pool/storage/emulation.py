"""Emulate the speed of other memories, for benches and tests on machines that lack them: named profiles with sources.

``LIGHTCK_EMULATE=name`` or ``use(name)`` selects a profile; by default none is selected. A profile slows down verified
reads, and the copies and fences of pools that are opened afterwards. What a pool survives does not change, and every
report of the pool's medium says "emulated". Only bandwidth and latency are limited. Caches and contention are not
modelled. A thread that waits for the emulated memory may sleep, while it would use CPU time on the real one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightck._native import check, lib

VARIABLE = "LIGHTCK_EMULATE"
_IZRAELEVITZ = "Izraelevitz et al., Basic Performance Measurements of the Intel Optane DC PMM, 2019"


@dataclass(frozen=True, slots=True)
class Profile:
    """The speed of a memory. Bandwidths are in bytes per second."""

    name: str
    write: int
    read: int
    fence_ns: int
    """Nanoseconds of each fence and each sync."""
    transfer_nbytes: int
    """Smallest transfer in bytes, a power of two. A part of it takes as long as the whole."""
    source: str
    """Source of the figures, and which of them are assumed."""


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "optane-1",
            2_300_000_000,
            6_500_000_000,
            100,
            256,
            f"a sixth of optane-6: bandwidth grows with the number of modules ({_IZRAELEVITZ})",
        ),
        Profile(
            "optane-6",
            13_900_000_000,
            39_400_000_000,
            100,
            256,
            f"six interleaved modules: {_IZRAELEVITZ}. 100 ns per fence: assumed latency of a store to the controller",
        ),
        Profile(
            "cxl-ssd",
            2_000_000_000,
            6_000_000_000,
            1_500,
            4096,
            "a memory-semantic SSD whose cache is full. Latency: below 1.5 us on average (Zeng et al., Samsung CXL "
            "Memory Module Hybrid Prototype, 2025). Bandwidth and unit: assumed, those of NAND behind PCIe",
        ),
        Profile(
            "dram",
            128_000_000_000,
            128_000_000_000,
            0,
            64,
            "nominal rate of six channels of DDR4-2666: most machines do not reach it. For comparison: this "
            "emulation should slow no copy down",
        ),
    )
}

_active: Profile | None = None
_is_chosen = False
"""Whether ``use`` was called, so that the environment is not read any more."""


def use(profile: str | Profile | None) -> None:
    """Emulate this memory (a profile or its name) from now on; None: emulate no memory. Writes to pools that are open
    already are not affected. Raises ``ValueError`` for an unknown name."""
    global _active, _is_chosen
    if isinstance(profile, str):
        if profile not in PROFILES:
            raise ValueError(f"The memory {profile!r} is not known. These can be emulated: {', '.join(PROFILES)}.")
        profile = PROFILES[profile]
    numbers = (
        (0, 0, 0, 0) if profile is None else (profile.write, profile.read, profile.fence_ns, profile.transfer_nbytes)
    )
    check(lib.lck_emulate(*numbers), "emulating a memory")
    _active, _is_chosen = profile, True


def active_profile() -> Profile | None:
    """Return the emulated memory, or None. Call this before a pool is opened, because the first call reads the
    environment. Raises ``ImportError`` if ``LIGHTCK_EMULATE`` is invalid."""
    if not _is_chosen:
        _honour(os.environ.get(VARIABLE))
    return _active


def label() -> str | None:
    """Return a text such as ``emulated optane-1``; None if no memory is emulated."""
    profile = active_profile()
    return None if profile is None else f"emulated {profile.name}"


def _honour(name: str | None) -> None:
    try:
        use(name or None)
    except ValueError as error:
        raise ImportError(f"{VARIABLE}={name!r} cannot be used: {error} Unset {VARIABLE} or correct it.") from error
