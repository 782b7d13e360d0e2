"""The bench's rows on a CUDA device, at a small size."""

from __future__ import annotations

import pytest

from lightck.bench.measures import measure


@pytest.mark.parametrize("saver", ["lightck", "torch.save"])
def test_steps(saver, folder):
    options = {"workload": "vgg16", "size": "small", "saver": saver, "pairs": 3, "device": "cuda"}
    found = measure("gpu", options, str(folder))
    assert found["pairs"] == 3
    assert found["device"]
    assert not list(folder.iterdir())
