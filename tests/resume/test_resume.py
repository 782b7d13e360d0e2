"""A training that is killed again and again ends with the bits of one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import Training, check_kills_came, check_lightck_told, check_scenario_is_at_work, draw_kills
from .scenarios import SCENARIOS, Scenario


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS.values() if s.listed], ids=str)
def test_resume_is_bit_identical(scenario: Scenario, folder: Path, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("compiling_server" if scenario.compiles else "server")
    training = Training(server, scenario, folder)
    reference = training.reference()
    check_scenario_is_at_work(scenario, reference)
    survival = training.survive(reference, draw_kills(scenario, reference))
    check_kills_came(scenario, survival)
    check_lightck_told(scenario, survival)
