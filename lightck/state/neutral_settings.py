"""Settings of a process that change the bits of an update: a replay runs without them.

What a script sets (``torch.autocast`` around ``optimizer.step()``, ``torch.set_float32_matmul_precision``) is not known
to a process that recovers its checkpoint. So replays run with torch's defaults, and an update that was made with other
settings, where they may change its bits, has no record.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from lightck.state.fingerprint import flushes_denormals
from lightck.state.torch_classes import ELEMENT_WISE

_HIGHEST = "highest"


@contextmanager
def neutral_settings() -> Iterator[None]:
    """Use torch's default settings during the block: no autocast on this thread, the highest precision of matrix
    products."""
    precision = _matmul_precision()
    with ExitStack() as stack:
        for kind in _device_types():
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if precision not in (_HIGHEST, None):
            torch.set_float32_matmul_precision(_HIGHEST)
            stack.callback(torch.set_float32_matmul_precision, precision)
        if precision is None:
            _use_exact_products(stack)
        yield


def _use_exact_products(stack: ExitStack) -> None:
    """Set the highest precision by torch's newer interface, if a script has used it, until the stack is closed."""
    backends: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cuda)
    for one in (backend.matmul for backend in backends):
        stack.callback(setattr, one, "fp32_precision", one.fp32_precision)
        one.fp32_precision = "ieee"


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Use float32 as the default dtype, in all threads, during the block. (Optimizers create state in the default
    dtype. Updates that were made with another default dtype are not recorded.)"""
    before = torch.get_default_dtype()
    if before is torch.float32:
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def settings_reason(kind: type[Optimizer]) -> str:
    """Return why a replay may compute other bits than an update that this class makes now; "" if it does not."""
    if flushes_denormals():
        return "torch.set_flush_denormal(True) takes very small numbers for zero"
    if torch.get_default_dtype() is not torch.float32:
        return "torch.set_default_dtype() changes the state that optimizers create"
    if kind in ELEMENT_WISE:
        return ""  # no matrix products, and nothing that autocast converts
    if any(map(torch.is_autocast_enabled, _device_types())):
        return "optimizer.step() runs inside torch.autocast"
    if _matmul_precision() != _HIGHEST:
        return "the precision of the optimizer's float32 matrix products is not 'highest', or torch does not say it"
    return ""


def _device_types() -> list[str]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if found is None else ["cpu", found.type]


def _matmul_precision() -> str | None:
    """Return the precision of matrix products in float32; None if torch does not say it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # if a script uses both of torch's interfaces for it
        return None
