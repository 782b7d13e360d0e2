"""The trainings of ``test_resume.py``, saved by ``Gradients``: after a kill the updates are made again, bit for bit.

Trainings about loaders and compiled models take minutes more, and their checkpoints are like those of the others:
``LIGHTCK_TEST_ALL=1`` runs them too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .harness import Training, check_kills_came, check_lightck_reported, check_scenario_is_at_work, draw_kills
from .scenarios import SCENARIOS, Scenario

pytestmark = pytest.mark.long

REFUSED = {"interval-of-3", "four-slots", "lbfgs-closure", "bf16-parameters-with-fp32-state", "adafactor"}
"""Their arguments or optimizers are refused by name (``tests/session/test_gradient_records.py``)."""
MORE = ("loader", "break", "iterable", "sampler", "workers", "eval-mode", "compiled")
"""Parts of the names of trainings that run with ``LIGHTCK_TEST_ALL=1`` only, apart from ``KEPT``."""
KEPT = ("plain-loader", "stateful-loader-in-state", "compiled-after-attach")


def chosen(scenario: Scenario) -> bool:
    is_more = any(part in scenario.name for part in MORE) and scenario.name not in KEPT
    is_run = not is_more or os.environ.get("LIGHTCK_TEST_ALL") == "1"
    return is_run and scenario.listed and scenario.name not in REFUSED


@pytest.mark.parametrize("scenario", [one for one in SCENARIOS.values() if chosen(one)], ids=str)
def test_resume_is_bit_identical(scenario: Scenario, folder: Path, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("compiling_server" if scenario.compiles else "server")
    training = Training(server, scenario, folder, {"base_every": 3})
    reference = training.reference()
    check_scenario_is_at_work(scenario, reference)
    survival = training.survive(reference, draw_kills(scenario, reference))
    check_kills_came(scenario, survival)
    check_lightck_reported(scenario, survival)
