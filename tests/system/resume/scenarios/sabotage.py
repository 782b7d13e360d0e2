"""Faults put into lightck in a child, to see that the comparison finds them."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

import lightck
from lightck.dataloader.loader import SessionLoader
from lightck.pipeline.pipeline import Pipeline
from lightck.restore import restore
from lightck.session.session import Session
from lightck.state.rng import RngState


def rng_is_not_restored() -> None:
    RngState.restore = lambda self: None  # type: ignore[method-assign]


def scheduler_is_not_restored() -> None:
    load = restore._load

    def without_schedulers(name: str, obj: Any, value: Any) -> None:
        if not isinstance(obj, LRScheduler):
            load(name, obj, value)

    restore._load = without_schedulers


def every_third_checkpoint_only() -> None:
    begin_checkpoint = Pipeline.begin_checkpoint

    def sometimes(self: Pipeline, closing: Any) -> None:
        if closing.step % 3 == 0:
            begin_checkpoint(self, closing)

    Pipeline.begin_checkpoint = sometimes  # type: ignore[method-assign]


def momentum_is_not_restored() -> None:
    restore.set_state = lambda saved, live, state: None


def lightck_cannot_be_called() -> None:
    """For a reference run."""
    for name in ("attach", "recover"):
        setattr(lightck, name, None)
    Session.__init__ = None  # type: ignore[assignment]
    SessionLoader.__init__ = None  # type: ignore[assignment]
