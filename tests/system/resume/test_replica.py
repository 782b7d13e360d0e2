"""Some trainings of ``test_resume.py``, saved by ``Replica``: after a kill they go on bit for bit.

``LIGHTCK_TEST_ALL=1`` runs all that ``Replica`` takes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .harness import Training, check_kills_came, check_lightck_reported, check_scenario_is_at_work, draw_kills
from .scenarios import SCENARIOS, Scenario

pytestmark = pytest.mark.long

REFUSED = {"four-slots", "lbfgs-closure", "bf16-parameters-with-fp32-state"}
"""Their arguments or optimizers are refused by name (``tests/session/test_replica.py``)."""
CHOSEN = (
    "accumulation-and-clipping",
    "ema-swapped-in-by-data-while-paused",
    "gan-whose-optimizers-alternate",
    "gradscaler-fused-forced-skips",
    "layers-frozen-and-unfrozen-in-mid-training",
)


def chosen() -> list[Scenario]:
    runs_all = os.environ.get("LIGHTCK_TEST_ALL") == "1"
    found = [one for one in SCENARIOS.values() if one.listed and one.name not in REFUSED]
    return [one for one in found if runs_all or one.name in CHOSEN]


@pytest.mark.parametrize("scenario", chosen(), ids=str)
def test_resume_is_bit_identical(scenario: Scenario, folder: Path, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("compiling_server" if scenario.compiles else "server")
    training = Training(server, scenario, folder, {"replica": True})
    reference = training.reference()
    check_scenario_is_at_work(scenario, reference)
    survival = training.survive(reference, draw_kills(scenario, reference))
    check_kills_came(scenario, survival)
    check_lightck_reported(scenario, survival)
