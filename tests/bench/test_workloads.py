"""The six workloads: their checkpoints are as large as the paper's, and their trainings resume exactly."""

from __future__ import annotations

import pytest
import torch
from toys import crashed

import lightck
from bench.measures.training import Training, differing
from bench.workloads import FULL, NAMES, SMALL, checkpoint_nbytes, checkpoint_shapes, workload


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_as_large_as_in_the_papers_table(name):
    of = workload(name)
    assert abs(checkpoint_nbytes(of) / of.paper_nbytes - 1) <= 0.03


def test_a_checkpoints_size_is_that_of_the_state_after_a_step():
    training = Training(workload("resnet18", "small"))
    training.iterate()
    assert checkpoint_nbytes(training.workload) == training.nbytes
    assert checkpoint_shapes(training.workload) == [t.numel() * t.element_size() for t in training.tensors()]


def test_every_workload_has_a_small_size():
    assert list(SMALL) == list(FULL) == list(NAMES)
    assert all(checkpoint_nbytes(SMALL[name]) < 10**7 for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_small_size_trains_and_goes_on_exactly_after_a_crash(name, pool):
    plain = Training(workload(name, "small"))
    losses = [float(plain.iterate()) for _ in range(4)]
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    assert len(set(losses)) == 4

    first = Training(workload(name, "small"))
    with lightck.attach(first.model, pool, optimizer=first.optimizer) as session:
        first.iterate()
        first.iterate()
        session.flush()
        image = crashed(pool)
    second = Training(workload(name, "small"), seed=99)
    with lightck.attach(second.model, image, optimizer=second.optimizer, resume=True) as session:
        second.step = session.step
        assert second.step == 2
        assert [float(second.iterate()) for _ in range(2)] == losses[2:]
    assert not differing(plain.digest(), second.digest())


def test_a_scrambled_state_differs_in_every_tensor():
    training = Training(workload("resnet18", "small"))
    training.iterate()
    expected = training.digest()
    training.scramble()
    assert differing(expected, training.digest()) == sorted(expected)
