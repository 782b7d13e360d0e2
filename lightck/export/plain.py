"""Values of a version's small state for those who read it elsewhere: as JSON with tensors beside it, or for torch.

Both are readings, not the exact value: JSON has no tuples and no keys that are numbers, and ``torch.load(...,
weights_only=True)`` takes no numpy arrays and no deques. What exactly comes back is what a pool holds.
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
from lightck.restore.contents import Contents, named
from lightck.state.storable import dtype_name

if TYPE_CHECKING:
    from lightck.export.choice import Chosen


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """In the place of a tensor that lies in the payload under this name."""

    name: str


class JsonEncoder:
    """Turns values into JSON: dicts get string keys, sequences become lists, and what is a tensor, an array or bytes
    becomes ``{"tensor": name}`` and a tensor of the file. Raises ``StateValueError`` where two keys are one string."""

    def __init__(self, chosen: Chosen, contents: Contents, read: Callable[[str], torch.Tensor]) -> None:
        self._chosen = chosen
        self._contents = contents
        self._read = read

    def of(self, value: object, path: str) -> object:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, complex):
            return [value.real, value.imag]
        if isinstance(value, Mapping):
            return self.of_map(value, path)
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return [self.of(item, f"{path}/{i}") for i, item in enumerate(value)]
        if isinstance(value, PayloadRef):
            return {"tensor": self._large(value.name)}
        return {"tensor": self._tensor(path, _as_tensor(value))}

    def of_map(self, value: Mapping[Any, object], path: str) -> dict[str, object]:
        self._refuse_one_name(value, path)
        return {str(key): self.of(item, f"{path}/{key}") for key, item in value.items()}

    def _refuse_one_name(self, value: Iterable[object], path: str) -> None:
        """Of 1 and "1" the file would hold the last, without a word."""
        seen: dict[str, object] = {}
        for key in value:
            if str(key) in seen:
                raise StateValueError(
                    f"{path!r} has the keys {seen[str(key)]!r} and {key!r}. Its keys become names in JSON, where both "
                    f"are {str(key)!r}. Nothing was written. {self._chosen.cure}"
                )
            seen[str(key)] = key

    def _large(self, name: str) -> str:
        entry = named(self._contents.entries, name)
        if name not in self._chosen.tensors:
            self._chosen.add(name, PlannedTensor(entry.dtype, entry.shape, lambda: self._read(name)))
        return name

    def _tensor(self, path: str, tensor: torch.Tensor) -> str:
        name, n = path, 1
        while name in self._chosen.tensors:
            n += 1
            name = f"{path}#{n}"
        return self._chosen.add(name, PlannedTensor(dtype_name(tensor.dtype), tuple(tensor.shape), lambda: tensor))


def _as_tensor(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
    assert isinstance(value, np.ndarray), "nothing else can be stored"
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))


def everything(checkpoint: Checkpoint) -> dict[str, object]:
    """All that a checkpoint holds, as torch has it."""
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
    """The value without the types that ``torch.load(..., weights_only=True)`` refuses; each tensor as it is."""
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
    """``b""`` in the words in which torch takes bytes: pickle writes empty ones by a name that is refused."""

    def __reduce__(self) -> tuple[object, ...]:
        return codecs.encode, ("", "latin1")


_NO_BYTES = _NoBytes()


def count_tensors(value: object) -> int:
    """Different tensors in a nested value."""
    found: set[int] = set()

    def peek(item: object) -> None:
        if isinstance(item, torch.Tensor):
            found.add(id(item))
        elif isinstance(item, Mapping):
            for part in item.values():
                peek(part)
        elif isinstance(item, (list, tuple, set)):
            for part in item:
                peek(part)

    peek(value)
    return len(found)
