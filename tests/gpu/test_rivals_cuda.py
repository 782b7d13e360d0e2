"""A rival's checkpoint out of a CUDA device is of the step that it says, whatever the device does meanwhile."""

from __future__ import annotations

import pytest
import torch

from bench import rivals


@pytest.mark.parametrize("name", ["CheckFreq", "torch.save"])
def test_what_was_saved_at_a_step_is_that_step(name, folder):
    model = torch.nn.Linear(2000, 2000).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rival = rivals.named(name, **({"interval": 1} if name == "CheckFreq" else {}))
    rival.start(model, optimizer, str(folder))
    for step in range(1, 6):
        model(torch.ones(64, 2000, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = [p.detach().clone() for p in model.parameters()]
        rival.save(step)
    rival.finish()
    other = torch.nn.Linear(2000, 2000).cuda()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    assert rivals.named(name).load(other, fresh, str(folder)) == 5
    assert all(map(torch.equal, expected, other.parameters()))
