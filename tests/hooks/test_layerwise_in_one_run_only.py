"""A script gets lightck.layerwise(), or loses it, between a crash and the resume: the updates have the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from toys import adam, forward, killed_child, net, same, weights

import lightck
from lightck.errors import DataMismatchError


def trained(
    pool: Path, is_layerwise: bool, kill_at: int | None = None, changes_state: bool = False
) -> dict[str, torch.Tensor]:
    model = net()
    optimizer = adam(model)
    if is_layerwise:
        lightck.layerwise(model, optimizer)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, strict_data=True) as session:
        if changes_state:
            optimizer.state[model[2].bias]["exp_avg"].mul_(2)
        while session.step < 6:
            if session.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            forward(model, session.step).backward()
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_the_resume_is_exact_and_is_not_refused(pool, caplog, before, after):
    expected = trained(pool.with_name("whole.pool"), False)
    killed_child(lambda: trained(pool, before, kill_at=4))
    caplog.clear()
    assert same(trained(pool, after), expected)
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


def test_other_state_in_a_layerwise_update_is_still_found(pool):
    killed_child(lambda: trained(pool, True, kill_at=4))
    with pytest.raises(DataMismatchError, match=r"the optimizer's state of '2\.bias'"):
        trained(pool, True, changes_state=True)
