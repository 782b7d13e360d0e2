"""lightck: every finished training step of a PyTorch model survives a crash, at almost no cost.

::

    session = lightck.attach(model, pool_path, resume=True)   # then train as always; after a crash, rerun the script
    ckpt = lightck.recover(pool_path)                         # the newest checkpoint, to inspect or to use elsewhere

A public name is imported when it is first used. So the command line and the pool readers, which need no torch, do not
wait until torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightck import errors as errors

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
    "Gradients",
    "Host",
    "Keep",
    "LightckError",
    "Pin",
    "Replica",
    "Replicas",
    "Session",
    "Stats",
    "StoredPiece",
    "Tier",
    "TopK",
    "attach",
    "export_checkpoint",
    "layerwise",
    "preemption",
    "recover",
]
_MODULES = {
    "Auto": "session.interval",
    "Checkpoint": "restore.checkpoint",
    "Device": "pipeline.staging.kinds",
    "Direct": "pipeline.staging.kinds",
    "Drift": "restore.restore",
    "Durability": "pool.storage.durability",
    "Exported": "export",
    "FullState": "strategy.full",
    "Gradients": "strategy.gradients",
    "Host": "pipeline.staging.kinds",
    "Keep": "tiers.keep",
    "LightckError": "errors",
    "Pin": "tiers.pin",
    "Replica": "strategy.replica",
    "Replicas": "session.replicas",
    "Session": "session.session",
    "Stats": "stats",
    "StoredPiece": "restore.ranges",
    "Tier": "tiers.tier",
    "TopK": "strategy.topk",
    "attach": "session.attach",
    "export_checkpoint": "export",
    "layerwise": "hooks.layerwise",
    "preemption": "session.preemption",
    "recover": "session.recover",
}

if TYPE_CHECKING:
    from lightck.errors import LightckError
    from lightck.export import Exported, export_checkpoint
    from lightck.hooks.layerwise import layerwise
    from lightck.pipeline.staging.kinds import Device, Direct, Host
    from lightck.pool.storage.durability import Durability
    from lightck.restore.checkpoint import Checkpoint
    from lightck.restore.ranges import StoredPiece
    from lightck.restore.restore import Drift
    from lightck.session.attach import attach
    from lightck.session.interval import Auto
    from lightck.session.preemption import preemption
    from lightck.session.recover import recover
    from lightck.session.replicas import Replicas
    from lightck.session.session import Session
    from lightck.stats import Stats
    from lightck.strategy.full import FullState
    from lightck.strategy.gradients import Gradients
    from lightck.strategy.replica import Replica
    from lightck.strategy.topk import TopK
    from lightck.tiers.keep import Keep
    from lightck.tiers.pin import Pin
    from lightck.tiers.tier import Tier
else:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
