"""The trainings of ``test_resume.py``, saved by ``Gradients``: after a kill the updates are made again, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import Training, check_kills_came, check_lightck_reported, check_scenario_is_at_work, draw_kills
from .scenarios import SCENARIOS, Scenario

pytestmark = pytest.mark.long

REFUSED = {"interval-of-3", "four-slots", "lbfgs-closure", "bf16-parameters-with-fp32-state", "adafactor"}
"""Their arguments or optimizers are refused by name (``tests/session/test_gradient_records.py``)."""


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS.values() if s.listed and s.name not in REFUSED], ids=str)
def test_resume_is_bit_identical(scenario: Scenario, folder: Path, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("compiling_server" if scenario.compiles else "server")
    training = Training(server, scenario, folder, {"base_every": 3})
    reference = training.reference()
    check_scenario_is_at_work(scenario, reference)
    survival = training.survive(reference, draw_kills(scenario, reference))
    check_kills_came(scenario, survival)
    check_lightck_reported(scenario, survival)
