"""What a user logs of a step: ``session.log(val_loss=0.31)``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import SupportsFloat

_NAMES_NBYTES_MAX = 1 << 15


def checked_metrics(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return the metrics as floats; a number that no float can hold is infinite. Raises ``TypeError`` for what is no
    number, and ``ValueError`` for too many."""
    found = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, (str, bytes, bool)):
                raise TypeError
            found[name] = float(value)
        except OverflowError:
            found[name] = math.inf
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"log({name}={value!r}): a metric is a number. Pass float(...) of it.") from None
    if sum(len(name.encode()) + 32 for name in found) > _NAMES_NBYTES_MAX:
        raise ValueError(f"log() got {len(found)} metrics, whose names are too long together. Log fewer of them.")
    return found
