"""lightck: every finished training step of a PyTorch model survives a crash, at almost no cost.

::

    session = lightck.attach(model, pool_path, resume=True)   # then train as always; started again, it goes on
    ckpt = lightck.recover(pool_path)                         # what a crash left, to look at or to use elsewhere

A public name is imported when it is first asked for, so that the command line and the pool readers, which need no
torch, do not wait for it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightck import errors as errors

if TYPE_CHECKING:
    from lightck.attach import attach
    from lightck.checkpoint import Checkpoint
    from lightck.errors import LightckError
    from lightck.export import Exported, export_checkpoint
    from lightck.interval import Auto
    from lightck.keep import Keep
    from lightck.layerwise import layerwise
    from lightck.pin import Pin
    from lightck.pool.durability import Durability
    from lightck.recover import recover
    from lightck.restore import Drift
    from lightck.session import Session
    from lightck.staging.kinds import Device, Direct, Host
    from lightck.stats import Stats
    from lightck.strategy import FullState

__version__ = "0.1.0"
__all__ = [
    "Auto",
    "Checkpoint",
    "Device",
    "Direct",
    "Drift",
    "Durability",
    "Exported",
    "FullState",
    "Host",
    "Keep",
    "LightckError",
    "Pin",
    "Session",
    "Stats",
    "attach",
    "export_checkpoint",
    "layerwise",
    "recover",
]
_HOMES = {
    "Auto": "interval",
    "Checkpoint": "checkpoint",
    "Device": "staging.kinds",
    "Direct": "staging.kinds",
    "Drift": "restore",
    "Durability": "pool.durability",
    "Exported": "export",
    "FullState": "strategy",
    "Host": "staging.kinds",
    "Keep": "keep",
    "LightckError": "errors",
    "Pin": "pin",
    "Session": "session",
    "Stats": "stats",
    "attach": "attach",
    "export_checkpoint": "export",
    "layerwise": "layerwise",
    "recover": "recover",
}


class _Package(ModuleType):
    """This package. ``lightck.attach`` is the function, although importing the module of that name would put the module
    there: the import system sets it as an attribute, and that is refused."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{self.__name__}.{_HOMES[name]}"), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOMES})


sys.modules[__name__].__class__ = _Package
