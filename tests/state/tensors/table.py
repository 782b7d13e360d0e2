"""Tables of every dtype, layout and role, for the tests of this folder.

``STORED`` and ``REFUSED`` are written here and not read from the library: a new dtype of a later torch is in neither,
and fails a test until somebody decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ALL = {str(item).removeprefix("torch."): item for item in vars(torch).values() if isinstance(item, torch.dtype)}

STORED = frozenset(
    (
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
        "bits8",
        "bits16",
        "bits1x8",
        "bits2x4",
        "bits4x2",
    )
)

REFUSED = {
    **dict.fromkeys(("qint8", "qint32", "quint8", "quint2x4", "quint4x2"), ("need a scale", "int_repr")),
    **{f"{sign}int{bits}": ("torch cannot copy", "uint8") for sign in ("", "u") for bits in range(1, 8)},
}
"""name -> words of the reason and of the cure."""

ROLES = ("parameter", "buffer", "optimizer", "state")
PLACES = {
    "parameter": "model/p_odd",
    "buffer": "model/b_odd",
    "optimizer": "optimizer/clock/o_odd",
    "state": "state/box/value/odd",
}
"""role -> where an error finds the tensor ``odd`` of a ``Holder``."""
COUNT = 1440
"""Elements of the memory that a layout is a view of."""


def memory(dtype: torch.dtype, seed: int, count: int = COUNT) -> torch.Tensor:
    """Random bytes as elements, with NaNs of every kind."""
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda m: m.view(12, 10, 12),
    "scalar": lambda m: m[7],
    "empty": lambda m: m[:0],
    "empty_matrix": lambda m: m[:0].view(3, 0, 2),
    "empty_strided": lambda m: m.view(12, 120)[:, 5:5].t(),
    "ones": lambda m: m.as_strided((1, 5, 1), (77, 1, 99)),
    "channels_last": lambda m: m.view(4, 10, 6, 6).permute(0, 3, 1, 2),
    "channels_last_3d": lambda m: m.view(4, 5, 2, 6, 6).permute(0, 4, 1, 2, 3),
    "transposed": lambda m: m.view(20, 72).t(),
    "permuted": lambda m: m.view(8, 9, 20).permute(2, 0, 1),
    "offset": lambda m: m[17:1317],
    "narrow": lambda m: m.view(36, 40)[:, 3:33],
    "steps": lambda m: m[5::3],
    "gaps": lambda m: m.view(36, 40)[1::2, ::5].t(),
    "expanded": lambda m: m[:120].view(1, 120).expand(9, 120),
    "broadcast": lambda m: m[3:6].view(3, 1, 1).expand(3, 40, 10),
    "windows": lambda m: m.unfold(0, 6, 2),
}

COMPLEX_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugated": lambda m: m.view(36, 40).conj(),
    "conjugated_gaps": lambda m: m.view(36, 40)[:, ::2].conj(),
    "negative": lambda m: m.conj().imag,
}


def layouts_for(dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    # torch has no views of complex32 as real numbers that it can also copy
    more = COMPLEX_LAYOUTS if dtype.is_complex and dtype is not torch.complex32 else {}
    return LAYOUTS | more


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the tensor's elements, in order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


class Box:
    """An object for ``state=``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Keeper(torch.optim.Optimizer):
    """An optimizer that keeps given tensors as state, and changes only its first parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)


class Holder:
    """One tensor of each name in each role, with the objects to save and restore them."""

    def __init__(self, tensors: Callable[[str], dict[str, torch.Tensor]]) -> None:
        """Build the objects. ``tensors(role)``: returns name -> tensor."""
        self.model = nn.Module()
        self.model.clock = nn.Parameter(torch.zeros(1))
        for name, tensor in tensors("parameter").items():
            self.model.register_parameter(f"p_{name}", nn.Parameter(tensor, requires_grad=False))
        for name, tensor in tensors("buffer").items():
            self.model.register_buffer(f"b_{name}", tensor)
        self.optimizer = Keeper([self.model.clock])
        self.optimizer.state[self.model.clock] = {f"o_{n}": t for n, t in tensors("optimizer").items()}
        self.box = Box(tensors("state"))

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "state": {"box": self.box}}

    def held(self) -> dict[str, torch.Tensor]:
        """Return role/name -> tensor."""
        model = {n: t for n, t in [*self.model.named_parameters(), *self.model.named_buffers()] if n != "clock"}
        state = self.optimizer.state[self.model.clock]
        return model | state | {f"s_{n}": t for n, t in self.box.value.items()}
