"""What decides, beside the state, whether a resumed training computes the same bits: machine, software versions,
threads."""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from functools import lru_cache

import torch

from lightck.state import values


def fingerprint() -> dict[str, object]:
    """Return what a bit-identical continuation depends on beside the state. The caller must not change the dict."""
    return _fingerprint(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), _cuda())


@lru_cache(maxsize=1)
def _fingerprint(threads: int, is_deterministic: bool, cuda: str | None) -> dict[str, object]:
    return values.ConstantDict(
        torch=str(torch.__version__),
        python=".".join(map(str, sys.version_info[:3])),
        machine=platform.machine(),
        cpu=torch.backends.cpu.get_cpu_capability(),
        vendor=_vendor(),
        threads=threads,
        deterministic=is_deterministic,
        cuda=cuda,
    )


def _vendor() -> str | None:
    """Return the vendor of the processor, or None if it is unknown. The vendor decides bits: with the same instruction
    set, torch draws another dropout mask on Intel's processors than on others."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in ("vendor_id", "CPU implementer"):
                return value.strip()
    return None


def _cuda() -> str | None:
    """Return the name of the current CUDA device and the versions of CUDA (or HIP) and cuDNN; None if CUDA is not
    used."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    version = torch.version.cuda or torch.version.hip
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{torch.cuda.get_device_name()} (CUDA {version}, cuDNN {cudnn})"


def flushes_denormals() -> bool:
    """Whether this thread takes numbers below the normal range for zero (``torch.set_flush_denormal``). torch's
    helper threads do so only if they were started after the setting was made. So the number of threads decides bits
    then."""
    return bool((torch.full((1,), 1e-39, dtype=torch.float32, device="cpu") * 1.0 == 0).item())
