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
    from lightck.errors import LightckError
    from lightck.export import Exported, export_checkpoint
    from lightck.hooks.layerwise import layerwise
    from lightck.pipeline.staging.kinds import Device, Direct, Host
    from lightck.pool.storage.durability import Durability
    from lightck.restore.checkpoint import Checkpoint
    from lightck.restore.recover import recover
    from lightck.restore.restore import Drift
    from lightck.session.attach import attach
    from lightck.session.interval import Auto
    from lightck.session.session import Session
    from lightck.stats import Stats
    from lightck.strategy.full import FullState
    from lightck.tiers.keep import Keep
    from lightck.tiers.pin import Pin

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
    "Auto": "session.interval",
    "Checkpoint": "restore.checkpoint",
    "Device": "pipeline.staging.kinds",
    "Direct": "pipeline.staging.kinds",
    "Drift": "restore.restore",
    "Durability": "pool.storage.durability",
    "Exported": "export",
    "FullState": "strategy.full",
    "Host": "pipeline.staging.kinds",
    "Keep": "tiers.keep",
    "LightckError": "errors",
    "Pin": "tiers.pin",
    "Session": "session.session",
    "Stats": "stats",
    "attach": "session.attach",
    "export_checkpoint": "export",
    "layerwise": "hooks.layerwise",
    "recover": "restore.recover",
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
