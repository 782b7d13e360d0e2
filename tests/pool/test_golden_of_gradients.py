"""The golden pool with gradient records opens for ever, and its updates give the same bits for ever.

``golden/make_gradients_golden.py`` made it and says what is in it.
"""

from __future__ import annotations

import json
import lzma
from contextlib import closing
from pathlib import Path
from typing import Any

import format_reference as reference
import pytest
from module_at import module_at

import lightck
from lightck.errors import FormatError
from lightck.pool.gradient_reader import checkpoint_of, committed, needed_problems, older_base_problems
from lightck.pool.reader import open_pool

HERE = Path(__file__).parent / "golden"

golden = module_at(HERE / "make_gradients_golden.py")


@pytest.fixture
def kept(pool: Path) -> Path:
    pool.write_bytes(lzma.decompress((HERE / "v1-gradients.pool.xz").read_bytes()))
    pool.chmod(0o600)
    return pool


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return dict(json.loads((HERE / "v1-gradients.json").read_text()))


def test_each_step_recovers_exactly(kept: Path, expected: dict[str, Any]) -> None:
    assert golden.expected(kept) == expected
    assert lightck.recover(kept).step == 7


def test_it_restores_into_live_objects(kept: Path, expected: dict[str, Any]) -> None:
    model, optimizer, counter = golden.build()
    lightck.recover(kept, model, optimizer, {"counter": counter})
    assert golden.plain(model.state_dict()) == expected["steps"][0]["model"]
    assert counter.value["seen"] == 7


def test_every_block_verifies(kept: Path) -> None:
    with closing(open_pool(str(kept), gradients=True)) as reader:
        newest = checkpoint_of(reader, committed(reader)[0])
        assert needed_problems(reader, newest) == older_base_problems(reader, newest) == []


def test_it_is_as_drawn(kept: Path, expected: dict[str, Any]) -> None:
    """Read by the independent reader: records, bases and gradients lie where docs/format.md says."""
    pool = reference.GradientPool(kept.read_bytes())
    record = max(pool.records.values(), key=lambda one: one["generation"])
    found, drawn = pool.named(record), expected["records"][0]
    assert found.manifest["step"] == drawn["step"]
    assert {name: step for name, (step, _) in found.bases.items()} == {one[0]: one[2] for one in drawn["bases"]}
    assert {name: step for name, (step, _) in found.older.items()} == {one[0]: one[2] for one in drawn["older"]}
    assert [[one[key] for key in ("step", "generation", "slot", "flags")] for one in found.chain] == drawn["chain"]
    assert found.sentinels == drawn["sentinels"]
    dense = {name: data.hex() for name, data in found.record.items() if name.startswith("gradient/")}
    assert dense == {name: data for name, data in drawn["gradients"].items() if name in dense}
    current = {name: data for name, (step, data) in found.bases.items() if step == 7}
    model = expected["steps"][0]["model"]
    assert any(name.removeprefix("model/") in model for name in current)
    for name, data in current.items():
        if name.startswith("model/") and name != "model/turned":  # whose bytes lie in another order
            assert data.hex() == model[name.removeprefix("model/")]["bytes"], name


def test_a_reader_that_makes_no_updates_refuses_it(kept: Path) -> None:
    with pytest.raises(FormatError, match="holds gradient records"):
        open_pool(str(kept))


def test_it_trains_on(kept: Path) -> None:
    golden.train(kept, 2, resume=True)
    assert lightck.recover(kept).step == 9


def test_it_trains_on_as_a_training_that_was_never_interrupted(kept: Path, folder: Path) -> None:
    golden.train(kept, 2, resume=True)
    whole = folder / "whole.pool"
    golden.train(whole, 9)
    one, other = (golden.recovered(path, None) for path in (kept, whole))
    assert (one["model"], one["optimizer"]) == (other["model"], other["optimizer"])


def test_it_is_still_what_this_version_writes(folder: Path, expected: dict[str, Any]) -> None:
    """The parts that do not depend on torch: a change of the format must not go unnoticed."""
    fresh = folder / "fresh.pool"
    golden.make(fresh)
    found = golden.expected(fresh)
    for key in ("uuid", "nbytes", "slots", "homes", "entries", "lines", "records"):
        assert found[key] == expected[key], key
    for one, other in zip(found["steps"], expected["steps"], strict=True):
        assert (one["step"], one["model"], one["state"]) == (other["step"], other["model"], other["state"])
