"""What the pool's writer is told of a version: numbers and addresses, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class VersionPlan:
    """One version as the pipeline hands it down. Arrays are parallel; record numbers are the writer's."""

    step: int
    iteration: int
    records: npt.NDArray[np.int64]
    """Record numbers of the tensors to copy."""
    sources: npt.NDArray[np.uint64]
    """Their addresses."""
    now: npt.NDArray[np.bool_]
    """Whether to copy before ``begin`` returns."""
    kept: npt.NDArray[np.int64]
    """Record numbers of the tensors whose bytes in the slot still hold."""
    present: npt.NDArray[np.int64]
    """Record numbers that have no bytes to copy: tied or empty tensors."""
    state: bytes
