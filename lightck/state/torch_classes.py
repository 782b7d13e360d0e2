"""The optimizers of ``torch.optim``: which class is exactly one of them, and what is known about their bits.

What is known was measured with torch 2.13 on the CPU (``tests/restore/test_replay_bits.py`` measures it again).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

TORCH_CLASSES: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
"""Name -> class, of every optimizer in this torch."""

ELEMENT_WISE = frozenset(
    TORCH_CLASSES[name]
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
    if name in TORCH_CLASSES
)
"""Classes that compute each element from the same element of the gradient and of the state alone. (Adafactor and Muon
take sums over rows and whole matrices, SparseAdam updates rows.)"""


_NARROW = (torch.bfloat16, torch.float16)


def irreproducible_reason(
    kind: type[Optimizer], options: Mapping[str, object], is_fused: bool, dtype: torch.dtype
) -> str | None:
    """Return why torch computes other bits at each run of the same update of a parameter of this dtype, or None if it
    does not."""
    if issubclass(kind, torch.optim.SGD) and is_fused and options.get("momentum") and dtype in _NARROW:
        return f"fused SGD with momentum computes other bits of {str(dtype).removeprefix('torch.')} at each run"
    return None


def foreign_code(kind: type) -> str | None:
    """Search an optimizer's class and its bases for code that is not torch's own. Return the name of the first class or
    method with such code, or None if there is none."""
    for one in kind.__mro__[:-1]:
        if not _is_torch_module(one.__module__):
            return one.__qualname__
        for name, value in vars(one).items():
            function = getattr(value, "__func__", value)
            while function is not None:  # the functions that a decorator or a patch wraps
                if not _is_torch_module(getattr(function, "__globals__", {}).get("__name__", "torch")):
                    return f"{one.__qualname__}.{name}"
                function = getattr(function, "__wrapped__", None)
    return None


def _is_torch_module(module: str) -> bool:
    """Whether a module is part of torch. ``typing_extensions`` counts as a part, because torch marks deprecated methods
    with it."""
    return module.partition(".")[0] in ("torch", "typing_extensions")
