"""``pause_on_nonfinite=True``: a broken state is not committed, the training goes on, and what is found is named."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from toys import BIG, adam, everything, is_step, net, train

import lightck
from lightck.pipeline.nonfinite import BLOCK


def started(pool: Any, width: int = 8, model: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    model = net(width) if model is None else model
    optimizer = adam(model)
    options.setdefault("pause_on_nonfinite", True)
    return model, optimizer, lightck.attach(model, pool, optimizer=optimizer, **options)


def spoil(tensor: torch.Tensor, at: int = 0, value: float = float("nan")) -> None:
    with torch.no_grad():
        tensor.view(-1)[at] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("width", [8, BIG])
def test_nonfinite_weights_are_not_committed_and_the_last_good_checkpoint_stays(pool, caplog, value, width):
    model, optimizer, session = started(pool, width)
    train(model, optimizer, 3)
    seen = everything(model, optimizer)
    session.flush()
    with torch.no_grad():
        model[0].weight.fill_(value)
    with caplog.at_level(logging.WARNING, "lightck"):
        for number in range(3, 8):
            train(model, optimizer, 1, start=number)
            session.end_step()
    reported = [r.getMessage() for r in caplog.records if "not committed" in r.getMessage()]
    assert len(reported) == 1, "once"
    assert "'model/0.weight'" in reported[0]
    assert session.paused_reason == "'model/0.weight' holds values that are not finite"
    assert session.committed == 3
    assert session.stats().skipped == 5
    assert session.flush() == 3, "what is durable"
    assert session.stats().skipped == 5, "the same step is not counted twice"
    session.close()
    assert is_step(lightck.recover(pool), seen)


def test_commits_go_on_when_values_are_finite_again(pool, caplog):
    model, optimizer, session = started(pool)
    train(model, optimizer, 1)
    session.flush()
    bad = model[2].bias[0].item()
    spoil(model[2].bias)
    session.flush()
    train(model, optimizer, 0)
    optimizer.step()
    session.end_step()
    assert session.committed == 1
    spoil(model[2].bias, value=bad)
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.nan_to_num_()
    with caplog.at_level(logging.WARNING, "lightck"):
        optimizer.step()
        assert session.flush() == 3
    assert session.paused_reason is None
    assert any("finite again" in r.getMessage() for r in caplog.records)
    session.close()
    assert lightck.recover(pool).step == 3


@pytest.mark.parametrize("where", ["optimizer", "buffer", "last value"])
def test_what_is_looked_at(pool, where):
    model = torch.nn.Sequential(torch.nn.Linear(4, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 2))
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, pause_on_nonfinite=True)
    train(model, optimizer, 2)
    session.flush()
    target = {
        "optimizer": (optimizer.state[model[0].bias]["exp_avg_sq"], 3, "optimizer/0.bias/exp_avg_sq"),
        "buffer": (model[1].running_var, 5, "model/1.running_var"),
        "last value": (model[2].weight, 59, "model/2.weight"),
    }[where]
    optimizer.step()
    spoil(target[0], target[1])
    session.end_step()
    assert target[2] in (session.paused_reason or "")
    session.close()
    assert lightck.recover(pool).step == 2


def test_every_value_is_looked_at_in_its_turn(pool):
    """One spoiled value in the middle of a tensor of several blocks: found by the rolling look at the latest."""
    model = torch.nn.Linear(1, 2 * BLOCK + 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = lightck.attach(model, pool, optimizer=optimizer, pause_on_nonfinite=True)
    spoil(model.weight, BLOCK + 77)
    found = None
    for number in range(4):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        session.end_step()
        if session.paused_reason is not None:
            found = number
            break
    assert found is not None
    session.close()


def test_buffers_that_begin_with_infinity_are_left_alone(pool, caplog):
    model = net()
    model.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    with caplog.at_level(logging.INFO, "lightck"):
        model, optimizer, session = started(pool, model=model)
        train(model, optimizer, 3)
        session.close()
    assert any("model/mask" in r.getMessage() for r in caplog.records)
    assert lightck.recover(pool).step == 3


def test_buffer_that_begins_with_nan_is_refused(pool):
    model = net()
    model.register_buffer("mean", torch.full((4,), float("nan")))
    model, optimizer, session = started(pool, model=model)
    train(model, optimizer, 1)
    assert session.flush() is None
    assert "model/mean" in (session.paused_reason or "")
    session.close()


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_loss_scale_that_broke_down_is_found(pool, scale):
    model = net()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    session = lightck.attach(model, pool, optimizer=optimizer, state={"scaler": scaler}, pause_on_nonfinite=True)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4) * number).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        session.end_step()

    step(1)
    session.flush()
    scaler.update(scale)
    optimizer.step()
    session.end_step()
    assert "the loss scale of 'scaler'" in (session.paused_reason or "")
    assert session.flush() == 1
    session.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_every_floating_dtype_is_looked_at(pool, dtype):
    model = net()
    model.register_buffer("extra", torch.zeros(100, dtype=torch.float32).to(dtype))
    model, optimizer, session = started(pool, model=model)
    train(model, optimizer, 1)
    assert session.flush() == 1
    assert session.paused_reason is None
    model.extra.copy_(torch.full((100,), float("nan")).to(dtype))
    train(model, optimizer, 1, start=1)
    session.end_step()
    assert "model/extra" in (session.paused_reason or "")
    session.close()


def test_float4_has_nothing_to_look_for(pool):
    model = net()
    model.register_buffer("extra", torch.ones(100, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    model, optimizer, session = started(pool, model=model)
    train(model, optimizer, 1)
    assert session.flush() == 1
    assert session.paused_reason is None
    session.close()


def test_layouts_that_are_not_contiguous(pool):
    model = net()
    model.register_buffer("turned", torch.zeros(30, 40).t())
    model.register_buffer("last", torch.zeros(2, 3, 8, 8).contiguous(memory_format=torch.channels_last))
    model, optimizer, session = started(pool, model=model)
    train(model, optimizer, 1)
    assert session.flush() == 1
    model.last.fill_(float("inf"))
    optimizer.step()
    session.end_step()
    assert "model/last" in (session.paused_reason or "")
    session.close()


def test_without_it_everything_is_committed(pool):
    model, optimizer, session = started(pool, pause_on_nonfinite=False)
    train(model, optimizer, 1)
    spoil(model[0].weight)
    optimizer.step()
    assert session.flush() == 2
    assert session.paused_reason is None
    session.close()


def test_pin_while_paused_holds_the_last_good_checkpoint(pool):
    model, optimizer, session = started(pool)
    train(model, optimizer, 2)
    seen = everything(model, optimizer)
    session.flush()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    train(model, optimizer, 2, start=2)
    pin = session.pin()
    assert pin.step == 2
    session.close()
    assert is_step(lightck.recover(pool, step=2), seen)
