"""Names in a tier: one value has one name, and what has another form is ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.tiers.decisions import Listing, complete, newest_complete
from lightck.tiers.names import Claim, ManifestName, ObjectName, TierCheckpoint, Writer, claim_name, parse

HEX = "0123456789abcdef"
claims = st.builds(Claim, st.integers(0, 10**17), st.text(HEX, min_size=8, max_size=8))
worlds = st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))
writers = st.builds(lambda claim, world: Writer(claim, *world), claims, worlds)
nonces = st.text(HEX, min_size=8, max_size=8)
manifests = st.builds(ManifestName, writers, st.integers(0, 10**18), nonces)
objects = st.builds(ObjectName, writers, st.text(HEX, min_size=64, max_size=64), nonces)


@given(st.one_of(manifests, objects))
def test_a_name_that_is_written_is_read(name):
    assert parse(str(name)) == name


@given(claims)
def test_the_file_of_a_claim_is_read(claim):
    assert parse(claim_name(claim)) == claim


@given(st.one_of(st.text(max_size=80), st.from_regex(r"[0-9a-f./-]{0,90}"), manifests.map(str).map(lambda s: s[::-1])))
def test_what_is_read_has_the_name_that_was_read(text):
    found = parse(text)
    if found is not None:
        assert (claim_name(found) if isinstance(found, Claim) else str(found)) == text


@pytest.mark.parametrize(
    "name",
    [
        "../000001-00000000/claim.json",
        "000001-00000000/claim.json/",
        "0000001-00000000/claim.json",
        "000001-0000000G/claim.json",
        "000001-00000000/rank-00002-of-00002/steps/000000000001-00000000.json",
        "000001-00000000/rank-00000-of-00002/steps/000000000001.json",
        "000001-00000000/rank-00000-of-00002/steps/0000000000001-00000000.json",
        "000001-00000000/rank-00000-of-00002/data/../../../etc/passwd",
        "000001-00000000/rank-00000-of-00002/data/" + "A" * 64 + "-00000000",
        "000001-00000000/claim.json\n",
    ],
)
def test_other_forms_are_ignored(name):
    assert parse(name) is None
    assert not Listing.of([(name, 0.0)], 1.0).claims


def test_a_checkpoint_is_complete_with_the_manifests_of_all_ranks():
    claim = Claim(1, "0" * 8)
    first, second = (str(ManifestName(Writer(claim, rank, 2), 7, "0" * 8)) for rank in range(2))
    assert not complete(Listing.of([(first, 0.0)], 1.0))
    assert newest_complete(Listing.of([(first, 0.0), (second, 0.0)], 1.0)) == TierCheckpoint(claim, 7)


def test_a_checkpoint_of_another_number_of_ranks_completes_none():
    claim = Claim(1, "0" * 8)
    names = [str(ManifestName(Writer(claim, rank, n), 7, "0" * 8)) for rank, n in ((0, 2), (1, 3))]
    assert not complete(Listing.of([(name, 0.0) for name in names], 1.0))
