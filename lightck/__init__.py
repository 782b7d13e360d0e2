"""lightck: every finished training step of a PyTorch model survives a crash, at almost no cost.

::

    session = lightck.attach(model, pool_path)     # then train as always
    ckpt = lightck.recover(pool_path)              # after the crash; or attach(..., resume=True)
"""

from lightck.attach import attach
from lightck.checkpoint import Checkpoint
from lightck.errors import LightckError
from lightck.export import Exported, export_checkpoint
from lightck.keep import Keep
from lightck.pin import Pin
from lightck.pool.durability import Durability
from lightck.recover import recover
from lightck.restore import Drift
from lightck.session import Session
from lightck.stats import Stats
from lightck.strategy import FullState

__version__ = "0.1.0"
__all__ = [
    "Checkpoint",
    "Drift",
    "Durability",
    "Exported",
    "FullState",
    "Keep",
    "LightckError",
    "Pin",
    "Session",
    "Stats",
    "attach",
    "export_checkpoint",
    "recover",
]
