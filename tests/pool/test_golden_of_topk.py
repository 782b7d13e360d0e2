"""The golden pool with compressed gradients opens for ever, and its updates give the same bits for ever.

``golden/make_topk_golden.py`` made it and says what is in it.
"""

from __future__ import annotations

import json
import lzma
import struct
from pathlib import Path
from typing import Any

import format_reference as reference
import pytest
from module_at import module_at

import lightck
from lightck.restore import gradient_state
from lightck.state.fingerprint import fingerprint

MADE_ON = {"cpu": "AVX512", "vendor": "AuthenticAMD"}
HERE = Path(__file__).parent / "golden"

golden = module_at(HERE / "make_topk_golden.py")


@pytest.fixture
def kept(pool: Path) -> Path:
    pool.write_bytes(lzma.decompress((HERE / "v1-topk.pool.xz").read_bytes()))
    pool.chmod(0o600)
    return pool


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return dict(json.loads((HERE / "v1-topk.json").read_text()))


def test_each_step_recovers_as_it_did(kept: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All its values are exact, so another processor gives the same bits; lightck cannot know that, and would say that
    it is another one."""
    monkeypatch.setattr(gradient_state, "fingerprint", lambda: fingerprint() | MADE_ON)
    assert json.loads(json.dumps(golden.expected(kept))) == expected
    assert [exact for exact, _ in expected["exact"]] == [False, True, True]


def test_it_is_as_drawn(kept: Path, expected: dict[str, Any]) -> None:
    """Read by the independent reader: the residual lies with the base of its parameter, and the gradient has as many
    elements as are not zero."""
    pool = reference.GradientPool(kept.read_bytes())
    found = pool.named(max(pool.records.values(), key=lambda one: one["generation"]))
    residual = "state/TopK/residuals_of_bases/large"
    assert found.bases[residual][0] == found.bases["model/large"][0]
    data = found.record["gradient/large/indices"], found.record["gradient/large/values"]
    indices, values = struct.unpack("<24i", data[0]), struct.unpack("<24f", data[1])
    assert list(indices) == sorted(set(indices))
    assert all(values)
    assert set(found.record) == {"gradient/large/indices", "gradient/large/values", "gradient/small"}


def test_it_trains_on(kept: Path) -> None:
    golden.train(kept, 2, resume=True)
    assert lightck.recover(kept).step == 9


def test_it_is_still_what_this_version_writes(folder: Path, expected: dict[str, Any]) -> None:
    """The parts that do not depend on torch: a change of the format must not go unnoticed."""
    fresh = folder / "fresh.pool"
    golden.make(fresh)
    found = json.loads(json.dumps(golden.expected(fresh)))
    for key in ("uuid", "nbytes", "slots", "homes", "entries", "lines", "records", "exact"):
        assert found[key] == expected[key], key
