"""Which combinations CI runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def every_second(*axes: Iterable[Any]) -> list[Any]:
    """Return the combinations of what lies on the axes, as parameters. Neighbours on an axis take turns: CI runs one of
    them, and the other has the mark ``campaign``."""
    found = []
    axes = tuple(map(tuple, axes))
    assert not any(type(value).__name__ == "ParameterSet" for axis in axes for value in axis), "values, without marks"
    for each in product(*(enumerate(axis) for axis in axes)):
        is_left_out = sum(index for index, _ in each) % 2
        found.append(pytest.param(*(value for _, value in each), marks=pytest.mark.campaign if is_left_out else ()))
    return found


HALVED = (
    "bench/test_results.py",
    "bench/test_rivals.py",
    "cli/test_process.py",
    "crash/suite/test_campaigns_kill.py",
    "crash/suite/test_flips.py",
    "crash/suite/test_gradient_flips.py",
    "crash/suite/test_gradient_power_cut.py",
    "crash/suite/test_hostile.py",
    "crash/suite/test_mutants.py",
    "crash/suite/test_power_cut.py",
    "crash/suite/test_recovery_mutants.py",
    "demo/test_demo.py",
    "ranks/test_coupled_units.py",
    "ranks/test_deepspeed_oracle.py",
    "ranks/test_gradients.py",
    "ranks/test_split.py",
    "restore/test_replay_bits.py",
    "session/test_replica.py",
    "system/findings/test_kinds.py",
    "system/findings/test_loaders.py",
    "system/findings/test_replay.py",
    "system/findings/test_state.py",
    "system/findings/test_updates.py",
    "system/resume/test_gradients.py",
    "system/resume/test_resume.py",
    "tiers/test_late_drain.py",
    "tiers/test_preempted_trainings.py",
)
"""Files whose long tests have so many parameters that CI runs every second one: those beside have the mark
``campaign``."""


HALVED_WHOLLY = (
    "dataloader/test_loader.py",
    "integrations/test_accelerate.py",
    "integrations/test_deepspeed.py",
    "integrations/test_lightning.py",
    "integrations/test_transformers.py",
    "pipeline/test_staging.py",
    "pipeline/test_wait_policy.py",
    "ranks/test_fetched_blocks.py",
    "ranks/test_gradients.py",
    "ranks/test_layerwise.py",
    "ranks/test_layout.py",
    "ranks/test_lost_pool.py",
    "ranks/test_model.py",
    "ranks/test_peer_copies.py",
    "ranks/test_relayout.py",
    "ranks/test_split.py",
    "ranks/test_split_mesh.py",
    "ranks/test_stages.py",
    "ranks/test_worlds.py",
    "ranks/test_worlds_hosts.py",
    "system/findings/test_follow.py",
)
"""Files of which the same is true of all tests with parameters."""


def halve(items: Iterable[pytest.Item]) -> None:
    """Give every second of these tests the mark ``campaign``, beginning with the second one of each function."""
    seen: Counter[str] = Counter()
    for item in items:
        path = item.path.as_posix()
        is_chosen = path.endswith(HALVED_WHOLLY) or (path.endswith(HALVED) and item.get_closest_marker("long"))
        if is_chosen and hasattr(item, "callspec") and not item.get_closest_marker("campaign"):
            name = f"{path}::{item.name.partition('[')[0]}"
            seen[name] += 1
            if seen[name] % 2 == 0:
                item.add_marker(pytest.mark.campaign)
