"""Trainers, callbacks and training arguments of transformers with which a resume would not be exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from lightck.errors import SessionError, UnsupportedError

_KEEPS_INPUTS = "_buffered_inputs"
"""Attribute of TRL's trainers that train several times on inputs that they keep (GRPO, RLOO, distillation)."""
_REFUSED = {
    "GRPOTrainer": "it trains several times on generations that it keeps, and these are not saved",
    "RLOOTrainer": "it trains several times on generations that it keeps, and these are not saved",
    "OnlineDPOTrainer": "it trains on generations of an engine whose state is not saved",
    "BEMACallback": "it keeps averages of the weights that are not saved",
    "SyncRefModelCallback": "it changes a reference model that is not saved",
}
"""Names of classes of trainers and callbacks, and why a resume would not be exact with them."""


def refuse_hidden_state(trainer: transformers.Trainer) -> None:
    """Raise ``UnsupportedError`` for a trainer or a callback that keeps state which is not saved."""
    for one in (trainer, *trainer.callback_handler.callbacks):
        reasons = [(kind.__name__, _REFUSED.get(kind.__name__, "")) for kind in type(one).__mro__]
        if hasattr(one, _KEEPS_INPUTS):
            reasons.append(
                (type(one).__name__, "it trains several times on inputs that it keeps, and these are not saved")
            )
        for name, reason in reasons:
            if reason:
                raise UnsupportedError(
                    f"{name} cannot be resumed exactly: {reason}. Use the checkpoints of the Trainer itself."
                )


def refuse_arguments(trainer: transformers.Trainer) -> None:
    """Raise ``UnsupportedError`` for training arguments with which a resume would not be exact."""
    args = trainer.args
    refused = {
        "auto_find_batch_size": (args.auto_find_batch_size, "it begins the training anew with another batch size"),
        "ignore_data_skip": (args.ignore_data_skip, "the data would begin anew at a resume"),
        "deepspeed": (trainer.is_deepspeed_enabled, "DeepSpeed has its own optimizers and partitions"),
        "sync_ref_model": (
            getattr(args, "sync_ref_model", False),
            "TRL changes the reference model while it trains, and the pool does not hold that model",
        ),
        "fsdp": (trainer.is_fsdp_enabled, "the Trainer's FSDP was not tested with lightck"),
    }
    for name, (is_given, reason) in refused.items():
        if is_given:
            raise UnsupportedError(
                f"TrainingArguments({name}=...) cannot be used with lightck: {reason}. Leave the argument out, or use "
                "the checkpoints of the Trainer itself."
            )


def refuse_other_batches(saved: Mapping[str, Any], args: transformers.TrainingArguments, path: str) -> None:
    """Raise ``SessionError`` if an update of the run before had another number of batches, or its batches another size.
    (An epoch may have the same number of updates all the same.) Pools of earlier releases do not say it."""
    for key, name, now in (
        ("batches_per_update", "gradient_accumulation_steps", args.gradient_accumulation_steps),
        ("batch_size", "per_device_train_batch_size", args.train_batch_size),
    ):
        before = saved.get(key, now)
        if before != now:
            raise SessionError(
                f"This Trainer has {name}={now}, and the run in the pool {path!r} had {before}, so the Trainer cannot "
                f"find its place. Give {name}={before}, or begin another pool with its weights: "
                "lightck.recover(path, model)."
            )
