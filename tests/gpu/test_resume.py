"""A training on a device that is killed again and again ends with the bits of one that was not.

The scenarios and what must hold between their processes are those of ``tests/system/resume``. With
``LIGHTCK_TEST_DEVICE=cpu`` the scenarios that need nothing of CUDA run on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from system.resume.forkserver import ForkServer
from system.resume.harness import Kill, Training, check_kills_came, check_scenario_is_at_work, draw_kills
from system.resume.scenarios import SCENARIOS, Scenario
from system.resume.scenarios.device import DEVICE, NEEDS_CUDA

NAMES = [
    name
    for name in SCENARIOS
    if name.startswith("device-") and (DEVICE != "cpu" or not any(part in name for part in NEEDS_CUDA))
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """It imports no compiler, since that starts threads where torch is built for CUDA. Children share its cache."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with ForkServer(warms=False, environment=cache) as started:
        yield started


def survives(fork_server: ForkServer, scenario: Scenario, folder: Path) -> None:
    training = Training(fork_server, scenario, folder)
    reference = training.reference()
    check_scenario_is_at_work(scenario, reference)
    survival = training.survive(reference, draw_kills(scenario, reference))
    check_kills_came(scenario, survival)


@pytest.mark.parametrize("name", NAMES)
def test_resume_is_bit_identical(name: str, folder: Path, server: ForkServer) -> None:
    try:
        survives(server, SCENARIOS[name], folder)
    finally:
        server.bury()


@pytest.fixture(params=["expandable_segments:True", "backend:cudaMallocAsync"])
def server_with_allocator(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    with ForkServer(environment={"PYTORCH_CUDA_ALLOC_CONF": request.param}, warms=False) as started:
        yield started
        started.bury()


def test_resume_with_another_allocator(server_with_allocator: ForkServer, folder: Path) -> None:
    scenario = SCENARIOS["device-float16"]
    training = Training(server_with_allocator, scenario, folder)
    reference = training.reference()
    training.survive(reference, [Kill("place", "update", 5), Kill("clock", nth=3, delay=0.001)])
