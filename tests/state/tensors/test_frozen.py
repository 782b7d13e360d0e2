"""A mostly frozen model writes little more than what changes, and the frozen parameters left out are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toys import BIG, everything, forward, is_step, same

import lightck
from lightck.errors import CorruptPoolError, NoCheckpointError

PARTS, ROWS = 36, 512


class Mostly(nn.Module):
    """40 equal layers of 1 MiB each, of which only the last four are trained."""

    def __init__(self, seed: int = 0, strided: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(ROWS, ROWS, bias=False) for _ in range(PARTS + 4))
        for layer in self.layers[:PARTS]:
            layer.requires_grad_(False)
            if strided:  # a part of a larger storage, which cannot be copied directly
                layer.weight.data = torch.rand(ROWS, 2 * ROWS)[:, ::2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layers[0].weight[0]
        for layer in self.layers[PARTS:]:
            x = torch.tanh(layer(x))
        return x


def iterate(model: Mostly, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(number))
    model(x).square().sum().backward()
    optimizer.step()


def test_nine_tenths_frozen_write_at_most_12_percent_per_step(pool):
    """The optimizer is stateless, so that only parameters are written; measured from the third checkpoint on."""
    model = Mostly()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    whole = sum(p.nbytes for p in model.parameters())
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        written = []
        for number in range(8):
            before = session.stats().bytes_written
            iterate(model, optimizer, number)
            session.flush()
            written.append(session.stats().bytes_written - before)
        assert is_step(lightck.recover(pool), everything(model, optimizer))
    assert all(nbytes >= whole for nbytes in written[:2]), "each slot holds everything once"
    assert all(nbytes <= 0.12 * whole for nbytes in written[2:]), [nbytes / whole for nbytes in written]
    other = Mostly(seed=5)
    lightck.recover(pool, other)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
@pytest.mark.parametrize("culprit", [0, 17, PARTS - 1])
def test_unannounced_write_is_found_in_at_most_one_step_for_each_left_out_tensor(pool, culprit, strided, caplog):
    """Each tensor has 1 MiB, so each checkpoint reads the next one. Every checkpoint that left the written tensor out
    is struck."""
    model = Mostly(strided=strided)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with lightck.attach(model, pool, optimizer=optimizer, slots=5) as session:
        for number in range(7):
            iterate(model, optimizer, number)
            session.flush()
        assert session.stats().left_out == PARTS
        model.layers[culprit].weight.data[3, 4] += 1.0
        for number in range(7, 7 + PARTS):
            iterate(model, optimizer, number)
            session.flush()
            if f"'model/layers.{culprit}.weight' was written" in caplog.text:
                break
        else:
            raise AssertionError("nothing was found")
        assert is_step(lightck.recover(pool), everything(model, optimizer))
        for step in range(8, session.step):
            with pytest.raises((NoCheckpointError, CorruptPoolError)):
                lightck.recover(pool, step=step)


@pytest.mark.parametrize(("kind", "until"), [(torch.optim.AdamW, 6), (torch.optim.SGD, 3)])
@pytest.mark.parametrize("width", [8, BIG])
def test_tensors_that_were_made_under_inference_mode_are_saved_exactly(pool, width, kind, until):
    """torch counts no writes to inference tensors, in frozen parameters, optimizer state and copies of buffers."""
    with torch.inference_mode():
        frozen = nn.Linear(4, 4).requires_grad_(False)
    torch.manual_seed(0)
    model = nn.Sequential(frozen, nn.Linear(4, width), nn.BatchNorm1d(width))
    optimizer = kind(model[1:].parameters(), lr=0.01)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(6):
            optimizer.zero_grad()
            forward(model, number).backward()
            with torch.inference_mode(number < until):
                optimizer.step()
            seen = everything(model, optimizer)
            session.flush()
            assert is_step(lightck.recover(pool), seen)


class Adversarial(nn.Module):
    """A generator and a discriminator beside a frozen backbone, which takes the bytes that are read again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Linear(2048, 2048).requires_grad_(False)
        self.g = nn.Linear(4, 4)
        self.d = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))


def test_a_parameter_that_a_fused_optimizer_updated_is_written_although_it_is_frozen_at_the_boundary(pool, caplog):
    """A fused kernel moves no version counter, and ``requires_grad`` is False again when the checkpoint closes."""
    model = Adversarial()
    g = torch.optim.Adam(model.g.parameters(), lr=0.01, fused=True)
    d = torch.optim.SGD(model.d.parameters(), lr=0.01, fused=True)
    with lightck.attach(model, pool, optimizer=[g, d]) as session:
        for number in range(24):
            z = torch.randn(8, 4)
            if number % 6 == 5:
                model.d.requires_grad_(True)
                d.zero_grad()
                model.d(model.g(z).detach()).mean().backward()
                d.step()
            model.d.requires_grad_(False)
            g.zero_grad()
            (-model.d(model.g(z)).mean()).backward()
            g.step()
            session.end_step()
            session.flush()
            assert same(dict(lightck.recover(pool).model), dict(model.state_dict())), number
        assert session.stats().left_out > 0
    assert "was written in a way" not in caplog.text


def test_an_update_of_a_layer_that_is_unfrozen_is_no_unannounced_write(pool, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model[0].requires_grad_(False)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(12):
            model[0].requires_grad_(number >= 6)
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.end_step()
            session.flush()
            assert is_step(lightck.recover(pool), everything(model, optimizer))
    assert "was written in a way" not in caplog.text
