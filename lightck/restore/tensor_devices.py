"""The device to which a restore moves a tensor inside a value: inside an optimizer's lists, or in ``state=``.

Such a tensor is read into host memory first. ``torch.load`` would put it on the device from which it was saved. But a
training may continue on other devices than before, so here the live objects decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class MovedTensors:
    """Moves tensors inside lists, tuples and dicts. A tensor that two places share is moved once.

    ``restored``: name of an entry -> the tensor that was read; it holds the moved tensors afterwards."""

    def __init__(self, restored: dict[str, torch.Tensor]) -> None:
        self._restored = restored
        self._names: dict[int, str] | None = None
        """id of a tensor of ``restored`` -> its name. None until it is needed."""
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id of a tensor -> that tensor, which stays alive so that its id stays its own, and the moved one."""

    def moved(self, value: Any, device_for: Callable[[str | None], torch.device]) -> Any:
        """Return ``value`` with its tensors moved. Containers other than tuples are changed in place. ``device_for``:
        from the name of a tensor's entry (None: it has none) to its device."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, device_for)
        if isinstance(value, dict):
            for key, part in list(value.items()):  # not value.update(): in a Counter it adds
                value[key] = self.moved(part, device_for)
        elif isinstance(value, tuple):
            return tuple(self.moved(part, device_for) for part in value)
        elif isinstance(value, (list, deque)):
            for i, part in enumerate(value):
                value[i] = self.moved(part, device_for)
        return value

    def _tensor(self, tensor: torch.Tensor, device_for: Callable[[str | None], torch.device]) -> torch.Tensor:
        if id(tensor) not in self._moved:
            if self._names is None:
                self._names = {id(tensor): name for name, tensor in self._restored.items()}
            name = self._names.get(id(tensor))
            found = tensor.to(device_for(name))
            if name is not None:
                self._restored[name] = found
            self._moved[id(tensor)] = tensor, found
        return self._moved[id(tensor)][1]


def like_live(saved: Any, live: Any) -> Any:
    """Return ``saved`` with each tensor on the device of the tensor that ``live`` has in the same place. Tensors that
    ``live`` lacks stay where they are. Containers other than tuples are changed in place."""
    return _like_live(saved, live, {})


def _like_live(saved: Any, live: Any, moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(saved, torch.Tensor):
        if not isinstance(live, torch.Tensor) or live.device == saved.device or live.is_meta:
            return saved
        key = id(saved), live.device
        if key not in moved:
            moved[key] = saved, saved.to(live.device)
        return moved[key][1]
    if isinstance(saved, dict) and isinstance(live, dict):
        for key, part in list(saved.items()):  # not saved.update(): in a Counter it adds
            if key in live:
                saved[key] = _like_live(part, live[key], moved)
    elif isinstance(saved, (list, tuple, deque)) and isinstance(live, (list, tuple, deque)):
        parts = [_like_live(part, live[i], moved) if i < len(live) else part for i, part in enumerate(saved)]
        if isinstance(saved, tuple):
            return tuple(parts)
        for i, part in enumerate(parts):
            saved[i] = part
    return saved
