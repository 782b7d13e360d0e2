"""Attributes of a Trainer that a library, or the user, changes while it trains: sums of metrics, counters, averages.

The Trainer of transformers keeps what it knows in ``TrainerState``. A class that inherits from it often adds attributes
of its own: TRL's trainers collect metrics from one log to the next, and a ``compute_loss`` may depend on an average.
``ChangedAttributes`` saves those that are plain, and names the others.
"""

from __future__ import annotations

import functools

import transformers

from lightck.integrations.attributes import ChangedAttributes, assigned_in


def attributes_of(trainer: transformers.Trainer) -> ChangedAttributes:
    """Return the attributes of this Trainer that its own code, and not that of transformers, assigns."""
    return ChangedAttributes(trainer, assigned_by_transformers(), trained=trainer.model)


@functools.cache
def assigned_by_transformers() -> frozenset[str]:
    """Return the names of all attributes that the code of ``transformers.Trainer`` assigns. What matters of these is
    saved elsewhere, or set anew by each ``train()``."""
    return frozenset(assigned_in(transformers.Trainer))
