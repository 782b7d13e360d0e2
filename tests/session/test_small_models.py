"""A model that is copied whole at the boundary, and grows until its copies are made in the background."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import lightck
from lightck.errors import StateChangedError
from lightck.pipeline import write_table

LARGE = 2048


@pytest.fixture(autouse=True)
def small_models_are_copied_whole(monkeypatch):
    """As users have it, and not as the suite has it otherwise (LIGHTCK_TEST_BACKGROUND=1)."""
    monkeypatch.setattr(write_table, "WHOLE_NBYTES_MAX", 512 * 1024)


class Growing:
    """A small model with SGD; ``grow`` puts layers of 20 MiB into its middle."""

    def __init__(self, folder, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 256), nn.Identity(), nn.Linear(256, 8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.pool = folder / "run.pool"
        self.session = lightck.attach(self.model, self.pool, optimizer=self.optimizer, **options)

    def grow(self):
        layers = nn.Sequential(nn.Linear(256, LARGE), nn.Linear(LARGE, LARGE), nn.Linear(LARGE, 256))
        self.model[1] = layers
        self.optimizer.add_param_group({"params": list(layers.parameters())})

    def step(self):
        self.model(torch.ones(2, 8)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.session.end_step()


def recovered(pool, name, **options):
    return lightck.recover(pool, **options).model[name].clone()


def test_a_small_model_is_committed_when_its_step_closes(folder):
    training = Growing(folder)
    with training.session:
        for step in range(1, 4):
            training.step()
            assert training.session.stats().committed == step
            assert torch.equal(recovered(training.pool, "0.weight"), training.model[0].weight)


def test_data_writes_are_found_at_once_in_a_model_that_grew_late(folder, caplog):
    """The first background copies are read whole, however many checkpoints were made before.

    A write that a copy meets costs that checkpoint, and no later one: the tensor is then copied at the end of a step.
    """
    training, held = Growing(folder), {}
    with training.session, caplog.at_level(logging.WARNING, logger="lightck"):
        for step in range(1, 21):
            if step == 7:
                training.grow()
            training.step()
            held[step] = training.model[2].weight.detach().clone()
            training.model[2].weight.data.mul_(0.99)
            if step >= 11:
                found = lightck.recover(training.pool)
                assert found.step >= step - 1 or f"step {step - 1} is given up" in caplog.text
                assert torch.equal(found.model["2.weight"], held[found.step]), f"recovered at step {step}"
    assert caplog.text.count("is given up") <= 1


def test_a_pin_of_a_small_model_is_not_struck_for_a_later_write(folder, caplog):
    training = Growing(folder, slots=3)
    with training.session, caplog.at_level(logging.INFO, logger="lightck"):
        for _ in range(4):
            training.step()
        pin = training.session.pin()
        pinned = training.model[0].weight.detach().clone()
        training.grow()
        for _ in range(6):
            training.step()
        for _ in range(200):  # a copy that ends before the write is right, and nothing is reported
            training.step()
            training.model[1][1].weight.data.mul_(0.99)
            if any("moves no version counter" in record.getMessage() for record in caplog.records):
                break
        else:
            raise AssertionError("nothing was found")
        training.session.flush()
        assert torch.equal(recovered(training.pool, "0.weight", step=4), pinned)
        pin.release()


def test_check_finds_a_data_write_in_a_small_model(folder, monkeypatch):
    monkeypatch.setenv("LIGHTCK_CHECK", "1")
    training = Growing(folder)
    with pytest.raises(StateChangedError), training.session:
        for _ in range(4):
            training.step()
            training.model[0].weight.data.mul_(0.5)
