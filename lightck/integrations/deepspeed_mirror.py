"""A module tree with the names of DeepSpeed's model, and with what lightck saves in place of its parameters.

Each module of the mirror has the buffers of the module that it mirrors: the same dict, so a buffer that is replaced is
replaced in both. The root's forward is that of the engine. So the hooks on the root run around each forward of the
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_DELEGATED = ("get_extra_state", "set_extra_state", "_save_to_state_dict")
"""Methods that a module's class may have of its own, to keep state that is no parameter and no buffer."""


class _Mirror(nn.Module):
    """One module of the mirror. Each mirrored class has a subclass of this one, with the same name."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["_original"] = original  # not as a child

    @property
    def training(self) -> bool:
        """Whether the mirrored module trains."""
        original = self.__dict__.get("_original")
        return True if original is None else bool(original.training)

    @training.setter
    def training(self, value: bool) -> None:
        """Do nothing: the mirrored module decides."""


def mirror_of(model: nn.Module, tensors: Mapping[int, torch.Tensor], forward: Callable[..., Any]) -> nn.Module:
    """Return a mirror of a model. ``tensors``: id of a parameter -> what the mirror has in its place; without one, the
    parameter itself. ``forward``: what the root calls."""
    made: dict[int, nn.Module] = {}
    root = _module_of(model, tensors, made)
    root.__dict__["forward"] = forward
    return root


def _module_of(original: nn.Module, tensors: Mapping[int, torch.Tensor], made: dict[int, nn.Module]) -> nn.Module:
    if id(original) in made:
        return made[id(original)]
    module = made[id(original)] = _class_of(type(original))(original)
    parameters = {
        key: None if param is None else tensors.get(id(param), param) for key, param in original._parameters.items()
    }
    module.__dict__["_parameters"] = parameters
    module.__dict__["_buffers"] = original._buffers
    module.__dict__["_non_persistent_buffers_set"] = original._non_persistent_buffers_set
    module.__dict__["_modules"] = {
        key: None if child is None else _module_of(child, tensors, made) for key, child in original._modules.items()
    }
    return module


def _class_of(kind: type[nn.Module]) -> type[_Mirror]:
    """Return a class with the name of ``kind``. lightck knows wrappers by their names."""
    own = [name for name in _DELEGATED if getattr(kind, name) is not getattr(nn.Module, name)]
    return type(kind.__name__, (_Mirror,), {"__module__": kind.__module__, **{name: _delegate(name) for name in own}})


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: _Mirror, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.__dict__["_original"], name)(*args, **kwargs)

    method.__name__ = name
    return method
