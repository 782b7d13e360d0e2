"""Every optimizer of torch.optim, in every implementation that this machine has: killed, resumed, bit-identical."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from survival import Training, loads_by_itself, plain, pool_uuid, survives, survives_kill_9, was_predicted, with_closure
from torch.optim import Optimizer

import lightck

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}, {"t0": 2, "weight_decay": 0.01}],
    "Adadelta": [{}, {"weight_decay": 0.01, "maximize": True}],
    "Adafactor": [{}, {"weight_decay": 0.01, "maximize": True}],
    "Adagrad": [{"lr_decay": 0.01}, {"initial_accumulator_value": 0.1, "weight_decay": 0.01}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.01}, {"decoupled_weight_decay": True, "maximize": True}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "Adamax": [{}, {"weight_decay": 0.01, "maximize": True}],
    "LBFGS": [{"max_iter": 3}, {"max_iter": 4, "history_size": 3, "line_search_fn": "strong_wolfe"}],
    "Muon": [{}, {"nesterov": False, "weight_decay": 0.0}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.01}],
    "RAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.01}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.5, "weight_decay": 0.01}, {"momentum": 0.9, "maximize": True}],
    "Rprop": [{}, {"etas": (0.4, 1.3), "maximize": True}],
    "SGD": [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.8, "dampening": 0.3, "maximize": True},
    ],
}
REFUSED = {"SparseAdam"}
IMPLEMENTATIONS = ("foreach", "fused")


def classes() -> dict[str, type[Optimizer]]:
    found = {n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, Optimizer)}
    return {n: c for n, c in found.items() if c is not Optimizer}


def accepted(name: str) -> set[str]:
    return set(inspect.signature(classes()[name].__init__).parameters)


def table() -> Iterator[Any]:
    for name, variants in OPTIONS.items():
        for options in variants:
            chosen = [{}] if not {*IMPLEMENTATIONS} & accepted(name) else [{"foreach": False}]
            chosen += [{which: True} for which in IMPLEMENTATIONS if which in accepted(name)]
            for how in chosen:
                every = options | how
                yield pytest.param(name, every, id="-".join([name, *(f"{k}={v}" for k, v in every.items())]))


def make(name: str, options: dict[str, Any], model: torch.nn.Module) -> list[Optimizer]:
    if name != "Muon":
        return [classes()[name](model.parameters(), **{"lr": 0.01, **options})]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, **{"lr": 0.01, **options}), torch.optim.AdamW(others)]


def training(name: str, options: dict[str, Any]) -> Training:
    return Training(partial(make, name, options), with_closure if name == "LBFGS" else plain)


def test_every_optimizer_of_this_torch_is_in_the_table():
    assert set(classes()) == OPTIONS.keys() | REFUSED


@pytest.mark.parametrize(("name", "options"), list(table()))
def test_killed_training_goes_on_bit_identically(pool, name, options):
    run = training(name, options)
    checkpoint = survives(pool, run)
    loads_by_itself(checkpoint, run)


@pytest.mark.parametrize(("name", "options"), [p for p in table() if p.values[0] != "LBFGS"])
def test_layout_is_predicted_at_attach(pool, caplog, name, options):
    run = training(name, options)
    with lightck.attach(run.model, pool, optimizer=run.optimizers):
        laid_out = pool_uuid(pool)
        run.learn(0, 3)
    assert pool_uuid(pool) == laid_out, "the pool was laid out anew"
    was_predicted(pool)
    assert [r.getMessage() for r in caplog.records if r.name == "lightck"] == []


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_survives_a_real_kill(pool, name):
    survives_kill_9(pool, training(name, OPTIONS[name][-1]))
