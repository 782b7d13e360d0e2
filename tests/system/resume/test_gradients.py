"""The trainings of ``test_resume.py``, saved by ``Gradients``: after a kill the updates are made again, bit for bit.

Trainings about loaders and compiled models take minutes more, and their checkpoints are like those of the others:
``LIGHTCK_TEST_ALL=1`` runs them too.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from .harness import Training, check_kills_came, check_lightck_reported, check_scenario_is_at_work, draw_kills
from .scenarios import SCENARIOS, Scenario

pytestmark = pytest.mark.long

REFUSED = {"four-slots", "lbfgs-closure", "bf16-parameters-with-fp32-state", "adafactor"}
"""Their arguments or optimizers are refused by name (``tests/session/test_gradient_records.py``)."""
MORE = ("loader", "break", "iterable", "sampler", "workers", "eval-mode", "compiled")
"""Parts of the names of trainings that run with ``LIGHTCK_TEST_ALL=1`` only, apart from ``KEPT``."""
KEPT = ("plain-loader", "stateful-loader-in-state", "compiled-after-attach")


WITH_INTERVAL = (
    "accumulation-and-clipping",
    "batches-by-hand-without-end-step",
    "dropout",
    "ema-in-state",
    "ema-swapped-in-by-data-while-paused",
    "gan-whose-optimizers-alternate",
    "gradscaler-fused-forced-skips",
    "layers-frozen-and-unfrozen-in-mid-training",
    "per-epoch-scheduler-and-evaluation",
    "plain-loader",
    "stateful-loader-in-state",
    "weight-clamp",
)
"""Trainings that are run with an interval too; the others with ``LIGHTCK_TEST_ALL=1``."""
INTERVALS = (2, 3, 5)
"""Shorter than a round, as long, and longer."""


def chosen(scenario: Scenario) -> bool:
    is_more = any(part in scenario.name for part in MORE) and scenario.name not in KEPT
    is_run = not is_more or os.environ.get("LIGHTCK_TEST_ALL") == "1"
    return is_run and scenario.listed and scenario.name not in REFUSED


def cases() -> list[Any]:
    """Scenarios and intervals."""
    found = []
    for number, one in enumerate(one for one in SCENARIOS.values() if chosen(one)):
        is_left_out = number % 2 and one.name not in (*KEPT, *WITH_INTERVAL)
        found.append(pytest.param(one, 1, id=str(one), marks=pytest.mark.campaign if is_left_out else ()))
    for number, one in enumerate(one for one in SCENARIOS.values() if chosen(one)):
        interval = INTERVALS[number % len(INTERVALS)]
        if one.name in WITH_INTERVAL or os.environ.get("LIGHTCK_TEST_ALL") == "1":
            found.append(pytest.param(one, interval, id=f"{one}, every {interval}"))
    return found


@pytest.mark.parametrize(("scenario", "interval"), cases())
def test_resume_is_bit_identical(
    scenario: Scenario, interval: int, folder: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue("compiling_server" if scenario.compiles else "server")
    scenario = replace(scenario, loses=scenario.loses * interval)
    training = Training(server, scenario, folder, {"base_every": 3, "interval": interval})
    reference = training.reference()
    check_scenario_is_at_work(scenario, reference)
    survival = training.survive(reference, draw_kills(scenario, reference))
    check_kills_came(scenario, survival)
    check_lightck_reported(scenario, survival)
