"""torch's schedulers know nothing of the updates before a crash, and must not warn of a wrong order of calls."""

from __future__ import annotations

import warnings

import torch
from toys import net

import lightck


def test_a_scheduler_that_steps_first_after_a_resume_gives_no_warning(pool):
    """The kill came between the last update of an epoch and the scheduler."""
    for n_updates in (2, 0):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
            for _ in range(n_updates):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            session.flush()
            if not n_updates:
                assert session.step == 2
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    scheduler.step()
                assert optimizer.param_groups[0]["lr"] == 0.25


def test_torch_still_warns_in_a_new_training(pool):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        scheduler.step()
    assert any("before `optimizer.step()`" in str(one.message) for one in seen)
