"""What the hooks cost, as it is measured when a session begins."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from lightck.hooks import hook_cost


def test_the_measurement_runs_no_hook_of_the_user():
    """A hook on all modules may count, or draw random numbers: lightck's own module must not reach it."""
    hook_cost._measured_seconds_per_hook.cache_clear()
    calls: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, *_: calls.append(module))
    try:
        assert hook_cost.seconds_per_hook() == 0.0
        assert calls == []
        nn.Identity()(torch.empty(0))
        assert len(calls) == 1  # the hook works
    finally:
        handle.remove()
    assert hook_cost.seconds_per_hook() > 0.0


def test_the_measurement_does_not_follow_the_default_device(monkeypatch):
    devices = []
    monkeypatch.setattr(nn.Identity, "forward", lambda _, x: devices.append(x.device.type))
    hook_cost._measured_seconds_per_hook.cache_clear()
    with torch.device("meta"):
        hook_cost.seconds_per_hook()
    assert set(devices) == {"cpu"}
