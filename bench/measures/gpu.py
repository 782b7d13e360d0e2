"""The measure ``steps`` for a training on a CUDA device, with the device's name.

A window ends when the device has finished its work. The cost of a checkpoint falls within its window: tensors leave the
device during the step after the boundary, and the gate before that step's update waits for them.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.measures import steps
from lightck.errors import BenchError


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise BenchError("There is no CUDA device, and these rows need one. Run them on a machine with a GPU.")
    return {**steps.measure(options, folder), "device": torch.cuda.get_device_name()}
