"""Convert values of a checkpoint's small state for other programs: to JSON with separate tensors, or for torch.

Each of the two conversions loses types. JSON has no tuples and no number keys. ``torch.load(..., weights_only=True)``
accepts no numpy arrays and no deques. Only a recovery from the pool returns the exact types.
"""

from __future__ import annotations

import codecs
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightck.errors import StateValueError
from lightck.export.tensors import PlannedTensor
from lightck.restore.checkpoint import Checkpoint
from lightck.restore.contents import Contents, existing_entry
from lightck.state.storable import dtype_name

if TYPE_CHECKING:
    from lightck.export.choice import Chosen


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """Placeholder for a tensor that is stored in the pool outside the small state."""

    name: str
    """The tensor's name in the pool."""


class JsonEncoder:
    """Converts values to JSON. Dicts get string keys; sequences and sets become lists. A tensor, an array or bytes
    becomes ``{"tensor": name}``, and a tensor of this name is added to ``chosen``. Raises ``StateValueError`` if two
    keys of a dict become the same string."""

    def __init__(self, chosen: Chosen, contents: Contents, read: Callable[[str], torch.Tensor]) -> None:
        self._chosen = chosen
        self._contents = contents
        self._read = read

    def encode(self, value: object, path: str) -> object:
        """Return a value as JSON. ``path``: where the value lies, for names of tensors and error messages."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, complex):
            return [self.encode(part, path) for part in (value.real, value.imag)]
        if isinstance(value, Mapping):
            return self.encode_map(value, path)
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]
        if isinstance(value, PayloadRef):
            return {"tensor": self._payload_tensor(value.name)}
        return {"tensor": self._small_state_tensor(path, _as_tensor(value))}

    def encode_map(self, value: Mapping[Any, object], path: str) -> dict[str, object]:
        self._refuse_equal_names(value, path)
        return {str(key): self.encode(item, f"{path}/{key}") for key, item in value.items()}

    def _refuse_equal_names(self, value: Iterable[object], path: str) -> None:
        """Raise ``StateValueError`` for keys such as 1 and "1": JSON would silently keep only the last of them."""
        seen: dict[str, object] = {}
        for key in value:
            if str(key) in seen:
                raise StateValueError(
                    f"{path!r} has the keys {seen[str(key)]!r} and {key!r}. In JSON keys are strings, and both become "
                    f"{str(key)!r}. Nothing was written. {self._chosen.cure}"
                )
            seen[str(key)] = key

    def _payload_tensor(self, name: str) -> str:
        entry = existing_entry(self._contents.entries, name)
        if name not in self._chosen.tensors:
            self._chosen.add(name, PlannedTensor(entry.dtype, entry.shape, lambda: self._read(name)))
        return name

    def _small_state_tensor(self, path: str, tensor: torch.Tensor) -> str:
        name, number = path, 1
        while name in self._chosen.tensors:
            number += 1
            name = f"{path}#{number}"
        return self._chosen.add(name, PlannedTensor(dtype_name(tensor.dtype), tuple(tensor.shape), lambda: tensor))


def _as_tensor(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
    assert isinstance(value, np.ndarray), "nothing else can be stored"
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))


def everything(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the content of a ``format="torch"`` file with ``what="all"``: a dict of state_dicts, numbers and random
    states."""
    rng = checkpoint.rng
    return {
        "step": checkpoint.step,
        "iteration": checkpoint.iteration,
        "model": checkpoint.model,
        "optimizer": checkpoint.optimizer,
        "optimizer_names": [saved.names for saved in checkpoint.contents.optimizers],
        "state": checkpoint.state,
        "rng": {"python": rng.python, "numpy": rng.numpy, "torch": rng.torch, "cuda": dict(rng.cuda)},
    }


def for_torch(value: object) -> object:
    """Return a nested value in which each value of a type that ``torch.load(..., weights_only=True)`` refuses is
    converted. Tensors are not copied."""
    if isinstance(value, np.ndarray):
        return _as_tensor(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, OrderedDict):
        return OrderedDict((for_torch(key), for_torch(item)) for key, item in value.items())
    if isinstance(value, Counter):
        return Counter({for_torch(key): for_torch(item) for key, item in value.items()})
    if isinstance(value, Mapping):
        return {for_torch(key): for_torch(item) for key, item in value.items()}
    if isinstance(value, (tuple, frozenset)):
        return tuple(map(for_torch, value))
    if isinstance(value, set):
        return set(map(for_torch, value))
    if isinstance(value, (list, deque)):
        return list(map(for_torch, value))
    return _NO_BYTES if isinstance(value, bytes) and not value else value


class _NoBytes:
    """Stands for ``b""`` in a pickle, and loads as ``b""``. Python pickles ``b""`` itself as a call of ``bytes``, which
    ``torch.load(..., weights_only=True)`` refuses. This class is pickled as a call of ``codecs.encode``, which is
    allowed."""

    def __reduce__(self) -> tuple[object, ...]:
        return codecs.encode, ("", "latin1")


_NO_BYTES = _NoBytes()


def count_tensors(value: object) -> int:
    """Count the distinct tensors in a nested value."""
    found: set[int] = set()

    def visit(item: object) -> None:
        if isinstance(item, torch.Tensor):
            found.add(id(item))
        elif isinstance(item, Mapping):
            for part in item.values():
                visit(part)
        elif isinstance(item, (list, tuple, set)):
            for part in item:
                visit(part)

    visit(value)
    return len(found)
