"""``steps`` of a training on a CUDA device, with the device's name.

A window ends when the device has done its work. What a checkpoint costs lies within its window: tensors are sent during
the step that follows the boundary, and the gate before that step's update waits for them.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.measures import steps
from lightck.errors import BenchError


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise BenchError("There is no CUDA device. These rows are for a machine that has one.")
    return {**steps.measure(options, folder), "device": torch.cuda.get_device_name()}
