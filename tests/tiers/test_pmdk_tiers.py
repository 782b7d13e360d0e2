"""A lost PMDK pool is rebuilt from its tier, as a PMDK pool."""

from __future__ import annotations

from typing import Any

import pytest
from toys import everything, same, train

import lightck
from lightck.errors import NoSpaceError
from lightck.pool.storage.backends import backend_for
from tiers.test_attached_tiers import attached, drains, is_ready, trained, until

pytestmark = pytest.mark.usefixtures("pmdk")


@pytest.fixture(autouse=True)
def _no_drain_is_left() -> Any:
    yield
    until(lambda: not drains())


def test_a_lost_pmdk_pool_is_made_anew_from_its_tier(folder, caplog):
    pool, tiers = folder / "run.pool", [lightck.Tier(folder / "tier", every=2)]
    model, optimizer, session = attached(pool, tiers, backend="pmdk")
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 5)
    pool.unlink()
    model, optimizer, session = attached(pool, tiers, backend="pmdk", resume=True)
    with session:
        assert session.step == 5
        assert "was rebuilt from step 5" in caplog.text
        assert backend_for(str(pool)).name == "pmdk"
        trained(session, model, optimizer, 3)
        end = everything(model, optimizer)
    model, optimizer, session = attached(folder / "other.pool", None)
    with session:
        train(model, optimizer, 8)
        assert same(everything(model, optimizer), end)
    assert lightck.recover(pool).step == lightck.recover(folder / "tier").step == 8


def test_a_pmdk_pool_that_cannot_be_made_leaves_nothing(folder, monkeypatch):
    pool, tiers = folder / "run.pool", [lightck.Tier(folder / "tier", every=2)]
    model, optimizer, session = attached(pool, tiers, backend="pmdk")
    with session:
        trained(session, model, optimizer, 2)
    pool.unlink()

    def no_space(*_: object, **__: object) -> None:
        raise NoSpaceError("The folder has no room.")

    with monkeypatch.context() as patched:
        patched.setattr("lightck.pool.storage.pmdk.PmdkBackend.create", no_space)
        with pytest.raises(NoSpaceError, match="no room"):
            attached(pool, tiers, backend="pmdk", resume=True)
    assert not pool.exists()
    with attached(pool, tiers, backend="pmdk", resume=True)[2] as session:
        assert session.step == 2
