"""Some rounds of ``claims.py``, whose long campaigns are run by hand; and two runs that claim one tier at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightck.errors import TierClaimedError
from lightck.tiers import claiming
from lightck.tiers.claiming import ClaimFile, claim_tiers, read_claim
from lightck.tiers.decisions import Listing
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import Claim, claim_name
from tiers import claims


def test_eight_processes_claim_a_folder_at_once(tmp_path):
    assert claims.run(str(tmp_path), {}, 5).claims >= 5 * claims.N_TRAINERS


def test_eight_processes_claim_a_place_in_an_object_store_at_once(bucket):
    assert claims.run(bucket.url, bucket.options, 5).claims >= 5 * claims.N_TRAINERS


class _Interrupted:
    """A tier that another process claims between the first listing of this one and what follows."""

    def __init__(self, root: str, between: Callable[[], object]) -> None:
        self._store, self._between = FolderStore(root), between
        self._is_listed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def listing(self) -> Listing:
        found = self._store.listing()
        if not self._is_listed:
            self._is_listed = True
            self._between()
        return found


@pytest.mark.parametrize("tag", ["00000000", "ffffffff"], ids=["the lower claim", "the higher claim"])
@pytest.mark.parametrize("n", [1, 2], ids=["one tier", "two tiers"])
def test_a_run_that_loses_the_race_for_a_tier_leaves_no_claim_there(n, tag, tmp_path, monkeypatch):
    monkeypatch.setattr(claiming, "_PAUSE_SECONDS_MAX", 0.01)
    roots = [str(tmp_path / f"tier-{number}") for number in range(n)]
    claims = []

    def first() -> None:
        claims.append(claim_tiers([FolderStore(each) for each in roots], "b", "first", None))
        monkeypatch.setattr(claiming.secrets, "token_hex", lambda _: tag)

    stores: list[Any] = [*(FolderStore(each) for each in roots[:-1]), _Interrupted(roots[-1], first)]
    with pytest.raises(TierClaimedError, match="another run"):
        claim_tiers(stores, "a", "second", None)
    for root in roots:
        store = FolderStore(root)
        assert store.listing().claims == set(claims)
        assert read_claim(store, claims[0]).run == "b"


def test_a_claim_that_was_withdrawn_meanwhile_is_no_error(tmp_path):
    """The highest claim of a listing is gone when its file is to be read, and that of the own run is left."""
    store = FolderStore(str(tmp_path / "tier"))
    own = claim_tiers([store], "b", "first", None)
    other = Claim(own.number, "ffffffff")
    store.put(claim_name(other), ClaimFile("second", "a").packed())
    interrupted: Any = _Interrupted(store.root, lambda: store.delete(claim_name(other)))
    assert claim_tiers([interrupted], "b", "third", None).number == own.number + 1
