"""Small trainings store what they stored when the digests were kept, at the same places."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import store_digests
from store_digests import BACKENDS, KEPT, TRAININGS, differences, digests_of

from lightck.pool import writer

SCRIPT = "LIGHTCK_TEST_BACKGROUND=1 PYTHONPATH=tests python tests/crash/suite/store_digests.py"
CURE = f"if they should differ: {SCRIPT} --keep, and say why in the commit"


@pytest.fixture(scope="module")
def kept() -> dict[str, object]:
    return json.loads(KEPT.read_text())


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_training_stores_the_same_bytes(name: str, backend: str, kept, folder: Path, pmdk: None) -> None:
    now = {f"{name}, {backend}": digests_of(name, backend, folder)}
    assert not differences(kept, now), CURE


def test_other_small_state_is_seen(kept, folder: Path) -> None:
    with patch.object(store_digests, "MACHINE", {**store_digests.MACHINE, "threads": 2}):
        now = {"two slots, file": digests_of("two slots", "file", folder)}
    found = differences(kept, now)
    assert {line.rpartition(" checkpoints ")[2] for line in found} == {
        f"{generation} {group}" for generation in (1, 2, 3) for group in ("before the sync", "commit")
    }


def test_a_record_of_the_batch_that_is_missing_is_seen(kept, folder: Path) -> None:
    with patch.object(writer, "pack_next_batch", lambda *_: b""):
        now = {"two slots, file": digests_of("two slots", "file", folder)}
    assert {line.rpartition(" checkpoints ")[2] for line in differences(kept, now)} == {
        "1 batch that follows",
        "2 batch that follows",
    }
