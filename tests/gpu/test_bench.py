"""The bench's rows on a CUDA device, at a small size."""

from __future__ import annotations

import pytest

from bench.measures import measure


@pytest.mark.parametrize("staging", [None, "direct", "host", "device"])
@pytest.mark.parametrize("saver", ["lightck", "torch.save"])
def test_steps(saver, staging, folder):
    options = {"workload": "vgg16", "size": "small", "saver": saver, "pairs": 3, "device": "cuda", "staging": staging}
    found = measure("gpu", options, str(folder))
    assert found["pairs"] == 3
    assert found["device"]
    if saver == "lightck":
        assert staging is None or found["staging"] in (f"{staging.title()}()", "Host()")
    assert not list(folder.iterdir())
