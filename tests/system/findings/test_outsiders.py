"""What outsiders broke in an hour: trainings that were never killed, and that attaching to them ended."""

from __future__ import annotations

import copy
import itertools
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from toys import same, weights

import lightck
from lightck.dataloader.batch import checksum_of


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 1))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_per_sample_gradients_by_torch_func(pool: Path, is_wrapped: bool) -> None:
    """Its tensors are wrappers without memory of their own, and the model's forward runs inside the transform."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.randn(6, 4) for _ in range(5)]

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x[None],)).square().sum()

    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for x in session.loader(data) if is_wrapped else data:
            params = {name: p.detach() for name, p in model.named_parameters()}
            grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
            for name, p in model.named_parameters():
                p.grad = grads[name].mean(0)
            optimizer.step()
    assert session.step == 5
    assert same(dict(lightck.recover(pool).model), weights(model))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_in_a_batch_are_not_looked_into(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    assert checksum_of(nested) is None
    assert checksum_of((nested, torch.ones(3))) is not None


def test_a_server_model_that_is_loaded_from_its_clients(pool: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The clients have optimizers of their own; the server's model is never called, and end_step() is its update."""
    caplog.set_level(logging.WARNING, "lightck")
    model = net()
    with lightck.attach(model, pool) as session:
        for number in range(4):
            client = copy.deepcopy(model)
            optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
            for _ in range(8):
                client(torch.full((2, 4), float(number))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            model.load_state_dict(client.state_dict())
            session.end_step()
    assert lightck.recover(pool).step == 4
    assert same(dict(lightck.recover(pool).model), weights(model))
    assert not [r for r in caplog.records if "nothing is saved" in r.getMessage()]


def test_clients_that_make_a_few_updates_each_are_no_model_that_was_built_again(
    pool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lightck")
    model = net()
    with lightck.attach(model, pool) as session:
        for number in range(5):
            client = copy.deepcopy(model)
            optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
            for _ in range(4):
                client(torch.full((2, 4), float(number))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        model.load_state_dict(client.state_dict())
        session.end_step()
    assert not caplog.records


def test_batches_that_are_used_again_are_named_once(pool: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lightck")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        loader = session.loader([torch.randn(6, 4) for _ in range(2)])
        for _ in range(3):
            for x in itertools.islice(itertools.cycle(loader), 5):
                model(x).square().sum().backward()
                optimizer.step()
    assert len([r for r in caplog.records if "uses batches again" in r.getMessage()]) == 1


def test_a_finished_cell_that_is_run_again_says_nothing(pool: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The loader would have given the batch that followed: the loop did not ask for it."""
    caplog.set_level(logging.WARNING, "lightck")
    for until in (3, 5, 3):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
            loader = session.loader([torch.full((6, 4), float(i)) for i in range(8)])
            for x in loader if session.step < until else ():
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if session.step >= until and until == 3:
                    break
                if session.step > until:  # as of a process that is killed: nothing closes this step's checkpoint
                    session.abandon()
                    break
    assert not caplog.records
