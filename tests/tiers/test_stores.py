"""What every store of a tier does: one contract, for the folder and for the object store."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightck.errors import TierError
from lightck.pool.format.structures import DamagedError
from lightck.tiers.names import Claim, ManifestName, ObjectName, Writer, claim_name
from lightck.tiers.open_store import is_tier, open_store
from lightck.tiers.store import Store

CLAIM = Claim(1, "0123abcd")
WRITER = Writer(CLAIM, 0, 1)
MANIFEST = str(ManifestName(WRITER, 7, "89abcdef"))


def object_name(number: int, nonce: str = "89abcdef") -> str:
    return str(ObjectName(WRITER, f"{number:064x}", nonce))


@pytest.fixture(params=["folder", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A root where nothing lies, with its options."""
    if request.param == "folder":
        return str(tmp_path / "tier"), {}
    bucket = request.getfixturevalue("bucket")
    return bucket.url, bucket.options


@pytest.fixture
def store(place: tuple[str, dict[str, Any]]) -> Store:
    return open_store(*place)


def put_beside(place: tuple[str, dict[str, Any]], name: str, data: bytes) -> None:
    """Write something below the root of which lightck knows nothing."""
    root, options = place
    if options:
        open_store(root, options)._library.put(name, data)
    else:
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_what_was_put_is_got_and_listed(store):
    data = bytes(range(256)) * 100
    store.put(claim_name(CLAIM), b"{}")
    store.put(object_name(1), memoryview(data))
    store.put(MANIFEST, bytearray(b"manifest"))
    assert store.get(object_name(1), len(data)) == data
    assert store.get(MANIFEST, 100) == b"manifest"
    listing = store.listing()
    assert listing.claims == {CLAIM}
    assert [str(each) for each in listing.objects] == [object_name(1)]
    assert [str(each) for each in listing.manifests] == [MANIFEST]


def test_an_empty_object_is_one(store):
    store.put(object_name(1), b"")
    assert store.get(object_name(1), 0) == b""


def test_what_is_put_again_replaces_the_first(store):
    store.put(object_name(1), b"damaged")
    store.put(object_name(1), b"right")
    assert store.get(object_name(1), 100) == b"right"


def test_what_is_missing_is_no_failure_of_the_store(store):
    store.put(claim_name(CLAIM), b"{}")
    with pytest.raises(FileNotFoundError):
        store.get(object_name(1), 100)
    store.delete(object_name(1))
    assert not store.link(object_name(1), object_name(1, "00000000"))


def test_an_object_larger_than_asked_for_is_damaged(store):
    store.put(object_name(1), b"12345")
    with pytest.raises(DamagedError):
        store.get(object_name(1), 4)
    assert store.get(object_name(1), 5) == b"12345"


def test_a_deleted_object_is_gone(store):
    store.put(object_name(1), b"1")
    store.put(object_name(2), b"2")
    store.delete(object_name(1))
    assert [str(each) for each in store.listing().objects] == [object_name(2)]
    with pytest.raises(FileNotFoundError):
        store.get(object_name(1), 100)


def test_a_linked_object_outlives_the_first(store):
    store.put(object_name(1), b"bytes")
    assert store.link(object_name(1), object_name(1, "00000000"))
    store.delete(object_name(1))
    assert store.get(object_name(1, "00000000"), 100) == b"bytes"


def test_a_folder_that_is_removed_is_made_again(tmp_path):
    store = open_store(tmp_path / "tier")
    store.put(claim_name(CLAIM), b"{}")
    store.put(object_name(1), b"1")
    shutil.rmtree(tmp_path / "tier" / str(WRITER) / "data")
    store.put(object_name(1), b"1")
    shutil.rmtree(tmp_path / "tier" / str(WRITER))
    store.put(MANIFEST, b"manifest")
    assert not store.link(object_name(1), object_name(1, "00000000"))
    store.put(object_name(1), b"1")
    assert store.link(object_name(1), object_name(1, "00000000"))
    assert store.get(object_name(1, "00000000"), 100) == b"1"


@pytest.mark.parametrize("work", ["put", "link", "claim"])
def test_nothing_is_written_where_nothing_is_mounted_any_more(tmp_path, work):
    """The medium goes between two objects of a checkpoint, so that nobody has looked for the claim since."""
    tier = tmp_path / "tier"
    store = open_store(tier)
    for name in (claim_name(CLAIM), object_name(1)):
        store.put(name, b"{}")
    tier.rename(tmp_path / "unmounted")
    tier.mkdir()
    with pytest.raises(TierError, match="a folder in it does not exist"):
        if work == "put":
            store.put(object_name(2), b"2")
        elif work == "link":
            store.link(object_name(1), object_name(1, "00000000"))
        else:
            store.put(claim_name(CLAIM), b"{}")
    assert not list(tier.iterdir())
    tier.rmdir()
    with pytest.raises(TierError, match="its folder, or the one above it, does not exist"):
        store.put(object_name(2), b"2")
    (tmp_path / "unmounted").rename(tier)
    store.put(object_name(2), b"2")


def test_the_time_of_the_store_is_that_of_its_listings(store):
    """To the second, which is what HTTP says of an object."""
    store.put(claim_name(CLAIM), b"{}")
    before = store.now()
    store.put(object_name(1), b"1")
    (written,) = store.listing().objects.values()
    after = store.now()
    assert int(before) <= written <= after + 1
    assert abs(after - time.time()) < 60
    assert len(store.listing().objects) == 1
    assert not store.listing().manifests


def test_names_of_others_are_not_listed(place, store):
    store.put(claim_name(CLAIM), b"{}")
    for name in ("000001-0123abcd/rank-00000-of-00001/data/x", "README", "a/b/c/d/e/f", ".tmp-1234"):
        put_beside(place, name, b"x")
    listing = store.listing()
    assert listing.claims == {CLAIM}
    assert not listing.objects
    assert not listing.manifests


def test_a_place_with_something_else_in_it_is_refused(place, store):
    store.refuse_foreign_contents()  # nothing lies there
    put_beside(place, ".tmp-1234", b"x")
    store.refuse_foreign_contents()
    put_beside(place, "thesis.tex", b"x")
    assert not store.has_claim()
    assert not is_tier(*place)
    with pytest.raises(TierError, match=r"thesis\.tex"):
        store.refuse_foreign_contents()
    store.put(claim_name(CLAIM), b"{}")
    store.refuse_foreign_contents()  # a tier, in which the user has put something
    assert store.has_claim()
    assert is_tier(*place)


def test_as_many_calls_at_once_as_it_says(store):
    with ThreadPoolExecutor(store.n_parallel) as threads:
        list(threads.map(lambda number: store.put(object_name(number), b"%d" % number * 10000), range(12)))
        found = list(threads.map(lambda number: store.get(object_name(number), 10**6), range(12)))
    assert found == [b"%d" % number * 10000 for number in range(12)]


def test_it_is_named_as_the_user_names_it(place, store):
    assert str(store) == place[0]
    assert str(open_store(place[0] + "/", place[1])) == place[0]
